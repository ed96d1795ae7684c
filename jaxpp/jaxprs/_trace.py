"""Traces a function of pytrees to a jaxpr without constants and without references."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.tree_util as jtu
import numpy as np

from jaxpp import _compat
from jaxpp.jaxprs import _in_place, primitives
from jaxpp.jaxprs._arguments import is_array, refuse_array_likes
from jaxpp.jaxprs._constants import without_constants
from jaxpp.jaxprs._equations import (
    called_jaxpr,
    contains,
    is_literal,
    map_jaxprs,
    opened,
    sub_jaxprs,
    variables,
)
from jaxpp.jaxprs._parts import descendants

_STATIC_OUTPUT = object()


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced at given arguments.

    `jaxpr` takes `inputs`: the arrays that the function closes over, then the array leaves of the
    arguments.
    """

    jaxpr: jex.ClosedJaxpr
    inputs: list[Any]
    num_closed_over: int
    out_tree: Any
    out_static: list[Any]

    def rebuild(self, outputs: Iterable[Any]) -> Any:
        """Puts the jaxpr's outputs and the static leaves back into the function's result."""
        return jtu.tree_unflatten(self.out_tree, self.output_leaves(outputs))

    def output_leaves(self, outputs: Iterable[Any]) -> list[Any]:
        """Returns the leaves of the function's result: the jaxpr's outputs, and the static ones."""
        outputs = iter(outputs)
        return [next(outputs) if s is _STATIC_OUTPUT else s for s in self.out_static]

    def output_paths(self) -> list[str]:
        """Returns the path of each array in the function's result, as `keystr` of JAX writes it."""
        # JAX asks user-defined pytrees to accept an `object()` for a leaf.
        tree = jtu.tree_unflatten(self.out_tree, [object() for _ in self.out_static])
        leaves = jtu.tree_flatten_with_path(tree)[0]
        return [
            jtu.keystr(path)
            for (path, _), static in zip(leaves, self.out_static, strict=True)
            if static is _STATIC_OUTPUT
        ]


def trace(fun: Callable, args: Sequence[Any], kwargs: dict | None = None) -> Traced:
    """Traces `fun`; every leaf of the arguments that is not an array is static, as in Equinox.

    A value that `fun` writes to a `jax.new_ref` of its own becomes plain data.

    Raises:
        ValueError: `fun` changes an argument in place, and the change is lost; or a leaf stands for
            an array by `__jax_array__`.
    """
    leaves, tree = jtu.tree_flatten((tuple(args), kwargs or {}))
    refuse_array_likes(tuple(args), kwargs)
    traced = [is_array(leaf) for leaf in leaves]
    static = [None if t else leaf for leaf, t in zip(leaves, traced, strict=True)]
    result = {}

    def flat(*named):
        arrays = iter([array for own in named for array in own.arrays])
        full = [next(arrays) if t else s for t, s in zip(traced, static, strict=True)]
        args, kwargs = jtu.tree_unflatten(tree, full)
        out_leaves, result["tree"] = jtu.tree_flatten(fun(*args, **kwargs))
        out_leaves = list(map(_fixed_if_empty, out_leaves))
        flows = [is_array(leaf) and leaf.dtype != jax.dtypes.float0 for leaf in out_leaves]
        pairs = list(zip(out_leaves, flows, strict=True))
        result["static"] = [_STATIC_OUTPUT if flows else leaf for leaf, flows in pairs]
        written = _in_place.writes(tree, full, (args, kwargs))
        result["writes"] = [write for write, _ in written]
        return [leaf for leaf, flows in pairs if flows] + [value for _, value in written]

    arrays = [leaf for leaf, t in zip(leaves, traced, strict=True) if t]
    # JAX's errors name the user's function and its arguments.
    named, signature = _named(fun, args, kwargs or {})
    vars(flat).update(__wrapped__=fun, __signature__=signature)
    jaxpr = without_refs(jax.make_jaxpr(flat)(*named))
    opened, consts = without_constants(jaxpr)
    if result["writes"]:
        opened = _without_writes(opened, result["writes"], fun)
    return Traced(opened, [*consts, *arrays], len(consts), result["tree"], result["static"])


