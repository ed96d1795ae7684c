"""The scheduled loop: a scan whose body is task equations, with the table by which they run.

On one device it runs as the scan that it is; `place` runs it as the schedule's table says.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from jaxpp import _compat, _jaxprs, _specs
from jaxpp._typing import Atom, Aval, Eqn, Var
from jaxpp.schedules import Dependencies, Kind, Table
from jaxpp.transforms.stages import call_task, is_task_call


class Key(NamedTuple):
    """The tasks of one kind of a stage: a pair, as `("F", 0)`; there is one a microbatch."""

    kind: Kind
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}"


#: A task of a loop's body. Its parameters are its jaxpr, its `Key`, and whether it computes a part
#: of its stage's forward again.
task_p = jex.Primitive("pipeline_task")
task_p.multiple_results = True
task_p.def_impl(lambda *xs, jaxpr, **_: _jaxprs.run(jaxpr, *xs))
task_p.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))


def make_task(
    key: Key,
    jaxpr: jex.ClosedJaxpr,
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    recomputes: bool = False,
) -> Eqn:
    """Makes the equation of a task."""
    params = {"key": key, "jaxpr": jaxpr, "recomputes": recomputes}
    eqn: Any = jex.new_jaxpr_eqn(list(invars), list(outvars), task_p, params, jaxpr.effects)
    return eqn


def remade(
    task: Eqn, jaxpr: jex.ClosedJaxpr, invars: Iterable[Atom], outvars: Iterable[Var]
) -> Eqn:
    """Makes the equation of a task anew, with another jaxpr."""
    return make_task(task.params["key"], jaxpr, [*invars], [*outvars], task.params["recomputes"])


@dataclasses.dataclass(frozen=True)
class ScheduledLoop:
    """A scan over microbatches whose body is task equations: the parameters of a `loop_p` equation.

    The inputs of the body are constants, carries and slices; its results are the carries for the
    next microbatch, and the results of each. What else its variables are is between its tasks.

    Args:
        body: the tasks of one microbatch, in an order that respects their dependence. A variable
            that a task makes is read by other tasks, or it is one result of the body. A result that
            no task makes is a carry that passes through.
        num_consts: the number of the inputs that are the same for all microbatches.
        folds: for each carry the primitive that combines it with what each microbatch adds, in any
            order; None where the order counts.
        table: which rank runs the tasks, in which order; it splits the backward as the tasks do.
            Each of its directions has carries and results of its own: the loop has as many of each
            of the body's, side by side.
        reverse: whether the loop takes the last slices first.
        replicas: their number. Where there are several, all operands but constants, and all
            results, have a first axis with a row for each, which runs by itself.
        is_batched: whether the loop is under `jax.vmap`.
    """

    body: jex.ClosedJaxpr
    num_consts: int
    folds: tuple[jex.Primitive | None, ...]
    table: Table
    reverse: bool = False
    replicas: int = 1
    is_batched: bool = False

    @classmethod
    def of(cls, eqn: Eqn) -> "ScheduledLoop":
        """Reads the loop of an equation."""
        return cls(**eqn.params)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the loop's equation."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def tasks(self) -> Sequence[Eqn]:
        """The equations of the tasks."""
        return self.body.eqns

    @property
    def num_carry(self) -> int:
        return len(self.folds)

    @property
    def consts(self) -> Sequence[Var]:
        return self.body.jaxpr.invars[: self.num_consts]

    @property
    def carries(self) -> Sequence[Var]:
        return self.body.jaxpr.invars[self.num_consts :][: self.num_carry]

    @property
    def xs(self) -> Sequence[Var]:
        return self.body.jaxpr.invars[self.num_consts + self.num_carry :]

    @property
    def carry_outs(self) -> Sequence[Var]:
        return self.body.jaxpr.outvars[: self.num_carry]

    @property
    def ys(self) -> Sequence[Var]:
        return self.body.jaxpr.outvars[self.num_carry :]

    @functools.cached_property
    def num_directions(self) -> int:
        return 1 + max(self.table.direction_of)

    @property
    def operands(self) -> list[tuple[Var, int | None]]:
        """The variable of each operand, and its direction; None where it is that of all."""
        carries = [(v, d) for v in self.carries for d in range(self.num_directions)]
        return [*((v, None) for v in self.consts), *carries, *((v, None) for v in self.xs)]

    @property
    def results(self) -> list[tuple[Var, int]]:
        """The variable of each result, and its direction."""
        return [(v, d) for v in self.body.jaxpr.outvars for d in range(self.num_directions)]

    def stage_number(self, stage: int, direction: int) -> int:
        """The number of a stage in a direction, among those of all directions."""
        return direction * self.table.num_stages + stage

    @functools.cached_property
    def recomputations(self) -> tuple[Eqn, ...]:
        """The tasks `R`, for the stages for which the table has some.

        They are not in the body, which has all tasks of a microbatch without a schedule. They make
        variables that the forwards of their stages make, too.
        """
        stages = {task.stage for task in self.table.tasks if task.kind is Kind.R}
        forwards = [t for t in self.tasks if t.params["key"].kind is Kind.F]
        again = [_recomputation(self, t) for t in forwards if t.params["key"].stage in stages]
        return tuple(task for task in again if task is not None)

    @functools.cached_property
    def dependencies(self) -> Dependencies:
        """For each kind and stage, the tasks of the same microbatch whose values it reads."""
        tasks = (*self.tasks, *self.recomputations)
        makers: dict[Var, list[Key]] = {}
        for task in tasks:
            for v in task.outvars:
                makers.setdefault(v, []).append(task.params["key"])
        return {
            (key := task.params["key"]): tuple(
                dict.fromkeys(
                    maker
                    for v in _jaxprs.variables(task.invars)
                    for maker in makers.get(v, ())
                    if maker.kind is not Kind.R or maker.stage == key.stage
                )
            )
            for task in tasks
        }


def _recomputation(loop: ScheduledLoop, forward: Eqn) -> Eqn | None:
    """Makes the `R` of an `F`; None if the stage's other tasks read nothing that it can make again.

    It is the same program, so that it makes the same bits; but it has no effect. What depends on a
    carry, or comes from an effect, the `F` alone makes: of the `R` nothing reads it.
    """
    key, jaxpr = Key(Kind.R, forward.params["key"].stage), forward.params["jaxpr"]
    eqns, inputs = jaxpr.eqns, jaxpr.jaxpr.invars
    source = dict(zip(inputs, forward.invars, strict=True))
    carries, results = {*loop.carries}, {*loop.body.jaxpr.outvars}
    lost = _jaxprs.descendants(eqns, _jaxprs.results_of(e for e in eqns if e.effects))
    stale = _jaxprs.descendants(eqns, [v for v, own in source.items() if own in carries])
    outputs = []
    for v, made in zip(jaxpr.jaxpr.outvars, forward.outvars, strict=True):
        if _jaxprs.is_literal(v) or v not in lost:
            again = made not in results and (_jaxprs.is_literal(v) or v not in stale)
            outputs.append((v, made if again else _jaxprs.fresh_var(made)))
    others = (t for t in loop.tasks if t.params["key"].stage == key.stage)
    if not {made for _, made in outputs} & {v for t in others for v in t.invars}:
        return None
    if any(e.effects for e in eqns):
        own = [e for e in eqns if not (e.effects or lost & set(_jaxprs.variables(e.invars)))]
        jaxpr, inputs, _ = _jaxprs.part(own, [v for v, _ in outputs], str(key))
    again = [made for _, made in outputs]
    return make_task(key, jaxpr, [source[v] for v in inputs], again, forward.params["recomputes"])


def run_as_scan(*operands: Any, **params: Any):
    """Computes the loop's results, microbatch after microbatch, all tasks of each in order.

    Each direction of the table is a scan over its own microbatches. Replicas run one after the
    other.
    """
    loop = ScheduledLoop(**params)
    consts = operands[: loop.num_consts]
    if loop.replicas > 1:
        one = functools.partial(run_as_scan, **{**params, "replicas": 1})

        def replica(_, rows):
            return None, one(*consts, *rows)

        rows = list(operands[loop.num_consts :])
        return jax.lax.scan(replica, None, rows, length=loop.replicas)[1]
    count, length, reverse = loop.num_directions, loop.table.num_microbatches, loop.reverse
    step = functools.partial(_step, loop, consts)
    rest = list(operands[loop.num_consts :])
    carries, xs = rest[: count * loop.num_carry], rest[count * loop.num_carry :]
    if count == 1:
        carry, ys = jax.lax.scan(step, carries, xs, length=length, reverse=reverse)
        return [*carry, *ys]
    made = []
    for direction in range(count):
        own = [i for i, d in enumerate(loop.table.direction_of) if d == direction]
        at = np.array([length - 1 - i for i in own] if reverse else own, np.int32)
        start = carries[direction::count]
        carry, ys = jax.lax.scan(step, start, [x[at] for x in xs], length=len(own))
        ys = [jnp.zeros_like(y, shape=(length, *y.shape[1:])).at[at].set(y) for y in ys]
        made.append([*carry, *ys])
    return [result for own in zip(*made, strict=True) for result in own]


def _step(loop: ScheduledLoop, consts, carry, slices):
    """Runs all tasks of one microbatch in order; gives the new carries, and its results."""
    values = dict(zip(loop.body.jaxpr.invars, [*consts, *carry, *slices], strict=True))
    for task in loop.tasks:
        inputs = [values[v] for v in task.invars]
        # Else XLA keeps the forward's values, and computes nothing again.
        if task.params["recomputes"]:
            inputs = jax.lax.optimization_barrier(_jaxprs.with_cloned_keys(inputs))
            inputs = _jaxprs.with_cloned_keys(inputs)
        # The names of these calls outlive differentiation, so that `was_loop` can find the loop.
        run = functools.partial(_jaxprs.run, task.params["jaxpr"])
        made = call_task(run, str(task.params["key"]), inputs)
        values.update(zip(task.outvars, made, strict=True))
    results = [values[v] for v in loop.body.jaxpr.outvars]
    return results[: loop.num_carry], results[loop.num_carry :]


loop_p = jex.Primitive("pipeline_loop")
loop_p.multiple_results = True


@jax.debug_key_reuse(False)
def _plain(*avals, **params):
    return jax.make_jaxpr(lambda *xs: run_as_scan(*xs, **params))(*avals)


def _abstract(*avals, **params):
    loop = ScheduledLoop(**params)
    if loop.replicas > 1:
        own = [a if n < loop.num_consts else row_type(a) for n, a in enumerate(avals)]
        made, effects = _abstract(*own, **{**params, "replicas": 1})
        return [with_rows(y, loop.replicas) for y in made], effects
    given = dict(zip(loop.operands, avals, strict=True))
    became = dict(zip(loop.carry_outs, loop.carries, strict=True))
    made = []
    for v, direction in loop.results:
        if (carry := became.get(v)) is None:
            made.append(v.aval.update(shape=(loop.table.num_microbatches, *v.aval.shape)))
        else:
            aval = given[carry, direction]
            weak = aval.weak_type and (v is carry or v.aval.weak_type)
            made.append(aval.update(weak_type=weak))
    if any(map(_compat.is_split, [*made, *(v.aval for v in loop.ys)])):
        jaxpr = _plain(*avals, **params)
        return jaxpr.out_avals, jaxpr.jaxpr.effects
    return made, loop.body.effects


def row_type(aval: Aval) -> Aval:
    """Returns the type of a row of an array that has one for each replica."""
    sharding = aval.sharding
    spec = jax.sharding.PartitionSpec(*tuple(sharding.spec)[1:])
    return aval.update(shape=aval.shape[1:], sharding=sharding.update(spec=spec))


def with_rows(aval: Aval, replicas: int) -> Aval:
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


def _batch(axis, args, dims, **params):
    """Batches the tasks of a loop over an axis, by whose name they may know it.

    The loop keeps its schedule.
    """
    loop, size = ScheduledLoop(**params), axis.size
    operands = [v for v, _ in loop.operands]
    given = {v for v, d in zip(operands, dims, strict=True) if d is not None}
    batched = _reached(loop, given, axis.name)
    if not batched:
        return loop_p.bind(*args, **params), [None] * len(loop.results)
    consts, stacked = {*loop.consts}, {*loop.xs, *loop.ys}

    def axis_of(v: Var) -> int:
        """The axis of the batch: after those of the replicas and of the microbatches."""
        return (loop.replicas > 1 and v not in consts) + (v in stacked)

    def operand(v: Var, x, dim):
        if dim is not None:
            return jnp.moveaxis(x, dim, axis_of(v))
        # A carry that begins equal for the whole batch may become different.
        if v not in batched:
            return x
        return jnp.moveaxis(jnp.broadcast_to(x, (size, *x.shape)), 0, axis_of(v))

    new = _jaxprs.Substitution(
        (v, Var(with_rows(v.aval, size))) for v in loop.body.jaxpr.invars if v in batched
    )

    def batch(task):
        jaxpr = task.params["jaxpr"]
        axes, out_axes = (
            [0 if v in batched else None for v in own] for own in (task.invars, task.outvars)
        )
        run = jax.vmap(
            functools.partial(_jaxprs.run, jaxpr),
            axes,
            out_axes,
            axis_name=axis.name,
            axis_size=size,
            spmd_axis_name=axis.spmd_name,
        )
        avals = [
            v.aval if axis is None else _specs.type_of(v.aval, (size, *v.aval.shape))
            for v, axis in zip(jaxpr.jaxpr.invars, axes, strict=True)
        ]
        made = _jaxprs.bind_constants(*_jaxprs.without_constants(jax.make_jaxpr(run)(*avals)))
        outvars = list(map(_jaxprs.fresh_var, made.jaxpr.outvars))
        new.of.update(zip(task.outvars, outvars, strict=True))
        return remade(task, made, map(new, task.invars), outvars)

    tasks = list(map(batch, loop.tasks))
    invars, outvars = map(new, loop.body.jaxpr.invars), map(new, loop.body.jaxpr.outvars)
    body = _compat.make_closed_jaxpr([*invars], [*outvars], tasks)
    outputs = loop_p.bind(
        *map(operand, operands, args, dims), **{**params, "body": body, "is_batched": True}
    )
    return outputs, [axis_of(v) if v in batched else None for v, _ in loop.results]


def _reached(loop: ScheduledLoop, sources: set[Var], axis_name: Any) -> set[Var]:
    """Finds all variables that depend on the sources, or an axis, in any microbatch."""
    reached, before = set(sources), -1
    while before < len(reached):
        before = len(reached)
        for task in loop.tasks:
            inside = task.params["jaxpr"].jaxpr
            own = [
                v for v, given in zip(inside.invars, task.invars, strict=True) if given in reached
            ]
            own += _jaxprs.results_of(e for e in inside.eqns if _compat.knows_axis(e, axis_name))
            made = _jaxprs.descendants(inside.eqns, own)
            outvars = zip(inside.outvars, task.outvars, strict=True)
            reached.update(o for v, o in outvars if not _jaxprs.is_literal(v) and v in made)
        for pair in zip(loop.carries, loop.carry_outs, strict=True):
            reached.update(pair if not reached.isdisjoint(pair) else ())
    return reached


_compat.checkify_as(loop_p, run_as_scan)
ad.primitive_jvps[loop_p] = _jvp
batching.fancy_primitive_batchers[loop_p] = _batch


def _flat(eqn) -> jex.ClosedJaxpr:
    """Returns a loop as scans whose bodies are flat: tasks may share an array of keys."""
    plain = _plain(*(v.aval for v in eqn.invars), **eqn.params)
    opened = [
        _jaxprs.map_jaxprs(e, lambda body: _jaxprs.inline(body, is_task_call)) for e in plain.eqns
    ]
    return _compat.with_equations(plain, opened)


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


def operand_stages(eqn) -> dict[Var, frozenset[int]]:
    """Finds the stages that read each operand of a loop."""
    loop = ScheduledLoop.of(eqn)
    readers: dict[Var, set[int]] = {}
    for task in loop.tasks:
        for v in _jaxprs.variables(task.invars):
            readers.setdefault(v, set()).add(task.params["key"].stage)
    stages: dict[Var, frozenset[int]] = {}
    for atom, (v, d) in zip(eqn.invars, loop.operands, strict=False):
        if v in readers and not _jaxprs.is_literal(atom):
            directions = range(loop.num_directions) if d is None else [d]
            own = {loop.stage_number(stage, d) for stage in readers[v] for d in directions}
            stages[atom] = stages.get(atom, frozenset()) | own
    return stages


def result_stages(eqn) -> list[frozenset[int]]:
    """Finds the stage that makes each result of a loop (none for a carry that passes through)."""
    loop = ScheduledLoop.of(eqn)
    maker = {v: task.params["key"].stage for task in loop.tasks for v in task.outvars}
    numbers = ([loop.stage_number(maker[v], d)] if v in maker else [] for v, d in loop.results)
    return list(map(frozenset, numbers))


def ordered_carries(loop: ScheduledLoop) -> dict[Key, str]:
    """Finds the tasks whose microbatches must keep their order, for the sake of a carry.

    Gives for each the place in the user's code that makes the carry, ` at file:line`.
    """
    ordered = {v for v, fold in zip(loop.carry_outs, loop.folds, strict=True) if fold is None}
    found: dict[Key, str] = {}
    for task in loop.tasks:
        key, jaxpr = task.params["key"], task.params["jaxpr"]
        maker = {v: e for e in jaxpr.eqns for v in e.outvars}
        for made, v in zip(task.outvars, jaxpr.jaxpr.outvars, strict=True):
            if made in ordered:
                eqn = None if _jaxprs.is_literal(v) else maker.get(v)
                line = "" if eqn is None else _compat.at_source_line(eqn)
                found[key] = found.get(key) or line
    return found
