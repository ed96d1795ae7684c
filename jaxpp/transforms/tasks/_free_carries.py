"""Computes the carries that no stage makes before the loop, by a loop of their own.

Differentiation gives such carries: where microbatches were combined one after the other, by "max"
or by an operator of the user's, the cotangent of the result goes back through them in a chain. With
the chain before the loop, tasks read slices of it, and their microbatches may come in any order.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jaxpp import _jaxprs
from jaxpp.transforms.tasks._body import WHOLE, Body


def carry_before(body: Body) -> Body:
    """Makes the carries that depend on no stage slices, computed before the loop.

    One that nothing reads but its own next value stays: a sum over microbatches is one.
    """
    free = _free(body)
    pairs = list(zip(body.carries, body.carry_outs, strict=True))
    outs = dict(pairs)
    rest = (*(out for carry, out in pairs if carry not in free), *body.ys)
    carries: list[Any] = []
    chain: list[Any] = []
    read = _read(_jaxprs.needed(body.eqns, rest), rest)
    while new := [v for v in free if v in read and v not in carries]:
        carries += new
        chain = _jaxprs.needed([e for e in body.eqns if not e.effects], map(outs.get, carries))
        read = _read(chain, [])
    if not carries:
        return body
    last, stacked = _run(body, chain, carries, [outs[v] for v in carries])
    final = dict(zip(carries, last, strict=True))
    joins = [(0, lambda v=v: final[v]) if v in final else WHOLE for v in body.carries]
    kept = [(v, out) for v, out in pairs if v not in final]
    keep = _jaxprs.ancestors(body.eqns, [*(out for _, out in kept), *body.ys])
    return body.divided(
        [p for p, k in zip(body.placed(), keep, strict=True) if k],
        joins,
        dict(zip(carries, stacked, strict=True)),
        carries=tuple(v for v, _ in kept),
        carry_outs=tuple(out for _, out in kept),
        xs=(*body.xs, *carries),
    )


def _read(eqns: Sequence[Any], outputs: Sequence[Any]) -> set[Any]:
    return {v for e in eqns for v in _jaxprs.variables(e.invars)}.union(_jaxprs.variables(outputs))


def _free(body: Body) -> list[Any]:
    """Finds the carries whose next values depend on no stage, effect, or carry that does."""
    effects = [v for e in body.eqns if e.effects for v in e.outvars]
    free, before = list(body.carries), None
    while free != before:
        before = free
        others = [v for v in body.carries if v not in free]
        staged = body.from_stages([*others, *effects])
        pairs = zip(body.carries, body.carry_outs, strict=True)
        free = [v for v, out in pairs if _jaxprs.is_literal(out) or out not in staged]
        free = [v for v in free if v in before]
    return free


def _run(body: Body, chain: Sequence[Any], carries: Sequence[Any], outs: Sequence[Any]):
    """Runs the equations of some carries; gives their last values, and those of each microbatch."""
    part = _jaxprs.part(chain, outs)
    slices = [v for v in part.inputs if v in body.xs]

    def step(carried, one):
        own = zip([*carries, *slices], [*carried, *one], strict=True)
        values = {**body.values, **dict(own)}
        return _jaxprs.run(part.jaxpr, *(values[v] for v in part.inputs)), carried

    first, xs = ([body.values[v] for v in some] for some in (carries, slices))
    return jax.lax.scan(step, first, xs, length=body.length, reverse=body.reverse)
