"""Where a program is cut: at named scopes, at layers of a stack, or by balance."""

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _balance, _costs, _layers, _marks, _modules, _scans, _stages

# ---- named scopes -------------------------------------------------------------------------------


def cut_at_scopes(
    jaxpr: jex.ClosedJaxpr, names: Sequence[str], modules: Sequence[str], model: Sequence[Any]
) -> jex.ClosedJaxpr:
    """Marks the first equation under each `jax.named_scope` of `names`.

    `layers.2` or `layers[2]` names a layer of the scan under the scope `layers`. `modules` could
    have been named too, and are listed where a name is unknown; `model` are the inputs of the
    jaxpr over which such a scan goes.
    """
    inlined, _ = _stages.dissolve_marks(_inline_plain_calls(jaxpr))
    places = _places_in_scopes(inlined, names, model)
    divided = _scans.divide(inlined, model, _wanted(places.values()))
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
            if nested is not None and not _starts_with_scope(nested, name):
                raise ValueError(
                    f"The scope {name!r} is inside a `{nested.primitive.name}`"
                    f"{_compat.at_source_line(nested)}, whose body is one unit: no cut can be made "
                    f"there."
                )
            if nested is None:
                raise ValueError(_no_scope(name, flat, modules))
            position = flat.eqns.index(nested)
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
    return re.search(rf"(^|[/(]){re.escape(name)}($|[/)])", _scope_path(eqn)) is not None


def _contains_scope(eqn, name: str) -> bool:
    return _jaxprs.contains(eqn, lambda e: _in_scope(e, name))


def _starts_with_scope(eqn, name: str) -> bool:
    """Whether an equation is a checkpoint of which the scope holds the first equation."""
    return eqn.primitive.name in _jaxprs.CHECKPOINTS and any(
        _in_scope(sub.eqns[0], name) for sub in _jaxprs.sub_jaxprs(eqn) if sub.eqns
    )


def _no_scope(name: str, jaxpr, modules: Sequence[str]) -> str:
    if name.startswith(_modules.WHOLE):
        return (
            f"{name.removeprefix(_modules.WHOLE)!r} cannot stay whole: the function never calls it."
        )
    scopes = list(dict.fromkeys(s for e in jaxpr.eqns if (s := _scope_path(e))))
    named = (
        f"No module of the first argument is called {name!r} ({_modules.listed(modules)}), and n"
        if modules
        else "N"
    )
    return f"{named}o equation is under jax.named_scope({name!r}) ({_modules.listed(scopes)})."


# ---- balance ------------------------------------------------------------------------------------


def cut_balanced(
    jaxpr: jex.ClosedJaxpr,
    num_stages: int,
    cost: _costs.Cost,
    whole: Sequence[str],
    modules: Sequence[str],
    model: Sequence[Any],
) -> jex.ClosedJaxpr:
    """Marks `num_stages - 1` cuts that balance the stages.

    No cut is made between equations under one of the scopes `whole` that follow each other. A scan
    over arrays of the model, which are the inputs `model` of the jaxpr, counts as its iterations.
    """
    inlined = _inline_plain_calls(jaxpr)
    units = _scans.divide(inlined, model, lambda scan: scan.places)
    flat, sunk = sink_argument_chains(units.jaxpr)
    varying = _jaxprs.descendants(flat.eqns, flat.jaxpr.invars)
    eqns = [e for e in flat.eqns if any(v in varying for v in e.outvars)]
    crossing = _crossing_bytes(flat.jaxpr, eqns)
    heads = _heads(eqns, sunk, units)
    for i, head in enumerate(heads):
        if (i > 0 and heads[i - 1] is head) or _is_joined(head, units):
            crossing[i] = float("inf")
    for name in whole:
        runs = list(_runs_in_scope(eqns, sunk, units, name))
        if not runs:
            raise ValueError(_no_scope(name, flat, modules))
        for first, last in runs:
            crossing[first + 1 : last + 1] = [float("inf")] * (last - first)
    costs = [0.0 if e.outvars[0] in units.slices | units.joins else cost(e) for e in eqns]
    try:
        cuts = _balance.balanced_cuts(costs, crossing, num_stages)
    except ValueError as error:
        hint = _scans.loop_that_is_one_unit(inlined, model)
        raise ValueError(f"split_stages: {error}{hint}") from None
    starts = [heads[c].outvars[0] for c in cuts]
    places = [units.places.get(v) for v in starts]
    divided = _scans.divide(inlined, model, _wanted(p for p in places if p is not None))
    starts = [v if p is None else divided.start_of(p) for v, p in zip(starts, places, strict=True)]
    return mark_starts(divided, starts, range(1, num_stages), [None] * len(cuts))


