"""The arguments of a call: their positions, and the types for which a step has been compiled.

Keyword arguments are put at the positions that the function has for them, if it has any.
Arrays are traced, and Python numbers too, as by `jax.jit`. A number in an Equinox module is static,
as for `eqx.filter_jit`: it is a setting of a layer (the rate of a dropout), which `eqx.filter` does
not take for a parameter. All other leaves are static.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jaxpp import _compat, _specs, jaxprs
from jaxpp._program import Fed

# ---- positions -----------------------------------------------------------------------------------


@jtu.register_pytree_with_keys_class
class Keywords:
    """The arguments of a call that have a name alone; they follow those with a position."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def tree_flatten_with_keys(self):
        names = tuple(sorted(self.values))
        return tuple((jtu.GetAttrKey(name), self.values[name]) for name in names), names

    @classmethod
    def tree_unflatten(cls, names: Sequence[str], values: Sequence[Any]) -> "Keywords":
        return cls(dict(zip(names, values, strict=True)))


def as_positional(
    fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], most: int | None = None
) -> tuple[Any, ...]:
    """Turns the arguments of a call of `fun` into those of a call of `positional(fun)`.

    Args:
        fun: the function, whose signature says which keyword has a position.
        args: the positional arguments of a call of `fun`.
        kwargs: its keyword arguments.
        most: the number of positions to which arguments are moved at most; None for all.
    """
    if not kwargs:
        return tuple(args)
    moved, rest = list(args), dict(kwargs)
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # `fun` has no signature
        parameters = []
    for parameter in parameters[len(args) : most]:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.name not in rest:
            break
        moved.append(rest.pop(parameter.name))
    return (*moved, Keywords(rest)) if rest else tuple(moved)


def positional(fun: Callable) -> Callable:
    """Makes `fun` a function of positional arguments, the last of which may be `Keywords`."""

    @functools.wraps(fun)
    def call(*args):
        if args and isinstance(args[-1], Keywords):
            return fun(*args[:-1], **args[-1].values)
        return fun(*args)

    return call


def without_keywords(args: Sequence[Any]) -> Sequence[Any]:
    """Returns the arguments that have a position."""
    return args[:-1] if args and isinstance(args[-1], Keywords) else args


def with_keywords(prefix: Any, args: Sequence[Any], otherwise: Any) -> Any:
    """Extends a prefix of the arguments that have a position to all; the others get `otherwise`."""
    known = without_keywords(args)
    if len(known) == len(args):
        return prefix
    return (*(prefix if type(prefix) is tuple else (prefix,) * len(known)), otherwise)


# ---- types ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Signature:
    """The types of a call's leaves: an aval for a traced leaf, the value for a static leaf."""

    tree: Any
    avals: tuple[Any, ...]
    arrays: tuple[int, ...]
    static: tuple[Any, ...]
    #: For each leaf, whether a number that stands there is traced.
    numbers: tuple[bool, ...]
    static_argnums: tuple[int, ...]

    @staticmethod
    def of(args: Sequence[Any], static_argnums: tuple[int, ...]) -> "Signature":
        leaves, tree = jtu.tree_flatten(args)
        numbers = tuple(_numbers_traced(args, static_argnums))
        traced = [_is_traced(x, is_number) for x, is_number in zip(leaves, numbers, strict=True)]
        avals = tuple(type_of(x) if t else None for x, t in zip(leaves, traced, strict=True))
        static = tuple(None if t else x for x, t in zip(leaves, traced, strict=True))
        arrays = tuple(i for i, t in enumerate(traced) if t)
        return Signature(tree, avals, arrays, static, numbers, static_argnums)

    @property
    def types(self) -> Any:
        """The arguments, with a type in place of each traced leaf."""
        pairs = zip(self.static, self.avals, strict=True)
        return jtu.tree_unflatten(self.tree, [x if a is None else a for x, a in pairs])

    def matches(self, leaves: Sequence[Any], tree: Any) -> bool:
        if tree != self.tree:
            return False
        for leaf, aval, value, number in zip(
            leaves, self.avals, self.static, self.numbers, strict=True
        ):
            if aval is None:
                if leaf is not value and (type(leaf) is not type(value) or leaf != value):
                    return False
                if jaxprs.is_array(leaf):
                    return False
            elif isinstance(leaf, jax.Array):
                given = leaf.aval
                if given.shape != aval.shape or given.dtype != aval.dtype:
                    return False
                if given.weak_type != aval.weak_type:
                    return False
                if _compat.memory_kind(given) != _compat.memory_kind(aval):
                    return False
            elif not _is_traced(leaf, number) or type_of(leaf) != aval:
                return False
        return True

    def is_like(self, other: "Signature") -> bool:
        """Tells whether another signature has the same types, so that only static leaves differ."""
        return (self.tree, self.avals) == (other.tree, other.avals)

    def difference(self, args: Sequence[Any]) -> str:
        """Says where arguments, or their types, differ first from those of the signature."""
        given, known = Signature.of(args, self.static_argnums).types, self.types
        if len(given) != len(known):
            return f"there are {len(given)} of them, not {len(known)}"
        return next(
            (f"args[{n}]{d}" for n, arg in enumerate(given) if (d := _difference(arg, known[n]))),
            "none",
        )


