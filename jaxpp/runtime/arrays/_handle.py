"""`ArrayHandle`: stands for an array that is elsewhere, or in parts, and knows its type alone."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat


class ArrayHandle(jax.Array):
    """A leaf of pytrees that stands for an array: its type is known, its value is fetched.

    Operators and methods of arrays work where this process has all of the value; else they raise an
    error that says how to get it. Functions of JAX take a handle for its type alone
    (`jax.eval_shape`, `jax.make_jaxpr`, `jnp.zeros_like`); to compute with it, gather it first.
    Subclasses set `_aval`.
    """

    _aval: jax.ShapeDtypeStruct
    #: Tells whether the array is bound to its devices.
    committed = True  # pyright: ignore

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape, dtype and weak type."""
        return self._aval

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.itemsize

    def want(self) -> None:
        """Notes that the value is wanted here, where it is not, so that one fetch brings many."""

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} stays with its ranks and cannot be pickled; gather it with jaxpp.gather, or "
            f"save it with jaxpp.save_state."
        )


class HandleSharding:
    """The place of a handle's array."""

    #: The kind and place of an array with this sharding, for errors.
    array: Any
    #: Tells whether this process holds the whole of such an array.
    is_fully_addressable: Any


def _refuse(what: str, array: Any, error: type[Exception] = TypeError) -> NoReturn:
    """Raises an error of a handle, or of the place of one."""
    shown = array.array if isinstance(array, HandleSharding) else repr(array)
    here = "in parts, on several devices" if array.is_fully_addressable else "not in this process"
    raise error(
        f"{what} of {shown}: its value is {here}. Gather it with jaxpp.gather (or, to NumPy, "
        f"jax.device_get), or compute with it inside a placed function."
    )


def _delegate(name: str, method: bool) -> Any:
    """Makes a method or a property that fetches the array, and calls that of the array."""

    def fetched(handle: Any) -> Any:
        if not isinstance(handle, ArrayHandle):
            return handle
        if not handle.is_fully_addressable:
            _refuse(name, handle)
        return jnp.asarray(handle)

    def call(self: ArrayHandle, *args: Any, **kwargs: Any) -> Any:
        return getattr(fetched(self), name)(*map(fetched, args), **kwargs)

    call.__name__ = name
    return call if method else property(lambda self: getattr(fetched(self), name))


def _of_value(name: str) -> Any:
    """Makes a method that fetches the value to this process, and calls that of the NumPy array."""

    def call(self: ArrayHandle, *args: Any) -> Any:
        return getattr(np.asarray(self), name)(*args)

    call.__name__ = name
    return call


#: Attributes that the type of a handle has.
_OF_TYPE = "shape", "dtype", "weak_type", "ndim", "size"
#: Attributes about an array's place, which checkpointers read; a subclass gives its `sharding`.
_PLACES = {"addressable_data", "addressable_shards", "device", "global_shards"}
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow "
    "rpow matmul rmatmul and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert "
    "round lt le gt ge eq ne getitem iter"
).split()
for _name in _OF_TYPE:
    setattr(ArrayHandle, _name, property(operator.attrgetter(f"_aval.{_name}")))
for _name, _member in list(vars(jax.Array).items()):
    if _name in _PLACES:
        setattr(ArrayHandle, _name, property(functools.partial(_refuse, _name)))
    elif not _name.startswith("_") and _name != "sharding" and _name not in vars(ArrayHandle):
        setattr(ArrayHandle, _name, _delegate(_name, isinstance(_member, Callable)))
for _name in (f"__{name}__" for name in _OPERATORS):
    setattr(ArrayHandle, _name, _delegate(_name, method=True))
for _name in "__float__ __int__ __complex__ __bool__ __index__ item tolist".split():
    setattr(ArrayHandle, _name, _of_value(_name))
ArrayHandle.__hash__ = object.__hash__  # type: ignore[method-assign]


_to_function = functools.partial(_refuse, "a JAX function", error=ValueError)
_compat.refuse_as_argument(ArrayHandle, _to_function)
_compat.refuse_as_place(HandleSharding, _to_function)
