"""Where a program is cut: at named scopes, at layers of a stack, or by balance."""

import contextlib
import dataclasses
import functools
import itertools
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import (
    _balance,
    _checkpoints,
    _costs,
    _layers,
    _marks,
    _modules,
    _scans,
    _stages,
    _states,
    _units,
)

# ---- named scopes -------------------------------------------------------------------------------


def cut_at_scopes(
    jaxpr: jex.ClosedJaxpr, names: Sequence[str], modules: Sequence[str], model: Sequence[Any]
) -> jex.ClosedJaxpr:
    """Marks the first equation under each `jax.named_scope` of `names`.

    `layers.2` or `layers[2]` names a layer of the scan under the scope `layers`. `modules` could
    have been named too, and are listed where a name is unknown; `model` are the inputs of the
    jaxpr over which such a scan goes.
    """
    jaxpr, _ = _stages.dissolve_marks(jaxpr)
    places = _places_in_scopes(jaxpr, names, model)
    divided = _scans.divide(jaxpr, model, _wanted(places.values()))
    flat, sunk = sink_argument_chains(divided.jaxpr)
    positions = []
    for name in names:
        if name in places:
            start = divided.start_of(places[name])
            position = next(i for i, e in enumerate(flat.eqns) if start in e.outvars)
        else:
            position = next((i for i, e in enumerate(flat.eqns) if _in_scope(e, name)), None)
        if position is None:
            nested = next((e for e in flat.eqns if _contains_scope(e, name)), None)
            if nested is None:
                raise ValueError(_no_scope(name, flat, modules))
            raise ValueError(
                f"The scope {name!r} is inside a `{nested.primitive.name}`"
                f"{_compat.at_source_line(nested)}, whose body is one unit: no cut can be made "
                f"there."
            )
        while position > 0 and _leads(flat.eqns[position - 1], sunk, divided):
            position -= 1
        positions.append(position)
    if positions != sorted(positions):
        order = [n for _, n in sorted(zip(positions, names, strict=True))]
        raise ValueError(f"The cuts {list(names)} are out of order: they run in the order {order}.")
    if len(set(positions)) < len(positions):
        raise ValueError(
            f"Two of the cuts {list(names)} are at the same equation; drop one of them."
        )
    return insert_marks(flat, positions, names, range(1, len(names) + 1))


def _places_in_scopes(jaxpr, names: Sequence[str], model) -> dict[str, _scans.Place]:
    """The places of those names that name a layer of a scan under a scope."""
    indexed = {name: m for name in names if (m := _layers.INDEXED.fullmatch(name))}
    places: dict[str, _scans.Place] = {}
    for name, match in indexed.items():
        if any(_contains_scope(e, name) for e in jaxpr.eqns):
            continue
        scans = _scans.divide(jaxpr, model).scans
        found = [s for s in scans if _in_scope(s.eqn, match[1])]
        # flax's nn.scan names the body, and not the scan.
        found = found or [s for s in scans if _contains_scope(s.eqn, match[1])]
        if len(found) > 1:
            lines = ", ".join(_compat.source_line(s.eqn) for s in found)
            raise ValueError(
                f"The cut at {name!r} is not unique: under the scope {match[1]!r} are "
                f"{len(found)} scans over layers ({lines}); give each a scope of its own."
            )
        if found:
            places[name] = found[0].place_of(int(match[2]), match[1])
    return places


def _wanted(places: Iterable[_scans.Place]) -> Callable[[_scans.LayerScan], Collection[int]]:
    places = list(places)
    return lambda scan: [iteration for number, iteration in places if number == scan.number]


def _scope_path(eqn) -> str:
    return str(eqn.source_info.name_stack)


def _in_scope(eqn, name: str) -> bool:
    """Whether an equation is under a scope; `layers.2`, `layers[2]` and `layers/2` are the same."""
    name = re.escape(_with_slashes(name))
    return re.search(rf"(^|[/(]){name}($|[/)])", _with_slashes(_scope_path(eqn))) is not None


