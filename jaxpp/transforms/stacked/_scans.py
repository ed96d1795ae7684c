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
from collections.abc import Collection, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms.stacked import _origins, _rows
from jaxpp.transforms.stacked._cut_scan import cut_scan

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
        """Returns the place before the iteration that runs a layer of the stack called `stack`.

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
        """Returns the first variable of the equation after a place."""
        return next(v for v, p in self.places.items() if p == place)


def divide_scans(
    jaxpr: jex.ClosedJaxpr,
    model: Sequence[Any],
    places: Collection[Iteration] = (),
) -> Divided:
    """Cuts the scans over stacked layers in a program whose calls are open.

    Args:
        jaxpr: the program.
        model: its inputs that are arrays of the model; bit i of `LayerScan.arrays` is the i-th.
        places: where to cut, by the numbers that `layer_scans` gives.

    Returns:
        The program with the same inputs and results, and the places of its cuts.
    """
    origins = _origins.Origins(jaxpr.jaxpr.invars, model)
    scan_of = {id(scan.eqn): scan for scan in layer_scans(jaxpr, model)}
    known = _jaxprs.Substitution()
    pieces: list[_Piece] = []
    for old in jaxpr.eqns:
        eqn, scan = known.rename(old), scan_of.get(id(old))
        cuts = {i for number, i in places if scan is not None and number == scan.number}
        if scan is None or not cuts:
            origins.add(eqn)
            pieces.append(_Piece(eqn))
            continue
        made, results = _cut(dataclasses.replace(scan, eqn=eqn), sorted(cuts), origins)
        pieces += made
        known.of.update(zip(eqn.outvars, results, strict=True))
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    place_of = {p.eqn.outvars[0]: p.place for p in pieces if p.place is not None}
    eqns = [p.eqn for p in pieces]
    if place_of:
        # An array that was made whole is not needed any more where only slices were read.
        eqns = _jaxprs.needed(eqns, [*outvars, *place_of])
    return Divided(
        _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns),
        place_of,
        frozenset(p.eqn.outvars[0] for p in pieces if p.kind == "slice"),
        frozenset(p.eqn.outvars[0] for p in pieces if p.kind == "join"),
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
    whole, xs = eqn.invars[: num_consts + num_carry], eqn.invars[num_consts + num_carry :]
    starts = sorted({0, *cuts, length})
    bounds = [length - i for i in reversed(starts)] if reverse else starts
    slicers = [origins.slicer(eqn) for _ in bounds[1:]]
    slices = [
        [slicer.rows(v, low, high) if high - low < length else v for v in xs]
        for slicer, (low, high) in zip(slicers, itertools.pairwise(bounds), strict=True)
    ]
    parts, results, stacks = cut_scan(eqn, bounds, whole, slices)
    pieces: list[_Piece] = []
    order = -1 if reverse else 1
    for start, part, slicer in zip(starts, parts, slicers[::order], strict=False):
        pieces += [_Piece(e, "slice") for e in slicer.eqns]
        pieces.append(_Piece(part, place=(scan.number, start) if start in cuts else None))
    for stacked, rows in zip(eqn.outvars[num_carry:], stacks, strict=True):
        if len(rows) > 1 and not isinstance(stacked, jex.DropVar):
            pieces.append(_Piece(_rows.join(eqn, rows, stacked), "join"))
            rows = pieces[-1].eqn.outvars
        results.append(rows[0])
    for piece in pieces:
        origins.add(piece.eqn)
    return pieces, results
