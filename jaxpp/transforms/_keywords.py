"""Puts keyword arguments at the positions that a function has for them, if it has any."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu


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


def with_keywords(prefix: Any, args: Sequence[Any], own: Any) -> Any:
    """Extends a prefix of the arguments that have a position to all; the others get `own`."""
    known = without_keywords(args)
    if len(known) == len(args):
        return prefix
    return (*(prefix if type(prefix) is tuple else (prefix,) * len(known)), own)
