"""`ArrayHandle`: what is known of an array that lives elsewhere, or in parts, by its type alone."""

import math
from typing import Any

import jax


class ArrayHandle(jax.Array):
    """A leaf of pytrees that stands for an array: its type is known, its value is fetched.

    Subclasses set `_aval`.
    """

    _aval: Any

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and weak type."""
        return self._aval

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._aval.shape

    @property
    def dtype(self) -> Any:
        """The type of the elements."""
        return self._aval.dtype

    @property
    def weak_type(self) -> bool:
        """Whether it takes the dtype of what it is combined with."""
        return self._aval.weak_type

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.itemsize

    @property
    def committed(self) -> bool:
        """Whether it belongs where it is; always true."""
        return True
