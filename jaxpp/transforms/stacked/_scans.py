"""Cuts a scan over stacked layers between its iterations.

A `lax.scan` that goes over arrays of the model (its xs: the layers' parameters, stacked) becomes
several scans of the same body, each over a static slice of the xs. Its carries go from one scan to
the next, and the stacked results are concatenated.

Pipelines over stacked layers are usually made by reshaping the stack to [stages, layers per stage]
(MaxText, praxis), so that the number of stages must divide that of the layers; slices need not be
of one length.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp.transforms.stacked import _origins, _rows

#: A place where a program can be cut: the number of a scan, and the iteration after the cut.
Iteration = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """A scan over stacked layers: the `number`-th of a program.

    `arrays` has for each of the xs the arrays of the model that it was computed from, as bits; 0 if
    it has other sources.
    """

    number: int
    eqn: Any
    arrays: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    def place_of(self, layer: int, stack: str) -> Iteration:
        """Gives the place before the iteration that runs a layer of the stack called `stack`.

        Raises:
            ValueError: if there is no such layer.
        """
        if layer >= self.length:
            raise ValueError(
                f"The cut at {f'{stack}.{layer}'!r} cannot be made: the scan"
                f"{_compat.at_source_line(self.eqn)} has {self.length} layers; the last is "
                f"{f'{stack}.{self.length - 1}'!r}."
            )
        return self.number, self.length - 1 - layer if self.eqn.params["reverse"] else layer


@dataclasses.dataclass(frozen=True)
class Divided:
    """A program whose scans are cut.

    Equations are named by the first variable that they make. `places` has the place before an
    equation. An equation of `slices` belongs to the equation after it, one of `joins` (which
    concatenate) to the equation before it: no cut should be made between.
    """

    jaxpr: jex.ClosedJaxpr
    places: dict[Any, Iteration]
    slices: frozenset[Any]
    joins: frozenset[Any]
    scans: tuple[LayerScan, ...]

    def start_of(self, place: Iteration) -> Any:
        """Gives the first variable of the equation after a place."""
        return next(v for v, p in self.places.items() if p == place)


def divide_scans(
    jaxpr: jex.ClosedJaxpr,
    model: Sequence[Any],
    wanted: Callable[[LayerScan], Collection[int]] = lambda _: (),
) -> Divided:
    """Cuts the scans over stacked layers in a program whose calls are open.

    Args:
        jaxpr: the program.
        model: its inputs that are arrays of the model; bit i of `LayerScan.arrays` is the i-th.
        wanted: gives the iterations before which a scan is to be cut.

    Returns:
        The program with the same inputs and results, and the places of its cuts.
    """
    divider = _Divider(jaxpr, model, wanted)
    entries = divider.walk(jaxpr.eqns)
    outvars = [divider.known(v) for v in jaxpr.jaxpr.outvars]
    entries = divider.without_bypassed(entries, outvars)
    named = [(e.eqn.outvars[0], e) for e in entries if e.eqn.outvars]

    def of_kind(kind: str) -> frozenset[Any]:
        return frozenset(v for v, e in named if e.kind == kind)

    return Divided(
        _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, [e.eqn for e in entries]),
        {v: e.place for v, e in named if e.place is not None},
        of_kind("slice"),
        of_kind("join"),
        tuple(divider.scans),
    )


def find_scan(jaxpr: jex.ClosedJaxpr, model: Sequence[Any], arrays: int, stack: str) -> LayerScan:
    """Finds the scan that goes over arrays of the model, which are called `stack`.

    Raises:
        ValueError: if there is none, or several; the message says what stands in the way.
    """
    divider = _Divider(jaxpr, model, lambda _: ())
    divider.walk(jaxpr.eqns)
    found = [s for s in divider.scans if any(a and not a & ~arrays for a in s.arrays)]
    if len(found) == 1:
        return found[0]
    if found:
        lines = ", ".join(_compat.source_line(s.eqn) for s in found)
        raise ValueError(
            f"A cut inside {stack!r} is not unique: {len(found)} scans go over its layers ({lines})"
            f". Give num_stages alone, which may cut any of them."
        )
    obstacle = divider.obstacle(jaxpr.eqns, arrays)
    raise ValueError(
        f"No cut can be made inside {stack!r}: "
        f"{obstacle or 'no lax.scan goes over its arrays as xs.'}"
    )


def loop_that_is_one_unit(jaxpr: jex.ClosedJaxpr, model: Sequence[Any]) -> str:
    """Says why a loop over parameters was not cut, as a further sentence; empty without one."""
    divider = _Divider(jaxpr, model, lambda _: ())
    divider.walk(jaxpr.eqns)
    loops = [e for e in jaxpr.eqns if e.primitive.name in ("scan", "while")]
    obstacle = divider.obstacle(loops, (1 << len(model)) - 1, "a parameter")
    return f" A loop counts as one place where {obstacle}" if obstacle else ""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An equation of the result: `"plain"`, `"slice"` or `"join"` (see `Divided`)."""

    eqn: Any
    kind: str = "plain"
    place: Iteration | None = None


