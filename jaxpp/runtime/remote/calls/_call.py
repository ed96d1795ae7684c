"""A call of a step as it goes from the driver to a rank, and the inputs that the rank makes."""

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpp._program import Message
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayType, Copier, Home, from_host, sharding_in
from jaxpp.runtime.transport import Bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """The transfer of an argument before the step, from a rank that holds it to a reader."""

    array: int
    message: Message


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a step, for one rank.

    Args:
        number: counts the calls of all steps of the mesh.
        step: the step's number.
        arrays: for each input of the program the id of an array of the rank; `VALUE` for one that
            comes with the call, `MOVED` for one that comes from another rank, `FED` for one that
            the rank loads itself.
        results: the id of the step's first result; those of the others follow.
        dropped: ids of arrays that this call consumes, or that nobody wants any more.
        moves: what is sent and received before the step, in one order for all ranks.
        fed: of each array that the rank loads itself, the number of its batch, and its own there.
        checks: JAX's settings under which results are checked, such as `"debug_nans"`.
    """

    number: int
    step: int
    arrays: tuple[int, ...]
    results: int
    dropped: tuple[int, ...]
    moves: tuple[Move, ...] = ()
    fed: tuple[tuple[int, int], ...] = ()
    checks: tuple[str, ...] = ()

    def pack(self, values: Sequence[np.ndarray]) -> list[Bytes]:
        """Gives the bytes of a call and of arrays that come with it; large ones by themselves."""
        small = [None if v.nbytes > LARGE else v.tobytes() for v in values]
        fields = tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        return [pickle.dumps((fields, small)), *(v.data for v in values if v.nbytes > LARGE)]

    @staticmethod
    def unpack(packed: Bytes, *large: Bytes) -> tuple["Call", list[Bytes]]:
        """Undoes `pack`."""
        fields, small = pickle.loads(packed)
        rest = iter(large)
        return Call(*fields), [next(rest) if v is None else v for v in small]


VALUE, MOVED, FED = -1, -2, -3
#: Settings that a call takes from its caller: they are no part of the traced step.
CHECKS = ("debug_nans", "debug_infs")
#: Bytes above which an array goes by itself.
LARGE = 1 << 14


class Input:
    """Makes an input of a step from bytes that come with a call, or from an array of this rank.

    Args:
        array_type: of the input.
        home: where it goes.
        spec: how it is split there, if that is a mesh.
    """

    def __init__(self, array_type: ArrayType, home: Home, spec: Spec):
        self.array_type, self.spec = array_type, spec
        self._home = home
        self._copier = Copier((array_type,), (0,), home, (spec,))
        split = isinstance(home, Mesh) and array_type.host_dtype != jax.dtypes.float0
        self._sharding = sharding_in(home, spec) if split else None

    def __call__(self, data: Any) -> Any:
        """Makes the input from its bytes `data`, which are in memory that nobody else uses."""
        if self.array_type.nbytes <= LARGE:
            return self._copier(data)[0]
        return from_host(data, self.array_type, self._home, self.spec)

    def compile(self) -> None:
        """Compiles what makes the input from bytes, which the first call would do else."""
        if self.array_type.nbytes <= LARGE:
            self._copier(bytes(self.array_type.nbytes))

    def resplit(self, array: Any) -> Any:
        """Makes the input from an array of this rank; the array itself where its split is right."""
        wanted = self._sharding
        if wanted is None or array.sharding.is_equivalent_to(wanted, array.ndim):
            return array
        return jax.device_put(array, wanted)
