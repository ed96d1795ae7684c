"""The layers of stacked modules, named by paths.

`eqx.filter_vmap` of a constructor makes a module whose arrays have a leading axis of layers; a
`lax.scan` over the module runs one layer after the other. `blocks.2` is then a layer, and no
submodule.
"""

import dataclasses
import functools
import itertools
import operator
import re
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from jaxpp import _jaxprs

#: A path that ends with an index: `blocks.2` or `blocks[2]`.
INDEXED = re.compile(r"(.+)[.\[](\d+)\]?")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of stacked modules, or all of the stack where `index` is None.

    `arrays` has a bit for each array of the stack, by its number among the arrays of the model.
    """

    stack: str
    index: int | None
    arrays: int


def layer_at(model: eqx.Module, path: str) -> Layer | None:
    """Finds the layer of stacked modules that a path names; None if it names none."""
    match = INDEXED.fullmatch(path)
    stack = None if match is None else _node_at(model, match[1])
    if match is None or stack is None or isinstance(stack, list | tuple):
        return None
    leaves = [leaf for leaf in jtu.tree_leaves(model) if _jaxprs.is_array(leaf)]
    own = jtu.tree_leaves(stack)
    sizes = {leaves[i].shape[:1] for i in own}
    if len(sizes) != 1 or sizes == {()}:
        return None
    ((size,),) = sizes
    if int(match[2]) >= size:
        raise ValueError(
            f"The cut at {path!r} cannot be made: {match[1]!r} has {size} layers; the last is "
            f"{f'{match[1]}.{size - 1}'!r}."
        )
    return Layer(match[1], int(match[2]), arrays_of(stack))


def stack_at(model: eqx.Module, path: str) -> Layer:
    """Returns the module at a path as a stack of layers."""
    return Layer(path, None, arrays_of(_node_at(model, path)))


def _node_at(model: eqx.Module, path: str) -> Any:
    """Returns the node at a path, with numbers in place of arrays; None if there is no node."""
    node = numbered(model)
    for name in path.split("."):
        if isinstance(node, eqx.Module):
            node = vars(node).get(name)
        elif isinstance(node, dict):
            node = node.get(name, node.get(int(name)) if name.isdigit() else None)
        elif isinstance(node, list | tuple) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def numbered(model: Any) -> Any:
    """Puts its number in place of each array of a model, and None in place of other leaves."""
    numbers = itertools.count()
    return jtu.tree_map(lambda x: next(numbers) if _jaxprs.is_array(x) else None, model)


def arrays_of(node: Any) -> int:
    """Returns the arrays of a node of a `numbered` model, a bit each."""
    return functools.reduce(operator.or_, (1 << i for i in jtu.tree_leaves(node)), 0)
