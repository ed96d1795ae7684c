"""Divides outputs of an initialiser into parts, and says what stands in the way of it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, _jaxprs
from jaxpp.transforms.stacked import Bounds, Slicer

#: Arrays of fewer elements may be made whole, such as the keys of all layers.
SMALL = 1 << 16


def with_parts(
    jaxpr: jex.ClosedJaxpr, cuts: Sequence[Bounds | None]
) -> tuple[jex.ClosedJaxpr, dict[int, Any]]:
    """Divides outputs of a jaxpr into parts.

    Args:
        jaxpr: the jaxpr; its own equations stay, for others that need them.
        cuts: for each output where its rows are cut, or None where it stays whole.

    Returns:
        The jaxpr with parts in place of outputs. Also the equation to blame for each large output
        of which all rows have to be made before some can be taken.
    """
    outputs: list[Any] = []
    blamed: dict[int, Any] = {}
    whole: list[tuple[Any, int]] = []

    def note(eqn: Any, atoms: Sequence[Any], maker: Mapping[Any, Any]) -> None:
        whole.append((eqn, _size_behind(atoms, maker)))

    slicer = Slicer({v: e for e in jaxpr.eqns for v in e.outvars}, wanted_whole=note)
    for n, (output, bounds) in enumerate(zip(jaxpr.jaxpr.outvars, cuts, strict=True)):
        whole.clear()
        intervals = [] if bounds is None else pairwise(bounds)
        outputs += [slicer.rows(output, *rows) for rows in intervals] or [output]
        large = max(output.aval.size, SMALL)
        blamed.update((n, eqn) for eqn, size in reversed(whole) if size >= large)
    eqns = [*jaxpr.eqns, *slicer.eqns]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outputs, eqns), blamed


def _size_behind(atoms: Sequence[Any], maker: Mapping[Any, Any]) -> int:
    """Finds the size of the largest array among some atoms and those that they are made of."""
    stack, seen = _jaxprs.variables(atoms), set()
    while stack:
        var = stack.pop()
        if var not in seen:
            seen.add(var)
            stack.extend(_jaxprs.variables(maker[var].invars) if var in maker else [])
    return max((v.aval.size for v in seen), default=0)
