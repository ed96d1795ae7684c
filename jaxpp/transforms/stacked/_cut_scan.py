"""Cuts a scan between its iterations, into scans that go on from one another."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp.transforms.stacked import _rows


def cut_scan(
    scan: Any, bounds: Sequence[int], whole: Sequence[Any], slices: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[Any], list[list[Any]]]:
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
        made = [_jaxprs.fresh_var(v) for v in scan.outvars[:num_carry]]
        made += [_rows.rows_var(v, high - low) for v in scan.outvars[num_carry:]]
        params = _rows.scan_params(scan, high - low)
        scans.append(scan.replace(invars=[*consts, *carry, *xs], outvars=made, params=params))
        flags = zip(carry, made, changes, strict=False)
        carry = [after if changed else before for before, after, changed in flags]
    stacks = zip(*(part.outvars[num_carry:] for part in scans[::order]), strict=True)
    return scans, carry, list(map(list, stacks))


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
