"""Cuts a program at named scopes or at layers of a stack, and inserts the marks of all cuts."""

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _checkpoints, _compat, _jaxprs
from jaxpp.transforms.stacked import (
    Divided,
    Iteration,
    LayerScan,
    divide_scans,
    find_scan,
    layer_scans,
)
from jaxpp.transforms.stages import _layers, _marks, _modules, _stages, _units

# ---- named scopes -------------------------------------------------------------------------------


def cut_at_scopes(
    jaxpr: jex.ClosedJaxpr, names: Sequence[str], modules: Sequence[str], model: Sequence[Any]
) -> jex.ClosedJaxpr:
    """Marks the first equation under each `jax.named_scope` of `names`.

    `layers.2` or `layers[2]` names a layer of the scan under the scope `layers`. The names
    `modules` are listed in the error for an unknown name; `model` are the inputs of the jaxpr over
    which such a scan goes.
    """
    jaxpr, _ = _stages.dissolve_marks(jaxpr)
    places = _places_in_scopes(jaxpr, names, model)
    divided = divide_scans(jaxpr, model, wanted(places.values()))
    flat, sunk = sink_argument_chains(divided.jaxpr)
    positions = []
    for name in names:
        if name in places:
            start = divided.start_of(places[name])
            position = next(i for i, e in enumerate(flat.eqns) if start in e.outvars)
        else:
            position = next((i for i, e in enumerate(flat.eqns) if in_scope(e, name)), None)
        if position is None:
            nested = next((e for e in flat.eqns if contains_scope(e, name)), None)
            if nested is None:
                raise ValueError(no_scope(name, flat, modules))
            raise ValueError(
                f"The scope {name!r} is inside a `{nested.primitive.name}`"
                f"{_compat.at_source_line(nested)}, whose body is one unit: no cut can be made "
                f"there."
            )
        while position > 0 and leads(flat.eqns[position - 1], sunk, divided):
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


def _places_in_scopes(jaxpr, names: Sequence[str], model) -> dict[str, Iteration]:
    """Finds the place of each name that names a layer of a scan under a scope."""
    indexed = {name: m for name in names if (m := _layers.INDEXED.fullmatch(name))}
    places: dict[str, Iteration] = {}
    for name, match in indexed.items():
        if any(contains_scope(e, name) for e in jaxpr.eqns):
            continue
        scans = layer_scans(jaxpr, model)
        found = [s for s in scans if in_scope(s.eqn, match[1])]
        # flax's nn.scan names the body, and not the scan.
        found = found or [s for s in scans if contains_scope(s.eqn, match[1])]
        if len(found) > 1:
            lines = ", ".join(_compat.source_line(s.eqn) for s in found)
            raise ValueError(
                f"The cut at {name!r} is not unique: under the scope {match[1]!r} are "
                f"{len(found)} scans over layers ({lines}); give each a scope of its own."
            )
        if found:
            places[name] = found[0].place_of(int(match[2]), match[1])
    return places


def wanted(places: Iterable[Iteration]) -> Callable[[LayerScan], Collection[int]]:
    places = list(places)
    return lambda scan: [iteration for number, iteration in places if number == scan.number]


def _scope_path(eqn) -> str:
    return str(eqn.source_info.name_stack)


def in_scope(eqn, name: str) -> bool:
    """Tells whether an equation is under a scope; `layers.2`, `layers[2]`, `layers/2` are one."""
    name = re.escape(_with_slashes(name))
    return re.search(rf"(^|[/(]){name}($|[/)])", _with_slashes(_scope_path(eqn))) is not None


def _with_slashes(name: str) -> str:
    return re.sub(r"\[(\d+)\]", r"/\1", name).replace(".", "/")


def contains_scope(eqn, name: str) -> bool:
    return _jaxprs.contains(eqn, lambda e: in_scope(e, name))


def no_scope(name: str, jaxpr, modules: Sequence[str]) -> str:
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


# ---- shared -------------------------------------------------------------------------------------


def open_program(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, _checkpoints.Checkpoints]:
    """Opens all calls and checkpoints of a program but for outlined stages."""
    return _checkpoints.open_calls(jaxpr, lambda e: not _marks.is_stage_call(e))


class Equations:
    """A set of equations, told apart by identity."""

    def __init__(self, eqns):
        self._ids = {id(e) for e in eqns}
        self._keep = eqns

    def __contains__(self, eqn) -> bool:
        return id(eqn) in self._ids


def sink_argument_chains(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, Equations]:
    """Moves equations that only prepare arguments to just before their first reader.

    So a weight's cast, transpose or stacking goes with the stage that reads it. Also returns the
    equations moved: no cut should be made right after one of them.
    """
    eqns = jaxpr.eqns
    moves = _stages.argument_chains(jaxpr)
    sunk = {v: i for i, e in enumerate(eqns) if moves[i] for v in e.outvars}
    results = [sunk[v] for v in _jaxprs.variables(jaxpr.jaxpr.outvars) if v in sunk]

    def needs(i: int) -> list[int]:
        return [sunk[v] for v in _jaxprs.variables(eqns[i].invars) if v in sunk]

    stays = [i for i in range(len(eqns)) if not moves[i]]
    order = [eqns[i] for i in _checkpoints.ordered([*stays, *results], needs)]
    moved = Equations([eqns[i] for i in sunk.values()])
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, order), moved


def stacked(
    jaxpr: jex.ClosedJaxpr, model: Any, path: str, module: Any, arrays: Sequence[Any]
) -> Any:
    """Gives a `Layer` for a module whose layers a scan calls one by one; else the module itself."""
    if isinstance(module, _layers.Layer):
        return module
    stack = _layers.stack_at(model, path)
    for scan in layer_scans(jaxpr, arrays):
        own = functools.reduce(operator.or_, (a for a in scan.arrays if not a & ~stack.arrays), 0)
        if own and own == stack.arrays and _modules.calls_class(scan.eqn, type(module)):
            return stack
    return module


def mark_layers(
    jaxpr: jex.ClosedJaxpr, modules: Sequence[tuple[str, Any]], model: Sequence[Any]
) -> jex.ClosedJaxpr:
    """Marks those cuts that are layers: cut i opens stage i + 1."""
    layers = {i: m for i, (_, m) in enumerate(modules) if isinstance(m, _layers.Layer)}
    if not layers:
        return jaxpr
    places = []
    for layer in layers.values():
        scan = find_scan(jaxpr, model, layer.arrays, layer.stack)
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
    divided = divide_scans(jaxpr, model, wanted(places))
    starts = [divided.start_of(place) for place in places]
    return mark_starts(divided, starts, [i + 1 for i in layers], [modules[i][0] for i in layers])


def mark_starts(
    divided: Divided, starts: Sequence[Any], stages: Sequence[int], names: Sequence[Any]
) -> jex.ClosedJaxpr:
    """Marks the entrance of stages before the equations that make the variables `starts`."""
    flat, sunk = sink_argument_chains(divided.jaxpr)
    index = {v: i for i, e in enumerate(flat.eqns) for v in e.outvars}
    positions = []
    for var in starts:
        position = index[var]
        while position > 0 and leads(flat.eqns[position - 1], sunk, divided):
            position -= 1
        positions.append(position)
    return insert_marks(flat, positions, names, stages)


def leads(eqn, sunk: "Equations", divided: Divided) -> bool:
    """Tells whether an equation only prepares the one after it."""
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
