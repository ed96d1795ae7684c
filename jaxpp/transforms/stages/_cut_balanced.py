"""Cuts a program into stages of equal work, or of equally many layers.

The work is that of a cost of equations, or what a profile has measured (`Units`). The finest cut
(`Finest`), which a profile measures, makes every unit a stage: a layer, or what lies before the
first layer or after the last one.
"""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp._messages import warn
from jaxpp.jaxprs import Eqn, Var
from jaxpp.transforms import stacked
from jaxpp.transforms.stages import _balance, _calls, _cuts, _modules, _stages, _units


class Finest:
    """In the place of a cost: every unit is a stage. Notes the bytes between them, and names."""

    crossing: tuple[float, ...] = ()
    names: tuple[str, ...] = ()


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
        names: the names of these units: the module, the scope, or the parameters that each begins
            with; empty for the others.

    Example:
        >>> print(UnitCuts((8.0, 8.0), 3, (1, 2), ("blocks.1", "")))
        cuts before unit 1 (blocks.1), unit 2
    """

    firsts: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = itertools.zip_longest(self.firsts, self.names, fillvalue="")
        shown = (f"unit {first}" + f" ({name})" * bool(name) for first, name in pairs)
        return f"cuts before {', '.join(shown)}" if self.firsts else "no cuts"

    def choose(self, num_stages: int) -> Sequence[int]:
        """Returns the cuts."""
        return self.firsts


def _sizes(crossing: Sequence[float]) -> str:
    shown = [f"{n:.0f}" for n in crossing[:8]]
    return ", ".join(shown + ["..."] * (len(crossing) > 8)) or "no"


#: The measure by which stages are balanced: a name, the cost of an equation, or measured costs.
Balance = str | jaxprs.Cost | Units | Finest


def cut_balanced(
    traced: jaxprs.Traced,
    model: Any,
    checkpoints: jaxprs.Checkpoints,
    num_stages: int,
    balance: Balance,
    calls: Mapping[str, str | None],
    scopes: Sequence[str] | None,
    tolerance: float,
) -> jex.ClosedJaxpr:
    """Marks `num_stages - 1` cuts that balance the stages, up to the share `tolerance`.

    A scan over arrays of the model can be cut between iterations.

    `calls` has the scopes of calls of modules that are not cut inside, each with the module's class
    if it is a layer. `scopes` has the names of other such scopes; None to look for repeated blocks.
    """
    arrays = _modules.model_arrays(traced, model)
    jaxpr = traced.jaxpr
    scans = stacked.layer_scans(jaxpr, arrays)
    everywhere = [(scan.number, i) for scan in scans for i in range(scan.length)]
    divided = stacked.divide_scans(jaxpr, arrays, everywhere)
    line = _cuts.ArrangedProgram.of(divided)
    costed = _CostedEquations.of(line, divided, num_stages, balance, arrays, tolerance)
    wanted = balance.at_least if isinstance(balance, Units) else num_stages
    units = _whole_units(costed, calls, scopes, checkpoints, wanted)
    for name in scopes or ():
        if not any(unit.label == name for unit in units):
            raise ValueError(_cuts.no_scope(name, line.eqns, model))
    try:
        if isinstance(balance, Units | Finest):
            cuts = costed.unit_cuts(units, balance)
            if isinstance(balance, Finest):
                balance.names = _names(costed, units, cuts, model, arrays)
        else:
            way_out = functools.partial(stacked.way_out, jaxpr, arrays)
            cuts = _best_cuts(costed, units, way_out)
    except ValueError as error:
        loop = stacked.loop_that_is_one_unit(jaxpr, arrays)
        raise ValueError(f"split_stages: {error}{loop}") from None
    starts = [costed.heads[cut].outvars[0] for cut in cuts]
    places = [divided.places.get(v) for v in starts]
    line = _cuts.ArrangedProgram.of(
        stacked.divide_scans(jaxpr, arrays, [p for p in places if p is not None])
    )
    positions = (line.position_of(p or v) for v, p in zip(starts, places, strict=True))
    return line.marked(positions, range(1, len(cuts) + 1), [None] * len(cuts))


def cost_of(balance: Balance) -> jaxprs.Cost:
    """Returns the cost by which layers are found, and stages balanced; a ValueError for no cost."""
    if isinstance(balance, Units | Finest):
        return jaxprs.flops
    return jaxprs.cost_function(balance)


def _best_cuts(
    costed: "_CostedEquations",
    units: Sequence[_units.Unit],
    way_out: Callable[[Eqn], str],
) -> list[int]:
    """Finds the best cuts between units.

    Warns where the slowest stage is much slower than it could be.
    """
    layers, call = _units.note(units, costed.num_stages), _closed_call(costed, way_out)
    try:
        cuts = costed.cuts(units)
    except ValueError as error:
        hints = [f" Note that {text}." for text in (layers, call) if text]
        raise ValueError(f"{error}{''.join(hints)}") from None
    note = call
    if not note and layers and costed.is_slower(cuts, costed.cuts([])):
        note = layers
    if note:
        shares = ", ".join(f"{share:.2f}" for share in costed.shares(cuts))
        warn(f"split_stages: {note}. The stages have these shares: {shares}.")
    return cuts


def _whole_units(
    costed: "_CostedEquations",
    calls: Mapping[str, str | None],
    scopes: Sequence[str] | None,
    checkpoints: jaxprs.Checkpoints,
    wanted: int,
) -> list[_units.Unit]:
    """Finds the units that stay whole; an equation that goes with another begins and ends none."""
    eqns = [None if e.outvars[0] in costed.moved else e for e in costed.eqns]

    def iteration(eqn: Eqn | None) -> stacked.Iteration | None:
        return None if eqn is None else costed.places.get(eqn.outvars[0])

    def named(eqn: Eqn) -> Iterator[str]:
        # A scan whose body calls a module is under the module's scope: it is a stack of layers.
        inside = _cuts.contains_scope if iteration(eqn) else _cuts.in_scope
        return (name for name in scopes or () if inside(eqn, name))

    def called(eqn: Eqn) -> Iterator[str]:
        around = () if _compat.is_transposed(eqn) else _calls.scopes(eqn)
        yield from (scope for scope in around if scope in calls)
        if iteration(eqn):
            inside = _calls.scopes_inside(eqn)
            yield from (scope for scope in inside if calls.get(scope, scope) is None)

    units = [
        _units.Unit(i, i, place, place[0])
        for i, eqn in enumerate(eqns)
        if (place := iteration(eqn))
    ]
    units += _units.labelled(eqns, called, calls)
    if scopes is not None:
        return units + _units.labelled(eqns, named)
    units += _units.repeated_scopes(eqns) + _units.checkpoints(eqns, checkpoints)
    return _units.choose(units, costed.costs, wanted)


@dataclasses.dataclass(frozen=True)
class _CostedEquations:
    """The equations that depend on arguments, with facts of each.

    `heads` has for each the first, from it on, that does not only prepare the next one; `crossing`
    the bytes that cross before it; `shared` those of arrays of the model that are read before it
    and behind. An equation of `moved` goes with the one after it, or before it; `places` has the
    place before an equation. Both name it by the first variable that it makes.
    """

    eqns: Sequence[Eqn]
    heads: Sequence[Eqn]
    costs: Sequence[float]
    crossing: Sequence[float]
    shared: Sequence[float]
    moved: frozenset[Var]
    places: Mapping[Var, stacked.Iteration]
    num_stages: int
    count_layers: bool
    tolerance: float

    @classmethod
    def of(
        cls,
        line: _cuts.ArrangedProgram,
        divided: stacked.Divided,
        num_stages: int,
        balance: Balance,
        arrays: Iterable[Var],
        tolerance: float,
    ) -> "_CostedEquations":
        varying = jaxprs.descendants(line.eqns, line.jaxpr.jaxpr.invars)
        eqns = [e for e in line.eqns if not varying.isdisjoint(e.outvars)]
        heads: list[Eqn] = []
        for eqn in reversed(eqns):
            heads.append(heads[-1] if heads and line.is_lead(eqn) else eqn)
        heads.reverse()
        crossing = _cuts.bytes_from({v: i for i, e in enumerate(eqns) for v in e.outvars}, eqns)
        for i, head in enumerate(heads):
            if (i > 0 and heads[i - 1] is head) or eqns[i].outvars[0] in divided.joins:
                crossing[i] = float("inf")
        cost = cost_of(balance)
        moves = divided.slices | divided.joins
        costs = [0.0 if e.outvars[0] in moves else cost(e) for e in eqns]
        first: dict[Var, int] = {}
        model = set(arrays)
        for i, eqn in enumerate(eqns):
            for v in jaxprs.variables(eqn.invars):
                if v in model:
                    first.setdefault(v, i)
        shared = _cuts.bytes_from(first, eqns)
        return cls(
            eqns,
            heads,
            costs,
            crossing,
            shared,
            line.leads | divided.joins,
            divided.places,
            num_stages,
            balance == "layers",
            tolerance,
        )

    @functools.cached_property
    def blocks(self) -> list[_units.Unit]:
        """The blocks of equations that repeat: layers that may be cut inside."""
        return _units.Repeats.of(self.eqns, self.costs, self.crossing).blocks()

    def cuts(self, units: Sequence[_units.Unit]) -> list[int]:
        """Finds the positions of the best cuts, none of them inside a unit."""
        crossing = self._crossing_outside(units)
        layers = _units.layers_of(units)
        in_layers = sum(sum(self.costs[u.first : u.last + 1]) for u in layers)
        has_layers = in_layers >= sum(self.costs) / 2
        first = [unit.first for unit in layers]
        soft = layers if has_layers else _units.outermost([*units, *self.blocks])
        if self.count_layers:
            return _balance.even_cuts(
                [u.first for u in _units.layers_of(soft)], crossing, self.num_stages
            )
        borders = _units.borders(soft, crossing)
        return _balance.balanced_cuts(
            self.costs,
            crossing,
            self.num_stages,
            first if has_layers else (),
            borders=frozenset(borders),
            shared_bytes=self.shared,
            tolerance=self.tolerance,
        )

    def _crossing_outside(self, units: Sequence[_units.Unit]) -> list[float]:
        """Returns the bytes that cross at each position; infinite inside units."""
        crossing = list(self.crossing)
        for unit in _units.outermost(units):
            crossing[unit.first + 1 : unit.last + 1] = [float("inf")] * (unit.last - unit.first)
        return crossing

    def unit_cuts(self, units: Sequence[_units.Unit], balance: Units | Finest) -> list[int]:
        """Finds all cuts between units, or the best of them by the measured costs of units."""
        crossing = self._crossing_outside(units)
        if isinstance(balance, Units):
            cuts = _between_units(units, crossing, balance.at_least)
            balance.check([crossing[cut] for cut in cuts])
            return [cuts[first - 1] for first in balance.choose(self.num_stages)]
        cuts = _between_units(units, crossing, self.num_stages)
        balance.crossing = tuple(crossing[cut] for cut in cuts)
        return cuts

    def is_slower(self, cuts: Sequence[int], others: Sequence[int]) -> bool:
        """Tells whether the slowest stage is much slower than with other cuts."""
        return max(self.shares(cuts)) > 1.5 * max(self.shares(others))

    def shares(self, cuts: Sequence[int]) -> list[float]:
        """Returns each stage's share of the costs."""
        total = sum(self.costs) or 1.0
        bounds = itertools.pairwise([0, *cuts, len(self.costs)])
        return [sum(self.costs[a:b]) / total for a, b in bounds]


