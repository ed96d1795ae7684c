"""Distributes parameters that are stacked over layers: each stage has its rows of them.

Stages of a loop read slices of such a parameter. The pass divides the parameter, its gradients and
the optimizer state that is updated with them into parts. Each part is then an argument, or a
result, of its own, and is placed with its stage as any other. An equation that needs all rows at
once gathers them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Flow, Var, primitives, union
from jaxpp.transforms import stacked
from jaxpp.transforms._step import Fact, Guard, Step
from jaxpp.transforms.inside import is_reduction
from jaxpp.transforms.place import _conditionals
from jaxpp.transforms.tasks import is_loop, operand_stages, result_stages


def distribute(step: Step) -> Step:
    """Divides stacked arrays of a step into the parts that the stages of its loops read or make."""
    jaxpr, bounds, guards = _choose(step)
    if not bounds:
        return step.with_guards(jaxpr, guards)
    invars, outvars = jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
    cuts = [None if jaxprs.is_literal(v) else bounds.get(v) for v in outvars]
    given = {v: stacked.part_vars(v, bounds[v]) for v in invars if v in bounds}
    slicer = stacked.in_parts(jaxpr.eqns, bounds, given)
    ins = list(itertools.chain(*(given.get(v, [v]) for v in invars)))
    outs = slicer.outputs(outvars, cuts)
    split = _compat.make_closed_jaxpr(ins, outs, slicer.eqns)
    split = _compat.eliminate_dead_code(split, [True] * len(outs))
    facts = {v: Fact(anywhere=True) for v in slicer.floating}
    for v, eqn in slicer.gathered.items():
        why = f"for `{eqn.primitive.name}`{_compat.at_source_line(eqn)}"
        facts[v] = Fact(v in facts, why)
    in_cuts = [bounds.get(v) for v in invars]
    arguments = _in_parts(step.arguments, in_cuts, ins)
    results = _in_parts(step.results, cuts, outs)
    first = {a.array: n for n, a in reversed([*enumerate(arguments)])}
    for array, parts in itertools.groupby(list(enumerate(results)), key=lambda item: item[1].array):
        for k, (n, result) in enumerate(parts):
            if result.becomes is not None:
                # Where both arrays are cut alike, each part becomes the next value of its own.
                alike = cuts[array] == in_cuts[result.becomes]
                becomes = first[result.becomes] + k if alike else None
                results[n] = dataclasses.replace(result, becomes=becomes)
    done = dataclasses.replace(
        step, jaxpr=split, arguments=tuple(arguments), results=tuple(results), facts=facts
    )
    return done.with_guards(split, _guards(slicer, guards))


def _guards(slicer: stacked.Slicer, guards: Mapping[Var, Guard]) -> dict[Var, Guard]:
    """Returns the guards of the equations that are in the place of such as have guards.

    Those beside them, as slices and combinations, have none, for others may read their results.
    """
    found: dict[Var, Guard] = {}
    for eqn in slicer.eqns:
        for old in (slicer.replaced[v] for v in eqn.outvars[:1] if v in slicer.replaced):
            guard = next((guards[v] for v in old.outvars if v in guards), ())
            conditions: Any = tuple((slicer.whole(v), k) for v, k in guard)
            found.update((v, conditions) for v in eqn.outvars if conditions)
    return found


def _in_parts(
    records: Sequence[Any], cuts: Sequence[stacked.Bounds | None], parts: Sequence[Atom]
) -> list:
    """Makes a record for each part of arguments, or of results."""
    rest = iter(parts)
    found = []
    for record, cut in zip(records, cuts, strict=True):
        for rows in [None] if cut is None else pairwise(cut):
            found.append(dataclasses.replace(record, aval=next(rest).aval, rows=rows))
    return found


def _slice_literals(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Slices arrays that the step closes over right away, so that no rank gets their other rows."""

    def rule(eqn):
        if not stacked.takes_some_rows(eqn) or not jaxprs.is_literal(eqn.invars[0]):
            return None
        value = eqn.primitive.bind(jaxprs.literal_array(eqn.invars[0]), **eqn.params)
        return [], [jaxprs.literal(value, eqn.outvars[0].aval)]

    return jaxprs.rewrite(jaxpr, rule)


