"""Runs a step of a pass on terms, with its scheduled loops."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxpp.certification._evaluate import Evaluator
from jaxpp.certification._table import Term, name_of
from jaxpp.certification._terms import Terms


def argument_term(terms: Terms, path: str, aval: Any, cut: tuple[int, ...] | None) -> Term:
    """The term of an array of the caller: one that ranks have in parts is these parts."""
    dtype = name_of(aval.dtype)
    if cut is None:
        return terms.term("argument", (path,), (), aval.shape, dtype)
    return terms.join_rows(
        [
            terms.term("argument", (f"{path}[{a}:{b}]",), (), (b - a, *aval.shape[1:]), dtype)
            for a, b in itertools.pairwise(cut)
        ]
    )


def run_step(evaluator: Evaluator, step: Any, arrays: Sequence[Term]) -> Sequence[Term]:
    """The results of a step; `arrays` has the arrays of the caller."""
    terms = evaluator.terms
    # Once equations have places, a loop also reads the buffers of its results.
    with_buffers = any(e.primitive.name == "segment" for e in step.jaxpr.eqns)
    evaluator.run_loop = lambda eqn, args: evaluator.once(
        (id(eqn.params["tasks"]), with_buffers, *args),
        lambda: _run_loop(evaluator, eqn, args, with_buffers),
        bool(eqn.effects),
    )
    arguments = [
        arrays[a.array] if a.rows is None else terms.rows(arrays[a.array], *a.rows)
        for a in step.arguments
    ]
    return evaluator.run(step.jaxpr, arguments)


def _run_loop(
    evaluator: Evaluator, eqn: Any, args: Sequence[Term], with_buffers: bool
) -> list[Term]:
    """The results of a scheduled loop: microbatch after microbatch, the tasks of each in order."""
    terms, tasks = evaluator.terms, eqn.params["tasks"]
    if tasks.replicas == 1:
        results = [(v.aval.shape, name_of(v.aval.dtype)) for v in eqn.outvars]
        return _run_tasks(evaluator, eqn, args, with_buffers, results)
    made, outer = [], terms.where
    results = [(v.aval.shape[1:], name_of(v.aval.dtype)) for v in eqn.outvars]
    for d in range(tasks.replicas):
        terms.where = f"replica {d} in {outer}"
        own = [t if n < tasks.num_consts else terms.row(t, d) for n, t in enumerate(args)]
        made.append(_run_tasks(evaluator, eqn, own, with_buffers, results))
    terms.where, terms.eqn = outer, eqn
    return [terms.stack(rows) for rows in zip(*made, strict=True)]


def _run_tasks(
    evaluator: Evaluator,
    eqn: Any,
    args: Sequence[Term],
    with_buffers: bool,
    types: Sequence[tuple[tuple[int, ...], str]],
) -> list[Term]:
    """The results, of the given types, of the loop of one replica."""
    terms, tasks = evaluator.terms, eqn.params["tasks"]
    length = tasks.table.num_microbatches
    operands = tasks.operands(len(args) - (tasks.num_ys if with_buffers else 0))
    known = dict(zip(operands, args, strict=False))
    ys: list[list[Term | None]] = [[None] * length for _ in range(tasks.num_ys)]
    outer = terms.where
    for i in range(length):
        row = length - 1 - i if eqn.params["reverse"] else i
        own = {}
        for body in tasks.of_direction(tasks.table.direction_of[i] % tasks.num_directions):
            terms.where = f"{body.name} of microbatch {row} in {outer}"
            read = {**known, **own}
            inputs = [
                terms.row(known[ref], row) if ref.source == "x" else read[ref]
                for ref in body.inputs
            ]
            made = evaluator.run(body.jaxpr, inputs)
            for ref, term in zip(body.outputs, made, strict=True):
                if ref.source == "value":
                    own[ref] = term
                elif ref.source == "carry":
                    known[ref] = term
                elif ref.source == "y":
                    ys[ref.index][row] = term
    terms.where, terms.eqn = outer, eqn
    results = []
    for ref, (shape, dtype) in zip(tasks.results(), types, strict=True):
        if ref.source == "carry":
            results.append(known[ref])
            continue
        # The rows of the other direction are anything: nothing may read them.
        shape = shape[1:]
        rows = [terms.nothing(shape, dtype) if y is None else y for y in ys[ref.index]]
        results.append(terms.stack(rows))
    return results