def _names(
    costed: _CostedEquations,
    units: Sequence[_units.Unit],
    cuts: Sequence[int],
    model: Any,
    arrays: Sequence[Var],
) -> tuple[str, ...]:
    """Names what lies between cuts by its module or scope, or by the parameters it begins with.

    These are a layer, or an array of a layer that has begun before; a unit that reads none begins
    with those of the next one.
    """
    paths = dict(zip(arrays, _modules.array_paths(model), strict=False))
    reads = [[paths[v] for v in jaxprs.variables(e.invars) if v in paths] for e in costed.eqns]
    found: list[str] = []
    seen = {""}
    for first, end in itertools.pairwise((0, *cuts, len(costed.eqns))):
        path = next(itertools.chain.from_iterable(reads[first:]), "")
        place = next(
            (p for e in costed.eqns[first:end] if (p := costed.places.get(e.outvars[0]))), ()
        )
        layer = ".".join([_modules.layer_of(path), *map(str, place[1:])]) if path else ""
        scope = next((u.name for u in units if first <= u.first < end and u.name), "")
        found.append(scope or next((name for name in (layer, path) if name not in seen), ""))
        own = [*itertools.chain.from_iterable(reads[first:end])]
        seen.update((found[-1], *own, *map(_modules.layer_of, own)))
    return tuple(found)