def _choose(step: Step) -> tuple[jex.ClosedJaxpr, dict[Var, stacked.Bounds], dict[Var, Guard]]:
    """Chooses where variables are cut, and opens what holds equations over such variables."""
    jaxpr, guards = _slice_literals(step.jaxpr), step.guards
    # An argument that ranks load themselves is loaded whole.
    whole = [n for n, a in enumerate(step.arguments) if a.fed]
    while True:
        bounds = _bounds(jaxpr, step.pairs, whole)
        stuck = [
            e
            for e in jaxpr.eqns
            if e.primitive.name in ("cond", "custom_linear_solve")
            and not e.effects
            and any(v in bounds for v in jaxprs.variables([*e.invars, *e.outvars]))
        ]
        conditionals = [e for e in stuck if e.primitive.name == "cond"]
        if conditionals:
            jaxpr, guards = _conditionals.open_conditionals(jaxpr, conditionals, guards, [])
        elif systems := {v for e in stuck for v in e.outvars if v not in guards}:
            jaxpr = jaxprs.rewrite(jaxpr, functools.partial(_solution, systems))
        else:
            return jaxpr, bounds, guards


def _solution(systems: set[Var], eqn: Eqn) -> jaxprs.Replacement | None:
    """Opens a `custom_linear_solve`: its other functions are for derivatives of the solution."""
    if systems.isdisjoint(eqn.outvars):
        return None
    bodies, lengths = eqn.params["jaxprs"], eqn.params["const_lengths"]
    rest = eqn.invars[lengths.matvec + lengths.vecmat :]
    operands = [*rest[: lengths.solve], *rest[lengths.solve + lengths.transpose_solve :]]
    return jaxprs.inline_body(jaxprs.inline(bodies.solve, lambda e: True), operands, eqn)


def _bounds(
    jaxpr: jex.ClosedJaxpr, pairs: Mapping[int, int], whole: Sequence[int]
) -> dict[Var, stacked.Bounds]:
    eqns, invars, outvars = jaxpr.eqns, jaxpr.jaxpr.invars, jaxpr.jaxpr.outvars
    if not any(stacked.takes_some_rows(e) or stacked.concatenation_intervals(e) for e in eqns):
        return {}  # no stage has rows of an array
    tied = [(outvars[o], invars[i]) for o, i in pairs.items()]
    classes = stacked.Classes(eqns, tied)
    stay = {classes.of(invars[n]) for n in whole}
    variables = [*invars, *jaxprs.results_of(eqns)]
    return classes.bounds(_used(eqns), [v for v in variables if classes.of(v) not in stay])


def _used(eqns: Sequence[Eqn]) -> Iterator[tuple[Var, tuple[int, int], frozenset[int]]]:
    """Yields variables, rows of them that stages of loops read or make, and these stages."""
    flow = Flow(eqns)
    readers, makers = _readers(flow), _makers(flow)
    for eqn in eqns:
        if stacked.takes_some_rows(eqn) and (interval := stacked.slice_interval(eqn)):
            if not jaxprs.is_literal(eqn.invars[0]) and eqn.outvars[0] in readers:
                yield eqn.invars[0], interval, readers[eqn.outvars[0]]
        elif (intervals := stacked.concatenation_intervals(eqn)) and all(
            v in makers for v in jaxprs.variables(eqn.invars)
        ):
            for v, rows in zip(eqn.invars, intervals, strict=True):
                yield eqn.outvars[0], rows, frozenset() if jaxprs.is_literal(v) else makers[v]


def _makers(flow: Flow) -> dict[Var, frozenset[int]]:
    """Finds for each variable the stages of loops that make it, or that make its terms if a sum."""

    def rule(i: int, near: list[frozenset[int]]) -> Any:
        eqn = flow.eqns[i]
        if is_loop(eqn):
            return dict(zip(eqn.outvars, result_stages(eqn), strict=True))
        adds = is_reduction(eqn) or eqn.primitive.name in primitives.ADDS
        return union(near) if adds and len(near) == len(flow.reads[i]) else None

    return flow.down({}, rule)


def _readers(flow: Flow) -> dict[Var, frozenset[int]]:
    """Finds for each variable the stages of loops that read it, or what is computed from it."""

    def rule(i: int, near: list[frozenset[int]]) -> Any:
        eqn = flow.eqns[i]
        return operand_stages(eqn) if is_loop(eqn) else union(near) or None

    return flow.up({}, rule)
