"""Makes a step one flat jaxpr; finds what its arguments are; gives its results their own memory.

An argument is a parameter, optimizer state, part of the batch, or something else; and it may be the
old value of a result.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, jaxprs
from jaxpp._program import Role
from jaxpp.jaxprs import Eqn, Flow, Var
from jaxpp.transforms._step import Step
from jaxpp.transforms.inside import is_reduction
from jaxpp.transforms.stages import is_backward_call, is_enter, is_stage_call
from jaxpp.transforms.tasks import (
    ScheduledLoop,
    error_inside,
    holds_microbatch_loop,
    is_loop,
    is_microbatch_loop,
    result_stages,
    was_loop,
)


def flatten(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Inlines all calls of a step, but for those of stages outside of loops, and of reductions."""
    flat = jaxprs.inline(jaxpr, lambda e: not (is_stage_call(e) or is_reduction(e)))
    for eqn in flat.eqns:
        if is_loop(eqn):
            continue
        if holds_microbatch_loop(eqn):
            raise error_inside("place", "a microbatch loop", eqn)
        if is_microbatch_loop(eqn):
            trains = jaxprs.contains(eqn, is_backward_call)
            name = "OneFOneB" if trains else "ForwardOnly"
            raise ValueError(
                f"place: the microbatch loop{_compat.at_source_line(eqn)} has no schedule; wrap "
                f"the function: schedule(fun, jaxpp.schedules.{name}())."
            )
        if jaxprs.contains(eqn, was_loop):
            raise ValueError(
                f"place: the scheduled loop{_compat.at_source_line(eqn)} was differentiated, or "
                f"checkified, and has no schedule any more; do so first, then schedule: "
                f"schedule(jax.grad(microbatch(wrap_forward(f), M)), ...)."
            )
        if jaxprs.contains(eqn, is_loop):
            raise error_inside("place", "a scheduled loop", eqn)
    _refuse_checks(flat)
    live = _compat.eliminate_dead_code(flat, [True] * len(flat.jaxpr.outvars))
    loops = [e for e in flat.eqns if is_loop(e)]
    if loops and not any(map(is_loop, live.eqns)):
        raise ValueError(
            f"place: nothing reads what the scheduled loop{_compat.at_source_line(loops[0])} "
            f"computes, so that the step has nothing to run as a pipeline; return some of it, such "
            f"as the loss, or leave the loop out."
        )
    return live


def _refuse_checks(flat) -> None:
    """Refuses a `checkify.check` whose error nothing takes, as `jax.jit` does."""

    def look(eqn) -> bool:
        if _compat.is_check(eqn):
            raise ValueError(
                f"place: nothing takes the error of the checkify.check"
                f"{_compat.at_source_line(eqn)}. In a pipeline, let the loss return it: `error, "
                f"value = checkify.checkify(loss)(*args)`, then `return value, error`, "
                f"differentiated with has_aux=True and combined by reduce=(('mean', 'stack'), "
                f"'mean'); `error.throw()` after the step. checkify.checkify(step) of the placed "
                f"step runs the plain step, on one device."
            )
        return False

    for eqn in flat.eqns:
        jaxprs.contains(eqn, look)


def unused_mark(jaxpr: jex.ClosedJaxpr) -> Eqn | None:
    """Finds a mark in a step that has neither stages nor loops; None where there is none."""
    marks, used = [], []

    def look(eqn) -> bool:
        if is_enter(eqn):
            marks.append(eqn)
        elif is_stage_call(eqn) or is_loop(eqn):
            used.append(eqn)
        return bool(used)

    return None if any(jaxprs.contains(e, look) for e in jaxpr.eqns) or not marks else marks[0]


