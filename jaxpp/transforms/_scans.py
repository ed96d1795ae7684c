"""Cuts a scan over stacked layers between its iterations.

A `lax.scan` that goes over arrays of the model (its xs: the layers' parameters, stacked) becomes
several scans of the same body, each over a static slice of the xs; what it carries goes from one
to the next, and what it stacks is concatenated. A checkpoint around it is cut with it.

Pipelines over stacked layers are usually made by reshaping the stack to [stages, layers per stage]
(MaxText, praxis), so that the number of stages must divide that of the layers; slices need not be
of one length.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _origins

#: Where a program can be cut: the number of a scan, and the iteration that follows the cut. Where
#: a checkpoint holds the scan, the last place is that after all iterations, and `BEFORE` that
#: before the checkpoint.
Place = tuple[int, int]
BEFORE = -1


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """A scan over stacked layers: the `number`-th of a program.

    `arrays` are the arrays of the model, as bits, that each of the xs was computed from alone.
    """

    number: int
    eqn: Any
    arrays: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    def place_of(self, layer: int, stack: str) -> Place:
        """The place before the iteration that runs a layer of the stack called `stack`.

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

    @property
    def places(self) -> Collection[int]:
        """All iterations at which it can be cut."""
        return range(BEFORE, self.length + 1)


@dataclasses.dataclass(frozen=True)
class Divided:
    """A program whose scans are cut.

    Equations are named by the first variable they make. `places` has the place before an equation;
    `units` are the parts of scans; `slices` belong to the equation after them, `joins` (what
    concatenates) to that before them, and no cut should be made between.
    """

    jaxpr: jex.ClosedJaxpr
    places: dict[Any, Place]
    units: frozenset[Any]
    slices: frozenset[Any]
    joins: frozenset[Any]
    scans: tuple[LayerScan, ...]

    def start_of(self, place: Place) -> Any:
        """The first variable of the equation after a place."""
        return next(v for v, p in self.places.items() if p == place)


