"""Opens the conditionals around loops whose arrays are of several stages, and closes them again.

To open a `cond` is to put the equations of its branches among those around it, each under its
*guard*; selects make the results. These equations are placed as any others. Neighbouring equations
of one guard in a computation are put under a `cond` again. So each rank takes the same branch, and
runs what the plain function runs; the ranks share the predicate alone.
"""

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _specs, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Var
from jaxpp.transforms._step import Guard, Step
from jaxpp.transforms.stages import is_stage_call
from jaxpp.transforms.tasks import is_loop, operand_stages, result_stages


def open_spanning(step: Step) -> Step:
    """Opens each `cond` over arrays of several stages; guards say when its equations run."""
    jaxpr, known = step.jaxpr, step.guards
    effects: list[Eqn] = []
    while True:
        if not any(e.primitive.name == "cond" for e in jaxpr.eqns):
            return step.with_guards(jaxpr, known)
        stages = _array_stages(jaxpr)

        def is_spanning(eqn) -> bool:
            read = [stages.get(v, frozenset()) for v in jaxprs.variables(eqn.invars)]  # noqa: B023
            return len(frozenset().union(*read)) > 1 and not any(eqn is e for e in effects)

        spanning = [e for e in jaxpr.eqns if e.primitive.name == "cond" and is_spanning(e)]
        if not spanning:
            return step.with_guards(jaxpr, known)
        jaxpr, known = open_conditionals(jaxpr, spanning, known, effects)


def open_conditionals(
    jaxpr: jex.ClosedJaxpr,
    conditionals: Collection[Eqn],
    guards: Mapping[Var, Guard],
    effects: list[Eqn],
) -> tuple[jex.ClosedJaxpr, dict[Var, Guard]]:
    """Opens some `cond` equations of a flat jaxpr.

    Args:
        jaxpr: the program.
        conditionals: the equations of the program to open.
        guards: the guards of the variables whose equations run only at times.
        effects: a list to which are added the conditionals that the result keeps: an equation with
            an effect is put under one of its own at once.
    """
    known, found = jaxprs.Substitution(), dict(guards)
    eqns: list[Eqn] = []
    for old in jaxpr.eqns:
        eqn = known.rename(old)
        if not any(old is e for e in conditionals):
            eqns.append(eqn)
            continue
        index, *operands = eqn.invars
        outer = next((found.pop(v) for v in eqn.outvars if v in found), ())
        outcomes = []
        for k, branch in enumerate(eqn.params["branches"]):
            guard = outer if jaxprs.is_literal(index) else (*outer, (index, k))
            inner, results = _branch(branch, operands, eqn)
            outcomes.append(results)
            if jaxprs.is_literal(index) and k != index.val:
                continue
            for e in inner:
                if e.effects and guard:
                    eqns += under(guard, [e], e.outvars)
                    effects.append(eqns[-1])
                else:
                    found.update(dict.fromkeys(e.outvars, guard) if guard else {})
                    eqns.append(e)
        if jaxprs.is_literal(index):
            known.of.update(zip(eqn.outvars, outcomes[int(index.val)], strict=True))
            continue
        for out, *cases in zip(eqn.outvars, *outcomes, strict=True):
            eqns += jaxprs.splice(_select, [index, *cases], [out])
            if outer:
                found[out] = outer
    outvars = [known(v) for v in jaxpr.jaxpr.outvars]
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns), found


def _branch(branch: Any, operands: Sequence[Atom], eqn: Eqn) -> tuple[list[Eqn], list[Atom]]:
    """Returns the equations of a branch, its calls inlined, and its result atoms."""
    opened, values = jaxprs.without_constants(branch)
    flat = jaxprs.inline(opened, lambda e: not is_stage_call(e))
    consts = zip(values, flat.jaxpr.invars, strict=False)
    return jaxprs.inline_body(
        flat, [*(jaxprs.literal(c, v.aval) for c, v in consts), *operands], eqn
    )


def _select(index, *cases):
    return jax.lax.select_n(index.astype(jnp.bool_) if len(cases) == 2 else index, *cases)


def close_conditionals(
    eqns: Sequence[Eqn], outputs: Collection[Atom], guards: Mapping[Var, Guard]
) -> list[Eqn]:
    """Puts neighbouring equations of one guard under a `cond`; `outputs` are read outside."""
    runs: list[tuple[Guard, list[Eqn]]] = []
    for eqn in eqns:
        guard = next((guards[v] for v in eqn.outvars if v in guards), ())
        if not runs or runs[-1][0] != guard:
            runs.append((guard, []))
        runs[-1][1].append(eqn)
    closed: list[Eqn] = []
    read = set(jaxprs.variables(outputs))
    for guard, run in reversed(runs):
        results = [v for v in jaxprs.results_of(run) if v in read]
        closed[:0] = under(guard, run, results) if guard else run
        read |= jaxprs.operands_of(run)
        read.update(v for v, _ in guard)
    return closed


def under(guard: Guard, eqns: Sequence[Eqn], outputs: Sequence[Var]) -> list[Eqn]:
    """Puts equations under a `cond` that makes the outputs where a guard holds, else zeros."""
    part, literals = jaxprs.lift_arrays(jaxprs.part(eqns, outputs))
    numbers = [k for _, k in guard]

    def run(*values):
        reads, operands = values[: len(guard)], values[len(guard) :]
        tests = [v == k for v, k in zip(reads, numbers, strict=True)]
        holds = functools.reduce(operator.and_, tests)
        return jax.lax.cond(
            holds,
            lambda: jaxprs.run(part.jaxpr, *operands),
            lambda: [_specs.filled(v.aval, 0) for v in outputs],
        )

    return jaxprs.splice(run, [*(v for v, _ in guard), *part.inputs, *literals], outputs)


def _array_stages(jaxpr) -> dict[Var, frozenset[int]]:
    """Finds the stages whose arrays each variable is computed from; scalars count for none."""
    stages: dict[Var, frozenset[int]] = {}
    for eqn in jaxpr.eqns:
        if is_loop(eqn):
            for var, place in operand_stages(eqn).items():
                stages[var] = stages.get(var, frozenset()) | place
    for eqn in jaxpr.eqns:
        if is_loop(eqn):
            stages.update(zip(eqn.outvars, result_stages(eqn), strict=True))
            continue
        union = frozenset().union(
            *(stages.get(v, frozenset()) for v in jaxprs.variables(eqn.invars) if v.aval.size > 1)
        )
        stages.update((v, union) for v in eqn.outvars)
    return stages
