"""Builds the tasks of a scheduled loop: what each makes and reads of each microbatch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat, jaxprs, schedules
from jaxpp._specs import Spec, as_weak_as, filled
from jaxpp.jaxprs import Aval, Eqn, Literal, Var, primitives
from jaxpp.schedules import Kind, Table, Task
from jaxpp.transforms._step import Inside
from jaxpp.transforms.graph import Body, GraphTask, GraphValue
from jaxpp.transforms.inside import on_rows, propagate
from jaxpp.transforms.place._values import Values, operands_of
from jaxpp.transforms.stages import called_as
from jaxpp.transforms.tasks import ScheduledLoop, handed_on, row_type, rows_type


@dataclasses.dataclass(frozen=True)
class ArraysOfTask:
    """The arrays of all microbatches that the computation of a task takes.

    Its inputs are those of the task, with the arrays in place of slices; its constants; the number
    of the microbatch, if it `is_indexed`; and the buffers. Its outputs are those of the task, with
    the buffers in place of results.

    Args:
        slices: for each input of the task the type of the array that has the slices, of a replica;
            None for an input that is no slice.
        carries: the numbers of the inputs whose memory the outputs take.
        buffers: for each output of the task the type of its buffer, of a replica; None where it has
            none.
        replicas: their number.
        has_rows: for each input of the task whether it has a row for each of several replicas.
    """

    slices: tuple[Aval | None, ...]
    carries: tuple[int, ...]
    buffers: tuple[Aval | None, ...]
    replicas: int
    has_rows: tuple[bool, ...]

    @property
    def is_indexed(self) -> bool:
        """True if the computation takes the number of its microbatch."""
        return any(a is not None for a in (*self.slices, *self.buffers))


@dataclasses.dataclass(frozen=True)
class _LoopBody:
    """The body of a loop's task, with what it takes after the inputs of the task."""

    body: Body
    constants: tuple[GraphValue, ...]
    is_indexed: bool


