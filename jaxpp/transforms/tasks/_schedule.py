"""`schedule`: partitions the microbatch loops of a function into tasks, and orders the tasks."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic

import jax
import jax.extend.core as jex

from jaxpp import _compat, jaxprs, schedules
from jaxpp.jaxprs import Eqn, P, R, Var, definition_of
from jaxpp.schedules import Kind, Table
from jaxpp.transforms._step import changes
from jaxpp.transforms.stages import is_backward_call, is_stage_call, stage_of_call
from jaxpp.transforms.tasks import _loop, _replicas, _write
from jaxpp.transforms.tasks._edit import Loop
from jaxpp.transforms.tasks._loop import ScheduledLoop
from jaxpp.transforms.tasks._partition import STAGE_PASSES, TABLE_PASSES, partition
from jaxpp.transforms.tasks._read import read_loop


def schedule(fun: Callable[P, R], schedule: schedules.Schedule) -> "Scheduled[P, R]":
    """Partitions the body of each microbatch loop in `fun` into tasks, ordered by `schedule`.

    A loop is a `lax.scan`, as `microbatch` makes it, whose body calls the stages of a function made
    by `wrap_forward`. On one device the result runs as before, with the same values; `place` runs
    it in the order of the schedule's table. Under `vmap` a loop keeps its schedule. The derivative
    of a scheduled loop is a plain loop, which is an error in `place`: differentiate first, then
    schedule. If one loop has a backward pass and another has none, the other one runs by
    `ForwardOnly(like=schedule)`. The forwards before a loss over the whole batch, which is outside
    of `microbatch`, are such a loop.

    Args:
        fun: a function of pytrees, e.g. `microbatch(jax.value_and_grad(wrap_forward(...)), M)`.
        schedule: a `jaxpp.schedules.Schedule`, or any hashable object with
            `table(num_stages, num_microbatches)`.

    Returns:
        A function with the same arguments and results; its `passes_as_text(*args)` shows how the
        loops become tasks.

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
        make = {
            type: f"{name}()", str: f"jaxpp.schedules.by_name({name})",
            schedules.Table: "jaxpp.schedules.FromTable(table)",
            object: "jaxpp.schedules.OneFOneB(), for instance",
        }  # fmt: skip
        hint = next(make[kind] for kind in make if isinstance(schedule, kind))
        raise ValueError(f"schedule: {name} is not a schedule with a table(); make one: {hint}.")

    return Scheduled(fun, schedule)


#: The attributes of a placed step, which some ask of a scheduled function.
_OF_STEPS = ("as_text", "describe", "flops", "initialize", "lower", "mesh", "mfu", "programs")


