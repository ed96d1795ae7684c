"""Accumulates the gradient of a parameter that is stacked over layers in parts, one a stage.

Each stage reads some rows of such a parameter. So differentiation pads each stage's gradient with
zeros, and adds the padded gradients up. With one accumulator for each part, each stage accumulates
its own rows, and nothing else.
"""

import functools
import itertools
from typing import Any

import jax

from jaxpp import _jaxprs, _primitives
from jaxpp.transforms.stacked import (
    Bounds,
    Classes,
    Splitter,
    num_rows,
    pad_interval,
    takes_some_rows,
)
from jaxpp.transforms.tasks._microbatch_loop import MicrobatchLoop


def split_stacked_sums(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Divides a sum over rows that several stages make: the rows of each get an accumulator."""
    loop = _open_calls(loop)
    bounds = _bounds(loop)
    cuts = [bounds.get(v) for v in loop.carries]
    if not any(cuts):
        return loop
    splitter = Splitter(bounds, loop.carries)
    splitter.rewrite(loop.eqns)
    joins = [None if cut is None else lambda *rows: jax.lax.concatenate(rows, 0) for cut in cuts]
    operands, before = dict(loop.operands), list(loop.before)
    for carry, parts, cut in zip(loop.carries, splitter.inputs, cuts, strict=True):
        for part, rows in zip(parts, itertools.pairwise(cut or ()), strict=False):
            take = functools.partial(jax.lax.slice_in_dim, start_index=rows[0], limit_index=rows[1])
            eqns, (operands[part],) = _jaxprs.record(take, [loop.operands[carry]])
            before += eqns
    carry_outs = splitter.outputs(loop.carry_outs, cuts)
    ys = splitter.outputs(loop.ys, [None] * len(loop.ys))
    # New equations have no position: they join a task by dependence later.
    placed = [(e, None if n is None else loop.position[n]) for e, n in splitter.eqns]
    keep = _jaxprs.ancestors([e for e, _ in placed], (*carry_outs, *ys))
    loop = loop.divided(splitter.inputs, joins, operands=operands, before=tuple(before))
    placed = itertools.compress(placed, keep)
    return loop.with_equations(placed, carry_outs=tuple(carry_outs), ys=tuple(ys))


def _bounds(loop: MicrobatchLoop) -> dict[Any, Bounds]:
    """Finds where carries, and the values added to them, are cut: by what stages pad with zeros."""
    classes = Classes(loop.eqns, zip(loop.carries, loop.carry_outs, strict=True))
    used = [
        (eqn.outvars[0], interval, frozenset({loop.stage(position)}))
        for eqn, position in loop.placed()
        if position is not None and (interval := pad_interval(eqn))
        if interval != (0, num_rows(eqn.outvars[0]))
    ]
    carried = {classes.of(v) for v in loop.carries}
    made = (v for e in loop.eqns for v in e.outvars)
    variables = [*loop.consts, *loop.carries, *loop.xs, *made]
    return classes.bounds(used, [v for v in variables if classes.of(v) in carried])


def _open_calls(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Opens calls that take rows of an array, or pad rows with zeros.

    A stage that is rematerialised is such a call. Its backward is a program of its own, so that XLA
    cannot merge the recomputation with the forward even if the call is open.
    """

    def touches_rows(eqn) -> bool:
        if eqn.primitive.name in _primitives.CUSTOM_RULES or _jaxprs.called_jaxpr(eqn) is None:
            return False
        for inner in (inner for sub in _jaxprs.sub_jaxprs(eqn) for inner in sub.eqns):
            if takes_some_rows(inner) or pad_interval(inner) or touches_rows(inner):
                return True
        return False

    return loop.rewritten(_jaxprs.inlining(touches_rows))