class LoopTasks:
    """The tasks of a loop; it knows values by their variables in the loop's body.

    `shared` has, for each direction, the operands that all microbatches read, and the current
    values of accumulators; `sent` what a task of a microbatch hands to others; and `own` what a
    stage makes again of a microbatch, or moves, for itself; `of_stage` has what a stage has made
    last, in a direction, for all microbatches.

    Args:
        eqn: the loop's equation.
        number: its number among those of the step.
        stages_before: the number of the stages of the loops before it.
        ranks_of: the rank of each stage, in one direction after the other.
        values: makes values.
        bodies: those of tasks so far; equal ones are one.
        reductions: the segments of each stage that its tasks of a kind that `takes` do.
    """

    def __init__(
        self,
        eqn: Eqn,
        number: int,
        stages_before: int,
        ranks_of: Sequence[int],
        values: Values,
        bodies: dict[Hashable, Body],
        reductions: Mapping[int, Sequence[Eqn]],
    ):
        self.loop = loop = ScheduledLoop.of(eqn)
        self.number, self.stages_before, self.ranks_of = number, stages_before, ranks_of
        self.values, self.all_bodies, self.reductions = values, bodies, reductions
        self.equations = {t.params["key"]: t for t in (*loop.tasks, *loop.recomputations)}
        _check_kinds(loop.table, [kind for kind, _ in self.equations])
        orders = map(itertools.pairwise, loop.table.ranks)
        self.beside = {a: b for order in orders for a, b in order if a in loop.table.overlaps}
        self.order = [t for _, t in schedules.execution_order(loop.table, loop.dependencies)]
        self.results = dict(zip(loop.results, eqn.outvars, strict=True))
        #: The keeper of each result of the body: its carry, or a buffer of its own.
        self.kept_in: dict[Any, Any] = dict(zip(loop.carry_outs, loop.carries, strict=True))
        self.kept_in.update((v, v) for v in loop.ys)
        self.shared = self._operands_of(eqn)
        #: The specs of the operands that are gathered, after that.
        self.whole = {
            values.operand(atom): spec
            for atom in jaxprs.variables(eqn.invars[: loop.num_consts])
            if (spec := values.fact(atom).whole) is not None
        }
        # A value that a task hands on for its stage is the operand until the task has run.
        for task in (t for t in loop.tasks if t.params["key"].kind.of_stage):
            pairs = itertools.product(handed_on(task).items(), range(loop.num_directions))
            self.shared |= {(v, d): self.shared[read, d] for (v, read), d in pairs}
        self.of_stage: dict[tuple[int, int], dict[Var, GraphValue]] = {}
        #: For each stage the last task that takes sums, and the sums of those before it.
        self.last_sum = {(t.stage, self._direction(t)): t for t in self.order if t.kind.takes}
        self.sums: dict[int, list[GraphValue]] = {}
        self.sent: dict[tuple[int, Var], GraphValue] = {}
        self.local: dict[tuple[int, int], dict[Var, GraphValue]] = {}
        self.offloaded: dict[tuple[int, int], dict[Var, None]] = {}
        self.kept_alone = functools.cache(self._kept_alone)
        self.later = _kinds_after_offload(self.order)
        found = zip(self.equations.items(), lifted(list(self.equations.values())), strict=True)
        self.lifted = {key: (task, *parts) for (key, task), parts in found}
        computing = (key for key in self.equations if not key.kind.of_stage)
        self.bodies = {key: self._body_of(*self.lifted[key]) for key in computing}

    def tasks(self) -> Iterator[GraphTask]:
        """Makes the tasks in an order in which the ranks can run them."""
        for task in self.order:
            if task.kind in (Kind.O, Kind.L):
                yield from self._moved(task)
            elif task.kind.takes:
                yield from self._summed(task)
            elif task.kind.of_stage:
                yield from self._handed_to_stage(task)
            elif (task.kind, task.stage) in self.equations:
                yield self._computed(task)

    def _operands_of(self, eqn: Eqn) -> dict[tuple[Var, int], GraphValue]:
        """Finds the values of a loop's operands, and of the buffers of its results.

        Nothing reads the first value of a carry that has none.
        """
        carries, shared = {*self.loop.carries}, {}
        for (v, d), atom in zip(operands_of(self.loop), eqn.invars, strict=True):
            if v in carries and (jaxprs.is_literal(atom) or atom not in self.values.current):
                continue
            value = self.values.operand(atom)
            directions = range(self.loop.num_directions) if d is None else [d]
            shared |= {(v, n): value for n in directions}
        return shared

    # ---- tasks ----------------------------------------------------------------------------------

    def _computed(self, task: Task) -> GraphTask:
        """Makes a task that computes."""
        eqn, task_body = self.equations[task.kind, task.stage], self.bodies[task.kind, task.stage]
        direction = self._direction(task)
        inputs = [*self._read(jaxprs.variables(eqn.invars), task), *task_body.constants]
        if task_body.is_indexed:
            number = np.int32(self._microbatch(task))
            inputs.append(self.values.operand(jaxprs.literal_of(number)))
        inputs += [self.shared[v, direction] for v in eqn.outvars if self.kept_in.get(v) is v]
        outputs = [
            self._update(v, task) if v in self.kept_in else self._send(v, task) for v in eqn.outvars
        ]
        return self._task(task, task_body.body, inputs, outputs)

    def _read(self, variables: Iterable[Var], task: Task) -> list[GraphValue]:
        """Returns the values of variables that a task reads."""
        mb, direction = self._microbatch(task), self._direction(task)
        of_stage = self.of_stage.get((task.stage, direction), {})
        local = self.local.get((mb, task.stage), {}) | of_stage
        return [
            local.get(v) or self.sent.get((mb, v)) or self.shared[v, direction] for v in variables
        ]

    def _send(self, v: Var, task: Task) -> GraphValue:
        """Makes a value that others of the microbatch read; what `R` makes, those of its stage."""
        replicas, mb = self.loop.replicas, self._microbatch(task)
        value = GraphValue(
            rows_type(v.aval, replicas) if replicas > 1 else v.aval, "edge", str(task)
        )
        if task.kind is Kind.R:
            self.local.setdefault((mb, task.stage), {})[v] = value
        else:
            self.sent[mb, v] = value
        return value

    def _update(self, v: Var, task: Task) -> GraphValue:
        """Makes the next value of an accumulator, or of the buffer of a result."""
        kept, direction = self.kept_in[v], self._direction(task)
        kind = "gathered" if kept is v else "gradient"
        name = f"result of {task.kind}{task.stage}"
        memory = self.number, kept, direction
        value = self.values.add(self.results[v, direction], kind, name, memory)
        self.shared[kept, direction] = value
        return value

    def _moved(self, task: Task) -> Iterator[GraphTask]:
        """Makes a task that copies a stage's values to the memory of the host, or of the device."""
        at = mb, stage = self._microbatch(task), task.stage
        local, moved = self.local.setdefault(at, {}), self.offloaded.setdefault(at, {})
        if task.kind is Kind.O:
            alone = self.kept_alone(stage, self._direction(task), self.later[task])
            moved |= dict.fromkeys(v for v in alone if v in local or (mb, v) in self.sent)
        if not moved:
            return
        inputs = self._read(moved, task)
        key = "copy", task.kind, tuple(value.aval for value in inputs)
        if (body := self.all_bodies.get(key)) is None:
            space = jax.memory.Space.Host if task.kind is Kind.O else jax.memory.Space.Device
            copies = jax.make_jaxpr(lambda *xs: [jax.device_put(x, space) for x in xs])
            body = self.all_bodies[key] = Body(f"{task.kind}{stage}", copies(*key[2]), ())
        outputs = [GraphValue(aval, "edge", str(task)) for aval in body.jaxpr.out_avals]
        local |= zip(moved, outputs, strict=True)
        yield self._task(task, body, inputs, outputs)

    def _handed_to_stage(self, task: Task) -> Iterator[GraphTask]:
        """Makes a task that makes what those of its window read of what is made for their stage.

        An operand that it hands on, and that is not gathered, they read themselves.
        """
        key, direction = (Kind(task.kind.makes or task.kind), task.stage), self._direction(task)
        if key not in self.lifted:
            return
        readers = {(reader.kind, reader.stage) for reader in self.loop.table.windows[task]}
        read = {v for reader in readers & {*self.equations} for v in self.equations[reader].invars}
        eqn, jaxpr, constants = self.lifted[key]
        handed: dict[Var, Any] = {}
        for v, result in zip(eqn.outvars, jaxpr.jaxpr.outvars, strict=True):
            operand = self.shared.get((v, direction))
            if v in read and (operand is None or operand in self.whole):
                handed[v] = result
        if not handed:
            return
        part = jaxprs.part(jaxprs.needed(jaxpr.eqns, handed.values()), [*handed.values()])
        given = [
            *self._read(jaxprs.variables(eqn.invars), task),
            *map(self.values.operand, constants),
        ]
        known = dict(zip(jaxpr.jaxpr.invars, given, strict=True))
        inputs = [known[v] for v in part.inputs]
        body_key = "of a stage", jaxprs.structure(part.jaxpr)
        if (body := self.all_bodies.get(body_key)) is None:
            body = self.all_bodies[body_key] = Body(f"{key[0]}{task.stage}", part.jaxpr, ())
        outputs = [
            GraphValue(v.aval, "edge", str(task), spec=spec)
            for v, spec in zip(handed, self._gathered(part.jaxpr, inputs), strict=True)
        ]
        of_stage = self.of_stage.setdefault((task.stage, direction), {})
        of_stage |= zip(handed, outputs, strict=True)
        yield self._task(task, body, inputs, outputs)

    def _gathered(
        self, jaxpr: jex.ClosedJaxpr, inputs: Sequence[GraphValue]
    ) -> Sequence[Spec | None]:
        """Finds how results are split if the operands are gathered; None for what is left open."""
        if self.values.inside is None or self.whole.keys().isdisjoint(inputs):
            return [None] * len(jaxpr.out_avals)
        specs = [self.whole.get(value, value.spec) for value in inputs]
        return propagate(jaxpr, specs, self.values.inside.sizes)[1]

    def _summed(self, task: Task) -> Iterator[GraphTask]:
        """Makes a task that combines what replicas have added up for a stage since the last one.

        The last one makes the results of the segments; those before it leave sums of what the
        tasks that an `S` takes have added up, and these accumulators begin anew.
        """
        direction = self._direction(task)
        number = self.loop.stage_number(task.stage, direction)
        of_kinds = (e for e in self.loop.tasks if e.params["key"].kind in task.kind.takes)
        taken = {v for e in of_kinds for v in e.outvars}
        summed = {result for (v, _), result in self.results.items() if v in taken}
        found, is_last = (
            self.reductions.get(number, ()),
            task == self.last_sum[task.stage, direction],
        )
        parts = [e for e in found if _adds(e) and {*e.invars} <= summed]
        segments = [*parts, *(e for e in found if is_last and e not in parts)]
        if not segments:
            return
        rows = [v for e in segments for v in jaxprs.variables(e.invars)]
        sums = self.sums.get(number, [])
        inputs = [*map(self.values.operand, rows), *sums]
        key = "sum", *(jaxprs.structure(e.params["jaxpr"]) for e in segments), len(sums)
        if (body := self.all_bodies.get(key)) is None:
            traced = jax.make_jaxpr(_summing([e.params["jaxpr"] for e in segments], len(sums)))
            jaxpr, _ = jaxprs.without_constants(traced(*(value.aval for value in inputs)))
            body = self.all_bodies[key] = Body(f"{task.kind}{task.stage}", jaxpr, None)
        if is_last:
            results = (v for e in segments for v in e.outvars)
            outputs = [self.values.add(v, "gathered", str(task)) for v in results]
        else:
            outputs = [GraphValue(a, "gathered", str(task)) for a in body.jaxpr.out_avals]
            self.sums[number] = outputs
        yield self._task(task, body, inputs, outputs)
        if not is_last:
            yield self._begun_anew(task, rows)

    def _begun_anew(self, task: Task, rows: Sequence[Var]) -> GraphTask:
        """Makes accumulators of -0, for the results of the loop that an `S` has taken.

        A sum with -0 is the same, also where it is -0.
        """
        of_result = {v: result for result, v in self.results.items()}
        begun = []
        for v in rows:
            out, direction = of_result[v]
            memory = self.number, self.kept_in[out], direction
            begun.append(GraphValue(v.aval, "gradient", str(task), memory=memory, begins=True))
            self.shared[self.kept_in[out], direction] = self.values.current[v] = begun[-1]
        avals = [v.aval for v in rows]
        key = "zeros", *avals
        if (body := self.all_bodies.get(key)) is None:
            zeros = jax.make_jaxpr(lambda: [filled(aval, -0.0) for aval in avals])()
            body = self.all_bodies[key] = Body(f"start_{task.stage}", zeros, None)
        rank = self.ranks_of[self.loop.stage_number(task.stage, self._direction(task))]
        return GraphTask(rank, body, (), tuple(begun), "start")

    def _kept_alone(self, stage: int, direction: int, kinds: Collection[Kind]) -> list[Var]:
        """Finds the values that later tasks of a stage read, and no other stage of its rank.

        A number needs no copy: it has about no bytes. Nor does what a policy has offloaded already.
        """
        ranks = self.ranks_of[self.loop.stage_number(0, direction) :]
        written = {v for task in self.loop.tasks for v in task.outvars}
        found: dict[Var, tuple[bool, bool]] = {}
        for task in self.loop.tasks:
            key = task.params["key"]
            for v in jaxprs.variables(task.invars):
                moves = v in written and v.aval.size > 1 and _compat.memory_kind(v.aval) is None
                if moves and ranks[key.stage] == ranks[stage]:
                    alone, wanted = found.get(v, (True, False))
                    is_here = key.stage == stage
                    found[v] = alone and is_here, wanted or (is_here and key.kind in kinds)
        return [v for v, (alone, wanted) in found.items() if alone and wanted]

    def _task(
        self, task: Task, body: Body, inputs: Sequence[GraphValue], outputs: Sequence[GraphValue]
    ) -> GraphTask:
        number = self.loop.stage_number(task.stage, self._direction(task))
        of_step, beside = (
            t and dataclasses.replace(t, stage=self.stages_before + t.stage)
            for t in (task, self.beside.get(task))
        )
        values = tuple(inputs), tuple(outputs)
        rank = self.ranks_of[number]
        return GraphTask(rank, body, *values, str(task), of_step, self.number, beside=beside)

    def _direction(self, task: Task) -> int:
        return self.loop.table.direction_of[task.microbatch]

    def _microbatch(self, task: Task) -> int:
        """The number of the slices that a task takes."""
        last = self.loop.length - 1
        return last - task.microbatch if self.loop.reverse else task.microbatch

    # ---- bodies ---------------------------------------------------------------------------------

    def _body_of(
        self, task: Eqn, jaxpr: jex.ClosedJaxpr, constants: Sequence[Literal]
    ) -> _LoopBody:
        """Makes the body of a task; `jaxpr` is the task's, and takes `constants` last."""
        arrays = self._arrays(task)
        key = jaxprs.structure(jaxpr), arrays
        if (body := self.all_bodies.get(key)) is None:
            jaxpr_and_donated = computation(jaxpr, arrays, self.values.inside)
            body = self.all_bodies[key] = Body(str(task.params["key"]), *jaxpr_and_donated)
        values = tuple(map(self.values.operand, constants))
        return _LoopBody(body, values, arrays.is_indexed)

    def _arrays(self, task: Eqn) -> ArraysOfTask:
        """Finds the arrays of all microbatches that a task takes."""
        loop, replicas = self.loop, self.loop.replicas
        consts, slices, buffered = {*loop.consts} | loop.of_stages, {*loop.xs}, {*loop.ys}
        taken = set() if task.params["key"].kind is Kind.R else {*loop.carries}

        def types(variables: Sequence[Any], of_all: set[Any]) -> tuple[Aval | None, ...]:
            whole = (self.shared[v, 0].aval if v in of_all else None for v in variables)
            return tuple(a and (row_type(a) if replicas > 1 else a) for a in whole)

        return ArraysOfTask(
            types(task.invars, slices),
            tuple(i for i, v in enumerate(task.invars) if v in taken),
            types(task.outvars, buffered),
            replicas,
            tuple(v not in consts for v in task.invars) if replicas > 1 else (),
        )


