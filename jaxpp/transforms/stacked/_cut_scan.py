"""Cuts one scan into several over parts of its rows, each of which goes on from the one before."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Jaxpr, Var, primitives
from jaxpp.transforms.stacked import _rows


def scanned(eqn: Eqn) -> list[Atom]:
    """Returns the operands and results that a `scan` reads and makes row by row."""
    if eqn.primitive.name != "scan":
        return []
    num_consts, num_carry = _compat.scan_parts(eqn)
    return [*eqn.invars[num_consts + num_carry :], *eqn.outvars[num_carry:]]


def scan_params(eqn: Eqn, length: int) -> dict[str, Any]:
    """Returns the parameters of a `scan` for another number of iterations."""
    return {**eqn.params, "length": length, "unroll": min(eqn.params["unroll"], length)}


def cut_scan(
    scan: Eqn, bounds: Sequence[int], whole: Sequence[Atom], slices: Sequence[Sequence[Atom]]
) -> tuple[list[Eqn], list[Atom], list[list[Var]]]:
    """Makes a scan for each part of the rows that a scan goes over.

    Args:
        scan: the equation.
        bounds: where the rows are cut.
        whole: the constants of each new scan, and the carries of the first.
        slices: for each part its rows of the xs.

    Returns:
        The new scans, in the order in which they run; the final carries, of which one that no
        iteration changes is as it was before the first; and the parts of each stacked result.
    """
    num_consts, num_carry = _compat.scan_parts(scan)
    body = scan.params["jaxpr"].jaxpr
    ends = zip(body.invars[num_consts : len(whole)], body.outvars[:num_carry], strict=True)
    changes = [_handed_on(body, out) is not own for own, out in ends]
    order = -1 if scan.params["reverse"] else 1
    consts, carry = whole[:num_consts], list(whole[num_consts:])
    scans = []
    for (low, high), xs in list(zip(itertools.pairwise(bounds), slices, strict=True))[::order]:
        made = [jaxprs.fresh_var(v) for v in scan.outvars[:num_carry]]
        made += [_rows.rows_var(v, high - low) for v in scan.outvars[num_carry:]]
        params = scan_params(scan, high - low)
        scans.append(scan.replace(invars=[*consts, *carry, *xs], outvars=made, params=params))
        flags = zip(carry, made, changes, strict=False)
        carry = [after if changed else before for before, after, changed in flags]
    stacks = zip(*(part.outvars[num_carry:] for part in scans[::order]), strict=True)
    return scans, carry, list(map(list, stacks))


def _handed_on(jaxpr: Jaxpr, atom: Atom) -> Atom:
    """Finds the atom that an atom of an open jaxpr is a copy of, through calls that hand it on."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    while not jaxprs.is_literal(atom) and atom in maker:
        eqn = maker[atom]
        body = None if eqn.primitive.name in primitives.CUSTOM_RULES else jaxprs.called_jaxpr(eqn)
        if body is None:
            break
        opened = jaxprs.opened(body)
        inner = _handed_on(opened, opened.outvars[eqn.outvars.index(atom)])
        if inner not in opened.invars:
            break
        atom = eqn.invars[opened.invars.index(inner)]
    return atom
