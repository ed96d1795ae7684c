"""Finds blocks of equations that repeat: the layers of a model whose code names none.

Two equations are alike if they have the same primitive, and operands and results of the same types.
A region repeats with a period if each of its equations is like the one a period before. Where its
blocks begin is open by then: a region is cut into the most whole blocks, and of the places that
give as many, where the fewest bytes cross.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxpp.transforms.stages import _units

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
        cls, eqns: Sequence[Any], costs: Sequence[float], crossing: Sequence[float]
    ) -> "Repeats":
        numbers: dict[Hashable, int] = {}
        likes = [numbers.setdefault(_like(e), len(numbers)) for e in eqns]
        before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, float))])
        return cls(np.array(likes, int), before, crossing)

    def blocks(self) -> list[_units.Unit]:
        """Returns the blocks of all regions that do a part of the work that counts, in order."""
        regions = self._regions(0, len(self.likes))
        return [
            _units.Unit(first, first + period - 1, (number, k), ("block", number))
            for number, (period, firsts) in enumerate(sorted(regions, key=lambda r: r[1][0]))
            for k, first in enumerate(firsts)
        ]

    def _regions(self, low: int, high: int) -> Iterator[tuple[int, list[int]]]:
        """Finds the region of most work in a range, then those before it and after it."""
        found = [own for p in self._periods(low, high) for own in self._repeating(p, low, high)]
        if not found:
            return
        work, _, period, firsts = max(found)
        if work < _units.MINOR * self.before[-1] or not work:
            return
        yield period, firsts
        yield from self._regions(low, firsts[0])
        yield from self._regions(firsts[-1] + period, high)

    def _periods(self, low: int, high: int) -> list[int]:
        """Finds the distances at which much of the work is found again."""
        own = self.likes[low:high]
        order = np.argsort(own, kind="stable")
        costs = np.diff(self.before[low : high + 1])[order]
        work = np.zeros(high - low + 1)
        for n in range(1, _NEIGHBOURS + 1):
            alike = own[order[n:]] == own[order[:-n]]
            np.add.at(work, (order[n:] - order[:-n])[alike], costs[n:][alike])
        enough = _units.MINOR / 2 * self.before[-1]
        return [p for p in np.flatnonzero(work >= max(enough, 1e-300)).tolist() if p]

    def _repeating(
        self, period: int, low: int, high: int
    ) -> Iterator[tuple[float, int, int, list[int]]]:
        """Finds the regions of a period: their work, its negative, it, and where blocks begin."""
        own = self.likes[low:high]
        alike = np.concatenate([[False], own[period:] == own[:-period], [False]])
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


def _like(eqn) -> Hashable:
    """Returns what equations have in common that are alike."""
    operands, results = (tuple(str(v.aval) for v in own) for own in (eqn.invars, eqn.outvars))
    return eqn.primitive.name, operands, results
