"""`schedule`: partitions the microbatch loops of a function into tasks, and orders the tasks."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import _compat, _in_place, _jaxprs, schedules
from jaxpp._definitions import definition_of
from jaxpp._typing import P, R
from jaxpp.schedules import Kind, Table
from jaxpp.transforms.stages import is_backward_call, is_stage_call, stage_of_call
from jaxpp.transforms.tasks import _directions, _loop, _partition, _replicas
from jaxpp.transforms.tasks._body import joined, read_body


def schedule(fun: Callable[P, R], schedule: schedules.Schedule) -> Callable[P, R]:
    """Partitions the body of each microbatch loop in `fun` into tasks, ordered by `schedule`.

    A loop is a `lax.scan`, as `microbatch` makes it, whose body calls the stages of a function made
    by `wrap_forward`. On one device the result runs as before, with the same values; `place` runs
    it in the order of the schedule's table. Under `vmap` a loop keeps its schedule. Differentiated,
    it is a plain loop again, which `place` refuses: differentiate first, then schedule. Where one
    loop has a backward pass and another has none, the other runs by `ForwardOnly(like=schedule)`:
    so do the forwards before a loss over the whole batch, which is outside of `microbatch`.

    Args:
        fun: a function of pytrees, e.g. `microbatch(jax.value_and_grad(wrap_forward(...)), M)`.
        schedule: a `jaxpp.schedules.Schedule`, or any hashable object with
            `table(num_stages, num_microbatches)`.

    Returns:
        A function with the same arguments and results.

    Raises:
        ValueError: if there is no loop over stages, or it is not one forward and one backward pass.
        jaxpp.schedules.ScheduleError: if the table does not fit the loop: it lacks a task, repeats
            one, deadlocks, or is for another number of stages or microbatches.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> grad(jnp.eye(2), jnp.ones((8, 2))).shape
        (2, 2)
    """
    if isinstance(schedule, type) or not callable(getattr(schedule, "table", None)):
        name = schedule.__name__ if isinstance(schedule, type) else repr(schedule)
        make = {type: f"{name}()", str: f"jaxpp.schedules.by_name({name})"}
        kind = next((kind for kind in make if isinstance(schedule, kind)), None)
        hint = f"; make one: {make[kind]}" if kind else ""
        raise ValueError(f"schedule: {name} is not a schedule with a table(){hint}.")

    @functools.wraps(fun)
    def scheduled(*args: P.args, **kwargs: P.kwargs) -> R:
        if define := definition_of("schedule"):
            return define(fun)(*args, **kwargs)
        if _compat.is_jit_disabled():  # stages are calls of jitted functions
            return fun(*args, **kwargs)
        _in_place.warn_of_shared("schedule", args, stacklevel=2)
        traced = _jaxprs.trace(fun, args, kwargs)
        with jax.debug_key_reuse(False):  # tasks may share an array of keys
            return traced.rebuild(_run(traced.jaxpr, schedule, traced.inputs))

    return scheduled


def is_microbatch_loop(eqn) -> bool:
    """Tells whether an equation is a scan over calls of stages."""
    return eqn.primitive.name == "scan" and _jaxprs.contains(eqn, is_stage_call)


def _has_backward(eqn) -> bool:
    return _jaxprs.contains(eqn, lambda e: is_stage_call(e) and is_backward_call(e))


def holds_microbatch_loop(eqn) -> bool:
    """Tells whether a microbatch loop is inside an equation."""
    if _replicas.is_replicas(eqn):
        return False
    bodies = _jaxprs.sub_jaxprs(eqn)
    return any(_jaxprs.contains(e, is_microbatch_loop) for body in bodies for e in body.eqns)


def _uses_of_refs(eqn):
    for body in _jaxprs.sub_jaxprs(eqn):
        for inner in body.eqns:
            if any(map(_compat.is_ref, inner.invars)):
                yield inner
            yield from _uses_of_refs(inner)


def _check_loops(flat) -> None:
    """Checks that a flat program has microbatch loops, where a pipeline can start."""
    for eqn in flat.eqns:
        _replicas.check_differentiated(eqn)
        if holds_microbatch_loop(eqn):
            raise _loop.error_inside("schedule", "the microbatch loop", eqn)
        if is_microbatch_loop(eqn) and any(map(_compat.is_ref, eqn.invars)):
            lines = [_compat.at_source_line(e) for e in _uses_of_refs(eqn)]
            raise ValueError(
                f"schedule: the microbatch loop reads or writes{max(lines, default='')} a "
                f"jax.new_ref made outside of it, which the ranks of a pipeline cannot share. "
                f"Return the value and combine it (reduce=), hand it from one microbatch to the "
                f"next by 'carry' in in_axes and reduce, or make the ref in the function."
            )
    if not any(is_microbatch_loop(e) for e in flat.eqns):
        if any(_jaxprs.contains(e, _loop.is_loop) for e in flat.eqns):
            raise ValueError("schedule: the function is scheduled already; schedule it once.")
        calls = any(_jaxprs.contains(e, is_stage_call) for e in flat.eqns)
        missing = "microbatch" if calls else "wrap_forward and microbatch"
        raise ValueError(
            f"schedule: the function has no loop over microbatches of a staged function; apply "
            f"{missing} first: "
            f"schedule(microbatch(value_and_grad(wrap_forward(split_stages(f, S))), M), ...)."
        )


def _run(jaxpr, schedule: Any, inputs: list[Any]) -> list[Any]:
    """Evaluates a program with its microbatch loops scheduled."""
    flat = _jaxprs.inline(jaxpr, lambda e: _jaxprs.contains(e, is_microbatch_loop))
    _check_loops(flat)
    # No task accumulates a gradient that is not read. If all loops are unread, they stay.
    live = _compat.eliminate_dead_code(flat, [True] * len(flat.jaxpr.outvars))
    if any(map(is_microbatch_loop, live.eqns)):
        flat = live
    trains = any(is_microbatch_loop(e) and _has_backward(e) for e in flat.eqns)
    values = dict(zip(flat.jaxpr.invars, inputs, strict=True))
    plain: list[Any] = []

    def run_plain():
        part = _jaxprs.part(plain, [v for e in plain for v in e.outvars])
        outputs = _jaxprs.run(part.jaxpr, *(values[v] for v in part.inputs))
        values.update(zip(part.outputs, outputs, strict=True))
        plain.clear()

    for eqn in flat.eqns:
        if not is_microbatch_loop(eqn):
            # How rows of replicas are combined is known already.
            if not all(v in values for v in eqn.outvars):
                plain.append(eqn)
            continue
        run_plain()
        own = _forwards(schedule, eqn) if trains and not _has_backward(eqn) else schedule
        operands = _jaxprs.read(eqn.invars, values)
        if _replicas.is_replicas(eqn):
            bind = functools.partial(_bind_loop, schedule=own)
            values.update(_replicas.bind_replicas(eqn, flat.eqns, operands, bind))
        else:
            results, finish = _bind_loop(eqn, operands, schedule=own)
            values.update(zip(eqn.outvars, finish(results), strict=True))
    run_plain()
    return _jaxprs.read(flat.jaxpr.outvars, values)


def _bind_loop(
    eqn, operands: list[Any], schedule: Any, replicas: int = 1
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Schedules a loop.

    Args:
        eqn: the loop.
        operands: its operands. Slices have a row for each of the replicas, if there are several.
        schedule: the schedule.
        replicas: their number.

    Returns:
        The results of the scheduled loop, which have a row for each of several replicas, and the
        function that makes of these, or of their rows, the results of the loop as it was traced.
    """
    num_consts, num_carry = _compat.scan_parts(eqn)
    body, values = _jaxprs.without_constants(eqn.params["jaxpr"])
    body = _compat.eliminate_dead_code(body, [True] * len(body.jaxpr.outvars))
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    table = _table(schedule, body, length)
    constants = num_consts + len(values)
    opened = read_body(body, constants, num_carry, [*values, *operands], length, reverse)
    tasks, own = _partition.partition(opened, table)
    check(repr(schedule), table, tasks)
    taken = table.direction_of[::-1] if reverse else table.direction_of
    firsts = [own.values[v] for v in own.carries]
    tasks, carries, joins = _directions.separate(tasks, firsts, taken)
    consts, xs = ([own.values[v] for v in part] for part in (own.consts, own.xs))
    if replicas > 1:
        tasks = dataclasses.replace(tasks, replicas=replicas)
        carries = [_replicas.repeated(x, replicas) for x in carries]
        xs = [
            x if jnp.ndim(x) > v.aval.ndim + 1 else _replicas.repeated(x, replicas)
            for x, v in zip(xs, own.xs, strict=True)
        ]
    results = _loop.loop_p.bind(*consts, *carries, *xs, reverse=reverse, tasks=tasks)
    count = tasks.num_directions
    if replicas > 1 and count > 1:
        carried, ys = results[: tasks.num_carry], results[tasks.num_carry :]
        join = _directions.rows_of(taken * replicas)
        groups = (ys[n : n + count] for n in range(0, len(ys), count))
        results = [*carried, *(_replicas.in_one_row(join, own) for own in groups)]
        joins = joins[: len(joins) - len(ys) // count]
    return results, lambda results: list(own.finish(joined(results, joins)))


def _forwards(schedule: Any, eqn) -> schedules.ForwardOnly:
    """Gives the schedule of a loop without a backward, beside one that has the given schedule."""
    if not isinstance(schedule, schedules.Schedule):  # any object with a table
        table = schedule.table(next(_stage_counts(eqn)), eqn.params["length"])
        schedule = schedules.FromTable(table)
    return schedules.ForwardOnly(like=schedule)


def _table(schedule: Any, body, length: int) -> Table:
    """Makes the schedule's table for a loop; if it splits one backward, it splits all."""
    num_stages = next(s for e in body.eqns for s in _stage_counts(e))
    table = schedule.table(num_stages, length)
    if table.num_stages != num_stages or table.num_microbatches != length:
        raise schedules.ScheduleError(
            f"{schedule!r} gave a table for {table.num_stages} stages and {table.num_microbatches} "
            f"microbatches, but the loop has {num_stages} stages and {length} microbatches; make "
            f"the table for these."
        )
    return table.with_halves() if table.splits_backward else table


def _stage_counts(eqn):
    if (call := stage_of_call(eqn)) is not None:
        yield call[1]
    for sub in _jaxprs.sub_jaxprs(eqn):
        for inner in sub.eqns:
            yield from _stage_counts(inner)


def check(schedule: str, table: Table, tasks: _loop.LoopTasks) -> None:
    """Checks a table, which a schedule gave, against the tasks that were traced."""
    backward = any(b.kind in (Kind.B, Kind.I, Kind.W) for b in tasks.bodies)
    if not backward and not table.forward_only:
        raise schedules.ScheduleError(
            f"{schedule} runs backward tasks, but the loop has only a forward pass; use "
            f"ForwardOnly(), or differentiate the function before it is scheduled."
        )
    if backward and table.forward_only:
        raise schedules.ScheduleError(
            f"{schedule} has no backward tasks, but the loop is differentiated; use a schedule "
            f"for training, e.g. OneFOneB()."
        )
    schedules.check(table, dependencies=tasks.dependencies)
    ordered = _loop.ordered_carries(tasks)
    for rank in table.ranks:
        last: dict[tuple[Kind, int], int] = {}
        for task in rank:
            key = (task.kind, task.stage)
            if key in ordered and task.microbatch < last.get(key, -1):
                raise schedules.ScheduleError(
                    f"{schedule} runs {task.describe()} after microbatch {last[key]}, but the "
                    f"loop carries a value{ordered[key]} through this task from each microbatch "
                    f"to the next; keep their order."
                )
            last[key] = task.microbatch
