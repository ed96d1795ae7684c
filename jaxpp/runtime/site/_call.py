"""A call of a step as it goes to a site, and the inputs that the site makes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

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
    def of(value: Any, array_type: ArrayType) -> "Given":
        """Takes the bytes of an array of any kind; a copy where they are few."""
        # NumPy's 64-bit types become JAX's 32-bit ones, as in any call of JAX.
        is_jax = isinstance(value, jax.Array)
        host = to_host(value if is_jax else np.asarray(value, array_type.host_dtype))
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
class RankCall:
    """The part of one rank in a call: where each input of its program comes from.

    Before the step it sends those of other ranks. `dropped` are numbers of arrays that this call
    consumes, or that nobody wants any more.
    """

    inputs: tuple[Source, ...]
    sends: tuple[Moved, ...]
    dropped: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StepCall:
    """One call of a step, for the ranks of one process, of which each has its part.

    The `number` counts the calls of all steps. The first of the `results` has that number, and the
    others follow. `checks` are JAX's settings under which results are checked (`"debug_nans"`).
    """

    number: int
    step: int
    results: int
    checks: tuple[str, ...]
    parts: Mapping[int, RankCall]


class Input:
    """Makes an input of a step, at a home: of its bytes, or of what this rank has loaded."""

    def __init__(self, array_type: ArrayType, home: Home, spec: Spec):
        self.array_type, self.home, self.spec = array_type, home, spec
        self._copier = ArrayMaker((array_type,), (0,), home, (spec,))

    def __call__(self, data: Any) -> Any:
        """Makes the input from its bytes, which Ray owns: the array must not keep them."""
        if self.array_type.nbytes <= LARGE:
            return self._copier(data)[0]
        return from_host(np.array(data), self.array_type, self.home, self.spec)

    def of_loaded(self, value: Any) -> Any:
        """Makes the input from an array that this process has loaded, on the host or a device."""
        # Over several processes `device_put` would compare the values.
        if isinstance(value, jax.Array) and not spans(self.home):
            sharding = sharding_in(self.home, self.spec, self.array_type.kind)
            return jax.device_put(value, sharding)
        if not isinstance(value, jax.Array):
            value = np.array(value, self.array_type.host_dtype)
        return from_host(to_host(value), self.array_type, self.home, self.spec)
