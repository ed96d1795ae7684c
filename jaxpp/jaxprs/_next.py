"""Finds the parts of a result that are the next values of arguments: of a model, of its average."""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp.jaxprs._arguments import is_array
from jaxpp.jaxprs._equations import is_literal, variables
from jaxpp.jaxprs._typing import Eqn, Var

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a tree, by its number."""

    number: int
    shape: tuple[int, ...]
    dtype: Any


def leaves_of(avals: Iterable[Any]) -> list[Leaf]:
    """Numbers the arrays of some types."""
    return [Leaf(n, aval.shape, aval.dtype) for n, aval in enumerate(avals)]


def number_leaves(tree: Any, avals: Iterable[Any] | None = None) -> Any:
    """Puts a `Leaf` in place of each array of a tree: of the types given, or of its own."""
    if avals is None:
        avals = filter(is_array, jtu.tree_leaves(tree))
    found = iter(leaves_of(avals))
    return jtu.tree_map(lambda x: next(found) if is_array(x) else x, tree)


def leaf_numbers(tree: Any) -> list[int]:
    """Returns the numbers of the arrays of a tree."""
    return [leaf.number for leaf in jtu.tree_leaves(tree) if isinstance(leaf, Leaf)]


def next_values(
    arguments: Mapping[Key, Any],
    result: Any,
    origins: Callable[[], Sequence[Collection[int]]] | None = None,
) -> dict[Key, Any]:
    """Finds the parts of a result that are the next values of arguments; each has one at most.

    A next value has the structure of the argument, and arrays of the same types in the same places;
    larger parts go first. Where several parts or arguments are alike, such as a model and its
    average, it is the part that is computed from the argument, leaf by leaf, and from as little
    else as can be; where nothing is known of that, the first one.

    Args:
        arguments: trees with a `Leaf` in place of each array.
        result: such a tree.
        origins: makes for each array of the result the numbers of those arrays of the arguments
            that it is computed from. It is called only where several are alike.
    """
    types, found = {key: _type(tree) for key, tree in arguments.items()}, {}

    def alike(node: Any) -> list[Key]:
        own = _type(node)
        return [key for key, wanted in types.items() if key not in found and wanted == own]

    def largest(node: Any) -> list[Any]:
        return [node] if alike(node) else [x for child in _children(node) for x in largest(child)]

    nodes, known = largest(result), None
    while nodes:
        pairs = [(k, key) for k, node in enumerate(nodes) for key in alike(node)]
        if origins and any(len({*one}) < len(pairs) for one in zip(*pairs, strict=True)):
            known = known or origins()
            scores = [_score(arguments[key], nodes[k], known) for k, key in pairs]
            pairs = [pairs[i] for i in sorted(range(len(pairs)), key=lambda i: -scores[i])]
        taken = set()
        for k, key in pairs:
            if key not in found and k not in taken:
                taken.add(k)
                found[key] = nodes[k]
        rest = [node for k, node in enumerate(nodes) if k not in taken]
        nodes = [x for node in rest for child in _children(node) for x in largest(child)]
    return found


def _score(argument: Any, part: Any, origins: Sequence[Collection[int]]) -> float:
    """Counts the leaves that are computed from their old values, by their shares in what is."""
    pairs = zip(leaf_numbers(argument), leaf_numbers(part), strict=True)
    return sum(1 / len(origins[new]) for old, new in pairs if old in origins[new])


def _type(tree: Any) -> tuple[Any, list[Any]]:
    """Returns what two trees have in common that are alike."""
    found, structure = jtu.tree_flatten(tree)
    return structure, [isinstance(x, Leaf) and (x.shape, x.dtype) for x in found]


def _children(node: Any) -> list[Any]:
    """Returns the children of a node of a pytree."""
    children = jtu.tree_leaves(node, is_leaf=lambda x: x is not node)
    return [child for child in children if child is not node]


def origins(
    jaxpr: jex.ClosedJaxpr,
    inputs: Sequence[Var],
    ends: Callable[[Eqn], bool] = lambda eqn: False,
) -> list[frozenset[int]]:
    """Finds for each output the numbers of those inputs that reach it by arrays of its shape.

    `ends` tells which equations they do not go through.
    """
    reached = {v: frozenset({n}) for n, v in enumerate(inputs)}
    for eqn in jaxpr.eqns:
        if ends(eqn):
            continue
        operands = [v for v in variables(eqn.invars) if v in reached]
        for out in eqn.outvars:
            alike = [reached[v] for v in operands if v.aval.shape == out.aval.shape]
            if alike:
                reached[out] = frozenset().union(*alike)
    return [
        frozenset() if is_literal(v) else reached.get(v, frozenset()) for v in jaxpr.jaxpr.outvars
    ]
