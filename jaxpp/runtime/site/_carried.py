"""Values on their way to a site, such as functions of the user: as bytes, or as they are."""

import dataclasses
import functools
import io
import pickle
from typing import Any

import numpy as np

from jaxpp import _compat


@dataclasses.dataclass(frozen=True, eq=False)
class Plain:
    """A value that stays in this process."""

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
    """A value as bytes: a pickle, and the memory of its arrays."""

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
        file, buffers = io.BytesIO(), []
        _pickler()(file, protocol=5, buffer_callback=buffers.append).dump(value)
        return Packed(file.getvalue(), tuple(np.frombuffer(b.raw(), np.uint8) for b in buffers))

    def get(self) -> Any:
        """Returns the value; its arrays have memory of their own."""
        return pickle.loads(self.data, buffers=[bytearray(own) for own in self.buffers])


#: A value on its way; what makes one is `Plain.of` or `Packed.of`.
Carried = Plain | Packed


@functools.cache
def _pickler() -> Any:
    import ray.cloudpickle  # Ray takes long to import

    class Pickler(ray.cloudpickle.Pickler):  # pyright: ignore
        """Also pickles what a jaxpr consists of, and functions by their code where need be."""

        def reducer_override(self, value: Any) -> Any:
            found = _compat.reduced(value)
            return super().reducer_override(value) if found is NotImplemented else found

    return Pickler
