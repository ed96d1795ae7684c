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
from collections.abc import Collection, Iterable, Sequence

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var
from jaxpp.transforms.stacked import _rows
from jaxpp.transforms.stacked._rows import cut_scan
from jaxpp.transforms.stacked._slicer import Slicer
from jaxpp.transforms.stacked._walked import walked_as_xs

#: A place where a program can be cut: the number of a scan, and the iteration after the cut.
Iteration = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """A scan over stacked layers: the `number`-th of a program.

    `arrays` has for each of the xs the arrays of the model that it was computed from, as bits; 0 if
    it has other sources.
    """

    number: int
    eqn: Eqn
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
    places: dict[Var, Iteration]
    slices: frozenset[Var]
    joins: frozenset[Var]


def divide_scans(
    jaxpr: jex.ClosedJaxpr, model: Sequence[Var], places: Collection[Iteration] = ()
) -> Divided:
    """Cuts the scans over stacked layers in a program whose calls are open.

    Args:
        jaxpr: the program.
        model: its inputs that are arrays of the model; bit i of `LayerScan.arrays` is the i-th.
        places: where to cut, by the numbers that `layer_scans` gives.

    Returns:
        The program with the same inputs and results, and the places of its cuts.
    """
    scans, sources = _read(jaxpr, model)
    scan_of = {scan.eqn.outvars[0]: scan for scan in scans}
    pieces: list[_Piece] = []

    def rule(eqn: Eqn) -> jaxprs.Replacement | None:
        scan = scan_of.get(eqn.outvars[0]) if eqn.outvars else None
        cuts = {i for number, i in places if scan is not None and number == scan.number}
        if scan is None or not cuts:
            sources.add(eqn)
            return None
        parts, results = _cut(dataclasses.replace(scan, eqn=eqn), sorted(cuts), sources)
        pieces.extend(parts)
        return [piece.eqn for piece in parts], results

    divided = jaxprs.rewrite(jaxpr, rule)
    outvars = divided.jaxpr.outvars
    place_of = {p.eqn.outvars[0]: p.place for p in pieces if p.place is not None}
    if place_of:
        # An array that was made whole is not needed any more where only slices were read.
        eqns = jaxprs.needed(divided.eqns, [*outvars, *place_of])
        divided = _compat.with_equations(divided, eqns, outvars)
    slices, joins = (
        frozenset(p.eqn.outvars[0] for p in pieces if p.kind == kind) for kind in ("slice", "join")
    )
    return Divided(divided, place_of, slices, joins)


def walk_stacks(jaxpr: jex.ClosedJaxpr, model: Sequence[Var]) -> tuple[jex.ClosedJaxpr, list[Eqn]]:
    """Makes scans over stacked layers of those that take a layer of the model by its number.

    Also gives the scans that took layers so.
    """
    sources = _read(jaxpr, model)[1]
    return walked_as_xs(jaxpr, lambda array: bool(sources.model_arrays(array)))


def layer_scans(jaxpr: jex.ClosedJaxpr, model: Sequence[Var]) -> list[LayerScan]:
    """Finds the scans over arrays of the model, its inputs `model`, in a program."""
    return _read(jaxpr, model)[0]


def find_scan(jaxpr: jex.ClosedJaxpr, model: Sequence[Var], arrays: int, stack: str) -> LayerScan:
    """Finds the scan that goes over arrays of the model, which are called `stack`.

    Raises:
        ValueError: if there is none, or several; the message says what stands in the way.
    """
    scans, sources = _read(jaxpr, model)
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
        f"{_obstacle(jaxpr.eqns, sources, arrays) or 'no lax.scan goes over its arrays as xs.'}"
    )


def loop_that_is_one_unit(jaxpr: jex.ClosedJaxpr, model: Sequence[Var]) -> str:
    """Says why a loop over parameters was not cut, as a further sentence; empty without one."""
    _, sources = _read(jaxpr, model)
    loops = [e for e in jaxpr.eqns if e.primitive.name in ("scan", "while")]
    obstacle = _obstacle(loops, sources, (1 << len(model)) - 1, "a parameter")
    return f" A loop counts as one place where {obstacle}" if obstacle else ""


def way_out(jaxpr: jex.ClosedJaxpr, model: Sequence[Var], loop: Eqn) -> str:
    """Says how a loop of the program can be written so that it can be cut; empty if it is none."""
    sources = _read(jaxpr, model)[1]
    if loop.primitive.name not in ("scan", "while"):
        return ""
    xs = loop.invars[sum(_compat.scan_parts(loop)) :] if loop.primitive.name == "scan" else []
    if any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in xs):
        return (
            "a scan is cut between its iterations if it goes over arrays of the first argument: if "
            "its xs are parameters, make them the first argument of the function"
        )
    obstacle = _obstacle([loop], sources, (1 << len(model)) - 1, "a parameter") or ""
    return (
        f"{obstacle} Run the layers by a lax.scan over the layers, with their stack as xs".strip()
    )