def _with_slashes(name: str) -> str:
    return re.sub(r"\[(\d+)\]", r"/\1", name).replace(".", "/")


def _contains_scope(eqn, name: str) -> bool:
    return _jaxprs.contains(eqn, lambda e: _in_scope(e, name))


def _no_scope(name: str, jaxpr, modules: Sequence[str]) -> str:
    scopes = list(dict.fromkeys(".".join(p) for e in jaxpr.eqns if (p := _units.scope_path(e))))
    parts = [s.split(".") for s in scopes]
    inner = dict.fromkeys(
        ".".join(p[i:j]) for p in parts for i in range(len(p)) for j in range(i + 1, len(p) + 1)
    )
    there = _modules.listed(scopes) + _modules.nearest(name.replace("/", "."), inner)
    no_scope = f"o equation is under jax.named_scope({name!r}) ({there})."
    if not modules:
        return f"N{no_scope}"
    there = _modules.listed(modules, name)
    return f"No module of the first argument is called {name!r} ({there}), and n{no_scope}"


# ---- balance ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Whole:
    """What a balanced cut does not cut inside.

    `calls` are scopes of calls of modules, with the class where it is a layer, `scopes` names of
    others. Where these are None, it finds the repeated blocks.
    """

    calls: Mapping[str, type | None]
    scopes: Sequence[str] | None


def cut_balanced(
    jaxpr: jex.ClosedJaxpr,
    checkpoints: _checkpoints.Checkpoints,
    num_stages: int,
    balance: str | _costs.Cost,
    whole: Whole,
    modules: Sequence[str],
    model: Sequence[Any],
    states: Sequence[_states.State],
) -> jex.ClosedJaxpr:
    """Marks `num_stages - 1` cuts that balance the stages.

    A scan over arrays of the model, which are the inputs `model` of the jaxpr, counts as its
    iterations. No cut falls between what reads a state and what makes its next value, where this
    leaves enough places.
    """
    jaxpr = _states.make_early(jaxpr, states) if states else jaxpr
    divided = _scans.divide(jaxpr, model, lambda scan: range(scan.length))
    flat, sunk = sink_argument_chains(divided.jaxpr)
    varying = _jaxprs.descendants(flat.eqns, flat.jaxpr.invars)
    eqns = [e for e in flat.eqns if any(v in varying for v in e.outvars)]
    crossing = _crossing_bytes(flat.jaxpr, eqns)
    heads = _heads(eqns, sunk, divided)
    for i, head in enumerate(heads):
        if (i > 0 and heads[i - 1] is head) or eqns[i].outvars[0] in divided.joins:
            crossing[i] = float("inf")
    cost = _costs.resolve("flops" if balance == "layers" else balance)
    moves = divided.slices | divided.joins
    costs = [0.0 if e.outvars[0] in moves else cost(e) for e in eqns]
    own = [None if e in sunk or e.outvars[0] in moves else e for e in eqns]
    units = _whole_units(own, costs, num_stages, whole, divided.places, checkpoints)
    for name in whole.scopes or ():
        if not any(unit.label == name for unit in units):
            raise ValueError(_no_scope(name, flat, modules))
    line = _Line(crossing, costs, num_stages, balance == "layers")
    layers = _units.note(units, num_stages)
    note = _closed_call(eqns, costs, num_stages, divided.places)
    try:
        cuts = line.cuts(units)
    except ValueError as error:
        hints = [f" Note that {text}." for text in (layers, note) if text]
        hints.append(_scans.loop_that_is_one_unit(jaxpr, model))
        raise ValueError(f"split_stages: {error}{''.join(hints)}") from None
    if not note and layers and line.is_slower(cuts, line.cuts([])):
        note = layers
    together = _states.units(states, eqns, flat.jaxpr.outvars)
    with contextlib.suppress(ValueError):  # which says that there are too few places
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
    again = _scans.divide(jaxpr, model, _wanted(p for p in places if p is not None))
    starts = [v if p is None else again.start_of(p) for v, p in zip(starts, places, strict=True)]
    return mark_starts(again, starts, range(1, num_stages), [None] * len(cuts))


