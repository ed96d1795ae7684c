"""Finds the parts of a result that are the next values of arguments: of a model, of its average."""

import dataclasses
import itertools
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


@dataclasses.dataclass(frozen=True)
class Tree:
    """A pytree taken apart: a class of the user's need not take a `Leaf` in place of an array."""

    structure: Any
    leaves: tuple[Any, ...]

    @staticmethod
    def of(tree: Any, avals: Iterable[Any] | None = None) -> "Tree":
        """Takes a pytree apart; its arrays have the types given, or their own."""
        leaves, structure = jtu.tree_flatten(tree)
        arrays = iter(leaves_of(filter(is_array, leaves) if avals is None else avals))
        return Tree(structure, tuple(next(arrays) if is_array(x) else x for x in leaves))

    @property
    def numbers(self) -> list[int]:
        """The numbers of its arrays."""
        return [x.number for x in self.leaves if isinstance(x, Leaf)]

    @property
    def is_array(self) -> bool:
        """Tells whether it is a single array."""
        return jtu.treedef_is_leaf(self.structure) and bool(self.numbers)

    @property
    def type(self) -> tuple[Any, list[Any]]:
        """The structure and the types of the arrays: trees that are alike have the same."""
        types = [isinstance(x, Leaf) and (x.shape, x.dtype) for x in self.leaves]
        return self.structure, types

    @property
    def children(self) -> list["Tree"]:
        """The trees that it is made of, without their place."""
        leaves = iter(self.leaves)
        return [
            Tree(child, tuple(itertools.islice(leaves, child.num_leaves)))
            for child in jtu.treedef_children(self.structure)
        ]

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Puts the tree together, of arrays by their numbers."""
        leaves = [arrays[x.number] if isinstance(x, Leaf) else x for x in self.leaves]
        return jtu.tree_unflatten(self.structure, leaves)


def next_values(
    arguments: Mapping[Key, Tree],
    result: Tree,
    origins: Callable[[], Sequence[Collection[int]]] | None = None,
) -> dict[Key, Tree]:
    """Finds the parts of a result that are the next values of arguments; each has one at most.

    A next value has the structure of the argument, and arrays of the same types in the same places;
    larger parts go first. Where several parts or arguments are alike, such as a model and its
    average, it is the part that is computed from the argument, leaf by leaf, and from as little
    else as can be; where nothing is known of that, the first one.

    Args:
        arguments: trees.
        result: a tree.
        origins: makes for each array of the result the numbers of those arrays of the arguments
            that it is computed from. It is called only where several are alike.
    """
    types, found = {key: tree.type for key, tree in arguments.items()}, {}

    def alike(node: Tree) -> list[Key]:
        own = node.type
        return [key for key, wanted in types.items() if key not in found and wanted == own]

    def largest(node: Tree) -> list[Tree]:
        return [node] if alike(node) else [x for child in node.children for x in largest(child)]

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
        nodes = [x for node in rest for child in node.children for x in largest(child)]
    return found


def _score(argument: Tree, part: Tree, origins: Sequence[Collection[int]]) -> float:
    """Counts the leaves that are computed from their old values, by their shares in what is."""
    pairs = zip(argument.numbers, part.numbers, strict=True)
    return sum(1 / len(origins[new]) for old, new in pairs if old in origins[new])


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
