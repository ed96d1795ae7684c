"""Decides how each array of a step is split inside a rank, before anything is compiled.

Arguments and results are split as the caller says (`in_specs`, `out_specs`), optimizer state and
parameters further over the replicas (ZeRO), and all other values as Shardy splits them.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from jaxpp import jaxprs
from jaxpp._program import PIPELINE_AXIS
from jaxpp._specs import Spec, axes_of, spec_of
from jaxpp.transforms._step import Step
from jaxpp.transforms.inside._shardy import variable_specs
from jaxpp.transforms.tasks import ScheduledLoop, is_loop

# ---- what the caller says ------------------------------------------------------------------------

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

    def add(path: Any, given: Any, subtree: Any) -> None:
        leaves = [(tuple([*path, *below]), x) for below, x in jtu.tree_leaves_with_path(subtree)]
        arrays = [(leaf_path, x) for leaf_path, x in leaves if hasattr(x, "shape")]
        if _is_rules(given):
            _check_rules(given, arrays, f"{what} for {jtu.keystr(path)}")
        for leaf_path, leaf in leaves:
            wanted = _by_rules(given, leaf_path) if _is_rules(given) else given
            if wanted is None or not hasattr(leaf, "shape"):
                found.append(None)
                continue
            name = f"{what} for {jtu.keystr(leaf_path)}, {_kind(leaf)}"
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


# ---- ZeRO ----------------------------------------------------------------------------------------

# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". With
# optimizer state split (ZeRO-1, section 5.1) the gradients are reduced and scattered, each replica
# updates the part of the parameters that its state is for, and the new parameters are gathered,
# once a step. With parameters split too (ZeRO-3, section 5.3) each task gathers the parameters that
# it reads, and drops them when it ends, unless tasks of the schedule gather them (`Gather`).
# Gradients are accumulated whole all the same, as they are
# reduced once a step.


def scattered(
    spec: Spec, shape: Sequence[int], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> Spec | None:
    """Splits an array over further axes, along one of its dimensions.

    Args:
        spec: the spec of the array so far.
        shape: its shape.
        axes: the axes to split it over.
        sizes: the size of each axis inside a rank.

    Returns:
        The new spec. It splits the largest whole dimension that the axes divide, or else the
        largest one; None where they divide none, or where one of the axes is used already.

    Example:
        >>> scattered(((), ("model",)), (6, 8), ("data",), {"data": 2, "model": 2})
        (('data',), ('model',))
        >>> scattered(((),), (3,), ("data",), {"data": 2})
    """
    if set(axes_of(spec)) & set(axes):
        return None
    added = math.prod(sizes[a] for a in axes)
    found = [
        (not entry, size, -dimension)
        for dimension, (size, entry) in enumerate(zip(shape, spec, strict=True))
        if size and size % (added * math.prod(sizes[a] for a in entry)) == 0
    ]
    if not found:
        return None
    chosen = -max(found)[2]
    return tuple(e + axes if n == chosen else e for n, e in enumerate(spec))


def split_state(step: Step) -> Step:
    """Splits optimizer state and parameters further, as `zero1` and `zero3` say."""
    if step.inside is None:
        return step
    sizes = step.inside.sizes
    arguments = []
    for argument in step.arguments:
        axes = step.inside.zero.get(argument.role)
        spec = axes and scattered(argument.spec, argument.aval.shape, axes, sizes)
        arguments.append(dataclasses.replace(argument, spec=spec) if spec else argument)
    results = tuple(
        dataclasses.replace(r, spec=arguments[r.becomes].spec)
        if r.spec is None and r.becomes is not None
        else r
        for r in step.results
    )
    split = dataclasses.replace(step, arguments=tuple(arguments), results=results)
    return _note_gathered(split, [a.spec for a in step.arguments])


def _note_gathered(step: Step, whole: Sequence[Spec]) -> Step:
    """Notes how constants of loops that gather them are split once they are gathered.

    Args:
        step: the step, whose parameters are split.
        whole: the spec that each argument had before.
    """
    assert step.inside is not None
    gathering = [e for e in step.jaxpr.eqns if is_loop(e) and ScheduledLoop.of(e).of_stages]
    read = jaxprs.variables([v for e in gathering for v in e.invars[: e.params["num_consts"]]])
    if not read:
        return step
    split, kept = (
        variable_specs(step.jaxpr, read, specs, step.inside.sizes)
        for specs in ([a.spec for a in step.arguments], whole)
    )
    facts = {
        v: dataclasses.replace(step.fact(v), whole=kept[v])
        for v in read
        if kept[v] is not None and kept[v] != split[v]
    }
    return dataclasses.replace(step, facts={**step.facts, **facts})