def _heads(eqns, sunk: "_Equations", divided: _scans.Divided) -> list[Any]:
    """For each equation the first from it on that others do not go with: none before a slice."""
    heads: list[Any] = []
    for eqn in reversed(eqns):
        heads.append(heads[-1] if heads and _leads(eqn, sunk, divided) else eqn)
    return heads[::-1]


def _whole_units(
    eqns: Sequence[Any],
    costs: Sequence[float],
    num_stages: int,
    whole: Whole,
    places: Mapping[Any, _scans.Place],
    checkpoints: _checkpoints.Checkpoints,
) -> list[_units.Unit]:
    """The parts that stay whole; None stands for an equation that goes with another."""

    def iteration(eqn) -> _scans.Place | None:
        return None if eqn is None else places.get(eqn.outvars[0])

    def named(eqn) -> Iterator[str]:
        # A scan whose body calls a module is under the module's scope: it is a stack of layers.
        inside = _contains_scope if iteration(eqn) else _in_scope
        return (name for name in whole.scopes or () if inside(eqn, name))

    def calls(eqn) -> Iterator[str]:
        names = _compat.scope_names(eqn)
        if iteration(eqn):
            stacks = {n for n, cls in whole.calls.items() if cls is None}
            names = [*names, *(n for n in stacks if _contains_scope(eqn, n))]
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
        """The positions of the best cuts, none of them inside a unit."""
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
        """Whether the slowest stage is much slower than with other cuts."""
        return max(self.shares(cuts)) > 1.5 * max(self.shares(others))

    def shares(self, cuts: Sequence[int]) -> list[float]:
        """The share of the costs that each stage has."""
        total = sum(self.costs) or 1.0
        bounds = itertools.pairwise([0, *cuts, len(self.costs)])
        return [sum(self.costs[a:b]) / total for a, b in bounds]


def _closed_call(eqns, costs, num_stages: int, places: Mapping[Any, _scans.Place]) -> str:
    """Which call has much more than a stage's share of the work and is one unit, or nothing."""
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
    """For each position, the bytes of the values made before it and read from it on."""
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    last = {v: i for i, e in enumerate(eqns) for v in e.invars if not _jaxprs.is_literal(v)}
    change = [0.0] * (len(eqns) + 2)
    for var, i in made.items():
        if var in last:
            change[i + 1] += _costs.nbytes(var)
            change[last[var] + 1] -= _costs.nbytes(var)
    crossing, live = [], 0.0
    for i in range(len(eqns) + 1):
        live += change[i]
        crossing.append(live)
    return crossing


# ---- shared -------------------------------------------------------------------------------------


def open_program(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, _checkpoints.Checkpoints]:
    """A program with all calls and checkpoints open but for outlined stages."""
    return _checkpoints.open_calls(jaxpr, lambda e: not _marks.is_stage_call(e))


class _Equations:
    """A set of equations, told apart by identity."""

    def __init__(self, eqns):
        self._ids = {id(e) for e in eqns}
        self._keep = eqns

    def __contains__(self, eqn) -> bool:
        return id(eqn) in self._ids


def sink_argument_chains(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, _Equations]:
    """Moves what is computed from arguments alone, and lightly, to just before its first reader.

    So that a weight's cast, transpose or stacking goes with the stage that reads it: no cut should
    be made right after one of the equations moved, which are returned too.
    """
    eqns = jaxpr.eqns
    moves = _stages.argument_chains(jaxpr)
    sunk = {v: i for i, e in enumerate(eqns) if moves[i] for v in e.outvars}
    results = [sunk[v] for v in _jaxprs.variables(jaxpr.jaxpr.outvars) if v in sunk]

    def needs(i: int) -> list[int]:
        return [sunk[v] for v in _jaxprs.variables(eqns[i].invars) if v in sunk]

    stays = [i for i in range(len(eqns)) if not moves[i]]
    order = [eqns[i] for i in _checkpoints.ordered([*stays, *results], needs)]
    moved = _Equations([eqns[i] for i in sunk.values()])
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, order), moved


