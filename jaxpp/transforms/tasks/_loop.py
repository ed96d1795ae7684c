"""The scheduled loop: a primitive that holds the tasks of one microbatch and their schedule.

On one device it runs as the scan it came from; `place` runs it as the schedule's table says.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jaxpp import _compat, _jaxprs, _specs
from jaxpp.schedules import Dependencies, Kind, Table, Task
from jaxpp.transforms.stages import call_task, is_task_call


@dataclasses.dataclass(frozen=True)
class Ref:
    """The source of a task's input, or the target of its output.

    `source` is `"const"` (the same for all microbatches), `"x"` (sliced by microbatch), `"carry"`
    (handed from a microbatch to the next), `"y"` (a result of each microbatch), `"value"` (between
    tasks of the same microbatch) or `"unread"` (by no task); `index` is the number among those.
    """

    source: str
    index: int

    def __repr__(self):
        return f"{self.source}{self.index}"


@dataclasses.dataclass(frozen=True, eq=False)
class TaskBody:
    """The computation of one kind of task of a stage, for every microbatch of a direction.

    `stage` tells directions apart: with S stages, S + s is stage s in the second direction.
    `recomputes` says that the task computes a part of the stage's forward again.
    """

    kind: Kind
    stage: int
    jaxpr: jex.ClosedJaxpr
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    recomputes: bool

    @property
    def name(self) -> str:
        return f"{self.kind}{self.stage}"


@dataclasses.dataclass(frozen=True, eq=False)
class LoopTasks:
    """The tasks of one microbatch, in an order that respects their dependence.

    `table` says which rank runs the tasks, and in which order; it splits the backward as the tasks
    do. For each carry that takes its microbatches in any order, `folds` has the primitive that
    combines them. `is_batched` tells whether the loop is under `jax.vmap`. Where there are several
    `replicas`, all operands but constants, and all results, have a first axis with a row for each,
    which runs by itself.
    """

    bodies: tuple[TaskBody, ...]
    table: Table
    num_consts: int
    num_carry: int
    num_ys: int
    folds: dict[int, Any]
    num_directions: int = 1
    is_batched: bool = False
    replicas: int = 1

    @property
    def num_stages(self) -> int:
        """The number of stages in each direction."""
        return self.table.num_stages

    def __repr__(self):
        return "\n".join(
            ["", *(f"{b.name} {b.inputs} -> {b.outputs} {b.jaxpr}" for b in self.bodies)]
        )

    def body(self, task: Task, direction: int = 0) -> TaskBody | None:
        """Returns the body of a task; None for a task without work (a stage without gradients)."""
        return self._by_kind.get((task.kind, direction * self.num_stages + task.stage))

    @functools.cached_property
    def _by_kind(self) -> dict[tuple[Kind, int], TaskBody]:
        return {(b.kind, b.stage): b for b in (*self.bodies, *self.recomputations)}

    @functools.cached_property
    def recomputations(self) -> tuple[TaskBody, ...]:
        """The bodies of the tasks `R`, for the stages for which the table has some.

        They are no part of `bodies`, which are all tasks of a microbatch without a schedule.
        """
        stages = {task.stage for task in self.table.tasks if task.kind is Kind.R}
        again = [
            _recomputation(body, [b for b in self.bodies if b.stage == body.stage])
            for body in self.bodies
            if body.kind is Kind.F and body.stage % self.num_stages in stages
        ]
        return tuple(body for body in again if body is not None)

    @functools.cached_property
    def dependencies(self) -> Dependencies:
        """For each kind and stage, the tasks of the same microbatch whose values it reads."""
        bodies = [
            body for body in (*self.bodies, *self.recomputations) if body.stage < self.num_stages
        ]
        makers: dict[int, list[TaskBody]] = {}
        for body in bodies:
            for ref in body.outputs:
                if ref.source == "value":
                    makers.setdefault(ref.index, []).append(body)
        return {
            (body.kind, body.stage): tuple(
                dict.fromkeys(
                    (maker.kind, maker.stage)
                    for ref in body.inputs
                    if ref.source == "value"
                    for maker in makers[ref.index]
                    if maker.kind is not Kind.R or maker.stage == body.stage
                )
            )
            for body in bodies
        }

    def operands(self, number: int) -> list[Ref]:
        """Returns the `Ref` of each operand of the loop, which has `number` operands."""
        counts = {"const": self.num_consts, "carry": self.num_carry}
        counts["x"] = number - sum(counts.values())
        return [Ref(source, i) for source, count in counts.items() for i in range(count)]

    def results(self) -> list[Ref]:
        """Returns the `Ref` of each result of the loop."""
        counts = {"carry": self.num_carry, "y": self.num_ys}
        return [Ref(source, i) for source, count in counts.items() for i in range(count)]

    def of_replica(self) -> "LoopTasks":
        """Returns the tasks of the loop that one replica runs."""
        return dataclasses.replace(self, replicas=1)

    def of_direction(self, direction: int) -> list[TaskBody]:
        """Returns the bodies of the tasks of one direction."""
        return [b for b in self.bodies if b.stage // self.num_stages == direction]


def _recomputation(forward: TaskBody, others: Sequence[TaskBody]) -> TaskBody | None:
    """Makes the `R` of an `F`; None if the stage's other tasks read nothing that it can make again.

    It is the same program, so that it makes the same bits; but it has no effect. What depends on a
    carry, or comes from an effect, the `F` alone makes: of the `R` nothing reads it.
    """
    eqns, inputs = forward.jaxpr.eqns, forward.jaxpr.jaxpr.invars
    source = dict(zip(inputs, forward.inputs, strict=True))
    lost = _jaxprs.descendants(eqns, [v for e in eqns if e.effects for v in e.outvars])
    stale = _jaxprs.descendants(eqns, [v for v, ref in source.items() if ref.source == "carry"])
    outputs = []
    for n, (v, ref) in enumerate(zip(forward.jaxpr.jaxpr.outvars, forward.outputs, strict=True)):
        if _jaxprs.is_literal(v) or v not in lost:
            again = ref.source == "value" and (_jaxprs.is_literal(v) or v not in stale)
            outputs.append((v, ref if again else Ref("unread", n)))
    if not {ref for _, ref in outputs} & {ref for body in others for ref in body.inputs}:
        return None
    jaxpr = forward.jaxpr
    if any(e.effects for e in eqns):
        own = [e for e in eqns if not (e.effects or lost & set(_jaxprs.variables(e.invars)))]
        part = _jaxprs.part(own, [v for v, _ in outputs], f"R{forward.stage}")
        jaxpr, inputs = part.jaxpr, part.inputs
    return dataclasses.replace(
        forward,
        kind=Kind.R,
        jaxpr=jaxpr,
        inputs=tuple(source[v] for v in inputs),
        outputs=tuple(ref for _, ref in outputs),
    )


def run_as_scan(*operands: Any, tasks: LoopTasks, reverse: bool):
    """Computes the loop's results, microbatch after microbatch, all tasks of each in order.

    Each direction of the table is a scan over its own microbatches. Replicas run one after the
    other.
    """
    consts = operands[: tasks.num_consts]
    if tasks.replicas > 1:
        one = functools.partial(run_as_scan, tasks=tasks.of_replica(), reverse=reverse)

        def replica(_, rows):
            return None, one(*consts, *rows)

        rows = list(operands[tasks.num_consts :])
        return jax.lax.scan(replica, None, rows, length=tasks.replicas)[1]
    carry = list(operands[tasks.num_consts : tasks.num_consts + tasks.num_carry])
    xs = list(operands[tasks.num_consts + tasks.num_carry :])
    length = tasks.table.num_microbatches
    if tasks.num_directions == 1:
        step = functools.partial(_step, tasks, tasks.bodies, consts)
        carry, made = jax.lax.scan(step, carry, xs, length=length, reverse=reverse)
        return [*carry, *(made[i] for i in range(tasks.num_ys))]
    ys: list[Any] = [None] * tasks.num_ys
    taken = tasks.table.direction_of
    for direction in range(tasks.num_directions):
        own = [i for i, d in enumerate(taken) if d == direction]
        at = np.array([length - 1 - i for i in own] if reverse else own, np.int32)
        bodies = tasks.of_direction(direction)
        step = functools.partial(_step, tasks, bodies, consts)
        carry, made = jax.lax.scan(step, carry, [x[at] for x in xs], length=len(own))
        for i, rows in made.items():
            ys[i] = jnp.zeros((length, *rows.shape[1:]), rows.dtype).at[at].set(rows)
    return [*carry, *ys]


def _step(tasks: LoopTasks, bodies: Sequence[TaskBody], consts, carry, slices):
    """Runs all tasks of one microbatch in order; gives the new carries, and results by number."""
    known = {"const": consts, "carry": carry, "x": slices}
    values: dict[int, Any] = {}
    new, ys = list(carry), {}
    targets = {"value": values, "carry": new, "y": ys}
    for body in bodies:
        inputs = [
            values[r.index] if r.source == "value" else known[r.source][r.index]
            for r in body.inputs
        ]
        if body.recomputes:  # else XLA keeps the forward's values, and computes nothing again
            inputs = jax.lax.optimization_barrier(_jaxprs.with_cloned_keys(inputs))
            inputs = _jaxprs.with_cloned_keys(inputs)
        # The names of these calls outlive differentiation, so that `was_loop` can find the loop.
        run = functools.partial(_jaxprs.run, body.jaxpr)
        for ref, y in zip(body.outputs, call_task(run, body.name, inputs), strict=True):
            targets[ref.source][ref.index] = y
    return new, ys


_compat.forget_with(LoopTasks)
loop_p = jex.Primitive("pipeline_loop")
loop_p.multiple_results = True


@jax.debug_key_reuse(False)
def _plain(*avals, **params):
    return jax.make_jaxpr(lambda *xs: run_as_scan(*xs, **params))(*avals)


def _abstract(*avals, tasks: LoopTasks, **params):
    if tasks.replicas > 1:
        own = [a if n < tasks.num_consts else row_type(a) for n, a in enumerate(avals)]
        made, effects = _abstract(*own, tasks=tasks.of_replica(), **params)
        return [with_rows(y, tasks.replicas) for y in made], effects
    carries = list(avals[tasks.num_consts : tasks.num_consts + tasks.num_carry])
    ys: list[Any] = [None] * tasks.num_ys
    for body in tasks.bodies:
        for ref, v in zip(body.outputs, body.jaxpr.jaxpr.outvars, strict=True):
            if ref.source == "carry":
                weak = carries[ref.index].weak_type and v.aval.weak_type
                carries[ref.index] = carries[ref.index].update(weak_type=weak)
            elif ref.source == "y":
                ys[ref.index] = v.aval
    if any(y is None or _compat.is_split(y) for y in ys) or any(map(_compat.is_split, carries)):
        jaxpr = _plain(*avals, tasks=tasks, **params)
        return jaxpr.out_avals, jaxpr.jaxpr.effects
    length = tasks.table.num_microbatches
    stacked = [y.update(shape=(length, *y.shape)) for y in ys]
    effects = set().union(*(body.jaxpr.effects for body in tasks.bodies))
    return [*carries, *stacked], effects


def row_type(aval: Any) -> Any:
    """Returns the type of a row of an array that has one for each replica."""
    sharding = aval.sharding
    spec = jax.sharding.PartitionSpec(*tuple(sharding.spec)[1:])
    return aval.update(shape=aval.shape[1:], sharding=sharding.update(spec=spec))


def with_rows(aval: Any, replicas: int) -> Any:
    """Returns the type of an array that has a row of a type for each replica."""
    sharding = aval.sharding
    spec = jax.sharding.PartitionSpec(None, *tuple(sharding.spec))
    return aval.update(shape=(replicas, *aval.shape), sharding=sharding.update(spec=spec))


loop_p.def_impl(
    lambda *xs, **params: _jaxprs.run_compiled(functools.partial(run_as_scan, **params), *xs)
)
loop_p.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(
    loop_p, mlir.lower_fun(jax.debug_key_reuse(False)(run_as_scan), multiple_results=True)
)


def _jvp(primals, tangents, **params):
    """Differentiates the plain loop: the derivative's tasks are not those of the schedule."""
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    run = functools.partial(run_as_scan, **params)
    if not _compat.writes_jaxpr():  # else `was_loop` has to find the scan
        run = _jaxprs.compiled(run, *primals)
    return jax.jvp(run, tuple(primals), tangents)