def _adds(segment: Eqn) -> bool:
    """Tells whether a segment adds up the rows of replicas, and does nothing else."""
    return all(called_as(e, "merge_") == "sum" for e in segment.params["jaxpr"].eqns)


def _summing(bodies: Sequence[jex.ClosedJaxpr], num_sums: int) -> Callable[..., list[Any]]:
    """Makes the function of the inputs of several jaxprs, and of sums to add to their results."""

    def run(*xs):
        rows, sums = xs[: len(xs) - num_sums], xs[len(xs) - num_sums :]
        given, results = iter(rows), list[Any]()
        for body in bodies:
            results += jaxprs.run(body, *itertools.islice(given, len(body.in_avals)))
        return [*map(jnp.add, sums, results), *results[num_sums:]]

    return run


def _check_kinds(table: Table, kinds: Iterable[Kind]) -> None:
    """Checks that the tasks of each kind of a user's have work in some stage.

    Raises:
        ValueError: those of one kind have none.
    """
    kinds = {*kinds}
    for kind in sorted(table.kinds - kinds):
        if not (kind.is_own or kind.takes or (kind.of_stage and kind.makes in kinds)):
            raise ValueError(
                f"place: the table has tasks of the kind {kind} ({kind.title}), but the loop has "
                f"no work for them; give it some by Loop.insert in a rule of "
                f"jaxpp.extend.edit_loops, or use a schedule without that kind."
            )


