"""Finds what a function changes in its arguments in place while it is traced.

A traced function gets containers of its own, so its caller never sees such a change. It is lost,
unless the function returns the new value.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax.tree_util as jtu

from jaxpp import _compat
from jaxpp._messages import warn


@dataclasses.dataclass(frozen=True)
class Write:
    """The place of an argument at which a function has put a new value.

    Args:
        path: such as `args[0].first.kernel`.
        keeps: whether the place is in an object of Flax NNX. Users expect that such an object keeps
            what is written to it, though the function has read it again.
    """

    path: str
    keeps: bool


def writes(tree: Any, leaves: Sequence[Any], after: tuple[tuple, dict]) -> list[tuple[Write, Any]]:
    """Finds the writes of a function, and the values that it has written.

    Args:
        tree: the structure of the positional and the keyword arguments.
        leaves: the leaves that it was called with.
        after: the arguments after the call.
    """
    own = {id(leaf) for leaf in leaves}
    args, kwargs = after
    changed = [n for n, arg in enumerate(args) if _has_new(arg, own)]
    named = [n for n, arg in kwargs.items() if _has_new(arg, own)]
    if not changed and not named:
        return []
    args_before, kwargs_before = jtu.tree_unflatten(tree, leaves)
    found = [w for n in changed for w in _writes_in(f"[{n}]", args_before[n], args[n], own)]
    return found + [
        w for n in named for w in _writes_in(f"[{n!r}]", kwargs_before[n], kwargs[n], own)
    ]


def _has_new(arg: Any, own: set[int]) -> bool:
    """Tells whether an argument has a traced value that the function was not called with."""
    try:
        leaves = jtu.tree_leaves(arg)
    except Exception:  # a state of Equinox that has been written refuses to be read
        return False
    return any(id(leaf) not in own and _compat.is_of_this_trace(leaf) for leaf in leaves)


def _writes_in(name: str, before: Any, after: Any, own: set[int]) -> Iterator[tuple[Write, Any]]:
    places = {path for path, _ in jtu.tree_flatten_with_path(before)[0]}
    keepers = {p for p, x in jtu.tree_flatten_with_path(after, is_leaf=_keeps)[0] if _keeps(x)}
    for path, leaf in jtu.tree_flatten_with_path(after)[0]:
        keeps = any(path[:n] in keepers for n in range(len(path) + 1))
        # Of a new entry in a dictionary nobody expects that it outlives the call.
        if id(leaf) not in own and _compat.is_of_this_trace(leaf) and (keeps or path in places):
            yield Write(f"args{name}{jtu.keystr(path)}", keeps), leaf


def _keeps(node: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # a user with such an object has imported it
    return nnx is not None and isinstance(node, getattr(nnx, "Pytree", nnx.Module))


def warn_of_shared(name: str, args: Any) -> None:
    """Warns of a parameter of Flax NNX that is at two places of the arguments, as in a tied layer.

    Args:
        name: the transform that traces them.
        args: the arguments, of which a trace makes copies that share nothing.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    known: dict[int, str] = {}
    nodes = jtu.tree_leaves_with_path(args, is_leaf=lambda x: isinstance(x, nnx.Param))
    for path, node in nodes:
        if not isinstance(node, nnx.Param):
            continue
        own, first = jtu.keystr(path), known.setdefault(id(node), jtu.keystr(path))
        if own != first:
            warn(
                f"{name}: args{first} and args{own} are one parameter of Flax NNX. As in jax.jit, "
                f"they are two inside: each has a gradient of its own, and changes alone. Pass a "
                f"state, which has it once: outside, `graphdef, state = nnx.split(model)`; inside, "
                f"`nnx.merge(graphdef, state)`."
            )
            return


def lost(name: str, found: Sequence[Write], line: str) -> ValueError:
    """Makes the error for writes that are lost; `line` is where the first one is."""
    first, more = found[0], len(found) - 1
    others = f" and {more} other{'s' * (more > 1)}" if more else ""
    way_out = "Return the new value, or change a copy of the argument."
    if first.keeps:
        way_out = (
            "For Flax NNX: outside, `graphdef, state = nnx.split((model, optimizer))`; inside, "
            "`nnx.merge(graphdef, state)`, and return `nnx.state((model, optimizer))`. What may be "
            "lost is changed in a copy: `nnx.merge(..., copy=True)`."
        )
    return ValueError(
        f"{name} changes {first.path}{line}{others} in place. As in jax.jit, its caller never sees "
        f"that: what a function changes, it has to return. {way_out}"
    )