class Scheduled(Generic[P, R]):
    """A function whose microbatch loops are scheduled; see `schedule`."""

    def __init__(self, fun: Callable[P, R], schedule: schedules.Schedule):
        functools.update_wrapper(self, fun)
        self._fun, self._schedule = fun, schedule

    def __repr__(self):
        name = getattr(self._fun, "__name__", self._fun)
        return f"<{name} scheduled by {self._schedule}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            way_out = (
                f": {name} is of a placed step, step = jaxpp.place(fun, mesh). Before that, "
                f"passes_as_text(*args) shows the tasks"
            )
            raise AttributeError(
                f"A function of jaxpp.schedule has no attribute {name!r}"
                f"{way_out if name in _OF_STEPS else ''}."
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if define := definition_of("schedule"):
            return define(self._fun)(*args, **kwargs)
        if _compat.is_jit_disabled():  # stages are calls of jitted functions
            return self._fun(*args, **kwargs)
        jaxprs.warn_of_shared("schedule", args)
        traced = jaxprs.trace(self._fun, args, kwargs)
        with jax.debug_key_reuse(False):  # tasks may share an array of keys
            jaxpr = _scheduled(traced.jaxpr, self._schedule)
            return traced.rebuild(_run(jaxpr, traced.inputs))

    def passes_as_text(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Writes each microbatch loop as it was traced, and what each pass changes of it.

        Args:
            *args: the arguments, or `jax.ShapeDtypeStruct`s in place of their arrays.
            **kwargs: those by keyword.

        Returns:
            For each loop the body as a jaxpr, the task in front of each equation, and the equations
            before and after the loop; then the lines that each pass changes.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpp
            >>> def loss(w, x):
            ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
            ...     return jnp.mean((h @ w) ** 2)
            >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
            >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
            >>> text = grad.passes_as_text(jnp.eye(2), jnp.ones((8, 2)))
            >>> first, length, inputs, *_ = text.splitlines()
            >>> inputs
            'constants: 1, carries: 1, slices: 1'
        """
        traced = jaxprs.trace(self._fun, args, kwargs)
        texts: dict[str, str] = {}

        def note(number: int, name: str, loop: ScheduledLoop) -> None:
            texts[f"{name} (loop {number})"] = loop.as_text()

        with jax.debug_key_reuse(False):
            _scheduled(traced.jaxpr, self._schedule, note)
        return changes(texts)


def is_microbatch_loop(eqn) -> bool:
    """Tells whether an equation is a scan over calls of stages."""
    return eqn.primitive.name == "scan" and jaxprs.contains(eqn, is_stage_call)


def _has_backward(eqn) -> bool:
    return jaxprs.contains(eqn, lambda e: is_stage_call(e) and is_backward_call(e))


def holds_microbatch_loop(eqn) -> bool:
    """Tells whether a microbatch loop is inside an equation."""
    if _replicas.is_replicas(eqn):
        return False
    bodies = jaxprs.sub_jaxprs(eqn)
    return any(jaxprs.contains(e, is_microbatch_loop) for body in bodies for e in body.eqns)


def _uses_of_refs(eqn):
    for body in jaxprs.sub_jaxprs(eqn):
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
        if any(jaxprs.contains(e, _loop.is_loop) for e in flat.eqns):
            raise ValueError("schedule: the function is scheduled already; schedule it once.")
        calls = any(jaxprs.contains(e, is_stage_call) for e in flat.eqns)
        missing = "microbatch" if calls else "wrap_forward and microbatch"
        raise ValueError(
            f"schedule: the function has no loop over microbatches of a staged function; apply "
            f"{missing} first: "
            f"schedule(microbatch(value_and_grad(wrap_forward(split_stages(f, S))), M), ...)."
        )


def _run(jaxpr: jex.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates a program. Where no jaxpr records it, loops look for NaNs if `jax.debug_nans` says.

    JAX evaluates a jaxpr without it.
    """
    if _compat.writes_jaxpr():
        return jaxprs.run(jaxpr, *inputs)
    values = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    for loop, group in itertools.groupby(jaxpr.eqns, _loop.is_loop):
        if loop:
            for eqn in group:
                results = _loop.loop_p.bind(*jaxprs.read(eqn.invars, values), **eqn.params)
                values.update(zip(eqn.outvars, results, strict=True))
            continue
        jaxprs.run_equations(list(group), values)
    return jaxprs.read(jaxpr.jaxpr.outvars, values)


def _scheduled(
    jaxpr: jex.ClosedJaxpr,
    schedule: Any,
    note: Callable[[int, str, ScheduledLoop], None] = lambda number, name, loop: None,
) -> jex.ClosedJaxpr:
    """Puts scheduled loops in place of the microbatch loops of a program.

    `note` is called with the number of each loop, the name of each pass, and the loop after it.
    """
    flat = jaxprs.inline(jaxpr, lambda e: jaxprs.contains(e, is_microbatch_loop))
    _check_loops(flat)
    # No task accumulates a gradient that is not read. If all loops are unread, they stay.
    live = _compat.eliminate_dead_code(flat, [True] * len(flat.jaxpr.outvars))
    if any(map(is_microbatch_loop, live.eqns)):
        flat = live
    trains = any(is_microbatch_loop(e) and _has_backward(e) for e in flat.eqns)
    combined: set[Var] = set()
    numbers = itertools.count()

    def rule(eqn: Eqn) -> jaxprs.Replacement | None:
        if not is_microbatch_loop(eqn):  # what combined rows of replicas is made already
            return None if combined.isdisjoint(eqn.outvars) else ([], eqn.outvars)
        loop_schedule = _forwards(schedule, eqn) if trains and not _has_backward(eqn) else schedule
        noted = functools.partial(note, next(numbers))
        scheduled = functools.partial(_loop_equations, schedule=loop_schedule, note=noted)
        if not _replicas.is_replicas(eqn):
            return scheduled(eqn), eqn.outvars
        rows = _replicas.of_rows(eqn, flat.eqns, scheduled)
        combined.update(jaxprs.results_of(rows))
        return rows, eqn.outvars

    return jaxprs.rewrite(flat, rule)


def _loop_equations(
    eqn: Eqn, schedule: Any, note: Callable[[str, ScheduledLoop], None], join_rows: Any = None
) -> list[Eqn]:
    """Makes the equations in place of a microbatch loop: the scheduled one, and those around it."""
    loop = read_loop(eqn)
    note("traced", loop)
    for run in STAGE_PASSES:
        loop = run(loop)
        note(run.__name__, loop)
    loop = dataclasses.replace(loop, table=_table(schedule, loop))
    for run in TABLE_PASSES:
        loop = run(loop)
        note(run.__name__, loop)
    # JAX keeps few frames of a call: a line of the scan is one of jaxpp, a stage's is the user's.
    first = next((e for e, key in loop.grouped if key and _compat.source_line(e)), eqn)
    loop = partition(loop)
    check(repr(schedule), loop)
    loop = _gather(Loop(loop, "schedule"))._loop
    return _write.write(loop, _compat.at_line_of(eqn, first), join_rows)


def _gather(loop: Loop) -> Loop:
    """Lets the tasks of each stage that has a `G` read the constants that it gathers.

    It is a rule, as others write them by `jaxpp.extend`.
    """
    for stage in sorted({t.stage for t in loop.table.tasks if (t.kind.makes or t.kind) == Kind.G}):
        read = [v for v in loop.constants if any(key.stage == stage for key in v.readers)]
        if read:
            loop, gathered = loop.insert(Kind.G, stage, lambda *whole: whole, read)
            for key in dict.fromkeys(k for v in read for k in v.readers if k.stage == stage):
                pairs = [p for p in zip(read, gathered, strict=True) if key in p[0].readers]
                old, new = zip(*pairs, strict=True)
                loop = loop.read(key, new, of=old)
    return loop


def _forwards(schedule: Any, eqn) -> schedules.ForwardOnly:
    """Returns the schedule of a loop without a backward, beside one that has the given schedule."""
    if not isinstance(schedule, schedules.Schedule):  # any object with a table
        table = schedule.table(next(_stage_counts(eqn)), eqn.params["length"])
        schedule = schedules.FromTable(table)
    return schedules.ForwardOnly(like=schedule)


def _table(schedule: Any, loop: ScheduledLoop) -> Table:
    """Makes the schedule's table for a loop, with what its stages read.

    If it splits one backward, it splits all.
    """
    num_stages, length, graph = loop.num_stages, loop.length, loop.stage_inputs
    if isinstance(schedule, schedules.Schedule):
        schedule = schedule.for_graph(graph)
    table = schedule.table(num_stages, length)
    if table.num_stages != num_stages or table.num_microbatches != length:
        raise schedules.ScheduleError(
            f"{schedule!r} gave a table for {table.num_stages} stages and {table.num_microbatches} "
            f"microbatches, but the loop has {num_stages} stages and {length} microbatches; make "
            f"the table for these."
        )
    table = dataclasses.replace(table, stage_inputs=graph)
    return table.with_halves() if table.splits_backward else table


def _stage_counts(eqn):
    if (call := stage_of_call(eqn)) is not None:
        yield call[1]
    for sub in jaxprs.sub_jaxprs(eqn):
        for inner in sub.eqns:
            yield from _stage_counts(inner)


def _differentiates(task: Eqn) -> bool:
    """Tells whether a task has an equation that JAX made for a gradient."""
    return jaxprs.contains(task, lambda e: "transpose" in _compat.scope_names(e))


def check(schedule: str, loop: ScheduledLoop) -> None:
    """Checks the table of a loop, which a schedule gave, against the tasks that were traced."""
    table = loop.table
    backward = any(t.params["key"].kind in (Kind.B, Kind.I, Kind.W) for t in loop.tasks)
    if not backward and not table.forward_only:
        inside = any(map(_differentiates, loop.tasks))
        raise schedules.ScheduleError(
            f"{schedule} runs backward tasks, but the loop has only a forward pass; "
            + (
                "its stages take gradients themselves: value_and_grad is inside of them. Put it "
                "around: microbatch(value_and_grad(wrap_forward(split_stages(f, S))), M)."
                if inside
                else "use ForwardOnly(), or differentiate the function before it is scheduled: "
                "microbatch(value_and_grad(wrap_forward(split_stages(f, S))), M)."
            )
        )
    if backward and table.forward_only:
        raise schedules.ScheduleError(
            f"{schedule} has no backward tasks, but the loop is differentiated; use a schedule "
            f"for training, e.g. OneFOneB()."
        )
    schedules.check(table, dependencies=loop.dependencies)
    ordered = loop.ordered
    for rank in table.ranks:
        last: dict[_loop.Key, int] = {}
        for task in rank:
            key = _loop.Key(task.kind, task.stage)
            if key in ordered and task.microbatch < last.get(key, -1):
                raise schedules.ScheduleError(
                    f"{schedule} runs {task.describe()} after microbatch {last[key]}, but the "
                    f"loop carries a value{ordered[key]} through this task from each microbatch "
                    f"to the next; keep their order."
                )
            last[key] = task.microbatch