def _kinds_after_offload(order: Sequence[Task]) -> dict[Task, frozenset[Kind]]:
    """Finds for each `O` the kinds of the later tasks of its stage and microbatch."""
    found: dict[Task, frozenset[Kind]] = {}
    later: dict[tuple[int, int], frozenset[Kind]] = {}
    for task in reversed(order):
        kinds = later.get((task.stage, task.microbatch), frozenset())
        if task.kind is Kind.O:
            found[task] = kinds
        later[task.stage, task.microbatch] = kinds | {task.kind}
    return found


# ---- the computations of tasks -------------------------------------------------------------------


def computation(
    jaxpr: jex.ClosedJaxpr, arrays: ArraysOfTask, inside: Inside | None
) -> tuple[jex.ClosedJaxpr, tuple[int, ...]]:
    """Makes the computation of a task, and the numbers of the inputs whose memory outputs take.

    Args:
        jaxpr: that of the task, which takes constants after its inputs.
        arrays: the arrays of all microbatches.
        inside: the axes inside a rank.
    """
    index = Var(jax.typeof(np.int32(0)))
    before, invars = [], list(jaxpr.jaxpr.invars)
    for i, aval in enumerate(arrays.slices):
        if aval is not None:
            x, invars[i] = invars[i], Var(aval)
            before += jaxprs.splice(_read, [invars[i], index], [x])
    buffers, after, outvars = list[Var](), [], list(jaxpr.jaxpr.outvars)
    for i, aval in enumerate(arrays.buffers):
        if aval is not None:
            y, outvars[i] = outvars[i], Var(aval)
            buffers.append(Var(aval))
            after += jaxprs.splice(_write, [y, index, buffers[-1]], [outvars[i]])
    invars += [index] * arrays.is_indexed
    first = len(invars)
    whole = _compat.make_closed_jaxpr([*invars, *buffers], outvars, [*before, *jaxpr.eqns, *after])
    donated = (*arrays.carries, *range(first, first + len(buffers)))
    if arrays.replicas > 1:
        others = [False] * (first - len(arrays.has_rows))
        whole = _on_rows(whole, [*arrays.has_rows, *others, *[True] * len(buffers)], arrays, inside)
    return jaxprs.with_copied_constants(whole), donated


