"""What the arguments of a step are to it: parameters, optimizer state, or else."""

from collections.abc import Iterable, Mapping

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _jaxprs
from jaxpp._program import Role
from jaxpp.transforms import _loop, _marks


def roles_of(jaxpr: jex.ClosedJaxpr, pairs: Mapping[int, int]) -> tuple[Role, ...]:
    """The role of each argument of a step.

    Args:
        jaxpr: the step.
        pairs: for results that become arguments of the next step, the number of the argument.
    """
    for_all, sliced = [], []
    for eqn in jaxpr.eqns:
        if _loop.is_loop(eqn):
            tasks = eqn.params["tasks"]
            first = tasks.num_consts + tasks.num_carry
            for_all += eqn.invars[:first]
            sliced += eqn.invars[first:]
        elif _marks.is_stage_call(eqn):
            for_all += eqn.invars
    read, batch = _behind(jaxpr, for_all), _behind(jaxpr, sliced)
    state = frozenset(pairs.values())
    roles = []
    for n, v in enumerate(jaxpr.jaxpr.invars):
        if v in batch:
            roles.append(Role.BATCH)
        elif v in read:
            learned = jnp.issubdtype(v.aval.dtype, jnp.inexact)
            roles.append(Role.PARAMETER if learned else Role.OTHER)
        else:
            roles.append(Role.OPTIMIZER if n in state else Role.OTHER)
    return tuple(roles)


def _behind(jaxpr: jex.ClosedJaxpr, atoms: Iterable) -> set:
    """What variables are computed from, and they themselves."""
    found = set(_jaxprs.variables(atoms))
    for eqn, keep in zip(jaxpr.eqns, _jaxprs.ancestors(jaxpr.eqns, found), strict=True):
        if keep:
            found.update(_jaxprs.variables(eqn.invars))
    return found