def separate_results(step: Step) -> Step:
    """Gives each result its own memory: copies a result that is a literal, an argument or another.

    A donated argument that is itself a result is not copied, and is donated no more.
    """
    pairs = list(zip(step.jaxpr.jaxpr.invars, step.arguments, strict=True))
    jaxpr = jaxprs.with_separate_outputs(step.jaxpr, [v for v, a in pairs if not a.donated])
    results = set(jaxpr.jaxpr.outvars)
    arguments = tuple(
        dataclasses.replace(a, donated=False) if v in results else a for v, a in pairs
    )
    return dataclasses.replace(step, jaxpr=jaxpr, arguments=arguments)


def skip_carries(step: Step) -> Step:
    """Replaces the result of each carry that a loop only hands through by the loop's operand."""

    def rule(eqn):
        if not is_loop(eqn):
            return None
        carries = eqn.invars[eqn.params["num_consts"] :]
        cases = zip(eqn.outvars, carries, result_stages(eqn), strict=False)
        same = {out: carry for out, carry, place in cases if not place}
        return [eqn], [same.get(v, v) for v in eqn.outvars]

    known = jaxprs.Substitution()
    jaxpr = jaxprs.rewrite(step.jaxpr, rule, known)
    guards: dict[Var, Any] = {
        v: tuple((known(w), k) for w, k in guard) for v, guard in step.guards.items()
    }
    # An operand may be a number, or an argument.
    return separate_results(step.with_guards(jaxpr, guards))


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
    flow = Flow(jaxpr.eqns)
    read, batch = ({v for v, _ in flow.behind(jaxprs.variables(a))} for a in (for_all, sliced))
    # In a program of several steps a later loop reads weights that an update has made of state.
    early = Flow(_before_loops(jaxpr.eqns))
    learned_from = {v for v, _ in early.behind(jaxprs.variables(for_all))}
    state = frozenset(step.pairs.values())

    def role(n: int, v: Var) -> Role:
        if v in batch:
            return Role.BATCH
        if v in learned_from or (v in read and n not in state):
            learned = jnp.issubdtype(v.aval.dtype, jnp.inexact)
            return Role.PARAMETER if learned else Role.OTHER
        return Role.OPTIMIZER if n in state else Role.OTHER

    arguments = tuple(
        dataclasses.replace(a, role=role(n, v))
        for n, (a, v) in enumerate(zip(step.arguments, jaxpr.jaxpr.invars, strict=True))
    )
    return dataclasses.replace(step, arguments=arguments)


def _before_loops(eqns: Sequence[Eqn]) -> list[Eqn]:
    """Returns the equations that read no result of a loop, nor of a stage."""
    after: set[Var] = set()
    found = []
    for eqn in eqns:
        if (
            is_loop(eqn)
            or is_stage_call(eqn)
            or any(v in after for v in jaxprs.variables(eqn.invars))
        ):
            after.update(eqn.outvars)
        else:
            found.append(eqn)
    return found


def pair_state(
    args: Sequence[Any],
    donate_argnums: Collection[int],
    traced: jaxprs.Traced,
    jaxpr: jex.ClosedJaxpr,
) -> dict[int, int]:
    """Finds the outputs that are arguments of the next call, by output the number of the input.

    They are the arrays of the next values of arguments. An argument that is a single array has one
    only if it is donated, since a scalar loss looks like a scalar argument.
    """
    inside = jaxpr.jaxpr
    taken_apart = jaxprs.Tree.of(tuple(args), (v.aval for v in inside.invars))
    arguments = {
        n: tree
        for n, tree in enumerate(taken_apart.children)
        if tree.numbers and (n in donate_argnums or not tree.is_array)
    }
    leaves = traced.output_leaves(jaxprs.leaves_of(v.aval for v in inside.outvars))
    result = jaxprs.Tree(traced.out_tree, tuple(leaves))
    found = jaxprs.next_values(arguments, result, lambda: _origins(jaxpr))
    return {
        new: old
        for n, part in found.items()
        for new, old in zip(part.numbers, arguments[n].numbers, strict=True)
    }


def _origins(jaxpr: jex.ClosedJaxpr) -> list[frozenset[int]]:
    return jaxprs.origins(jaxpr, jaxpr.jaxpr.invars, lambda e: is_loop(e) or is_stage_call(e))