def _read(x, index):
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _write(y, index, buffer):
    return as_weak_as(buffer, jax.lax.dynamic_update_index_in_dim(buffer, y, index, 0))


def _on_rows(
    jaxpr: jex.ClosedJaxpr, has_rows: Sequence[bool], arrays: ArraysOfTask, inside: Inside | None
) -> jex.ClosedJaxpr:
    """Makes the computation of all replicas of that of one."""
    run = on_rows(jaxpr, has_rows, arrays.replicas, inside)
    avals = [
        rows_type(v.aval, arrays.replicas) if in_rows else v.aval
        for v, in_rows in zip(jaxpr.jaxpr.invars, has_rows, strict=True)
    ]
    of_rows, constants = jaxprs.without_constants(jax.make_jaxpr(run)(*avals))
    assert not constants
    return of_rows


def lifted(tasks: Sequence[Eqn]) -> list[tuple[jex.ClosedJaxpr, tuple[Literal, ...]]]:
    """Turns arrays in tasks, and numbers in which they differ, into inputs; also gives these."""
    found = []
    for part, numbers in jaxprs.lift_differing([_whole(t.params["jaxpr"]) for t in tasks]):
        part, arrays = jaxprs.lift_arrays(part)
        found.append((part.jaxpr, (*numbers, *arrays)))
    return found


def _whole(jaxpr: jex.ClosedJaxpr) -> jaxprs.Part:
    """Inlines the calls in a task that close over arrays, or have derivative rules of their own.

    A task is differentiated no more.
    """

    def closes_over(eqn) -> bool:
        is_plain = eqn.primitive.name in primitives.PLAIN_CALLS
        return is_plain and bool(_compat.constants_of(jaxprs.called_jaxpr(eqn)))

    def is_opened(eqn) -> bool:
        name = eqn.primitive.name
        return name in primitives.CUSTOM_RULES or (
            name in primitives.PLAIN_CALLS and jaxprs.contains(eqn, closes_over)
        )

    plain = jaxprs.inline(jaxpr, is_opened)
    return jaxprs.Part(plain, tuple(plain.jaxpr.invars), tuple(plain.jaxpr.outvars))
