"""Cuts a program at named scopes or at layers of a stack, and inserts the marks of all cuts."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Eqn, Var
from jaxpp.transforms import stacked
from jaxpp.transforms.stages import _calls, _marks, _modules, _stages, _units


def cut_at(
    traced: jaxprs.Traced,
    model: Any,
    names: Sequence[str],
    modules: Sequence[_modules.Named] | None,
    calls: Mapping[str, _calls.ModuleCall],
) -> jex.ClosedJaxpr:
    """Marks the cuts that a user names: `modules`, or scopes where these are None."""
    arrays = _modules.model_arrays(traced, model)
    if modules is None:
        return _cut_at_scopes(traced.jaxpr, list(names), model, arrays)
    modules = [(p, _stacked(traced.jaxpr, model, p, m, arrays)) for p, m in modules]
    return _mark_layers(_calls.mark_calls(traced.jaxpr, modules, calls), modules, arrays)


# ---- named scopes -------------------------------------------------------------------------------


def _cut_at_scopes(
    jaxpr: jex.ClosedJaxpr, names: Sequence[str], model: Any, arrays: Sequence[Var]
) -> jex.ClosedJaxpr:
    """Marks the first equation under each `jax.named_scope` of `names`.

    `layers.2` or `layers[2]` names a layer of the scan under the scope `layers`; such a scan goes
    over `arrays`, which are inputs of the jaxpr.
    """
    jaxpr, _ = _stages.dissolve_marks(jaxpr)
    places = _places_in_scopes(jaxpr, names, model, arrays)
    line = ArrangedProgram.of(stacked.divide_scans(jaxpr, arrays, places.values()))
    positions = []
    for name in names:
        if name in places:
            positions.append(line.position_of(places[name]))
            continue
        position = next((i for i, e in enumerate(line.eqns) if in_scope(e, name)), None)
        if position is None:
            position = _first_reader(line, name, model, arrays)
        if position is None:
            nested = next((e for e in line.eqns if contains_scope(e, name)), None)
            if nested is None:
                raise ValueError(no_scope(name, line.eqns, model))
            raise ValueError(
                f"The scope {name!r} is inside a `{nested.primitive.name}`"
                f"{_compat.at_source_line(nested)}, whose body is one unit: no cut can be made "
                f"there{_stages.order_of_transforms(nested)}."
            )
        positions.append(position)
    return line.marked(positions, range(1, len(names) + 1), names)


def _places_in_scopes(
    jaxpr: jex.ClosedJaxpr, names: Sequence[str], model: Any, arrays: Sequence[Var]
) -> dict[str, stacked.Iteration]:
    """Finds the place of each name that names a layer of a scan: under a scope, or by its path."""
    indexed = {name: m for name in names if (m := _modules.INDEXED.fullmatch(name))}
    places: dict[str, stacked.Iteration] = {}
    for name, match in indexed.items():
        if any(contains_scope(e, name) for e in jaxpr.eqns):
            continue
        scans = stacked.layer_scans(jaxpr, arrays)
        found = [s for s in scans if in_scope(s.eqn, match[1])]
        # flax's nn.scan names the body, and not the scan.
        found = found or [s for s in scans if contains_scope(s.eqn, match[1])]
        if len(found) > 1:
            lines = ", ".join(_compat.source_line(s.eqn) for s in found)
            raise ValueError(
                f"The cut at {name!r} is not unique: under the scope {match[1]!r} are "
                f"{len(found)} scans over layers ({lines}); give each a scope of its own."
            )
        elif not found and not _part(name, model, arrays):
            if layer := _modules.layer_at(model, _dotted(name)):
                found = [stacked.find_scan(jaxpr, arrays, layer.arrays, layer.stack)]
        if found:
            places[name] = found[0].place_of(int(match[2]), match[1])
    return places


def _part(name: str, model: Any, arrays: Sequence[Var]) -> set[Var]:
    """Finds the arrays of the part of the model that a path names."""
    written, dotted = name.replace('"', "'"), _dotted(name)
    leaves = [p for p, x in jtu.tree_leaves_with_path(model) if jaxprs.is_array(x)]
    parts: dict[str, set[Var]] = {}
    for path, var in zip(leaves, arrays, strict=False):
        for part in itertools.accumulate((key,) for key in path):
            if dotted == jtu.keystr(part, simple=True, separator="."):
                parts.setdefault(jtu.keystr(part), set()).add(var)
    if len(parts) > 1 and written not in parts:
        raise ValueError(
            f"split_stages: at= has {name!r}, which names {' and '.join(parts)} of the first "
            f"argument; give one of these."
        )
    return parts.get(written) or next(iter(parts.values()), set())


def _dotted(path: str) -> str:
    """Writes a path with dots alone."""
    return re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", path).strip(".")


def _first_reader(
    line: "ArrangedProgram", name: str, model: Any, arrays: Sequence[Var]
) -> int | None:
    """Finds where a part of the model begins that a path names, such as `blocks.2` of a dictionary.

    It is before the first equation that reads the part, and behind those that read others, where
    the fewest bytes cross.
    """
    own = _part(name, model, arrays)
    reads = [set(jaxprs.variables(e.invars)) for e in line.eqns]
    first = next((i for i, read in enumerate(reads) if read & own), None)
    if first is None:
        return None
    others = {*arrays} - own
    behind = max((i + 1 for i in range(first) if reads[i] & others), default=first)
    varying = jaxprs.descendants(line.eqns, line.jaxpr.jaxpr.invars)
    made = {v: i for i, e in enumerate(line.eqns) for v in e.outvars if v in varying}
    return min(range(first, behind - 1, -1), key=bytes_from(made, line.eqns).__getitem__)


def in_scope(eqn: Eqn, name: str) -> bool:
    """Tells whether an equation is under a scope; `layers.2`, `layers[2]`, `layers/2` are one."""
    name, path = re.escape(_with_slashes(name)), _with_slashes(str(eqn.source_info.name_stack))
    return re.search(rf"(^|[/(]){name}($|[/)])", path) is not None


def _with_slashes(name: str) -> str:
    return re.sub(r"\[(\d+)\]", r"/\1", name).replace(".", "/")


def contains_scope(eqn: Eqn, name: str) -> bool:
    """Tells whether an equation, or one inside it, is under a scope."""
    return jaxprs.contains(eqn, lambda e: in_scope(e, name))


def no_scope(name: str, eqns: Sequence[Eqn], model: Any) -> str:
    """Says that no equation is under a scope, and what there is instead."""
    scopes = list(dict.fromkeys(".".join(p) for e in eqns if (p := _units.scope_path(e))))
    parts = [s.split(".") for s in scopes]
    inner = dict.fromkeys(
        ".".join(p[i:j]) for p in parts for i in range(len(p)) for j in range(i + 1, len(p) + 1)
    )
    there = _modules.listed(scopes) + _modules.nearest(name.replace("/", "."), inner)
    no_scope = f"o equation is under jax.named_scope({name!r}) ({there})."
    if not isinstance(model, eqx.Module):
        layers = dict.fromkeys(map(_modules.layer_of, _modules.array_paths(model)))
        return (
            f"N{no_scope} at= names scopes, layers of a stack, or parts of the first argument by "
            f"their paths ({_modules.listed(list(layers), name)}); anywhere else, mark the cut in "
            f"the function with jaxpp.pipeline_enter_stage, or give num_stages alone."
        )
    there = _modules.listed(_modules.module_paths(model), name)
    return f"No module of the first argument is called {name!r} ({there}), and n{no_scope}"


# ---- modules and layers --------------------------------------------------------------------------


def _stacked(
    jaxpr: jex.ClosedJaxpr,
    model: Any,
    path: str,
    module: eqx.Module | _modules.Layer,
    arrays: Sequence[Var],
) -> eqx.Module | _modules.Layer:
    """Finds a `Layer` for a module whose layers a scan calls one by one; else the module itself."""
    if isinstance(module, _modules.Layer):
        return module
    stack = _modules.stack_at(model, path)
    for scan in stacked.layer_scans(jaxpr, arrays):
        taken = _modules.joined_bits(a for a in scan.arrays if not a & ~stack.arrays)
        if taken and taken == stack.arrays and _calls.calls_class(scan.eqn, type(module)):
            return stack
    return module


def _mark_layers(
    jaxpr: jex.ClosedJaxpr, modules: Sequence[_modules.Named], arrays: Sequence[Var]
) -> jex.ClosedJaxpr:
    """Marks those cuts that are layers: cut i opens stage i + 1."""
    layers = {i: m for i, (_, m) in enumerate(modules) if isinstance(m, _modules.Layer)}
    if not layers:
        return jaxpr
    places = []
    for layer in layers.values():
        scan = stacked.find_scan(jaxpr, arrays, layer.arrays, layer.stack)
        first = 0 if layer.index is None else scan.place_of(layer.index, layer.stack)[1]
        places.append((scan.number, first))
    line = ArrangedProgram.of(stacked.divide_scans(jaxpr, arrays, places))
    positions = map(line.position_of, places)
    return line.marked(positions, [i + 1 for i in layers], [modules[i][0] for i in layers])


# ---- shared -------------------------------------------------------------------------------------


def open_program(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, jaxprs.Checkpoints]:
    """Opens all calls and checkpoints of a program but for outlined stages."""
    jaxpr, checkpoints = jaxprs.open_calls(
        jaxpr, lambda e: not _marks.is_stage_call(e), _calls.apart
    )
    eqns = [e for eqn in jaxpr.eqns for e in _calls.apart(eqn, [eqn])]
    return _compat.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars), checkpoints


@dataclasses.dataclass(frozen=True)
class ArrangedProgram:
    """A divided program in which argument chains stand just before their first reader.

    So a weight's cast, transpose or stacking goes with the stage that reads it. Those equations
    that only prepare the one after them are in `leads`, by the first variable that they make: no
    cut should be made right after one. `places` has the place before an equation, likewise.
    """

    jaxpr: jex.ClosedJaxpr
    leads: frozenset[Var]
    places: Mapping[Var, stacked.Iteration]

    @classmethod
    def of(cls, divided: stacked.Divided) -> "ArrangedProgram":
        jaxpr, eqns = divided.jaxpr, divided.jaxpr.eqns
        moves = _stages.argument_chains(jaxpr)
        sunk = {v: i for i, e in enumerate(eqns) if moves[i] for v in e.outvars}
        results = [sunk[v] for v in jaxprs.variables(jaxpr.jaxpr.outvars) if v in sunk]

        def needs(i: int) -> list[int]:
            return [sunk[v] for v in jaxprs.variables(eqns[i].invars) if v in sunk]

        stays = [i for i in range(len(eqns)) if not moves[i]]
        order = [eqns[i] for i in jaxprs.ordered_by_needs([*stays, *results], needs)]
        sorted_jaxpr = _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, order)
        leads = divided.slices | {eqns[i].outvars[0] for i in sunk.values()}
        return cls(sorted_jaxpr, leads, divided.places)

    @property
    def eqns(self) -> Sequence[Eqn]:
        return self.jaxpr.eqns

    def is_lead(self, eqn: Eqn) -> bool:
        """Tells whether an equation only prepares the one after it."""
        return not self.leads.isdisjoint(eqn.outvars[:1])

    def position_of(self, start: Var | stacked.Iteration) -> int:
        """Returns the position of the equation that makes a variable, or that is after a place."""
        if isinstance(start, tuple):
            start = next(v for v, place in self.places.items() if place == start)
        return next(i for i, e in enumerate(self.eqns) if start in e.outvars)

    def marked(
        self,
        positions: Iterable[int],
        stages: Sequence[int],
        names: Sequence[str | None],
    ) -> jex.ClosedJaxpr:
        """Marks the entrance of stages, before equations and what only prepares these.

        Raises:
            ValueError: for positions that are not in order, or not distinct.
        """
        positions = list(positions)
        for n, position in enumerate(positions):
            while position > 0 and self.is_lead(self.eqns[position - 1]):
                position -= 1
            positions[n] = position
        if positions != sorted(positions):
            order = [name for _, name in sorted(zip(positions, names, strict=True))]
            raise ValueError(
                f"The cuts {list(names)} are out of order: they run in the order {order}."
            )
        if len(set(positions)) < len(positions):
            raise ValueError(
                f"Two of the cuts {list(names)} are at the same layer or equation; drop one."
            )
        opened = zip(stages, names, strict=True)
        return _insert_marks(self.jaxpr, dict(zip(positions, opened, strict=True)))


def bytes_from(begins: Mapping[Var, int], eqns: Sequence[Eqn]) -> list[float]:
    """Counts for each position the bytes of variables from where they begin to the last reader."""
    last = {v: i for i, e in enumerate(eqns) for v in jaxprs.variables(e.invars)}
    change = [0.0] * (len(eqns) + 2)
    for var, i in begins.items():
        if var in last:
            change[i + 1] += jaxprs.nbytes(var)
            change[last[var] + 1] -= jaxprs.nbytes(var)
    return list(itertools.accumulate(change[:-1]))


def _insert_marks(
    jaxpr: jex.ClosedJaxpr, opened: Mapping[int, tuple[int, str | None]]
) -> jex.ClosedJaxpr:
    """Marks all values made before and read after some positions as the entrance of a stage.

    `opened` has the number and the name of the stage that opens at each position.
    """
    varying = jaxprs.descendants(jaxpr.eqns, jaxpr.jaxpr.invars)
    last = {v: i for i, e in enumerate(jaxpr.eqns) for v in jaxprs.variables(e.invars)}
    known = jaxprs.Substitution()
    before: list[Var] = []
    eqns: list[Eqn] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i in opened:
            live = [v for v in before if last.get(v, -1) >= i]
            marked = list(map(jaxprs.fresh_var, live))
            params = dict(zip(("stage", "name"), opened[i], strict=True))
            operands = list(map(known, live))
            mark: Any = jex.new_jaxpr_eqn(operands, marked, _marks.enter_p, params, set())
            eqns.append(mark)
            known.of.update(zip(live, marked, strict=True))
        eqns.append(known.rename(eqn))
        before.extend(v for v in eqn.outvars if v in varying)
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns)
