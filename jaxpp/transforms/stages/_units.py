"""Finds the units that a balanced cut does not divide: repeated blocks, above all layers.

A block is a call of a module, the equations under a numbered scope, a checkpoint, or an iteration
of a scan over stacked layers. It is repeated if there are several of its kind: modules of one
class, scopes that differ by their numbers alone, checkpoints of one structure.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp import _checkpoints, _compat, _jaxprs

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

    def holds(self, other: "Unit") -> bool:
        """Tells whether another unit is inside."""
        return self.first <= other.first and other.last <= self.last


def labelled(
    eqns: Sequence[Any], labels: Callable[[Any], Iterable[Hashable]], kinds: Mapping | None = None
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


def repeated_scopes(eqns: Sequence[Any]) -> list[Unit]:
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

    def labels(eqn) -> Iterator[Hashable]:
        path = scope_path(eqn)
        return (label for d in range(len(path)) if (label := path[: d + 1]) in kinds)

    return labelled(eqns, labels, kinds)


def scope_path(eqn) -> tuple[str, ...]:
    """Returns the names of the scopes of an equation, without those that jaxpp has made."""
    return tuple(
        part
        for name in _compat.scope_names(eqn)
        if not name.startswith("jaxpp_")
        for part in name.split("/")
    )


def _without_number(name: str) -> str:
    return re.sub(r"[._\[]?\d+\]?$", "", name)


def checkpoints(eqns: Sequence[Any], opened: _checkpoints.Checkpoints) -> list[Unit]:
    """Makes a unit of each checkpoint; those of one structure are of one kind."""
    alike: dict[Hashable, list[str]] = {}
    for name, checkpoint in opened.items():
        alike.setdefault(_jaxprs.structure(checkpoint.params["jaxpr"]), []).append(name)
    kinds = {n: names[0] if len(names) > 1 else None for names in alike.values() for n in names}
    return labelled(eqns, _checkpoints.scopes, kinds)


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


def note(units: Sequence[Unit], num_stages: int) -> str:
    """Says what to do where there are fewer layers than stages; empty where there are enough."""
    kinds = [unit.kind for unit in outermost(units) if unit.kind is not None]
    layers = len(kinds)
    if layers >= num_stages or all(isinstance(kind, int) for kind in kinds):
        return ""
    return (
        f"no cut is made inside the {layers} layers that were found; whole=() allows cuts inside "
        f"them, and whole= names what stays whole instead"
    )
