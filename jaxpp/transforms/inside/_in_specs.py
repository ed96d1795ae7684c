"""Reads `in_specs` and `out_specs`: how a caller splits arguments and results inside a rank."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from jaxpp._program import PIPELINE_AXIS
from jaxpp._specs import Spec, axes_of, spec_of

#: Patterns, each with the spec of the leaves in whose paths it is found.
Rules = Sequence[tuple[str, PartitionSpec]]


def specs_of_leaves(
    prefix: Any, tree: Any, sizes: Mapping[str, int], what: str
) -> list[Spec | None]:
    """Finds the spec of each leaf of a pytree; None for a leaf without one.

    Args:
        prefix: a prefix of the pytree, whose leaves are `PartitionSpec`s, rules, or None.
        tree: the pytree; its array leaves have a shape.
        sizes: the axes inside a rank, and their sizes.
        what: the name of the prefix in errors, such as `"in_specs"`.

    Raises:
        ValueError: the prefix does not fit the pytree; a spec does not fit its leaf, whose path the
            message has; or no pattern of some rules is found in a path.
    """
    found: list[Spec | None] = []

    def add(path: Any, own: Any, subtree: Any) -> None:
        leaves = [(tuple([*path, *below]), x) for below, x in jtu.tree_leaves_with_path(subtree)]
        arrays = [(own_path, x) for own_path, x in leaves if hasattr(x, "shape")]
        if _is_rules(own):
            _check_rules(own, arrays, f"{what} for {jtu.keystr(path)}")
        for own_path, leaf in leaves:
            wanted = _by_rules(own, own_path) if _is_rules(own) else own
            if wanted is None or not hasattr(leaf, "shape"):
                found.append(None)
                continue
            name = f"{what} for {jtu.keystr(own_path)}, {_kind(leaf)}"
            found.append(_checked(wanted, leaf, sizes, name))

    try:
        jtu.tree_map_with_path(add, prefix, tree, is_leaf=_is_leaf)
    except ValueError as error:
        if str(error).startswith(what):
            raise
        raise ValueError(
            f"{what} is not a prefix of the pytree it stands for: {error}. Its leaves are "
            f"PartitionSpecs, None, and lists of rules [(pattern, PartitionSpec), ...]."
        ) from None
    return found


def _is_leaf(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec) or _is_rules(node)


def _is_rules(node: Any) -> bool:
    return isinstance(node, list | tuple) and bool(node) and all(
        isinstance(rule, tuple)
        and len(rule) == 2
        and isinstance(rule[0], str)
        and isinstance(rule[1], PartitionSpec)
        for rule in node
    )  # fmt: skip


def _by_rules(rules: Rules, path: tuple[Any, ...]) -> PartitionSpec | None:
    name = _name(path)
    return next((spec for pattern, spec in rules if re.search(pattern, name)), None)


def _name(path: tuple[Any, ...]) -> str:
    """Writes a leaf's path as the patterns of rules see it."""
    return jtu.keystr(path, simple=True, separator=".")


def _check_rules(rules: Rules, arrays: Sequence[tuple[Any, Any]], name: str) -> None:
    """Checks that rules are patterns, and that one is found in the path of an array."""
    for pattern, _ in rules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: {pattern!r} is not a pattern of re: {error}.") from None
    paths = [path for path, leaf in arrays if leaf.shape]
    if paths and not any(_by_rules(rules, path) for path in paths):
        first = ", ".join(repr(_name(path)) for path in paths[:3])
        raise ValueError(
            f"{name}: none of the patterns {[pattern for pattern, _ in rules]} is found in the "
            f"path of any array there: {first}{', ...' if len(paths) > 3 else ''}. Correct them, "
            f"or give None to have all of them whole."
        )


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]"


def _checked(given: Any, leaf: Any, sizes: Mapping[str, int], name: str) -> Spec:
    """Makes the spec of a leaf, and checks that it fits."""
    if not isinstance(given, PartitionSpec):
        raise ValueError(f"{name}: {given!r} is not a PartitionSpec, None or a list of rules.")
    if PartitionSpec.UNCONSTRAINED in tuple(given):
        raise ValueError(
            f"{name}: {given} leaves a dimension open, but how arguments and results are split is "
            f"settled here. Name its axes, or None for none."
        )
    if len(given) > len(leaf.shape):
        raise ValueError(
            f"{name}: {given} has {len(given)} entries, but the array has {len(leaf.shape)} "
            f"dimensions."
        )
    spec = spec_of(given, len(leaf.shape))
    axes = axes_of(spec)
    for axis in axes:
        if axis == PIPELINE_AXIS:
            raise ValueError(
                f"{name}: {given} names {axis!r}, the axis of the pipeline. The schedule says "
                f"which rank has what; a spec names the axes inside a rank: {tuple(sizes)}."
            )
        if axis not in sizes:
            raise ValueError(
                f"{name}: {given} names {axis!r}, which is no axis inside a rank of the mesh; "
                f"those are {tuple(sizes)}."
            )
        if axes.count(axis) > 1:
            raise ValueError(f"{name}: {given} names {axis!r} twice.")
    for dimension, (size, entry) in enumerate(zip(leaf.shape, spec, strict=True)):
        parts = 1
        for axis in entry:
            parts *= sizes[axis]
        if size % parts:
            raise ValueError(
                f"{name}: {given} splits dimension {dimension} of size {size} into {parts} parts, "
                f"which does not divide it. Pad it, or leave that dimension whole."
            )
    return spec
