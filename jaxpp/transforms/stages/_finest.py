"""The finest cut of a function, whose stages are its units: what a profile measures one by one.

A unit is a layer, or what lies before the first layer or after the last one.
"""

import abc
import dataclasses
import itertools
from collections.abc import Sequence

from jaxpp.transforms.stages import _balance, _units


class Finest:
    """In the place of a cost: every unit is a stage. Notes the bytes that cross between them."""

    crossing: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Units(abc.ABC):
    """The units of a function.

    Args:
        crossing: the bytes that cross from each unit, but the last, to those behind it.
        at_least: the number of units that was asked for when the function was cut.
    """

    crossing: tuple[float, ...]
    at_least: int

    def check(self, crossing: Sequence[float]) -> None:
        """Raises a ValueError where other bytes cross between the units of a function."""
        if tuple(crossing) != self.crossing:
            raise ValueError(
                f"the profile is of another function, or of other shapes: it has "
                f"{len(self.crossing) + 1} units, between which {_sizes(self.crossing)} bytes "
                f"cross, and the function has {len(crossing) + 1}, with {_sizes(crossing)}. "
                f"Profile this function, with the arguments of a microbatch."
            )

    @abc.abstractmethod
    def choose(self, num_stages: int) -> Sequence[int]:
        """Chooses the first unit of each stage but the first."""


@dataclasses.dataclass(frozen=True)
class UnitCosts(Units):
    """The costs of the units of a function, for `split_stages(balance=)`.

    Args:
        crossing: the bytes that cross from each unit, but the last, to those behind it.
        at_least: the number of units that was asked for when the function was cut.
        costs: the cost of each unit, in any one unit.
    """

    costs: tuple[float, ...]

    def choose(self, num_stages: int) -> Sequence[int]:
        """Chooses the first unit of each stage but the first, so that costs are balanced."""
        return _balance.balanced_cuts(self.costs, [0.0, *self.crossing, 0.0], num_stages)


@dataclasses.dataclass(frozen=True)
class UnitCuts(Units):
    """Cuts between units of a function, for `split_stages(at=)`.

    Args:
        crossing: the bytes that cross from each unit, but the last, to those behind it.
        at_least: the number of units that was asked for when the function was cut.
        firsts: the first unit of each stage but the first.
    """

    firsts: tuple[int, ...]

    def choose(self, num_stages: int) -> Sequence[int]:
        """Returns the cuts."""
        return self.firsts


def finest_cuts(
    units: Sequence[_units.Unit], crossing: Sequence[float], at_least: int
) -> list[int]:
    """Finds the cuts between the units.

    Each is, of the positions between two layers, the one that the fewest bytes cross. What comes
    after the last layer begins as soon as it can. A function without layers is cut into `at_least`
    parts of as many equations.

    Args:
        units: the units that are not cut inside.
        crossing: the bytes that cross before each equation; infinite where no cut is allowed.
        at_least: the number of units that are wanted where there are no layers.
    """
    layers = [unit for unit in _units.outermost(units) if unit.kind is not None]
    if len(layers) < 2:
        ones = [1.0] * (len(crossing) - 1)
        places = sum(1 for c in crossing[1:-1] if c != float("inf"))
        return _balance.balanced_cuts(ones, crossing, min(at_least, places + 1))
    return borders(layers, crossing)


def borders(units: Sequence[_units.Unit], crossing: Sequence[float]) -> list[int]:
    """Finds the positions before, between and after layers; none where there are no two layers."""
    layers = [unit for unit in _units.outermost(units) if unit.kind is not None]
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


def _sizes(crossing: Sequence[float]) -> str:
    shown = [f"{n:.0f}" for n in crossing[:8]]
    return ", ".join(shown + ["..."] * (len(crossing) > 8)) or "no"
