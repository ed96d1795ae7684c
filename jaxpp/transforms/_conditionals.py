"""Conditionals around the loops, where their values are on several stages."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs
from jaxpp.transforms import _loop, _marks


def expand_conditionals(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Turns a `cond` over values of several stages into selects, so that each stage has its own."""
    while True:
        stages = _array_stages(jaxpr)
        spanning = [
            e
            for e in jaxpr.eqns
            if e.primitive.name == "cond"
            and not e.effects
            and len(
                frozenset().union(
                    *(stages.get(v, frozenset()) for v in _jaxprs.variables(e.invars))
                )
            )
            > 1
        ]
        if not spanning:
            return jaxpr
        jaxpr = as_selects(jaxpr, spanning)


def as_selects(jaxpr: jex.ClosedJaxpr, conditionals: Sequence[Any]) -> jex.ClosedJaxpr:
    """Turns some `cond` equations of a flat jaxpr into selects: both branches are computed."""
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        eqns.extend(_as_selects(eqn) if eqn in conditionals else [eqn])
    jaxpr = _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars, eqns)
    return _jaxprs.inline(jaxpr, lambda e: not _marks.is_stage_call(e))


def _array_stages(jaxpr) -> dict[Any, frozenset[int]]:
    """The stages whose arrays a variable derives from; scalars count for none."""
    stages: dict[Any, frozenset[int]] = {}
    for eqn in jaxpr.eqns:
        if _loop.is_loop(eqn):
            for var, place in _loop.operand_stages(eqn).items():
                stages[var] = stages.get(var, frozenset()) | place
    for eqn in jaxpr.eqns:
        if _loop.is_loop(eqn):
            stages.update(zip(eqn.outvars, _loop.result_stages(eqn), strict=True))
            continue
        union = frozenset().union(
            *(stages.get(v, frozenset()) for v in _jaxprs.variables(eqn.invars) if v.aval.size > 1)
        )
        stages.update((v, union) for v in eqn.outvars)
    return stages


def _as_selects(eqn) -> list[Any]:
    def select(index, *operands):
        outcomes = [_jaxprs.run(branch, *operands) for branch in eqn.params["branches"]]
        if len(outcomes) == 2:
            index = index.astype(jnp.bool_)
        return [jax.lax.select_n(index, *cases) for cases in zip(*outcomes, strict=True)]

    traced = jax.make_jaxpr(select)(*(v.aval for v in eqn.invars))
    traced, consts = _jaxprs.without_constants(traced)
    known = [jex.Literal(c, v.aval) for c, v in zip(consts, traced.jaxpr.invars, strict=False)]
    call = jax.make_jaxpr(lambda *xs: jax.jit(lambda *ys: _jaxprs.run(traced, *ys))(*xs))(
        *(v.aval for v in traced.jaxpr.invars)
    ).eqns[0]
    return [call.replace(invars=[*known, *eqn.invars], outvars=list(eqn.outvars))]