class _Divider:
    """Rewrites one program, and tracks the sources of its variables."""

    def __init__(self, jaxpr, model: Sequence[Any], wanted: Callable):
        self.scans: list[LayerScan] = []
        self.known = _jaxprs.Substitution()
        self._wanted = wanted
        self._origins = _origins.Origins(jaxpr.jaxpr.invars, model)

    def walk(self, eqns: Sequence[Any]) -> list[_Entry]:
        """Makes the entries for some equations."""
        entries: list[_Entry] = []
        for eqn in eqns:
            eqn = self.known.rename(eqn)
            arrays = self._layer_arrays(eqn)
            if any(arrays):
                scan = LayerScan(len(self.scans), eqn, arrays)
                self.scans.append(scan)
                cuts = {i for i in self._wanted(scan) if 0 <= i < scan.length}
                if cuts:
                    entries.extend(self._cut_scan(scan, cuts))
                    continue
            self._origins.add(eqn)
            entries.append(_Entry(eqn))
        return entries

    def _layer_arrays(self, eqn) -> tuple[int, ...]:
        """Finds `LayerScan.arrays` of an equation; empty for all but a scan that can be cut."""
        if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or not eqn.outvars:
            return ()
        num_consts, num_carry = _compat.scan_parts(eqn)
        return tuple(self._origins.model_arrays(v) for v in eqn.invars[num_consts + num_carry :])

    # ---- scans ----------------------------------------------------------------------------------

    def _cut_scan(self, scan: LayerScan, cuts: set[int]) -> list[_Entry]:
        eqn, length = scan.eqn, scan.length
        num_consts, num_carry = _compat.scan_parts(eqn)
        body = eqn.params["jaxpr"].jaxpr
        # A carry that no iteration changes is given to each scan as it was before the first.
        untouched = [
            _handed_on(body, out) is own
            for own, out in zip(body.invars[num_consts:], body.outvars[:num_carry], strict=False)
        ]
        consts = eqn.invars[:num_consts]
        carry = list(eqn.invars[num_consts : num_consts + num_carry])
        xs = eqn.invars[num_consts + num_carry :]
        bounds = sorted({0, length, *cuts})
        entries: list[_Entry] = []
        stacks: list[list[Any]] = []
        for start, stop in itertools.pairwise(bounds):
            low, high = (length - stop, length - start) if eqn.params["reverse"] else (start, stop)
            slices, new = self._origins.slices(xs, low, high, eqn)
            entries.extend(_Entry(e, "slice") for e in new)
            rows = stop - start
            made = [jex.Var(v.aval) for v in eqn.outvars[:num_carry]]
            made += [jex.Var(_rows.with_rows(v.aval, rows)) for v in eqn.outvars[num_carry:]]
            params = eqn.params | {"length": rows, "unroll": min(eqn.params["unroll"], rows)}
            piece = eqn.replace(invars=[*consts, *carry, *slices], outvars=made, params=params)
            place = (scan.number, start) if start in cuts else None
            entries.append(_Entry(piece, place=place))
            self._origins.add(piece)
            carry = [
                c if same else new
                for c, new, same in zip(carry, made[:num_carry], untouched, strict=True)
            ]
            stacks.append(made[num_carry:])
        if eqn.params["reverse"]:
            stacks.reverse()
        results = [
            self._concatenate([s[i] for s in stacks], y, eqn, entries)
            for i, y in enumerate(eqn.outvars[num_carry:])
        ]
        self.known.of.update(zip(eqn.outvars, [*carry, *results], strict=True))
        return entries

    def _concatenate(self, parts: list[Any], whole: Any, scan, entries: list[_Entry]) -> Any:
        if len(parts) == 1 or isinstance(whole, jex.DropVar):
            return parts[0]
        eqn = _origins.joined(scan, parts, whole.aval)
        self._origins.add(eqn)
        entries.append(_Entry(eqn, "join"))
        return eqn.outvars[0]

    # ---- obstacles ------------------------------------------------------------------------------

    def obstacle(self, eqns: Sequence[Any], arrays: int, what: str = "it") -> str | None:
        """Says why a loop that uses arrays of the model (called `what`) is no scan over layers."""
        for eqn in eqns:
            read = [i for i, v in enumerate(eqn.invars) if self._origins.model_arrays(v) & arrays]
            is_plain = not any(True for _ in _jaxprs.sub_jaxprs(eqn))
            if not read or is_plain or any(self._layer_arrays(eqn)):
                continue
            where = f"`{eqn.primitive.name}`{_compat.at_source_line(eqn)}"
            if eqn.primitive.name != "scan":
                return f"{what} is used inside a {where}, whose body is one unit."
            if eqn.params["length"] == 1:
                return f"the {where} over {what} has one iteration."
            consts, carries = _compat.scan_parts(eqn)
            if min(read) < consts + carries:
                carry = min(read) - consts
                role = "a constant" if carry < 0 else f"carry {carry}"
                return (
                    f"each iteration of the {where} reads all of {what}, as {role}. Hand it to "
                    f"lax.scan as xs, so that an iteration reads its own layer alone."
                )
        return None

    # ---- unneeded equations ---------------------------------------------------------------------

    def without_bypassed(self, entries: list[_Entry], outvars: Sequence[Any]) -> list[_Entry]:
        """Drops bypassed equations that nothing reads any more."""
        read = set(_jaxprs.variables(outvars))
        kept = []
        for entry in reversed(entries):
            eqn = entry.eqn
            if self._origins.is_bypassed(eqn) and not any(v in read for v in eqn.outvars):
                continue
            read.update(_jaxprs.variables(eqn.invars))
            kept.append(entry)
        return kept[::-1]


def _handed_on(jaxpr, atom: Any) -> Any:
    """Finds the atom that an atom of an open jaxpr is a copy of, through calls that hand it on."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    while not _jaxprs.is_literal(atom) and atom in maker:
        eqn = maker[atom]
        body = None if eqn.primitive.name in _primitives.CUSTOM_RULES else _jaxprs.called_jaxpr(eqn)
        if body is None:
            break
        opened = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
        inner = _handed_on(opened, opened.outvars[eqn.outvars.index(atom)])
        if inner not in opened.invars:
            break
        atom = eqn.invars[opened.invars.index(inner)]
    return atom
