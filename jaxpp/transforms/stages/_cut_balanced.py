"""Cuts a program into stages of equal work, or of equally many layers."""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _checkpoints, _compat, _flops, _jaxprs
from jaxpp.transforms.stacked import Divided, Iteration, divide_scans, loop_that_is_one_unit
from jaxpp.transforms.stages import _balance, _cuts, _modules, _states, _units


@dataclasses.dataclass(frozen=True)
class Whole:
    """The scopes that a balanced cut does not cut inside.

    `calls` has the scopes of calls of modules, each with the module's class if it is a layer.
    `scopes` has the names of other scopes; None to look for repeated blocks.
    """

    calls: Mapping[str, type | None]
    scopes: Sequence[str] | None


def cut_balanced(
    jaxpr: jex.ClosedJaxpr,
    checkpoints: _checkpoints.Checkpoints,
    num_stages: int,
    balance: str | _flops.Cost,
    whole: Whole,
    modules: Sequence[str],
    model: Sequence[Any],
    states: Sequence[_states.State],
) -> jex.ClosedJaxpr:
    """Marks `num_stages - 1` cuts that balance the stages.

    A scan over arrays of the model, which are the inputs `model` of the jaxpr, can be cut between
    iterations. No cut falls between the first reader of a state and the equation that makes its
    next value, where this leaves enough places.
    """
    jaxpr = _states.make_early(jaxpr, states) if states else jaxpr
    divided = divide_scans(jaxpr, model, lambda scan: range(scan.length))
    flat, sunk = _cuts.sink_argument_chains(divided.jaxpr)
    varying = _jaxprs.descendants(flat.eqns, flat.jaxpr.invars)
    eqns = [e for e in flat.eqns if any(v in varying for v in e.outvars)]
    crossing = _crossing_bytes(flat.jaxpr, eqns)
    heads = _heads(eqns, sunk, divided)
    for i, head in enumerate(heads):
        if (i > 0 and heads[i - 1] is head) or eqns[i].outvars[0] in divided.joins:
            crossing[i] = float("inf")
    cost = _flops.resolve("flops" if balance == "layers" else balance)
    moves = divided.slices | divided.joins
    costs = [0.0 if e.outvars[0] in moves else cost(e) for e in eqns]
    own = [None if e in sunk or e.outvars[0] in moves else e for e in eqns]
    units = _whole_units(own, costs, num_stages, whole, divided.places, checkpoints)
    for name in whole.scopes or ():
        if not any(unit.label == name for unit in units):
            raise ValueError(_cuts.no_scope(name, flat, modules))
    line = _Line(crossing, costs, num_stages, balance == "layers")
    layers = _units.note(units, num_stages)
    note = _closed_call(eqns, costs, num_stages, divided.places)
    try:
        cuts = line.cuts(units)
    except ValueError as error:
        hints = [f" Note that {text}." for text in (layers, note) if text]
        hints.append(loop_that_is_one_unit(jaxpr, model))
        raise ValueError(f"split_stages: {error}{''.join(hints)}") from None
    if not note and layers and line.is_slower(cuts, line.cuts([])):
        note = layers
    together = _states.units(states, eqns, sunk, flat.jaxpr.outvars)
    with contextlib.suppress(ValueError):  # raised where there are too few places
        apart, cuts = cuts, line.cuts([*units, *together])
        if not note and line.is_slower(cuts, apart):
            note = _states.note(together, eqns)
    if note:
        shares = ", ".join(f"{share:.2f}" for share in line.shares(cuts))
        warnings.warn(
            f"split_stages: {note}. The stages have these shares: {shares}.", stacklevel=2
        )
    starts = [heads[c].outvars[0] for c in cuts]
    places = [divided.places.get(v) for v in starts]
    names = {name: name.removeprefix(_modules.WHOLE) for name in whole.calls}
    renamed = [_compat.rename_scopes(e, names) for e in jaxpr.eqns]
    jaxpr = _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, renamed)
    again = divide_scans(jaxpr, model, _cuts.wanted(p for p in places if p is not None))
    starts = [v if p is None else again.start_of(p) for v, p in zip(starts, places, strict=True)]
    return _cuts.mark_starts(again, starts, range(1, num_stages), [None] * len(cuts))


def _heads(eqns, sunk: _cuts.Equations, divided: Divided) -> list[Any]:
    """Finds for each equation the first, from it on, that does not only prepare the next one."""
    heads: list[Any] = []
    for eqn in reversed(eqns):
        heads.append(heads[-1] if heads and _cuts.leads(eqn, sunk, divided) else eqn)
    return heads[::-1]


