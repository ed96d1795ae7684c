"""Finds the roles of a step's arguments: parameter, optimizer state, batch or other."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _jaxprs
from jaxpp._program import Role
from jaxpp.transforms._step import Step
from jaxpp.transforms.stages import is_stage_call
from jaxpp.transforms.tasks import is_loop


def find_roles(step: Step) -> Step:
    """Finds the role of each argument."""
    jaxpr = step.jaxpr
    for_all, sliced = [], []
    for eqn in jaxpr.eqns:
        if is_loop(eqn):
            tasks = eqn.params["tasks"]
            first = tasks.num_consts + tasks.num_carry
            for_all += eqn.invars[:first]
            sliced += eqn.invars[first:]
        elif is_stage_call(eqn):
            for_all += eqn.invars
    read, batch = _behind(jaxpr, for_all), _behind(jaxpr, sliced)
    state = frozenset(step.pairs.values())

    def role(n: int, v: Any) -> Role:
        if v in batch:
            return Role.BATCH
        if v in read:
            learned = jnp.issubdtype(v.aval.dtype, jnp.inexact)
            return Role.PARAMETER if learned else Role.OTHER
        return Role.OPTIMIZER if n in state else Role.OTHER

    arguments = tuple(
        dataclasses.replace(a, role=role(n, v))
        for n, (a, v) in enumerate(zip(step.arguments, jaxpr.jaxpr.invars, strict=True))
    )
    return dataclasses.replace(step, arguments=arguments)


def _behind(jaxpr: jex.ClosedJaxpr, atoms: Iterable) -> set:
    """Finds the variables that some atoms are computed from, with the variables among the atoms."""
    found = set(_jaxprs.variables(atoms))
    for eqn, keep in zip(jaxpr.eqns, _jaxprs.ancestors(jaxpr.eqns, found), strict=True):
        if keep:
            found.update(_jaxprs.variables(eqn.invars))
    return found
