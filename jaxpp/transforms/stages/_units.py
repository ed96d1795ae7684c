"""Finds the units that a balanced cut does not divide: repeated blocks, above all layers.

A block that has a name is a call of a module, the equations under a numbered scope, a checkpoint,
or an iteration of a scan over stacked layers. It is repeated if there are several of its kind:
modules of one class, scopes that differ by their numbers alone, checkpoints of one structure. Where
a model has no names, equations that repeat are blocks (`Repeats`), which may be cut inside.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Eqn

#: The share of the work below which work does not count beside that of the layers: a list of norms
#: beside a list of blocks, or a residual connection beside stacked layers.
MINOR = 0.1


@dataclasses.dataclass(frozen=True)
class Unit:
    """The equations from `first` to `last`, which stay together.

    Units that are repeated have a `kind` in common, which is the number of the scan for iterations;
    other units have none.
    """

    first: int
    last: int
    label: Hashable
    kind: Hashable = None

    @property
    def name(self) -> str:
        """The module or scope that the unit is, and empty for another one."""
        if isinstance(self.label, str) and not _is_checkpoint(self):
            return self.label.rpartition(":")[2]
        path = self.label if isinstance(self.label, tuple) else ()
        return "/".join(path) if all(isinstance(n, str) for n in path) else ""

    def holds(self, other: "Unit") -> bool:
        """Tells whether another unit is inside."""
        return self.first <= other.first and other.last <= self.last


def labelled(
    eqns: Sequence[Eqn | None],
    labels: Callable[[Eqn], Iterable[Hashable]],
    kinds: Mapping | None = None,
) -> list[Unit]:
    """Makes a unit of each run of equations under a label; None among them does not end a run."""
    units, open_runs = [], {}
    for i, eqn in enumerate(eqns):
        if eqn is None:
            continue
        found = dict.fromkeys(labels(eqn))
        for label in [label for label in open_runs if label not in found]:
            units.append(_unit(label, open_runs.pop(label), kinds))
        for label in found:
            open_runs[label] = (open_runs.get(label, (i, i))[0], i)
    return units + [_unit(label, run, kinds) for label, run in open_runs.items()]


def _unit(label: Hashable, run: tuple[int, int], kinds: Mapping | None) -> Unit:
    return Unit(*run, label, None if kinds is None else kinds[label])


def repeated_scopes(eqns: Sequence[Eqn | None]) -> list[Unit]:
    """Makes units of the runs under scopes `layer_0`, `layer_1` ... that are in one scope."""
    siblings: dict[Hashable, set[str]] = {}
    paths = [() if e is None else scope_path(e) for e in eqns]
    for path in set(paths):
        for depth, name in enumerate(path):
            siblings.setdefault((path[:depth], _without_number(name)), set()).add(name)
    kinds = {
        path[: depth + 1]: tuple(map(_without_number, path[: depth + 1]))
        for path in set(paths)
        for depth, name in enumerate(path)
        if len(siblings[path[:depth], _without_number(name)]) > 1
    }

    def labels(eqn: Eqn) -> Iterator[Hashable]:
        path = scope_path(eqn)
        return (label for d in range(len(path)) if (label := path[: d + 1]) in kinds)

    return labelled(eqns, labels, kinds)


def scope_path(eqn: Eqn) -> tuple[str, ...]:
    """Returns the names of the scopes of an equation, without those that jaxpp has made."""
    return tuple(
        part
        for name in _compat.scope_names(eqn)
        if not name.startswith("jaxpp_")
        for part in name.split("/")
    )


def _without_number(name: str) -> str:
    return re.sub(r"[._\[]?\d+\]?$", "", name)


def checkpoints(eqns: Sequence[Eqn | None], opened: jaxprs.Checkpoints) -> list[Unit]:
    """Makes a unit of each checkpoint; those of one structure are of one kind."""
    alike: dict[Hashable, list[str]] = {}
    for name, checkpoint in opened.items():
        alike.setdefault(jaxprs.structure(checkpoint.params["jaxpr"]), []).append(name)
    kinds = {n: names[0] if len(names) > 1 else None for names in alike.values() for n in names}
    return labelled(eqns, jaxprs.checkpoint_scopes, kinds)


def choose(units: Sequence[Unit], costs: Sequence[float], num_stages: int) -> list[Unit]:
    """Chooses the units that stay whole: the outermost, but for those that hold more than a layer.

    Where fewer repeated units than stages are left, some of them are opened: those that do little
    but run stacked layers, and checkpoints of more than a stage's share of the costs.
    """
    before = np.concatenate([[0.0], np.cumsum(costs)])
    share = before[-1] / num_stages

    def cost(*chosen: Unit) -> float:
        return sum(float(before[u.last + 1] - before[u.first]) for u in chosen)

    units = [u for u in units if u.kind is not None or not _is_checkpoint(u) or cost(u) <= share]
    totals: dict[Hashable, float] = {}
    for unit in units:
        totals[unit.kind] = totals.get(unit.kind, 0.0) + cost(unit)
    largest = max((t for kind, t in totals.items() if kind is not None), default=0.0)
    units = [u for u in units if u.kind is None or totals[u.kind] >= MINOR * largest]
    while True:
        outer = outermost(units)
        opened = []
        for unit in outer:
            inside = [u for u in units if u is not unit and unit.holds(u)]
            iterations = cost(*(u for u in inside if isinstance(u.kind, int)))
            is_stack = iterations > (1 - MINOR) * cost(unit)
            if unit.kind is not None and (is_stack or _is_checkpoint(unit) and cost(unit) > share):
                opened.append(unit)
        if not opened or sum(u.kind is not None for u in outer) >= num_stages:
            return outer
        units = [u for u in units if u not in opened]


def _is_checkpoint(unit: Unit) -> bool:
    return isinstance(unit.label, str) and unit.label.startswith("jaxpp_checkpoint_")


def outermost(units: Sequence[Unit]) -> list[Unit]:
    """Returns the units that are in no other, in order."""
    found: list[Unit] = []
    for unit in sorted(units, key=lambda u: (u.first, -u.last)):
        if not found or unit.last > found[-1].last:
            found.append(unit)
    return found


def layers_of(units: Sequence[Unit]) -> list[Unit]:
    """Returns the outermost units that are repeated, in order."""
    return [unit for unit in outermost(units) if unit.kind is not None]


def borders(units: Sequence[Unit], crossing: Sequence[float]) -> list[int]:
    """Finds the positions before, between and after layers; none where there are no two layers.

    Each is, of the positions between two layers, the one that the fewest bytes cross. What comes
    after the last layer begins as soon as it can. `crossing` is infinite where no cut is allowed.
    """
    layers = layers_of(units)
    if len(layers) < 2:
        return []
    gaps = [(1, layers[0].first)]
    gaps += [(a.last + 1, b.first) for a, b in itertools.pairwise(layers)]
    cuts = []
    for first, stop in gaps:
        # Of those alike, the latest: what prepares a layer goes before it.
        cuts.append(min(range(stop, first - 1, -1), key=crossing.__getitem__, default=0))
    behind = range(layers[-1].last + 1, len(crossing) - 1)
    cuts.append(next((p for p in behind if crossing[p] != float("inf")), 0))
    return [cut for cut in cuts if cut and crossing[cut] != float("inf")]


def note(units: Sequence[Unit], num_stages: int) -> str:
    """Says what to do where there are fewer layers than stages; empty where there are enough."""
    kinds = [unit.kind for unit in layers_of(units)]
    layers = len(kinds)
    if layers >= num_stages or all(isinstance(kind, int) for kind in kinds):
        return ""
    return (
        f"no cut is made inside the {layers} layers that were found; whole=() allows cuts inside "
        f"them, and whole= names what stays whole instead"
    )


# ---- blocks of equations that repeat -------------------------------------------------------------

# Two equations are alike if they have the same primitive, and operands and results of the same
# types. A region repeats with a period if each of its equations is like the one a period before.
# The starts of its blocks are open by then: a region is cut into the most whole blocks, and of the
# places that give as many, where the fewest bytes cross.

#: An equation is compared with so many of those like it that come before it.
_NEIGHBOURS = 16


@dataclasses.dataclass(frozen=True)
class Repeats:
    """The types of equations, as numbers, and the costs before each position."""

    likes: np.ndarray
    before: np.ndarray
    crossing: Sequence[float]

    @classmethod
    def of(
        cls, eqns: Sequence[Eqn], costs: Sequence[float], crossing: Sequence[float]
    ) -> "Repeats":
        numbers: dict[Hashable, int] = {}
        likes = [numbers.setdefault(_like(e), len(numbers)) for e in eqns]
        before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
        return cls(np.array(likes, int), before, crossing)

    def blocks(self) -> list[Unit]:
        """Returns the blocks of all regions that do a part of the work that counts, in order."""
        regions = self._regions(0, len(self.likes))
        return [
            Unit(first, first + period - 1, (number, k), ("block", number))
            for number, (period, firsts) in enumerate(sorted(regions, key=lambda r: r[1][0]))
            for k, first in enumerate(firsts)
        ]

    def _regions(self, low: int, high: int) -> Iterator[tuple[int, list[int]]]:
        """Finds the region of most work in a range, then those before it and after it."""
        found = [
            region for p in self._periods(low, high) for region in self._repeating(p, low, high)
        ]
        if not found:
            return
        work, _, period, firsts = max(found)
        if work < MINOR * self.before[-1] or not work:
            return
        yield period, firsts
        yield from self._regions(low, firsts[0])
        yield from self._regions(firsts[-1] + period, high)

    def _periods(self, low: int, high: int) -> list[int]:
        """Finds the distances at which much of the work is found again."""
        likes = self.likes[low:high]
        order = np.argsort(likes, kind="stable")
        costs = np.diff(self.before[low : high + 1])[order]
        work = np.zeros(high - low + 1)
        for n in range(1, _NEIGHBOURS + 1):
            alike = likes[order[n:]] == likes[order[:-n]]
            np.add.at(work, (order[n:] - order[:-n])[alike], costs[n:][alike])
        enough = MINOR / 2 * self.before[-1]
        return [p for p in np.flatnonzero(work >= max(enough, 1e-300)).tolist() if p]

    def _repeating(
        self, period: int, low: int, high: int
    ) -> Iterator[tuple[float, int, int, list[int]]]:
        """Finds the regions of a period: their work, its negative, it, and where blocks begin."""
        likes = self.likes[low:high]
        alike = np.concatenate([[False], likes[period:] == likes[:-period], [False]])
        edges = np.flatnonzero(np.diff(alike.astype(int)))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - start >= period:
                firsts = self._firsts(low + start, low + end + period, period)
                if firsts:
                    work = float(self.before[firsts[-1] + period] - self.before[firsts[0]])
                    yield work, -period, period, firsts

    def _firsts(self, start: int, end: int, period: int) -> list[int]:
        """Finds where the blocks of a region begin."""
        found = []
        for phase in range(start, start + period):
            count = (end - phase) // period
            firsts = [phase + k * period for k in range(count)]
            crossing = sum(self.crossing[first] for first in firsts[1:])
            if count > 1 and crossing < math.inf:
                found.append((-count, crossing, firsts))
        return min(found)[2] if found else []


def _like(eqn: Eqn) -> Hashable:
    """Returns what equations have in common that are alike."""
    operands, results = (tuple(str(v.aval) for v in atoms) for atoms in (eqn.invars, eqn.outvars))
    return eqn.primitive.name, operands, results