def divide(
    jaxpr: jex.ClosedJaxpr,
    model: Sequence[Any],
    wanted: Callable[[LayerScan], Collection[int]] = lambda _: (),
) -> Divided:
    """Cuts the scans over stacked layers in a program whose calls are inlined.

    Args:
        jaxpr: the program.
        model: its inputs that are arrays of the model; bit i of `LayerScan.arrays` is the i-th.
        wanted: the iterations at which a scan is to be cut, of those in its `places`.

    Returns:
        The program with the same inputs and results, and where its parts are.
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
        of_kind("unit"),
        of_kind("slice"),
        of_kind("join"),
        tuple(divider.scans),
    )


def find(jaxpr: jex.ClosedJaxpr, model: Sequence[Any], arrays: int, stack: str) -> LayerScan:
    """The scan that goes over arrays of the model, which are called `stack`.

    Raises:
        ValueError: if there is none, or several; it says what stands in the way.
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
    """Why a loop over parameters was not cut, as a sentence to follow others; or nothing."""
    divider = _Divider(jaxpr, model, lambda _: ())
    divider.walk(jaxpr.eqns)
    loops = [e for e in jaxpr.eqns if e.primitive.name in ("scan", "while")]
    obstacle = divider.obstacle(loops, (1 << len(model)) - 1, "a parameter")
    return f" A loop counts as one place where {obstacle}" if obstacle else ""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An equation of the result: `"plain"`, `"unit"`, `"slice"` or `"join"` (see `Divided`)."""

    eqn: Any
    kind: str = "plain"
    place: Place | None = None


class _Divider:
    """Rewrites one program, and knows what its variables were computed from."""

    def __init__(self, jaxpr, model: Sequence[Any], wanted: Callable):
        self.scans: list[LayerScan] = []
        self.known = _jaxprs.Substitution()
        self._wanted = wanted
        self._origins = _origins.Origins(jaxpr.jaxpr.invars, model)

    def walk(self, eqns: Sequence[Any], inner: bool = False) -> list[_Entry]:
        """The entries for equations; `inner` where they are the body of a checkpoint."""
        entries: list[_Entry] = []
        # The place of the entry that follows, where a cut is wanted there.
        pending: Place | None = None
        for eqn in eqns:
            eqn = self.known.rename(eqn)
            new, after = self._rewrite(eqn, inner)
            entries.extend(_placed(new, pending))
            pending = after
        return entries

    def _rewrite(self, eqn, inner: bool) -> tuple[list[_Entry], Place | None]:
        """The entries for an equation, and the place after it if a cut is wanted there."""
        arrays = self._layer_arrays(eqn)
        if any(arrays):
            scan = LayerScan(len(self.scans), eqn, arrays)
            self.scans.append(scan)
            wanted = self._wanted(scan)
            cuts = {i for i in wanted if 0 <= i < scan.length}
            after = (scan.number, scan.length) if inner and scan.length in wanted else None
            if cuts or after:
                return self._cut_scan(scan, cuts), after
        elif eqn.primitive.name in _jaxprs.CHECKPOINTS:
            cut = self._cut_checkpoint(eqn, inner)
            if cut is not None:
                return cut, None
        self._origins.add(eqn)
        return [_Entry(eqn)], None

    def _layer_arrays(self, eqn) -> tuple[int, ...]:
        """For each of the xs of a scan, the arrays of the model that it alone comes from, or 0."""
        if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or not eqn.outvars:
            return ()
        num_consts, num_carry = _compat.scan_parts(eqn)
        return tuple(self._origins.model_arrays(v) for v in eqn.invars[num_consts + num_carry :])

    # ---- scans ----------------------------------------------------------------------------------

    def _cut_scan(self, scan: LayerScan, cuts: set[int]) -> list[_Entry]:
        eqn, length = scan.eqn, scan.length
        num_consts, num_carry = _compat.scan_parts(eqn)
        body = eqn.params["jaxpr"].jaxpr
        # What no iteration touches is given to each scan as it was before the first.
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
            new: list[Any] = []
            slices = [self._origins.slice(v, low, high, eqn, new) for v in xs]
            entries.extend(_Entry(e, "slice") for e in new)
            rows = stop - start
            made = [jex.Var(v.aval) for v in eqn.outvars[:num_carry]]
            made += [jex.Var(_origins.resized(v.aval, rows)) for v in eqn.outvars[num_carry:]]
            params = eqn.params | {"length": rows, "unroll": min(eqn.params["unroll"], rows)}
            piece = eqn.replace(invars=[*consts, *carry, *slices], outvars=made, params=params)
            place = (scan.number, start) if start in cuts else None
            entries.append(_Entry(piece, "unit", place))
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

    # ---- checkpoints ----------------------------------------------------------------------------

    def _cut_checkpoint(self, eqn, inner: bool) -> list[_Entry] | None:
        """A checkpoint that holds scans to be cut as several; None where it stays as it is."""
        first = len(self.scans)
        part = _jaxprs.part(*_jaxprs.inline_call(eqn, eqn.invars))
        flat = _jaxprs.inline(part.jaxpr, lambda e: e.primitive.name not in _KEPT)
        entries = self.walk(flat.eqns, inner=True)
        found = self.scans[first:]
        if not found:
            return None
        is_before = not inner and BEFORE in self._wanted(found[0])
        before = (found[0].number, BEFORE) if is_before else None
        outvars = [self.known(v) for v in flat.jaxpr.outvars]
        groups = _grouped(self.without_bypassed(entries, outvars))
        if len(groups) == 1:
            place = _place_of(groups[0]) or before
            self._origins.add(eqn)
            return [_Entry(eqn, "unit", place)] if place else None
        made = {v for g in groups for e in g if e.kind != "slice" for v in e.eqn.outvars}
        closed: list[_Entry] = []
        for i, group in enumerate(groups):
            rest = [e.eqn for g in groups[i + 1 :] for e in g]
            new = _closed(eqn, group, made, rest, outvars)
            closed.extend(_placed(new, _place_of(group) or (before if i == 0 else None)))
        for entry in closed:
            self._origins.add(entry.eqn)
        self.known.of.update(zip(eqn.outvars, outvars, strict=True))
        return closed

    # ---- what stands in the way -----------------------------------------------------------------

    def obstacle(self, eqns: Sequence[Any], arrays: int, what: str = "it") -> str | None:
        """Why a loop that uses arrays of the model (called `what`) is not a scan over layers."""
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

    # ---- what is not needed any more ------------------------------------------------------------

    def without_bypassed(self, entries: list[_Entry], outvars: Sequence[Any]) -> list[_Entry]:
        """Drops what was read only by what now reads slices of its operands."""
        read = set(_jaxprs.variables(outvars))
        kept = []
        for entry in reversed(entries):
            eqn = entry.eqn
            if self._origins.is_bypassed(eqn) and not any(v in read for v in eqn.outvars):
                continue
            read.update(_jaxprs.variables(eqn.invars))
            kept.append(entry)
        return kept[::-1]


_KEPT = _jaxprs.CUSTOM_RULES | _jaxprs.CHECKPOINTS


def _placed(entries: list[_Entry], place: Place | None) -> list[_Entry]:
    """The entries with a place before the first, unless it has one."""
    i = next(i for i, e in enumerate(entries) if e.kind != "slice")
    if place is None or entries[i].place is not None:
        return entries
    return [*entries[:i], dataclasses.replace(entries[i], place=place), *entries[i + 1 :]]


def _place_of(group: Sequence[_Entry]) -> Place | None:
    """The place before a group."""
    return next((e.place for e in group if e.kind != "slice"), None)


def _grouped(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    """The entries from each place to the next."""
    groups: list[list[_Entry]] = [[]]
    for entry in entries:
        if entry.place is not None:
            slices: list[_Entry] = []
            while groups[-1] and groups[-1][-1].kind == "slice":
                slices.insert(0, groups[-1].pop())
            groups.append(slices)
        groups[-1].append(entry)
    return [g for g in groups if g]


def _closed(
    checkpoint, group: Sequence[_Entry], made: set[Any], rest: Sequence[Any], results: Sequence[Any]
) -> list[_Entry]:
    """A part of a checkpoint's body as a checkpoint, after the slices of what it is given."""
    given, own = [], []
    for entry in group:
        reads = _jaxprs.variables(entry.eqn.invars)
        if entry.kind == "slice" and not any(v in made for v in reads):
            given.append(entry)
        else:
            made.update(entry.eqn.outvars)
            own.append(entry.eqn)
    later = {v for e in rest for v in _jaxprs.variables(e.invars)}
    later.update(_jaxprs.variables(results))
    outputs = [v for e in own for v in e.outvars if v in later]
    return [*given, _Entry(close_checkpoint(checkpoint, own, outputs), "unit")]


def close_checkpoint(checkpoint, eqns: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Equations as a checkpoint like another one.

    Its body has binders of the same names as the variables outside, which is harmless.
    """
    body = _jaxprs.part(eqns, outputs)
    jaxpr = _compat.with_closed_type(body.jaxpr, checkpoint.params["jaxpr"])
    return checkpoint.replace(
        invars=list(body.inputs),
        outvars=list(outputs),
        params=checkpoint.params | {"jaxpr": jaxpr},
    )


def _handed_on(jaxpr, atom: Any) -> Any:
    """What an atom of an open jaxpr is a copy of, through the calls that hand it on unchanged."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    while not _jaxprs.is_literal(atom) and atom in maker:
        eqn = maker[atom]
        body = None if eqn.primitive.name in _jaxprs.CUSTOM_RULES else _jaxprs.called_jaxpr(eqn)
        if body is None:
            break
        opened = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
        inner = _handed_on(opened, opened.outvars[eqn.outvars.index(atom)])
        if inner not in opened.invars:
            break
        atom = eqn.invars[opened.invars.index(inner)]
    return atom
