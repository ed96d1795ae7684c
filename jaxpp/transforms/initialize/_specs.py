"""Splits the values of an initialiser inside a rank, so that each device makes its own shards.

The specs go backward from the outputs: the operands of an elementwise operation are split as its
results are, and the operands of other operations are whole. An operation that adds elements up
would round in another way over split ones: each device runs it on the whole, and takes its shard of
the result.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp._specs import Spec, replicated


def with_split_outputs(
    jaxpr: jex.ClosedJaxpr, wanted: Mapping[Any, Spec]
) -> tuple[jex.ClosedJaxpr, dict[Any, Spec]]:
    """Splits an initialiser's outputs, and the values behind them as far as no bit changes.

    Args:
        jaxpr: the rank's part of the initialiser, in which each output has an equation of its own.
        wanted: the spec of each output.

    Returns:
        The jaxpr, with copies where an output is not split from the start, and the spec of each of
        its variables; those of its inputs are whole.

    Example:
        >>> import jax
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.broadcast_to(x, (4, 2)) * 3)(1.0)
        >>> wanted = {jaxpr.jaxpr.outvars[0]: (("data",), ())}
        >>> _, specs = with_split_outputs(jaxpr, wanted)
        >>> [specs[v] for eqn in jaxpr.eqns for v in eqn.outvars]
        [(('data',), ()), (('data',), ())]
    """
    wishes: dict[Any, set[Spec]] = {v: {spec} for v, spec in wanted.items()}
    specs: dict[Any, Spec] = {}
    for eqn in reversed(jaxpr.eqns):
        exact = _consists_of(eqn, _is_exact)
        for v in eqn.outvars:
            whole = replicated(len(v.aval.shape))
            wish = wishes.get(v, {whole})
            specs[v] = next(iter(wish)) if exact and len(wish) == 1 else whole
        like = _split_alike(eqn, specs)
        for v in _jaxprs.variables(eqn.invars):
            whole = replicated(len(v.aval.shape))
            split = like if len(v.aval.shape) == len(like) else whole
            wishes.setdefault(v, set()).add(split)
    specs.update((v, replicated(len(v.aval.shape))) for v in jaxpr.jaxpr.invars)
    eqns, outvars = list(jaxpr.eqns), []
    for v in jaxpr.jaxpr.outvars:
        if specs[v] != wanted[v]:
            own = _jaxprs.fresh_var(v)
            eqns += _jaxprs.splice(jnp.copy, [v], [own])
            specs[own] = wanted[v]
            v = own
        outvars.append(v)
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns), specs


def _split_alike(eqn: Any, specs: Mapping[Any, Spec]) -> Spec:
    """Finds the spec of an equation's operands that have dimensions; `()` where they are whole."""
    shapes = {v.aval.shape for v in eqn.outvars}
    own = {specs[v] for v in eqn.outvars}
    if len(shapes) > 1 or len(own) > 1 or not _consists_of(eqn, _is_elementwise):
        return ()
    operands = {v.aval.shape for v in _jaxprs.variables(eqn.invars)} - {()}
    return own.pop() if operands <= shapes else ()


def _consists_of(eqn: Any, kind: Callable[[Any], bool]) -> bool:
    """Tells whether an equation, or all those that it calls, are of a kind."""
    return not _jaxprs.contains(eqn, lambda e: _jaxprs.called_jaxpr(e) is None and not kind(e))


def _is_exact(eqn: Any) -> bool:
    """Tells whether an operation computes each element by itself, or moves elements only."""
    return eqn.primitive.name in _primitives.EXACT


def _is_elementwise(eqn: Any) -> bool:
    """Tells whether each element of the results is made of the elements at the same place."""
    shapes = {tuple(atom.aval.shape) for atom in [*eqn.invars, *eqn.outvars]}
    if eqn.primitive.name == "broadcast_in_dim":
        return len(shapes) == 1 or not eqn.invars[0].aval.shape
    return eqn.primitive.name in _primitives.ELEMENTWISE and len(shapes - {()}) < 2