def _whole_units(
    eqns: Sequence[Any],
    costs: Sequence[float],
    num_stages: int,
    whole: Whole,
    places: Mapping[Any, Iteration],
    checkpoints: _checkpoints.Checkpoints,
) -> list[_units.Unit]:
    """Finds the units that stay whole; None stands for an equation that goes with another."""

    def iteration(eqn) -> Iteration | None:
        return None if eqn is None else places.get(eqn.outvars[0])

    def named(eqn) -> Iterator[str]:
        # A scan whose body calls a module is under the module's scope: it is a stack of layers.
        inside = _cuts.contains_scope if iteration(eqn) else _cuts.in_scope
        return (name for name in whole.scopes or () if inside(eqn, name))

    def calls(eqn) -> Iterator[str]:
        names = _compat.scope_names(eqn)
        if iteration(eqn):
            stacks = {n for n, cls in whole.calls.items() if cls is None}
            names = [*names, *(n for n in stacks if _cuts.contains_scope(eqn, n))]
        return (name for name in names if name in whole.calls)

    units = [
        _units.Unit(i, i, place, place[0])
        for i, eqn in enumerate(eqns)
        if (place := iteration(eqn))
    ]
    units += _units.labelled(eqns, calls, whole.calls)
    if whole.scopes is not None:
        return units + _units.labelled(eqns, named)
    units += _units.repeated_scopes(eqns) + _units.checkpoints(eqns, checkpoints)
    return _units.choose(units, costs, num_stages)


@dataclasses.dataclass(frozen=True)
class _Line:
    """A sequence of equations: the bytes that cross each position, and the cost of each."""

    crossing: Sequence[float]
    costs: Sequence[float]
    num_stages: int
    count_layers: bool

    def cuts(self, units: Sequence[_units.Unit]) -> list[int]:
        """Finds the positions of the best cuts, none of them inside a unit."""
        units, crossing = _units.outermost(units), list(self.crossing)
        for unit in units:
            crossing[unit.first + 1 : unit.last + 1] = [float("inf")] * (unit.last - unit.first)
        layers = [unit for unit in units if unit.kind is not None]
        first = [unit.first for unit in layers]
        if self.count_layers:
            return _balance.even_cuts(first, crossing, self.num_stages)
        in_layers = sum(sum(self.costs[u.first : u.last + 1]) for u in layers)
        first = first if in_layers >= sum(self.costs) / 2 else ()
        return _balance.balanced_cuts(self.costs, crossing, self.num_stages, first)

    def is_slower(self, cuts: Sequence[int], others: Sequence[int]) -> bool:
        """Tells whether the slowest stage is much slower than with other cuts."""
        return max(self.shares(cuts)) > 1.5 * max(self.shares(others))

    def shares(self, cuts: Sequence[int]) -> list[float]:
        """Gives each stage's share of the costs."""
        total = sum(self.costs) or 1.0
        bounds = itertools.pairwise([0, *cuts, len(self.costs)])
        return [sum(self.costs[a:b]) / total for a, b in bounds]


def _closed_call(eqns, costs, num_stages: int, places: Mapping[Any, Iteration]) -> str:
    """Says which uncuttable call has much more than a stage's share of the work, if one has."""
    if not eqns:
        return ""
    i = max(range(len(eqns)), key=costs.__getitem__)
    is_call = any(True for _ in _jaxprs.sub_jaxprs(eqns[i])) and eqns[i].outvars[0] not in places
    if not is_call or costs[i] <= 1.5 * sum(costs) / num_stages:
        return ""
    return (
        f"the `{eqns[i].primitive.name}`{_compat.at_source_line(eqns[i])} has "
        f"{costs[i] / sum(costs):.0%} of the work, and no cut can be made inside it: call it for "
        f"each layer and not for all of them"
    )


def _crossing_bytes(jaxpr, eqns) -> list[float]:
    """Counts for each position the bytes of the values made before it and read from it on."""
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(eqns) for v in e.invars if not _jaxprs.is_literal(v)}
    change = [0.0] * (len(eqns) + 2)
    for var, i in made.items():
        if var in last:
            change[i + 1] += _flops.nbytes(var)
            change[last[var] + 1] -= _flops.nbytes(var)
    crossing, live = [], 0.0
    for i in range(len(eqns) + 1):
        live += change[i]
        crossing.append(live)
    return crossing