def stacked(
    jaxpr: jex.ClosedJaxpr, model: Any, path: str, module: Any, arrays: Sequence[Any]
) -> Any:
    """A module as a `Layer` if it is a stack that is called layer by layer in a scan, or itself."""
    if isinstance(module, _layers.Layer):
        return module
    stack = _layers.stack_at(model, path)
    for scan in _scans.divide(jaxpr, arrays).scans:
        own = functools.reduce(operator.or_, (a for a in scan.arrays if not a & ~stack.arrays), 0)
        if own and own == stack.arrays and _modules.calls_class(scan.eqn, type(module)):
            return stack
    return module


def mark_layers(
    jaxpr: jex.ClosedJaxpr, modules: Sequence[tuple[str, Any]], model: Sequence[Any]
) -> jex.ClosedJaxpr:
    """Marks those of the cuts that are layers: the i-th opens stage i + 1."""
    layers = {i: m for i, (_, m) in enumerate(modules) if isinstance(m, _layers.Layer)}
    if not layers:
        return jaxpr
    places = []
    for layer in layers.values():
        scan = _scans.find(jaxpr, model, layer.arrays, layer.stack)
        first = 0 if layer.index is None else scan.place_of(layer.index, layer.stack)[1]
        places.append((scan.number, first))
    if len(set(places)) < len(places):
        raise ValueError(
            f"split_stages: two of the cuts {[p for p, _ in modules]} are at the same layer; drop "
            f"one of them."
        )
    if places != sorted(places):
        names = [modules[i][0] for i in layers]
        order = [n for _, n in sorted(zip(places, names, strict=True))]
        raise ValueError(f"The cuts {names} are out of order: they run in the order {order}.")
    divided = _scans.divide(jaxpr, model, _wanted(places))
    starts = [divided.start_of(place) for place in places]
    return mark_starts(divided, starts, [i + 1 for i in layers], [modules[i][0] for i in layers])


def mark_starts(
    divided: _scans.Divided, starts: Sequence[Any], stages: Sequence[int], names: Sequence[Any]
) -> jex.ClosedJaxpr:
    """Marks the entrance of stages before the equations that make the variables `starts`."""
    flat, sunk = sink_argument_chains(divided.jaxpr)
    index = {v: i for i, e in enumerate(flat.eqns) for v in e.outvars}
    positions = []
    for var in starts:
        position = index[var]
        while position > 0 and _leads(flat.eqns[position - 1], sunk, divided):
            position -= 1
        positions.append(position)
    return insert_marks(flat, positions, names, stages)


def _leads(eqn, sunk: "_Equations", divided: _scans.Divided) -> bool:
    """Whether an equation only prepares the one after it."""
    return eqn in sunk or (bool(eqn.outvars) and eqn.outvars[0] in divided.slices)


def insert_marks(
    jaxpr, positions: Sequence[int], names: Sequence[str | None], stages: Sequence[int]
) -> jex.ClosedJaxpr:
    """Marks all values made before and read after each position as the entrance of a stage."""
    varying = _jaxprs.descendants(jaxpr.eqns, jaxpr.jaxpr.invars)
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not _jaxprs.is_literal(v)}
    known = _jaxprs.Substitution()
    made: list[Any] = []
    eqns: list[Any] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i in positions:
            k = positions.index(i)
            live = [v for v in made if last.get(v, -1) >= i]
            marked = [_jaxprs.fresh_var(v) for v in live]
            eqns.append(
                _marks.enter_equation([known(v) for v in live], marked, stages[k], names[k])
            )
            known.of.update(zip(live, marked, strict=True))
        eqns.append(known.rename(eqn))
        made.extend(v for v in eqn.outvars if v in varying)
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns)
