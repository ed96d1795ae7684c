"""The loops of replicas as one scheduled loop, whose values have a row for each replica.

`microbatch(..., replicas=D)` makes a scan over replicas, whose body calls the loop of one, and then
calls that combine the rows of its results. The loops of all replicas have the same tasks. So they
are one scheduled loop over arrays of rows, of which `place` gives each replica its own.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp._typing import Eqn, Var
from jaxpp.transforms.stages import call_merge, is_replica_call, is_stage_call, merge_of_call
from jaxpp.transforms.tasks import _accumulators
from jaxpp.transforms.tasks._loop import ScheduledLoop, loop_p, row_type
from jaxpp.transforms.tasks._microbatch_loop import MicrobatchLoop

#: Makes the tasks of the loop of a replica, and what is around them.
TasksOf = Callable[..., tuple[ScheduledLoop, MicrobatchLoop]]

#: How rows are combined number by number, so that it is the same for the parts of an array.
_ROW_BY_ROW: dict[str, Callable[[Any], Any]] = {
    "sum": lambda rows: functools.reduce(jnp.add, list(rows)),
    "last": lambda rows: rows[-1],
}
#: What makes of the parts of a sum over microbatches the sum.
_LINEAR = _primitives.ADDS | {"concatenate"}


def is_replicas(eqn) -> bool:
    """Tells whether an equation is a scan over the loops of replicas."""
    if eqn.primitive.name != "scan":
        return False
    return any(map(is_replica_call, _jaxprs.opened(eqn.params["jaxpr"]).eqns))


def check_differentiated(eqn: Eqn) -> None:
    """Checks that no gradient of all replicas is one sum, to which each adds.

    Raises:
        ValueError: so it is where a loop was differentiated that carries a value.
    """
    if is_replicas(eqn) and _compat.scan_parts(eqn)[1]:
        raise ValueError(
            f"schedule: the microbatch loop of replicas{_compat.at_source_line(eqn)} carries a "
            f"value, and was differentiated, so that the gradients of all replicas are one sum. "
            f"Differentiate first: microbatch(jax.value_and_grad(f), M, replicas=...)."
        )


def repeated(x: Any, replicas: int) -> Any:
    """Gives each replica the same row."""
    return jnp.broadcast_to(x, (replicas, *jnp.shape(x)))


def in_one_row(join: Callable[..., Any], results: Sequence[Any]) -> Any:
    """Joins the results of directions, whose microbatches of all replicas follow each other."""
    replicas, length, *rest = results[0].shape
    return join(*(r.reshape(replicas * length, *rest) for r in results)).reshape(results[0].shape)


def schedule_rows(eqn: Eqn, after: Sequence[Eqn], tasks_of: TasksOf) -> list[Eqn]:
    """Schedules the loops of replicas.

    Args:
        eqn: the scan over them.
        after: equations, among which are those that combine rows of its results.
        tasks_of: makes the tasks of the loop of one.

    Returns:
        The equations that make its results, and the results of those equations that add their rows
        up, or take the last: where stages make a result in parts, it is these that are combined.
    """
    wanted: list[Var] = []

    def run(*operands: Any) -> list[Any]:
        found = _run_rows(eqn, after, operands, tasks_of)
        wanted.extend(found)
        return list(found.values())

    operands = list(eqn.invars)
    traced = jax.make_jaxpr(run)(*(v.aval for v in operands))
    eqns, made = _jaxprs.inline_body(traced, operands)
    return _jaxprs.with_results(eqns, made, wanted)


def _run_rows(
    eqn: Eqn, after: Sequence[Eqn], operands: Sequence[Any], tasks_of: TasksOf
) -> dict[Var, Any]:
    """Does as `schedule_rows`, on values; gives those of the results by their variables."""
    replicas = eqn.params["length"]
    num_consts, num_carry = _compat.scan_parts(eqn)
    body, constants = _jaxprs.without_constants(eqn.params["jaxpr"])

    def holds_calls(e) -> bool:
        return not is_stage_call(e) and _jaxprs.contains(e, is_stage_call)

    flat = _jaxprs.inline(body, holds_calls)
    holds = [n for n, e in enumerate(flat.eqns) if holds_calls(e)]
    rows = set(flat.jaxpr.invars[len(constants) + num_consts :])
    varying = _jaxprs.descendants(flat.eqns, rows)
    assert len(holds) == 1 and not num_carry, "a replica runs one loop"
    assert not _whole_operands(flat.eqns[holds[0]]) & varying, "constants are those of all replicas"
    values = dict(zip(flat.jaxpr.invars, [*constants, *operands], strict=True))
    before, loop, rest = flat.eqns[: holds[0]], flat.eqns[holds[0]], flat.eqns[holds[0] + 1 :]
    _run(before, values, varying)
    results, finish = _run_loop(loop, values, tasks_of, replicas)
    values.update(zip(loop.outvars, jax.vmap(finish)(results), strict=True))
    _run(rest, values, varying)
    outs = [
        values[v] if v in varying else repeated(_jaxprs.read([v], values)[0], replicas)
        for v in flat.jaxpr.outvars
    ]
    found = dict(zip(eqn.outvars, outs, strict=True))
    made = dict(zip(eqn.outvars, flat.jaxpr.outvars, strict=True))
    finished = jax.make_jaxpr(finish)([row_type(jax.typeof(x)) for x in results])
    known = dict(zip(finished.jaxpr.invars, results, strict=True))
    wanted = dict(zip(loop.outvars, finished.jaxpr.outvars, strict=True))
    for merge in after:
        how = merge_of_call(merge)
        if how not in _ROW_BY_ROW:
            continue
        result = wanted.get(made.get(_jaxprs.variables(merge.invars)[0]))
        needed = [] if result is None else _jaxprs.needed(finished.eqns, [result])
        if result is not None and all(e.primitive.name in _LINEAR for e in needed):
            part = _jaxprs.part(needed, [result])
            rows = [call_merge(_ROW_BY_ROW[how], how, (known[v],)) for v in part.inputs]
            found |= zip(merge.outvars, _jaxprs.run(part.jaxpr, *rows), strict=True)
    return found


def _run_loop(
    eqn: Eqn, known: Mapping[Var, Any], tasks_of: TasksOf, replicas: int
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Runs the loops of all replicas as one; slices have a row for each.

    Also gives the function that makes of a row of the results those of the loop as it was traced.
    """
    scheduled, loop = tasks_of(eqn, join_rows=_accumulators.first_of)
    scheduled = dataclasses.replace(scheduled, replicas=replicas)
    values = dict(known)
    _jaxprs.run_equations(loop.before, values)
    operands = _jaxprs.read(loop.inputs, values)
    first = len(loop.consts)
    own = [v.aval.ndim for v in loop.carries] + [v.aval.ndim + 1 for v in loop.xs]
    rows = [
        x if jnp.ndim(x) > ndim else repeated(x, replicas)
        for x, ndim in zip(operands[first:], own, strict=True)
    ]
    results = loop_p.bind(*operands[:first], *rows, **scheduled.params)
    count = scheduled.num_directions
    if count > 1:
        join = _accumulators.rows_of(scheduled, replicas)
        for n in range(count * scheduled.num_carry, len(results), count):
            results[n : n + count] = [in_one_row(join, results[n : n + count])] * count

    def finish(results: Sequence[Any]) -> list[Any]:
        finished = values | dict(zip(loop.results, results, strict=True))
        _jaxprs.run_equations(loop.after, finished)
        return _jaxprs.read(eqn.outvars, finished)

    return results, finish


def _whole_operands(loop: Eqn) -> set[Var]:
    """The variables that a loop reads as constants, or begins with."""
    return set(_jaxprs.variables(loop.invars[: sum(_compat.scan_parts(loop))]))


def _run(eqns: Sequence[Eqn], values: dict[Var, Any], varying: set[Var]) -> None:
    """Runs equations of one replica: for all rows where they depend on one, else once."""
    for depends, group in itertools.groupby(eqns, lambda e: not varying.isdisjoint(e.outvars)):
        made = _jaxprs.results_of(own := list(group))
        part = _jaxprs.part(own, made)
        run = functools.partial(_jaxprs.run, part.jaxpr)
        if depends:
            run = jax.vmap(run, [0 if v in varying else None for v in part.inputs])
        values.update(zip(made, run(*(values[v] for v in part.inputs)), strict=True))
