"""Finds the modules of an Equinox model, and the layers of its stacked modules, by their paths."""

import dataclasses
import difflib
import functools
import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from jaxpp import jaxprs
from jaxpp.jaxprs import Var


def resolve_modules(model: Any, at: Any) -> "list[Named] | None":
    """Finds the submodules that `at` names, with their paths; None if `at` does not name modules.

    A path that ends with the index of a layer of stacked modules gives a `Layer`.
    """
    if not isinstance(model, eqx.Module):
        if callable(at):
            raise ValueError(
                "split_stages: `at` and `whole` can be functions only where the first argument is "
                "an Equinox model; give paths in it, such as blocks.2, or names of scopes."
            )
        return None
    found: list[Named] = []
    if callable(at):
        # In a copy, a module that stands in two places becomes two modules.
        model = jtu.tree_map(lambda leaf: leaf, model)
        paths = module_paths(model)
        chosen = at(model)
        for module in chosen if isinstance(chosen, list | tuple) else [chosen]:
            path = next((p for p, m in paths.items() if m is module), None)
            if path is None:
                name = repr(module) if isinstance(module, str) else type(module).__name__
                raise ValueError(
                    f"The function given for a cut returned {name}, which is not a submodule of "
                    f"{type(model).__name__}: {listed(paths)}."
                )
            found.append((path, paths[path]))
    else:
        paths = module_paths(model)
        at = [re.sub(r"\[(\d+)\]", r".\1", name) for name in at]
        named = [(n, paths[n] if n in paths else layer_at(model, n)) for n in at]
        if all(module is None for _, module in named):
            return None
        for name, module in named:
            if module is None:
                raise ValueError(
                    f"{type(model).__name__} has no submodule {name!r}: {listed(paths, name)}."
                )
            found.append((name, module))
    for path, module in found:
        if not isinstance(module, Layer) and not callable(module):
            raise ValueError(
                f"{path!r} is a {type(module).__name__}, which is not called: cut at a module that "
                f"has a __call__."
            )
    return found


def module_paths(model: eqx.Module) -> dict[str, eqx.Module]:
    """Finds every submodule by its path (`blocks.2.mlp`), outermost first."""
    found: dict[str, eqx.Module] = {}

    def visit(node: Any, path: str):
        if isinstance(node, eqx.Module):
            found.setdefault(path, node)
        for name, child in _children(node).items():
            visit(child, f"{path}.{name}" if path else str(name))

    visit(model, "")
    found.pop("", None)
    return found


def array_paths(model: Any) -> list[str]:
    """Returns the paths of the arrays of a pytree, `blocks.2.w`, in order."""
    leaves = jtu.tree_leaves_with_path(model)
    return [jtu.keystr(p, simple=True, separator=".") for p, x in leaves if jaxprs.is_array(x)]


def layer_of(path: str) -> str:
    """Names the layer of an array: its path up to the first number, or the first name in it."""
    names = [name for name in path.split(".") if name]
    numbered = (n + 1 for n, name in enumerate(names) if re.search(r"\d$", name))
    return ".".join(names[: next(numbered, 1 + (names[:1] == ["params"]))]) or "argument 0"


def _children(node: Any) -> Mapping[Any, Any]:
    if isinstance(node, eqx.Module):
        return vars(node)
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    return node if isinstance(node, dict) else {}


def listed(names: Sequence[str] | Mapping[str, Any], wanted: str = "") -> str:
    """Lists the possible names for an error message, and the one nearest to `wanted`."""
    shown = list(names)[:12]
    more = f", ... ({len(names)} in all)" if len(names) > len(shown) else ""
    there = f"there are {', '.join(map(repr, shown))}{more}" if shown else "there are none"
    return there + nearest(wanted, names)


def nearest(wanted: str, names: Iterable[str]) -> str:
    """Suggests the name nearest to `wanted`, as the end of a sentence; empty if none is near."""
    found = difflib.get_close_matches(wanted, names, 1)
    return f"; the nearest is {found[0]!r}" if found else ""


def repeated_classes(model: Any) -> set[type]:
    """Finds the classes of the modules in each list that holds several modules of one class."""
    found: set[type] = set()
    nodes = [model]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list | tuple):
            classes = [type(m) for m in node if isinstance(m, eqx.Module) and callable(m)]
            if len(set(classes)) < len(classes):
                found.update(classes)
        nodes.extend(_children(node).values())
    return found


# ---- layers of stacked modules -------------------------------------------------------------------

# `eqx.filter_vmap` of a constructor makes a module whose arrays have a leading axis of layers; a
# `lax.scan` over the module runs one layer after the other. `blocks.2` is then a layer, and no
# submodule.

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


#: A module, or a layer of stacked modules, with its path.
Named = tuple[str, eqx.Module | Layer]


def layer_at(model: Any, path: str) -> Layer | None:
    """Finds the layer of stacked modules that a path names; None if it names none."""
    match = INDEXED.fullmatch(path)
    stack = None if match is None else _node_at(model, match[1])
    if match is None or stack is None or isinstance(stack, list | tuple):
        return None
    leaves = [leaf for leaf in jtu.tree_leaves(model) if jaxprs.is_array(leaf)]
    numbers = jtu.tree_leaves(stack)
    sizes = {leaves[i].shape[:1] for i in numbers}
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


def _node_at(model: Any, path: str) -> Any:
    """Returns the node at a path, with numbers in place of arrays; None if there is no node."""
    node = counted(model)
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


def counted(model: Any) -> Any:
    """Puts its number in place of each array of a model, and None in place of other leaves."""
    numbers = itertools.count()
    return jtu.tree_map(lambda x: next(numbers) if jaxprs.is_array(x) else None, model)


def arrays_of(node: Any) -> int:
    """Returns the arrays of a node of a model `counted`, a bit each."""
    return joined_bits(1 << i for i in jtu.tree_leaves(node))


def joined_bits(sets: Iterable[int]) -> int:
    """Joins sets of arrays, a bit each."""
    return functools.reduce(operator.or_, sets, 0)


def model_arrays(traced: jaxprs.Traced, model: Any) -> list[Var]:
    """Returns the inputs that are arrays of the first argument, then those closed over."""
    invars, first = traced.jaxpr.jaxpr.invars, traced.num_closed_over
    count = sum(map(jaxprs.is_array, jtu.tree_leaves(model)))
    return [*invars[first : first + count], *invars[:first]]