def _difference(given: Any, other: Any) -> str:
    """Says where two pytrees differ first, as the end of a sentence; empty if they do not."""
    leaves = {jtu.keystr(p): x for p, x in jtu.tree_leaves_with_path(given)}
    others = {jtu.keystr(p): x for p, x in jtu.tree_leaves_with_path(other)}
    for path in [*others, *leaves]:
        if path not in leaves:
            return f"{path} is missing"
        if path not in others:
            return f"{path} is one too many"
        x, y = leaves[path], others[path]
        if x is not y and (type(x) is not type(y) or x != y):
            return f"{path} is {describe(x)}, not {describe(y)}"
    if jtu.tree_structure(given) != jtu.tree_structure(other):
        return " has another structure, though its leaves are alike"
    return ""


def with_arrays(args: Sequence[Any], static_argnums: Sequence[int]) -> tuple[Any, ...]:
    """Turns each traced number in the arguments of a step into an array."""
    leaves, tree = jtu.tree_flatten(tuple(args))
    numbers = _numbers_traced(args, static_argnums)
    pairs = zip(leaves, numbers, strict=True)
    return jtu.tree_unflatten(
        tree, [jnp.asarray(x) if n and _is_number(x) else x for x, n in pairs]
    )


def _is_traced(leaf: Any, number: bool) -> bool:
    """Tells whether a leaf is traced; `number` says whether a number that stands there is."""
    return jaxprs.is_array(leaf) or (number and _is_number(leaf))


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (int, float, complex)  # neither a bool nor an enumeration's member


def _numbers_traced(args: Sequence[Any], static_argnums: Sequence[int]) -> Iterator[bool]:
    """Tells for each leaf whether a Python number that stands there is traced."""
    for n, arg in enumerate(args):
        for node in jtu.tree_leaves(arg, is_leaf=_is_module):
            static = n in static_argnums or _is_module(node)
            yield from [not static] * len(jtu.tree_leaves(node))


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def type_of(array: Any) -> jax.ShapeDtypeStruct:
    """Returns an array's type without its sharding, which differs between a step's and a user's."""
    # JAX knows nothing of an array in another process, but the array has a type.
    aval = array.aval if isinstance(array, jax.Array | Fed) else jax.typeof(array)
    if isinstance(array, jax.ShapeDtypeStruct):  # JAX drops the memory kind of one device
        aval = aval.update(memory_space=_compat.memory_space(array))
    return _specs.type_of(aval)


def describe(value: Any) -> str:
    """Writes a type as JAX does, or a static value."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return repr(value)
    weak = ", weakly typed" if value.weak_type else ""
    kind = "<host>" if _compat.memory_kind(value) else ""
    return f"{value.dtype.name}{kind}[{','.join(map(str, value.shape))}]{weak}"
