"""The arguments of a function that is traced or called: which are arrays, and may be used."""

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from jaxpp import _compat
from jaxpp._program import Fed
from jaxpp.jaxprs._equations import is_key


def is_array(leaf: Any) -> bool:
    """Tells whether a leaf is traced: a JAX or NumPy array, or an object that stands for one."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | Fed)


def refuse_array_likes(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
    """Refuses a leaf that stands for an array by `__jax_array__`, as `jax.jit` does.

    It would be static, and the function compiled for its values.
    """
    for tree in (args, kwargs or {}):
        if not any(map(_is_array_like, jtu.tree_leaves(tree))):
            continue
        path, leaf = next(x for x in jtu.tree_leaves_with_path(tree) if _is_array_like(x[1]))
        raise ValueError(
            f"args{jtu.keystr(path)} is a {type(leaf).__name__}, which stands for an array by its "
            f"`__jax_array__`, but is neither an array nor a pytree of arrays. Pass the array, "
            f"jnp.asarray(x), or register the class as a pytree."
        )


def _is_array_like(leaf: Any) -> bool:
    known = is_array(leaf) or _compat.is_tracer(leaf)  # one of a `jax.new_ref` is no array
    return hasattr(type(leaf), "__jax_array__") and not known


def with_cloned_keys(values: Iterable[Any]) -> list[Any]:
    """Replaces random keys by clones, which `jax.debug_key_reuse` takes for keys not used yet."""
    return [jax.random.clone(x) if is_key(x) else x for x in values]


def describe_function(fun: Any) -> str:
    """Names a function, and the file and line where it is defined: `` `encode` (a.py:3) ``."""
    plain = inspect.unwrap(fun)
    while isinstance(plain, functools.partial):
        plain = plain.func
    name = getattr(plain, "__qualname__", repr(plain)).split("<locals>.")[-1]
    code = getattr(plain, "__code__", None)
    return f"`{name}`" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


#: The way out for who uses an array that a call has consumed.
DONATED = "use what that call returned, or leave the argument out of donate_argnums"


def check_arrays(arguments: Iterable[tuple[str, bool, Any]]) -> None:
    """Checks that no array has been deleted, and that no donated one is passed twice.

    Args:
        arguments: the name of each argument, whether it is donated, and its value.

    Raises:
        ValueError: one was donated to an earlier call, or is passed twice and donated once.
    """
    seen: dict[int, tuple[str, bool]] = {}
    for name, donated, value in arguments:
        if not isinstance(value, jax.Array) or _compat.is_tracer(value):
            continue
        if value.is_deleted():
            check_there(value, name)
        first, first_donated = seen.setdefault(id(value), (name, donated))
        if first != name and (donated or first_donated):
            raise ValueError(
                f"args{name} is the same array as args{first}, and one of them is donated, which "
                f"deletes both. Copy it with jnp.copy, or do not donate it."
            )


def check_there(value: Any, name: str) -> None:
    """Raises a ValueError if an argument has been deleted."""
    if isinstance(value, jax.Array) and value.is_deleted():
        why = getattr(value, "why_deleted", "") or "donated to an earlier call, which deleted it"
        way_out = getattr(value, "way_out", "") or DONATED
        raise ValueError(f"args{name} was {why}; {way_out}.")
