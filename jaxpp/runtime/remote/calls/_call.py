"""A call of a step as it goes from the driver to a rank, and the inputs that the rank makes."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpp._program import Message
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayType, Copier, Home, from_host, sharding_in


class Move(NamedTuple):
    """The transfer of an argument before the step, from a rank that holds it to a reader."""

    array: int
    message: Message


class Call(NamedTuple):
    """One call of a step, for one rank.

    Args:
        number: counts the calls of all steps of the mesh.
        step: the step's number.
        arrays: for each input of the program the id of an array of the rank; `VALUE` for one that
            comes with the call, `MOVED` for one that comes from another rank, `FED` for one that
            the rank loads itself.
        results: the id of the step's first result; those of the others follow.
        dropped: ids of arrays that this call consumes, or that nobody wants any more.
        moves: what the rank sends and receives before the step.
        fed: of each array that the rank loads itself, the number of its batch, and its own there.
        checks: JAX's settings under which results are checked, such as `"debug_nans"`.
        values: the bytes of arrays that come with the call.
    """

    number: int
    step: int
    arrays: tuple[int, ...]
    results: int
    dropped: tuple[int, ...]
    moves: tuple[Move, ...]
    fed: tuple[tuple[int, int], ...]
    checks: tuple[str, ...]
    values: tuple[bytes | np.ndarray, ...]


VALUE, MOVED, FED = -1, -2, -3
#: Settings that a call takes from its caller: they are no part of the traced step.
CHECKS = ("debug_nans", "debug_infs")
#: Bytes above which the memory of an array goes by itself.
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
        self._sharding = sharding_in(home, spec, array_type.kind) if split else None

    def __call__(self, data: Any) -> Any:
        """Makes the input from its bytes `data`, which are in memory that nobody else uses."""
        if self.array_type.nbytes <= LARGE:
            return self._copier(data)[0]
        return from_host(data, self.array_type, self._home, self.spec)

    def resplit(self, array: Any) -> Any:
        """Makes the input from an array of this rank; the array itself where its split is right."""
        wanted = self._sharding
        if wanted is None or array.sharding.is_equivalent_to(wanted, array.ndim):
            return array
        return jax.device_put(array, wanted)