def _batch(args, dims, *, tasks: LoopTasks, **params):
    """Batches the tasks of a loop; the loop keeps its schedule."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    refs = tasks.operands(len(args))
    batched = _reached(tasks, {r for r, d in zip(refs, dims, strict=True) if d is not None})

    def axis_of(ref: Ref) -> int:
        """The axis of the batch: after those of the replicas and of the microbatches."""
        of_replicas = tasks.replicas > 1 and ref.source != "const"
        return of_replicas + (ref.source in ("x", "y"))

    def operand(ref: Ref, x, dim):
        if dim is not None:
            return jnp.moveaxis(x, dim, axis_of(ref))
        # A carry that begins equal for the whole batch may become different.
        if ref not in batched:
            return x
        return jnp.moveaxis(jnp.broadcast_to(x, (size, *x.shape)), 0, axis_of(ref))

    def batch(body: TaskBody) -> TaskBody:
        axes, out_axes = (
            [0 if r in batched else None for r in own] for own in (body.inputs, body.outputs)
        )
        run = jax.vmap(functools.partial(_jaxprs.run, body.jaxpr), axes, out_axes, axis_size=size)
        avals = [
            v.aval if axis is None else _specs.type_of(v.aval, (size, *v.aval.shape))
            for v, axis in zip(body.jaxpr.jaxpr.invars, axes, strict=True)
        ]
        jaxpr = _jaxprs.bind_constants(*_jaxprs.without_constants(jax.make_jaxpr(run)(*avals)))
        return dataclasses.replace(body, jaxpr=jaxpr)

    outputs = loop_p.bind(
        *map(operand, refs, args, dims),
        tasks=dataclasses.replace(tasks, bodies=tuple(map(batch, tasks.bodies)), is_batched=True),
        **params,
    )
    results = tasks.results()
    return outputs, [axis_of(r) if r in batched else None for r in results]


def _reached(tasks: LoopTasks, sources: set[Ref]) -> set[Ref]:
    """Finds all that depends on the sources in any microbatch, with the sources."""
    reached, before = set(sources), 0
    while before < len(reached):
        before = len(reached)
        for body in tasks.bodies:
            invars = zip(body.jaxpr.jaxpr.invars, body.inputs, strict=True)
            variables = _jaxprs.descendants(body.jaxpr.eqns, [v for v, r in invars if r in reached])
            outvars = zip(body.jaxpr.jaxpr.outvars, body.outputs, strict=True)
            reached.update(r for v, r in outvars if not _jaxprs.is_literal(v) and v in variables)
    return reached


_compat.checkify_as(loop_p, run_as_scan)
ad.primitive_jvps[loop_p] = _jvp
batching.primitive_batchers[loop_p] = _batch


def _flat(eqn) -> jex.ClosedJaxpr:
    """Returns a loop as scans whose bodies are flat: tasks may share an array of keys."""
    plain = _plain(*(v.aval for v in eqn.invars), **eqn.params)
    opened = [
        _jaxprs.map_jaxprs(e, lambda body: _jaxprs.inline(body, is_task_call)) for e in plain.eqns
    ]
    return _compat.with_equations(plain, opened, plain.jaxpr.outvars)


_compat.use_keys_as(loop_p, _flat)


def is_loop(eqn) -> bool:
    """Tells whether an equation is a scheduled loop."""
    return eqn.primitive is loop_p


def was_loop(eqn) -> bool:
    """Tells whether an equation was a scheduled loop before it was differentiated."""
    return eqn.primitive.name == "scan" and _jaxprs.contains(eqn, is_task_call)


def error_inside(who: str, what: str, eqn) -> ValueError:
    """Makes the error of the transform `who` for a loop, `what`, that is inside an equation."""
    name = eqn.primitive.name
    way_out = "Move it to the top of the step."
    if name in ("scan", "while"):
        way_out = (
            "Write that loop in Python: a `for` over steps or batches, in the step or around its "
            "calls. To accumulate gradients over batches, join them and give microbatch more "
            "microbatches."
        )
    elif name == "cond":
        way_out = (
            "Decide in Python, between the calls of steps; or run the loop each time, and choose "
            "among its results (jnp.where, jax.lax.cond)."
        )
    return ValueError(
        f"{who}: {what} is inside a `{name}`{_compat.at_source_line(eqn)}, but a pipeline starts "
        f"at the top of a step only. {way_out}"
    )


def operand_stages(eqn) -> dict[Any, frozenset[int]]:
    """Finds the stages that read each operand of a loop."""
    tasks: LoopTasks = eqn.params["tasks"]
    offset = {"const": 0, "carry": tasks.num_consts, "x": tasks.num_consts + tasks.num_carry}
    stages: dict[Any, frozenset[int]] = {}
    for body in tasks.bodies:
        for ref in body.inputs:
            if ref.source in offset:
                var = eqn.invars[offset[ref.source] + ref.index]
                if not _jaxprs.is_literal(var):
                    stages[var] = stages.get(var, frozenset()) | {body.stage}
    return stages


def result_stages(eqn) -> list[frozenset[int]]:
    """Finds the stage that makes each result of a loop (none for a carry that passes through)."""
    tasks: LoopTasks = eqn.params["tasks"]
    made: list[frozenset[int]] = [frozenset()] * len(eqn.outvars)
    for body in tasks.bodies:
        for ref in body.outputs:
            if ref.source == "carry":
                made[ref.index] = frozenset({body.stage})
            elif ref.source == "y":
                made[tasks.num_carry + ref.index] = frozenset({body.stage})
    return made


def ordered_carries(tasks: LoopTasks) -> dict[tuple[Kind, int], str]:
    """Finds the tasks whose microbatches must keep their order, for the sake of a carry.

    Gives for each the place in the user's code that makes the carry, ` at file:line`.
    """
    found: dict[tuple[Kind, int], str] = {}
    for body in tasks.bodies:
        maker = {v: e for e in body.jaxpr.eqns for v in e.outvars}
        for ref, v in zip(body.outputs, body.jaxpr.jaxpr.outvars, strict=True):
            if ref.source == "carry" and ref.index not in tasks.folds:
                eqn = None if _jaxprs.is_literal(v) else maker.get(v)
                line = "" if eqn is None else _compat.at_source_line(eqn)
                found[body.kind, body.stage] = found.get((body.kind, body.stage)) or line
    return found