def _between_units(
    units: Sequence[_units.Unit], crossing: Sequence[float], at_least: int
) -> list[int]:
    """Finds the borders of layers; without layers, `at_least` parts of as many equations."""
    if len(_units.layers_of(units)) > 1:
        return _units.borders(units, crossing)
    ones = [1.0] * (len(crossing) - 1)
    places = sum(1 for c in crossing[1:-1] if c != float("inf"))
    return _balance.balanced_cuts(ones, crossing, min(at_least, places + 1))


def _closed_call(costed: _CostedEquations, way_out_of: Callable[[Eqn], str]) -> str:
    """Says which uncuttable call has much more than a stage's share of the work, if one has."""
    eqns, costs = costed.eqns, costed.costs
    if not eqns:
        return ""
    i = max(range(len(eqns)), key=costs.__getitem__)
    is_call = any(True for _ in jaxprs.sub_jaxprs(eqns[i]))
    is_cut = eqns[i].outvars[0] in costed.places
    if not is_call or is_cut or costs[i] <= 1.5 * sum(costs) / costed.num_stages:
        return ""
    way_out = way_out_of(eqns[i]) or "call it for each layer and not for all of them"
    return (
        f"the `{eqns[i].primitive.name}`{_compat.at_source_line(eqns[i])} has "
        f"{costs[i] / sum(costs):.0%} of the work, and no cut can be made inside it: {way_out}"
        f"{_stages.order_of_transforms(eqns[i])}"
    )
