"""The arrays of a message as JAX moves them from one process to another."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxpp._program import Message
from jaxpp.runtime.arrays import ArrayType, Home, from_host, plain, resplit, sharding_in


class Payload:
    """The arrays of a message, at home in a rank, but for empty ones; keys are integers."""

    def __init__(self, message: Message, home: Home):
        self._home = home
        types = [ArrayType.of(aval) for aval in message.avals]
        self._arrays = list(zip(types, message.specs or ((),) * len(types), strict=True))
        #: What moves, all of it in the memory of the devices.
        self.types = [
            jax.ShapeDtypeStruct(t.host_shape, t.host_dtype, sharding=sharding_in(home, spec))
            for t, spec in self._arrays
            if t.nbytes
        ]

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns what moves of the message's arrays, split as it is sent."""
        moved = [
            (resplit(plain(array), self._home, spec), type_.kind)
            for array, (type_, spec) in zip(arrays, self._arrays, strict=True)
            if type_.nbytes
        ]
        return [  # an array that is there already is the same object: it must not be donated yet
            array if kind is None else jax.device_put(array, type_.sharding)
            for (array, kind), type_ in zip(moved, self.types, strict=True)
        ]

    def whole(self, moved: Iterable[Any]) -> list[Any]:
        """Makes the message's arrays of what has moved."""
        rest = iter(moved)
        return [self._finished(next(rest) if own[0].nbytes else None, *own) for own in self._arrays]

    def _finished(self, array: Any, type_: ArrayType, spec: Any) -> Any:
        if array is None:
            return from_host(b"", type_, self._home, spec)
        if type_.kind is not None:
            array = jax.device_put(array, sharding_in(self._home, spec, type_.kind))
        return type_.of_plain(array)