# ---- finding scans ------------------------------------------------------------------------------


def _read(jaxpr: jex.ClosedJaxpr, model: Sequence[Var]) -> tuple[list[LayerScan], "_Sources"]:
    """Finds the scans over stacked layers of a program, and the sources of all its variables."""
    sources, scans = _Sources(jaxpr.jaxpr.invars, model), []
    for eqn in jaxpr.eqns:
        arrays = _layer_arrays(eqn, sources)
        if any(arrays):
            scans.append(LayerScan(len(scans), eqn, arrays))
        sources.add(eqn)
    return scans, sources


def _layer_arrays(eqn: Eqn, sources: "_Sources") -> tuple[int, ...]:
    """Finds `LayerScan.arrays` of an equation; empty for all but a scan that can be cut."""
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or not eqn.outvars:
        return ()
    return tuple(map(sources.model_arrays, eqn.invars[sum(_compat.scan_parts(eqn)) :]))


def _obstacle(
    eqns: Sequence[Eqn], sources: "_Sources", arrays: int, what: str = "it"
) -> str | None:
    """Says why a loop that uses arrays of the model (called `what`) is no scan over layers."""
    for eqn in eqns:
        read = [i for i, v in enumerate(eqn.invars) if sources.model_arrays(v) & arrays]
        is_plain = not any(True for _ in jaxprs.sub_jaxprs(eqn))
        if not read or is_plain or any(_layer_arrays(eqn, sources)):
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


class _Sources:
    """The sources of the variables of a program.

    Args:
        invars: the inputs of the program.
        model: the inputs that are arrays of the model; a set of these is an integer, a bit each.
    """

    def __init__(self, invars: Iterable[Var], model: Sequence[Var]):
        self._other = 1 << len(model)
        self._sources = dict.fromkeys(invars, self._other)
        self._sources.update((v, 1 << i) for i, v in enumerate(model))
        self._maker: dict[Var, Eqn] = {}

    def add(self, eqn: Eqn) -> None:
        """Notes the sources of the results of an equation."""
        sources = 0
        for v in jaxprs.variables(eqn.invars):
            sources |= self._sources.get(v, 0)
        for v in eqn.outvars:
            self._sources[v] = sources
            self._maker[v] = eqn

    def model_arrays(self, atom: Atom) -> int:
        """Finds the arrays of the model that an atom depends on; none if it has another source."""
        sources = 0 if jaxprs.is_literal(atom) else self._sources.get(atom, 0)
        return sources if sources < self._other else 0

    def slicer(self, scan: Eqn) -> Slicer:
        """Makes a slicer for a scan over arrays of the program."""

        def enters(eqn: Eqn) -> bool:
            if any(True for _ in jaxprs.sub_jaxprs(eqn)):
                return False
            is_prepared = self._sources[eqn.outvars[0]] < self._other
            return is_prepared or eqn.primitive.name in ("concatenate", "slice")

        def around(eqn: Eqn | None) -> Eqn:
            # An array made outside of a checkpoint is sliced outside: only the slice is kept.
            return jaxprs.outside_checkpoints(
                scan, [] if eqn is None else jaxprs.checkpoint_scopes(eqn)
            )

        return Slicer(self._maker, enters=enters, source=around)


# ---- cutting a scan -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
    """An equation in place of a scan: `"scan"`, `"slice"` or `"join"` (see `Divided`)."""

    eqn: Eqn
    kind: str = "scan"
    place: Iteration | None = None


def _cut(
    scan: LayerScan, cuts: Sequence[int], sources: _Sources
) -> tuple[list[_Piece], list[Atom]]:
    """Cuts a scan before some iterations; gives the pieces, and the atoms that are its results."""
    eqn, length, reverse = scan.eqn, scan.length, scan.eqn.params["reverse"]
    num_consts, num_carry = _compat.scan_parts(eqn)
    whole, xs = eqn.invars[: num_consts + num_carry], eqn.invars[num_consts + num_carry :]
    starts = sorted({0, *cuts, length})
    bounds = [length - i for i in reversed(starts)] if reverse else starts
    slicers = [sources.slicer(eqn) for _ in bounds[1:]]
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
        sources.add(piece.eqn)
    return pieces, results
