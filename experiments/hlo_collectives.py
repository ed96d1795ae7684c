"""Counts the collectives of compiled programs, as the text of their HLO has them."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp._program import Run
from jaxpp.runtime.arrays import sizes_of
from jaxpp.runtime.executor import Copier

_KINDS = (
    "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    "|ragged-all-to-all"
)
#: An instruction; those that only wait for the end of a started one are not counted.
_INSTRUCTION = re.compile(rf"^.*? = .*?\b({_KINDS})(?:-start)?\(.*$", re.MULTILINE)
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
#: Axes of a mesh of XLA's own: `mesh['x'=2,'y'=4] {'x','y':(2)2}`. Its devices may be in another
#: order than that of the axes: `mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}`.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_TRANSPOSED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


@dataclasses.dataclass(frozen=True)
class RankCollectives:
    """The collectives of a rank in a step, by kind and axes, such as `"all-reduce over data"`.

    Args:
        once: those that a step runs once, whatever the number of microbatches.
        in_tasks: for each kind of task, such as `"F0"`, those that each microbatch's runs. One in a
            loop inside a task counts once.
        all: how many a step runs.
    """

    once: Mapping[str, int]
    in_tasks: Mapping[str, Mapping[str, int]]
    all: Mapping[str, int]


def count_collectives(step: Any) -> list[RankCollectives]:
    """Counts the collectives of each rank of a step on an `MpmdMesh`.

    Args:
        step: a placed function, which has been called, or what its `lower(*args).compile()` gives.
    """
    compiled = step._cache[0] if hasattr(step, "_cache") else step
    local = compiled._run.step
    counted = []
    for executor, home in zip(local.executors, local.homes, strict=True):
        axes = sizes_of(home)
        every: Counter[str] = Counter()
        once: Counter[str] = Counter()
        in_tasks: dict[str, Counter[str]] = {}
        for run in executor.program.instructions:
            executable = isinstance(run, Run) and executor.executables[run.computation]
            if not axes or not executable or isinstance(executable, Copier):
                continue
            found = collectives(executable.as_text(), tuple(axes.values()), tuple(axes))
            own = Counter({f"{kind} over {names}": n for (kind, names), n in found.items()})
            every += own
            if run.task and own:
                task = f"{run.task.kind}{run.task.stage}"
                in_tasks[task] = in_tasks.get(task, Counter()) | own
            else:
                once += own
        in_order = {task: dict(sorted(own.items())) for task, own in in_tasks.items()}
        counted.append(RankCollectives(dict(sorted(once.items())), in_order, every))
    return counted


def collectives(hlo: str, shape: Sequence[int], names: Sequence[str]) -> Counter[tuple[str, str]]:
    """Counts the collectives of a compiled computation.

    Args:
        hlo: its text, as `jax.stages.Compiled.as_text` gives it.
        shape: the sizes of the axes of the mesh that it is compiled for.
        names: the names of these axes.

    Returns:
        For each kind and the axes it goes over, joined by commas, the number of instructions; one
        may reduce several arrays, and one in a loop counts once. The axes are `"?"` where the text
        does not tell them.

    Example:
        >>> line = "%x = f32[4] all-reduce(%y), replica_groups={{0,2},{1,3}}, to_apply=%add"
        >>> collectives(line, (2, 2), ("data", "model"))
        Counter({('all-reduce', 'data'): 1})
        >>> line = "%x = f32[4] all-gather(%y), replica_groups=mesh['a'=2,'b'=2] {'b'}, dims={0}"
        >>> collectives(line, (2, 2), ("data", "model"))
        Counter({('all-gather', 'model'): 1})
    """
    found: Counter[tuple[str, str]] = Counter()
    for match in _INSTRUCTION.finditer(hlo):
        groups = _groups(match.group(0), shape)
        axes = "?" if groups is None else ",".join(names[a] for a in _axes(groups, shape))
        if axes:  # else each group is a single device
            found[match.group(1), axes] += 1
    return found


def _groups(instruction: str, shape: Sequence[int]) -> list[list[int]] | None:
    """Finds the groups of devices of a collective, numbered as in the mesh; None if unknown."""
    if listed := _LISTED.search(instruction) or _PAIRS.search(instruction):
        return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed.group(1))]
    if iota := _IOTA.search(instruction):
        groups, dims, order = (_numbers(text or "") for text in iota.groups())
        numbers = np.arange(np.prod(dims)).reshape(dims)
        return (numbers.transpose(order) if order else numbers).reshape(groups).tolist()
    if mesh := _MESH.search(instruction):
        return _mesh_groups(*mesh.groups())
    if "replica_groups=" in instruction and "replica_groups={}" not in instruction:
        return None
    return [list(range(int(np.prod(shape))))]


def _mesh_groups(axes: str, devices: str | None, moving: str) -> list[list[int]] | None:
    """Finds the groups of devices along some axes of a mesh, or parts of axes: `'y':(2)2`."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    chosen = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", moving)
    }
    dims: list[int] = []
    own: list[int] = []
    for name, total in sizes.items():
        before, size = chosen.get(name, (total, 1))
        if name in chosen:
            own.append(len(dims) + 1)
        dims += [before, size, total // (before * size)]
    order = _order(devices, int(np.prod(dims)))
    if order is None:
        return None
    numbers = np.moveaxis(order.reshape(dims), own, range(-len(own), 0))
    return numbers.reshape(-1, int(np.prod([dims[n] for n in own]))).tolist()


def _order(devices: str | None, count: int) -> np.ndarray | None:
    """Finds the devices of a mesh of XLA's in the order of its axes: a list or transposed iota."""
    if devices is None:
        return np.arange(count)
    if transposed := _TRANSPOSED.match(devices):
        dims, order = (_numbers(text or "") for text in transposed.groups())
        numbers = np.arange(count).reshape(dims)
        return (numbers.transpose(order) if order else numbers).ravel()
    listed = _numbers(devices.strip("{}"))
    return np.array(listed) if len(listed) == count else None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _axes(groups: Iterable[Sequence[int]], shape: Sequence[int]) -> list[int]:
    """Finds the axes along which the devices of a group differ."""
    moving: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(group, shape))
        moving.update(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return sorted(moving)
