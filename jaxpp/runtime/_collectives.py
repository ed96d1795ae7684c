"""Which collectives a compiled computation runs, read off its HLO."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

_KINDS = (
    "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    "|ragged-all-to-all"
)
#: An instruction: those that only wait for what another one has started are not counted.
_INSTRUCTION = re.compile(rf"^.*? = .*?\b({_KINDS})(?:-start)?\(.*$", re.MULTILINE)
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
#: Axes of a mesh of XLA's own, in its order of devices: `mesh['x'=2,'y'=4] {'x','y':(2)2}`.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


def collectives(hlo: str, shape: Sequence[int], names: Sequence[str]) -> Counter[tuple[str, str]]:
    """Counts the collectives of a compiled computation.

    Args:
        hlo: its text, as `jax.stages.Compiled.as_text` gives it.
        shape: the sizes of the axes of the mesh that it is compiled for.
        names: the names of these axes.

    Returns:
        For each kind and the axes it goes over, joined by commas, the number of instructions; one
        may reduce several arrays, and one in a loop counts once.

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
        axes = _axes(_groups(match.group(0), shape), shape)
        found[match.group(1), ",".join(names[a] for a in axes)] += 1
    return found


def _groups(instruction: str, shape: Sequence[int]) -> list[list[int]]:
    """The devices that exchange something, by their numbers in the mesh."""
    if listed := _LISTED.search(instruction) or _PAIRS.search(instruction):
        return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed.group(1))]
    if iota := _IOTA.search(instruction):
        groups, dims, order = (_numbers(text or "") for text in iota.groups())
        numbers = np.arange(np.prod(dims)).reshape(dims)
        return (numbers.transpose(order) if order else numbers).reshape(groups).tolist()
    if mesh := _MESH.search(instruction):
        return _mesh_groups(*mesh.groups())
    return [list(range(int(np.prod(shape))))]


def _mesh_groups(axes: str, moving: str) -> list[list[int]]:
    """The groups of devices along some axes of a mesh, or parts of axes: `'y':(2)2`."""
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
    numbers = np.moveaxis(np.arange(np.prod(dims)).reshape(dims), own, range(-len(own), 0))
    return numbers.reshape(-1, int(np.prod([dims[n] for n in own]))).tolist()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _axes(groups: Iterable[Sequence[int]], shape: Sequence[int]) -> list[int]:
    """The axes along which the devices of a group differ."""
    moving: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(group, shape))
        moving.update(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return sorted(moving)
