"""A call of a step as it goes to a site, and the inputs that the site makes."""

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpp._program import Message
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayMaker, ArrayType, Home, from_host, sharding_in, spans, to_host

#: Settings that a call takes from its caller: they are no part of the traced step.
CHECKS = ("debug_nans", "debug_infs")
#: Bytes above which an input is made without a compiled copy.
LARGE = 1 << 14


@dataclasses.dataclass(frozen=True)
class Kept:
    """An input that the rank keeps: the array of that number."""

    array: int


@dataclasses.dataclass(frozen=True)
class Given:
    """An input that comes with the call, as its bytes."""

    data: bytes | np.ndarray

    @staticmethod
    def of(host: np.ndarray) -> "Given":
        """Takes the bytes of an array, a copy where they are few."""
        return Given(host if host.nbytes > LARGE else host.tobytes())


@dataclasses.dataclass(frozen=True)
class Moved:
    """An input that another rank sends before the step: there, the array of that number."""

    array: int
    message: Message


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An input that the rank loads itself: an array of a batch."""

    batch: int
    leaf: int


Source = Kept | Given | Moved | Loaded


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of one rank in a call.

    Args:
        inputs: where each input of its program comes from.
        sends: the inputs of other ranks that it sends before the step.
        dropped: numbers of arrays that this call consumes, or that nobody wants any more.
    """

    inputs: tuple[Source, ...]
    sends: tuple[Moved, ...]
    dropped: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a step, for the ranks of one process.

    Args:
        number: counts the calls of all steps of the mesh.
        step: the step's number.
        results: the number of the step's first result; those of the others follow.
        checks: JAX's settings under which results are checked, such as `"debug_nans"`.
        parts: by rank.
    """

    number: int
    step: int
    results: int
    checks: tuple[str, ...]
    parts: Mapping[int, Part]


class Input:
    """Makes an input of a step: of bytes, of an array of this rank, or of what it has loaded.

    Args:
        array_type: of the input.
        home: where it goes.
        spec: how it is split there, if that is a mesh.
    """

    def __init__(self, array_type: ArrayType, home: Home, spec: Spec):
        self.array_type, self.spec = array_type, spec
        self._home = home
        self._copier = ArrayMaker((array_type,), (0,), home, (spec,))
        split = isinstance(home, Mesh) and array_type.host_dtype != jax.dtypes.float0
        self._sharding = sharding_in(home, spec, array_type.kind) if split else None

    def __call__(self, data: Any) -> Any:
        """Makes the input from its bytes, which Ray owns: the array must not keep them."""
        if self.array_type.nbytes <= LARGE:
            return self._copier(data)[0]
        return from_host(np.array(data), self.array_type, self._home, self.spec)

    def resplit(self, array: Any) -> Any:
        """Makes the input from an array of this rank; the array itself where its split is right."""
        wanted = self._sharding
        if wanted is None or array.sharding.is_equivalent_to(wanted, array.ndim):
            return array
        return jax.device_put(array, wanted)

    def of_loaded(self, value: Any) -> Any:
        """Makes the input from an array that this process has loaded, on the host or a device."""
        # Over several processes `device_put` would compare the values.
        if isinstance(value, jax.Array) and not spans(self._home):
            kind = self.array_type.kind
            return jax.device_put(value, sharding_in(self._home, self.spec, kind))
        if not isinstance(value, jax.Array):
            value = np.array(value, self.array_type.host_dtype)
        return from_host(to_host(value), self.array_type, self._home, self.spec)


# ---- values of the user -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Plain:
    """A value of the user's that stays in this process."""

    value: Any

    @staticmethod
    def of(value: Any) -> "Plain":
        """Takes a value."""
        return Plain(value)

    def get(self) -> Any:
        """Returns the value."""
        return self.value


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A value of the user's as bytes: a pickle, and the memory of its arrays."""

    data: bytes
    buffers: tuple[np.ndarray, ...]

    @staticmethod
    def of(value: Any) -> "Packed":
        """Pickles a value: functions and classes by their code where need be.

        So it is known here, before any worker is called, that it can be pickled; and what cannot be
        read on the other side is an error of the method that reads it.

        Raises:
            Exception: the value cannot be pickled.
        """
        import ray.cloudpickle  # Ray takes long to import

        cloudpickle: Any = ray.cloudpickle
        buffers: list[pickle.PickleBuffer] = []
        data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return Packed(data, tuple(np.frombuffer(own.raw(), np.uint8) for own in buffers))

    def get(self) -> Any:
        """Returns the value; its arrays have memory of their own."""
        return pickle.loads(self.data, buffers=[bytearray(own) for own in self.buffers])


class Applied:
    """A function that runs on ranks.

    Args:
        pending: the call of the processes.
    """

    def __init__(self, pending: Any):
        self._pending = pending

    def results(self) -> dict[int, list[Any]]:
        """Waits for all; returns by rank what each of its processes gave.

        Raises:
            Exception: what the function raised on a rank.
            RankError: a rank has failed.
        """
        found: dict[int, list[Any]] = {}
        for own in self._pending.values().values():
            for rank, carried in own.items():
                found.setdefault(rank, []).append(carried.get())
        return found
