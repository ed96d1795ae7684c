"""Runs a step of a pass on terms, with its scheduled loops."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxpp.certification._evaluate import Evaluator
from jaxpp.certification._table import Term, name_of
from jaxpp.certification._terms import Terms


def argument_term(
    terms: Terms, number: int, path: str, aval: Any, cut: tuple[int, ...] | None
) -> Term:
    """The term of an array of the caller: one that ranks have in parts is these parts.

    Args:
        terms: the terms.
        number: the number of the array among the arguments; paths may be equal.
        path: its path.
        aval: its type.
        cut: the rows at which it is cut.
    """
    dtype = name_of(aval.dtype)
    if cut is None:
        return terms.term("argument", (path, number), (), aval.shape, dtype)
    return terms.join_rows(
        [
            terms.term(
                "argument", (f"{path}[{a}:{b}]", number), (), (b - a, *aval.shape[1:]), dtype
            )
            for a, b in itertools.pairwise(cut)
        ]
    )


def run_step(evaluator: Evaluator, step: Any, arrays: Sequence[Term]) -> Sequence[Term]:
    """The results of a step; `arrays` has the arrays of the caller."""
    terms = evaluator.terms
    evaluator.run_loop = lambda eqn, args: evaluator.once(
        (id(eqn.params["body"]), *args),
        lambda: _run_loop(evaluator, eqn, args),
        bool(eqn.effects),
    )
    arguments = [
        arrays[a.array] if a.rows is None else terms.rows(arrays[a.array], *a.rows)
        for a in step.arguments
    ]
    return evaluator.run(step.jaxpr, arguments)


def _run_loop(evaluator: Evaluator, eqn: Any, args: Sequence[Term]) -> list[Term]:
    """The results of a scheduled loop: microbatch after microbatch, the tasks of each in order."""
    terms, replicas = evaluator.terms, eqn.params["replicas"]
    if replicas == 1:
        results = [(v.aval.shape, name_of(v.aval.dtype)) for v in eqn.outvars]
        return _run_tasks(evaluator, eqn, args, results)
    made, outer = [], terms.where
    results = [(v.aval.shape[1:], name_of(v.aval.dtype)) for v in eqn.outvars]
    for d in range(replicas):
        terms.where = f"replica {d} in {outer}"
        own = [t if n < eqn.params["num_consts"] else terms.row(t, d) for n, t in enumerate(args)]
        made.append(_run_tasks(evaluator, eqn, own, results))
    terms.where, terms.eqn = outer, eqn
    return [terms.stack(rows) for rows in zip(*made, strict=True)]


def _run_tasks(
    evaluator: Evaluator,
    eqn: Any,
    args: Sequence[Term],
    types: Sequence[tuple[tuple[int, ...], str]],
) -> list[Term]:
    """The results, of the given types, of the loop of one replica."""
    terms, params = evaluator.terms, eqn.params
    body, table, num_carry = params["body"].jaxpr, params["table"], len(params["folds"])
    length, directions = table.num_microbatches, 1 + max(table.direction_of)
    consts, rest = args[: params["num_consts"]], args[params["num_consts"] :]
    # Each direction has carries and results of its own, side by side; buffers are not read.
    carries = [list(rest[d : directions * num_carry : directions]) for d in range(directions)]
    num_xs = len(body.invars) - len(consts) - num_carry
    xs = rest[directions * num_carry :][:num_xs]
    num_ys = len(body.outvars) - num_carry
    ys: list[list[list[Term | None]]] = [
        [[None] * length for _ in range(directions)] for _ in range(num_ys)
    ]
    outer, before = terms.where, evaluator.microbatch
    for i in range(length):
        row, d = length - 1 - i if params["reverse"] else i, table.direction_of[i]
        slices = [terms.row(x, row) for x in xs]
        values = dict(zip(body.invars, [*consts, *carries[d], *slices], strict=True))
        evaluator.microbatch = row
        for task in body.eqns:
            terms.where = f"{task.params['key']} of microbatch {row} in {outer}"
            made = evaluator.run(task.params["jaxpr"], [values[v] for v in task.invars])
            values.update(zip(task.outvars, made, strict=True))
        results = [values[v] for v in body.outvars]
        carries[d] = results[:num_carry]
        for own, term in zip(ys, results[num_carry:], strict=True):
            own[d][row] = term
    terms.where, terms.eqn, evaluator.microbatch = outer, eqn, before
    stacked = []
    for rows, (shape, dtype) in zip(
        itertools.chain(*ys), types[directions * num_carry :], strict=True
    ):
        # The rows of the other direction are anything: nothing may read them.
        whole = [terms.nothing(shape[1:], dtype) if y is None else y for y in rows]
        stacked.append(terms.stack(whole))
    return [*itertools.chain(*zip(*carries, strict=True)), *stacked]