def _heads(eqns, sunk: "_Equations", units: _scans.Divided) -> list[Any]:
    """For each equation the first from it on that others do not go with: none before a slice."""
    heads: list[Any] = []
    for eqn in reversed(eqns):
        heads.append(heads[-1] if heads and _leads(eqn, sunk, units) else eqn)
    return heads[::-1]


def _is_joined(eqn, units: _scans.Divided) -> bool:
    """Whether an equation goes with the one before it."""
    var = eqn.outvars[0]
    return var in units.joins or (var in units.units and var not in units.places)


def _runs_in_scope(
    eqns, sunk: "_Equations", units: _scans.Divided, name: str
) -> Iterator[tuple[int, int]]:
    """The first and last position of each run of equations under a scope, but for those moved.

    A scan whose body calls a module is under the module's scope: the module is a stack of layers.
    """
    run = None
    for i, eqn in enumerate(eqns):
        var = eqn.outvars[0]
        if eqn in sunk or var in units.slices or var in units.joins:
            continue
        if _in_scope(eqn, name) or (var in units.units and _contains_scope(eqn, name)):
            run = (i if run is None else run[0], i)
        elif run is not None:
            yield run
            run = None
    if run is not None:
        yield run


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


def _inline_plain_calls(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    return _jaxprs.inline(
        jaxpr,
        lambda e: (
            e.primitive.name not in _jaxprs.CUSTOM_RULES | _jaxprs.CHECKPOINTS
            and not _marks.is_stage_call(e)
        ),
    )


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
    sunk: dict[Any, Any] = {}
    order: list[Any] = []
    placed: set[int] = set()

    def place(eqn):
        stack = [eqn]
        while stack:
            top = stack[-1]
            waiting = [
                sunk[v]
                for v in top.invars
                if not _jaxprs.is_literal(v) and v in sunk and id(sunk[v]) not in placed
            ]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if id(top) not in placed:
                placed.add(id(top))
                order.append(top)

    for eqn, moves in zip(jaxpr.eqns, _stages.argument_chains(jaxpr), strict=True):
        if moves:
            sunk.update((v, eqn) for v in eqn.outvars)
        else:
            place(eqn)
    for var in jaxpr.jaxpr.outvars:
        if not _jaxprs.is_literal(var) and var in sunk:
            place(sunk[var])
    moved = _Equations(list(sunk.values()))
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, order), moved


def stacked(
    jaxpr: jex.ClosedJaxpr, model: Any, path: str, module: Any, arrays: Sequence[Any]
) -> Any:
    """A module as a `Layer` if it is a stack that is called layer by layer in a scan, or itself."""
    if isinstance(module, _layers.Layer):
        return module
    stack = _layers.stack_at(model, path)
    for scan in _scans.divide(_inline_plain_calls(jaxpr), arrays).scans:
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
    inlined = _inline_plain_calls(jaxpr)
    places = []
    for layer in layers.values():
        scan = _scans.find(inlined, model, layer.arrays, layer.stack)
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
    divided = _scans.divide(inlined, model, _wanted(places))
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
