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
    origins = _origins.Origins(jaxpr.jaxpr.invars, model)
    scans = layer_scans(jaxpr, model)
    scan_of = {id(scan.eqn): scan for scan in scans}
    known = _jaxprs.Substitution()
    pieces: list[_Piece] = []
    for old in jaxpr.eqns:
        eqn, scan = known.rename(old), scan_of.get(id(old))
        cuts = set(range(scan.length)).intersection(wanted(scan)) if scan else ()
        if scan is None or not cuts:
            origins.add(eqn)
            pieces.append(_Piece(eqn))
            continue
        made, results = _cut(dataclasses.replace(scan, eqn=eqn), sorted(cuts), origins)
        pieces += made
        known.of.update(zip(eqn.outvars, results, strict=True))
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    pieces = _without_bypassed(pieces, outvars, origins)
    named = [(p.eqn.outvars[0], p) for p in pieces if p.eqn.outvars]
    return Divided(
        _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, [p.eqn for p in pieces]),
        {v: p.place for v, p in named if p.place is not None},
        frozenset(v for v, p in named if p.kind == "slice"),
        frozenset(v for v, p in named if p.kind == "join"),
    )


def layer_scans(jaxpr: jex.ClosedJaxpr, model: Sequence[Any]) -> list[LayerScan]:
    """Finds the scans over arrays of the model, its inputs `model`, in a program."""
    return _read(jaxpr, model)[0]


def find_scan(jaxpr: jex.ClosedJaxpr, model: Sequence[Any], arrays: int, stack: str) -> LayerScan:
    """Finds the scan that goes over arrays of the model, which are called `stack`.

    Raises:
        ValueError: if there is none, or several; the message says what stands in the way.
    """
    scans, origins = _read(jaxpr, model)
    found = [s for s in scans if any(a and not a & ~arrays for a in s.arrays)]
    if len(found) == 1:
        return found[0]
    if found:
        lines = ", ".join(_compat.source_line(s.eqn) for s in found)
        raise ValueError(
            f"A cut inside {stack!r} is not unique: {len(found)} scans go over its layers ({lines})"
            f". Give num_stages alone, which may cut any of them."
        )
    raise ValueError(
        f"No cut can be made inside {stack!r}: "
        f"{_obstacle(jaxpr.eqns, origins, arrays) or 'no lax.scan goes over its arrays as xs.'}"
    )


def loop_that_is_one_unit(jaxpr: jex.ClosedJaxpr, model: Sequence[Any]) -> str:
    """Says why a loop over parameters was not cut, as a further sentence; empty without one."""
    _, origins = _read(jaxpr, model)
    loops = [e for e in jaxpr.eqns if e.primitive.name in ("scan", "while")]
    obstacle = _obstacle(loops, origins, (1 << len(model)) - 1, "a parameter")
    return f" A loop counts as one place where {obstacle}" if obstacle else ""


# ---- finding scans ------------------------------------------------------------------------------


def _read(jaxpr, model: Sequence[Any]) -> tuple[list[LayerScan], _origins.Origins]:
    """Finds the scans over stacked layers of a program, and the sources of all its variables."""
    origins, scans = _origins.Origins(jaxpr.jaxpr.invars, model), []
    for eqn in jaxpr.eqns:
        arrays = _layer_arrays(eqn, origins)
        if any(arrays):
            scans.append(LayerScan(len(scans), eqn, arrays))
        origins.add(eqn)
    return scans, origins


def _layer_arrays(eqn, origins: _origins.Origins) -> tuple[int, ...]:
    """Finds `LayerScan.arrays` of an equation; empty for all but a scan that can be cut."""
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or not eqn.outvars:
        return ()
    return tuple(map(origins.model_arrays, eqn.invars[sum(_compat.scan_parts(eqn)) :]))


def _obstacle(
    eqns: Sequence[Any], origins: _origins.Origins, arrays: int, what: str = "it"
) -> str | None:
    """Says why a loop that uses arrays of the model (called `what`) is no scan over layers."""
    for eqn in eqns:
        read = [i for i, v in enumerate(eqn.invars) if origins.model_arrays(v) & arrays]
        is_plain = not any(True for _ in _jaxprs.sub_jaxprs(eqn))
        if not read or is_plain or any(_layer_arrays(eqn, origins)):
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


# ---- cutting a scan -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
    """An equation of the result: `"plain"`, `"slice"` or `"join"` (see `Divided`)."""

    eqn: Any
    kind: str = "plain"
    place: Iteration | None = None


def _cut(
    scan: LayerScan, cuts: Sequence[int], origins: _origins.Origins
) -> tuple[list[_Piece], list[Any]]:
    """Cuts a scan before some iterations; gives the pieces, and the atoms that are its results."""
    eqn, length, reverse = scan.eqn, scan.length, scan.eqn.params["reverse"]
    num_consts, num_carry = _compat.scan_parts(eqn)
    first = num_consts + num_carry
    consts, carry, xs = eqn.invars[:num_consts], eqn.invars[num_consts:first], eqn.invars[first:]
    body = eqn.params["jaxpr"].jaxpr
    ends = zip(body.invars[num_consts:first], body.outvars[:num_carry], strict=True)
    changes = [_handed_on(body, out) is not own for own, out in ends]
    pieces: list[_Piece] = []
    stacks: list[list[Any]] = []
    for start, stop in itertools.pairwise(sorted({0, *cuts, length})):
        low, high = (length - stop, length - start) if reverse else (start, stop)
        slices, new = origins.slices(xs, low, high, eqn)
        part = _iterations(eqn, [*consts, *carry, *slices], num_carry, stop - start)
        pieces += [_Piece(e, "slice") for e in new]
        pieces.append(_Piece(part, place=(scan.number, start) if start in cuts else None))
        # A carry that no iteration changes is given to each scan as it was before the first.
        made = zip(carry, part.outvars[:num_carry], changes, strict=True)
        carry = [after if changed else before for before, after, changed in made]
        stacks.append(part.outvars[num_carry:])
    results = list(carry)
    for whole, *parts in zip(
        eqn.outvars[num_carry:], *(stacks[::-1] if reverse else stacks), strict=True
    ):
        if len(parts) > 1 and not isinstance(whole, jex.DropVar):
            pieces.append(_Piece(_origins.joined(eqn, parts, whole.aval), "join"))
            parts = pieces[-1].eqn.outvars
        results.append(parts[0])
    for piece in pieces:
        origins.add(piece.eqn)
    return pieces, results


def _iterations(scan, invars: Sequence[Any], num_carry: int, count: int) -> Any:
    """Makes the scan of some iterations of another one."""
    made = [
        jex.Var(v.aval if i < num_carry else _rows.with_rows(v.aval, count))
        for i, v in enumerate(scan.outvars)
    ]
    params = scan.params | {"length": count, "unroll": min(scan.params["unroll"], count)}
    return scan.replace(invars=list(invars), outvars=made, params=params)


def _without_bypassed(
    pieces: Sequence[_Piece], outvars: Sequence[Any], origins: _origins.Origins
) -> list[_Piece]:
    """Drops bypassed equations that nothing reads any more."""
    read = set(_jaxprs.variables(outvars))
    kept = []
    for piece in reversed(pieces):
        if not origins.is_bypassed(piece.eqn) or not read.isdisjoint(piece.eqn.outvars):
            read.update(_jaxprs.variables(piece.eqn.invars))
            kept.append(piece)
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