@jtu.register_pytree_with_keys_class
class _ArgumentArrays:
    """The arrays of one argument, with their paths in it, which JAX reads where it has an error."""

    def __init__(self, paths: tuple[str, ...], arrays: Iterable[Any]):
        self.paths, self.arrays = paths, list(arrays)

    def tree_flatten_with_keys(self):
        return tuple(zip(self.paths, self.arrays, strict=True)), self.paths

    def tree_flatten(self):
        return self.arrays, self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], arrays: Iterable[Any]) -> "_ArgumentArrays":
        return cls(paths, arrays)


def _named(
    fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[_ArgumentArrays], inspect.Signature]:
    """Returns the arrays of each argument of a call, and the arguments' names as a signature."""
    named = []
    for tree in (*args, *(kwargs[name] for name in sorted(kwargs))):
        leaves = [x for x in jtu.tree_leaves_with_path(tree) if is_array(x[1])]
        paths = tuple(jtu.keystr(path) for path, _ in leaves)
        named.append(_ArgumentArrays(paths, [x for _, x in leaves]))
    try:
        parameters = list(inspect.signature(fun).parameters.values())[: len(args)]
    except (TypeError, ValueError):  # `fun` has no signature
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += sorted(kwargs)
    if len(set(names)) < len(named):
        rest = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        return named, inspect.Signature([rest])
    kind = inspect.Parameter.POSITIONAL_ONLY
    return named, inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _without_writes(
    jaxpr: jex.ClosedJaxpr, found: Sequence[_in_place.Write], fun: Callable
) -> jex.ClosedJaxpr:
    """Removes the values that a function has written to its arguments; they come last.

    Raises:
        ValueError: one is lost: it is no result, and no result or effect depends on it.
    """
    inside = jaxpr.jaxpr
    results, values = inside.outvars[: -len(found)], inside.outvars[-len(found) :]
    maker = {v: e for e in inside.eqns for v in e.outvars}

    def origin(atom):
        """Returns the variable that calls have only handed through."""
        if is_literal(atom) or atom not in maker or called_jaxpr(maker[atom]) is None:
            return atom
        eqn = maker[atom]
        inner = opened(called_jaxpr(eqn))
        at = inner.outvars[eqn.outvars.index(atom)]
        return origin(eqn.invars[inner.invars.index(at)]) if at in inner.invars else atom

    kept = {origin(v) for v in variables(results)}.union(inside.invars)
    effects = [v for e in inside.eqns if e.effects for v in variables(e.invars)]
    lost: list[tuple[_in_place.Write, str]] = []
    for write, value in zip(found, values, strict=True):
        source = origin(value)
        if is_literal(source) or source in kept:
            continue
        read = descendants(inside.eqns, [value])
        if write.keeps or read.isdisjoint([*variables(results), *effects]):
            lost.append((write, _compat.at_source_line(maker[value])))
    if lost:
        name = getattr(fun, "__name__", "The function")
        raise _in_place.lost(name, [write for write, _ in lost], lost[0][1])
    return _compat.with_equations(jaxpr, inside.eqns, results)


def without_refs(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Puts plain values in place of the `jax.new_ref`s that a program makes.

    Raises:
        ValueError: a loop or a call takes a reference from outside it, and has a function with a
            derivative rule in it, which would be lost.
    """

    def open_inner(eqn):
        if any(map(_compat.is_ref, eqn.invars)):
            if contains(eqn, lambda e: e.primitive.name in primitives.CUSTOM_RULES):
                raise ValueError(
                    f"The `{eqn.primitive.name}`{_compat.at_source_line(eqn)} reads or writes a "
                    f"jax.new_ref made outside of it, and calls a function with a derivative rule "
                    f"of its own (jax.custom_jvp or custom_vjp), which would be lost. Carry a "
                    f"value in place of the ref, or make the ref inside."
                )
            return eqn
        if not _compat.makes_refs(eqn) or not any(True for _ in sub_jaxprs(eqn)):
            return eqn
        return _compat.without_ref_effects(map_jaxprs(eqn, without_refs))

    if not _compat.makes_refs(jaxpr):
        return jaxpr
    eqns = list(map(open_inner, jaxpr.eqns))
    return _compat.discharge_refs(_compat.with_equations(jaxpr, eqns))


def _fixed_if_empty(leaf: Any) -> Any:
    """Returns the leaf; a new array for a gradient by an integer, which has no bits."""
    if getattr(leaf, "dtype", None) != jax.dtypes.float0:
        return leaf
    return np.zeros(leaf.shape, jax.dtypes.float0)
