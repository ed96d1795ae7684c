"""Finds what the arguments of a step are to it, and which results are the next call's arguments.

An argument is a parameter, optimizer state, part of the batch, or something else.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _jaxprs, _next
from jaxpp._program import Role
from jaxpp.transforms._step import Step
from jaxpp.transforms.stages import is_stage_call
from jaxpp.transforms.tasks import ScheduledLoop, is_loop


def find_roles(step: Step) -> Step:
    """Finds the role of each argument."""
    jaxpr = step.jaxpr
    for_all, sliced = [], []
    for eqn in jaxpr.eqns:
        if is_loop(eqn):
            first = len(eqn.invars) - len(ScheduledLoop.of(eqn).xs)
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


def pair_state(
    args: Sequence[Any],
    donate_argnums: Collection[int],
    traced: _jaxprs.Traced,
    jaxpr: jex.ClosedJaxpr,
) -> dict[int, int]:
    """Finds the outputs that are arguments of the next call, by output the number of the input.

    They are the arrays of the next values of arguments. An argument that is a single array has one
    only if it is donated, since a scalar loss looks like a scalar argument.
    """
    inside = jaxpr.jaxpr
    numbered = _next.numbered(tuple(args), (v.aval for v in inside.invars))
    arguments = {
        n: tree
        for n, tree in enumerate(numbered)
        if _next.numbers(tree) and (n in donate_argnums or not isinstance(tree, _next.Leaf))
    }
    result = traced.rebuild(_next.leaves(v.aval for v in inside.outvars))
    found = _next.next_values(arguments, result, lambda: _origins(jaxpr))
    return {
        new: old
        for n, part in found.items()
        for new, old in zip(_next.numbers(part), _next.numbers(arguments[n]), strict=True)
    }


def _origins(jaxpr: jex.ClosedJaxpr) -> list[frozenset[int]]:
    return _next.origins(jaxpr, jaxpr.jaxpr.invars, lambda e: is_loop(e) or is_stage_call(e))
