"""Computes the carries that no stage makes before the loop, by a loop of their own.

Differentiation gives such carries: where microbatches were combined one after the other, by "max"
or by an operator of the user's, the cotangent of the result goes back through them in a chain. With
the chain before the loop, tasks read slices of it, and their microbatches may come in any order.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp import _jaxprs
from jaxpp._typing import Var
from jaxpp.transforms.tasks._microbatch_loop import MicrobatchLoop


def carry_before(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Makes the carries that depend on no stage slices, computed before the loop.

    One that nothing reads but its own next value stays: a sum over microbatches is one.
    """
    free = _free(loop)
    pairs = list(zip(loop.carries, loop.carry_outs, strict=True))
    outs = dict(pairs)
    rest = (*(out for carry, out in pairs if carry not in free), *loop.ys)
    carries: list[Any] = []
    chain: list[Any] = []
    read = _read(_jaxprs.needed(loop.eqns, rest), rest)
    while new := [v for v in free if v in read and v not in carries]:
        carries += new
        chain = _jaxprs.needed([e for e in loop.eqns if not e.effects], [outs[v] for v in carries])
        read = _read(chain, [])
    if not carries:
        return loop
    carries = [v for v in loop.carries if v in carries]
    rows = [v.aval.update(shape=(loop.length, *v.aval.shape)) for v in carries]
    stacked = list(map(Var, rows))
    run, operands = _chain(loop, chain, carries, [outs[v] for v in carries])
    last = [v for c, v in zip(loop.carries, loop.results, strict=False) if c in carries]
    before = _jaxprs.splice(run, operands, [*last, *stacked])
    kept = [(v, out) for v, out in pairs if v not in carries]
    keep = _jaxprs.ancestors(loop.eqns, [*(out for _, out in kept), *loop.ys])
    parts = [[] if v in carries else [v] for v in loop.carries]
    loop = loop.divided(
        parts,
        [None] * len(parts),
        xs=(*loop.xs, *carries),
        operands={**loop.operands, **dict(zip(carries, stacked, strict=True))},
        before=(*loop.before, *before),
    )
    placed = [p for p, k in zip(loop.placed(), keep, strict=True) if k]
    return loop.with_equations(placed, carry_outs=tuple(out for _, out in kept))


def _read(eqns: Sequence[Any], outputs: Sequence[Any]) -> set[Any]:
    return {v for e in eqns for v in _jaxprs.variables(e.invars)}.union(_jaxprs.variables(outputs))


def _free(loop: MicrobatchLoop) -> list[Any]:
    """Finds the carries whose next values depend on no stage, effect, or carry that does."""
    effects = [v for e in loop.eqns if e.effects for v in e.outvars]
    free, before = list(loop.carries), None
    while free != before:
        before = free
        others = [v for v in loop.carries if v not in free]
        staged = loop.from_stages([*others, *effects])
        pairs = zip(loop.carries, loop.carry_outs, strict=True)
        free = [v for v, out in pairs if _jaxprs.is_literal(out) or out not in staged]
        free = [v for v in free if v in before]
    return free


def _chain(
    loop: MicrobatchLoop, chain: Sequence[Any], carries: Sequence[Any], outs: Sequence[Any]
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Makes a loop of the equations of some carries, as a function; also gives its operands.

    The function gives the carries' last values, then their values in each microbatch.
    """
    part = _jaxprs.part(chain, outs)
    slices = [v for v in part.inputs if v in loop.xs]
    whole = [v for v in part.inputs if v not in slices and v not in carries]

    def run(*operands):
        rest = iter(operands)
        first, consts, xs = (list(itertools.islice(rest, len(n))) for n in (carries, whole, slices))
        known = dict(zip(whole, consts, strict=True))

        def step(carried, one):
            values = known | dict(zip([*carries, *slices], [*carried, *one], strict=True))
            return _jaxprs.run(part.jaxpr, *(values[v] for v in part.inputs)), carried

        last, stacked = jax.lax.scan(step, first, xs, length=loop.length, reverse=loop.reverse)
        return [*last, *stacked]

    return run, [loop.operands[v] for v in [*carries, *whole, *slices]]
