"""Builds the graph of a placed step: the tasks of its loops, and the segments around them."""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from jaxpp import _compat, _jaxprs, _numbers, _primitives, schedules
from jaxpp._specs import as_weak_as, replicated
from jaxpp._typing import Atom, Eqn, Literal, Var
from jaxpp.schedules import Kind, Table, Task
from jaxpp.transforms._step import Step
from jaxpp.transforms.graph import Body, GraphTask, TaskGraph, Value
from jaxpp.transforms.inside import on_rows
from jaxpp.transforms.place._segments import is_segment
from jaxpp.transforms.stages import stage_of_call
from jaxpp.transforms.tasks import ScheduledLoop, is_loop, row_type, rows_type


def build(step: Step) -> TaskGraph:
    """Builds the graph of a step whose equations are placed.

    Raises:
        ValueError: if its loops disagree on the stages or on their ranks.
    """
    builder = _Builder(step)
    for eqn in step.jaxpr.eqns:
        (builder.segment if is_segment(eqn) else builder.loop)(eqn)
    return builder.graph()


def _directions(eqns: Iterable[Eqn]) -> tuple[tuple[int, ...], ...]:
    """Finds for each direction the ranks of the stages; a loop may have only the first ones."""
    found = sorted({e.params["table"].directions for e in eqns if is_loop(e)}, key=len)
    for own in found[:-1]:
        if own != found[-1][: len(own)]:
            raise ValueError(
                f"place: the loops of one step put their stages on different ranks: "
                f"{own} and {found[-1]}; give them schedules with the same number of stages "
                f"and the same placement, such as ForwardOnly(like=...) for an evaluation."
            )
    if found:
        return found[-1]
    inner = [e for eqn in eqns for e in eqn.params["jaxpr"].eqns]
    calls = [c for e in inner if (c := stage_of_call(e)) is not None]
    return (tuple(range(max((n for _, n in calls), default=1))),)


class _Builder:
    """Adds tasks in order; `values` has the current value of each variable."""

    def __init__(self, step: Step):
        self.step = step
        self.directions = _directions(step.jaxpr.eqns)
        #: The rank of each stage, in one direction after the other.
        self.ranks_of = [rank for own in self.directions for rank in own]
        #: For each variable that is sent to be put together with others, the reason.
        self.why_gathered = {
            v: why
            for segment in filter(is_segment, step.jaxpr.eqns)
            for e in segment.params["jaxpr"].eqns
            if e.outvars and (why := step.fact(e.outvars[0]).gathered)
            for v in _jaxprs.variables(e.invars)
        }
        inside = step.jaxpr.jaxpr
        #: For each result that becomes an argument of the next call, the variable of that argument.
        self.before = {inside.outvars[n]: inside.invars[i] for n, i in step.pairs.items()}
        self.values: dict[Var, Value] = {}
        for v, own in zip(step.jaxpr.jaxpr.invars, step.arguments, strict=True):
            value = self._add(v, "argument", f"args{own.name}")
            value.argument, value.spec = own, own.spec if step.inside else None
        self.constants: dict[Hashable, Value] = {}
        self.bodies: dict[Hashable, Body] = {}
        self.tasks: list[GraphTask] = []
        self.loop_number = itertools.count()
        self.stages_before = 0  # of the loops so far

    def ranks(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Returns the ranks of some stages."""
        return tuple(sorted({self.ranks_of[s] for s in stages}))

    def graph(self) -> TaskGraph:
        """Makes the graph of all tasks added so far."""
        arguments = [self.values[v] for v in self.step.jaxpr.jaxpr.invars]
        results = [self.values[v] for v in self.step.jaxpr.jaxpr.outvars]
        for value, result in zip(results, self.step.results, strict=True):
            if value.spec is None:
                value.spec = result.spec

        def with_ranks(values, records):
            ranks = (self.ranks(record.stages) for record in records)
            return tuple(zip(values, ranks, strict=True))

        homes_of = list(zip(*self.directions, strict=True))
        return TaskGraph(
            tuple(self.tasks),
            with_ranks(arguments, self.step.arguments),
            with_ranks(results, self.step.results),
            tuple(
                tuple(s for s, ranks in enumerate(homes_of) if rank in ranks)
                for rank in range(max(self.ranks_of) + 1)
            ),
        )

    def _add(self, var: Var, kind: str, name: str) -> Value:
        """Makes the value that a variable has from now on; `kind` is for one that is no scalar."""
        if why := self.why_gathered.get(var):
            kind, name = "gathered", f"{name} {why}"
        scalar = var.aval.size == 1
        self.values[var] = value = Value(var.aval, "scalar" if scalar else kind, name)
        return value

    def _operand(self, atom: Atom) -> Value:
        """Returns the value of an atom; that of a literal is a constant."""
        return self._constant(atom) if _jaxprs.is_literal(atom) else self.values[atom]

    def _constant(self, literal: Literal) -> Value:
        """Returns the value of an array, which is known by its identity, or of a number."""
        aval = literal.aval
        if _jaxprs.is_array_literal(literal):
            key = id(literal.val)
        else:
            key = aval.dtype.name, np.asarray(literal.val, aval.dtype).tobytes()
        if key not in self.constants:
            spec = replicated(len(aval.shape)) if self.step.inside else None
            self.constants[key] = Value(
                aval, "gathered", "constant", constant=_jaxprs.kept(literal.val, aval), spec=spec
            )
        return self.constants[key]

    # ---- segments -------------------------------------------------------------------------------

    def segment(self, eqn: Eqn) -> None:
        """Adds a segment on each rank of its stages."""
        label, stages = eqn.params["label"], eqn.params["stages"]
        maker = {v: e for e in eqn.params["jaxpr"].eqns for v in e.outvars}
        for v in eqn.outvars:
            call = stage_of_call(maker[v]) if v in maker else None
            kind = "gathered" if call is None else "edge"
            self._add(v, kind, f"{label} {_origin(maker.get(v))}")
        part, constants = _jaxprs.lift_arrays(self._in_pairs(eqn))
        inputs = tuple(map(self._operand, [*part.inputs, *constants]))
        outputs = tuple(map(self._operand, part.outputs))
        name = f"{label}_{'_'.join(map(str, stages))}"
        key = _jaxprs.structure(part.jaxpr)
        if key not in self.bodies:
            self.bodies[key] = Body(name, _jaxprs.with_kept_constants(part.jaxpr), None)
        body = self.bodies[key]
        for rank in self.ranks(stages):
            self.tasks.append(GraphTask(rank, body, inputs, outputs, label))

    def _in_pairs(self, eqn: Eqn) -> _jaxprs.Part:
        """A segment's jaxpr, in which new values, and the old ones they replace, come first.

        JAX gives the memory of donated inputs to outputs of the same type in their order: so each
        new value takes the place of its own old one, and XLA has nothing to copy.
        """
        inside, read = _jaxprs.opened(eqn.params["jaxpr"]), _jaxprs.variables(eqn.invars)
        new = [n for n, v in enumerate(eqn.outvars) if self.before.get(v) in read]
        old = list(dict.fromkeys(read.index(self.before[eqn.outvars[n]]) for n in new))
        outputs = [*new, *(n for n in range(len(eqn.outvars)) if n not in new)]
        inputs = [*old, *(n for n in range(len(read)) if n not in old)]
        jaxpr = _compat.make_closed_jaxpr(
            [inside.invars[n] for n in inputs], [inside.outvars[n] for n in outputs], inside.eqns
        )
        return _jaxprs.Part(
            jaxpr, tuple(read[n] for n in inputs), tuple(eqn.outvars[n] for n in outputs)
        )

    # ---- loops ----------------------------------------------------------------------------------

    def loop(self, eqn: Eqn) -> None:
        """Adds the tasks of a loop in an order in which the ranks can run them."""
        number, loop = next(self.loop_number), ScheduledLoop.of(eqn)
        table, length = loop.table, loop.table.num_microbatches
        known = self._operands_of(eqn, loop, number)
        results = dict(zip(loop.results, eqn.outvars, strict=True))
        #: What keeps a result of the body: its carry, or a buffer of its own.
        kept_in: dict[Atom, Any] = dict(zip(loop.carry_outs, loop.carries, strict=True))
        kept_in |= {v: v for v in loop.ys}
        tasks = {t.params["key"]: t for t in (*loop.tasks, *loop.recomputations)}
        _check_kinds(table, [kind for kind, _ in tasks])
        lifted = zip(tasks.items(), _lifted(list(tasks.values())), strict=True)
        bodies = {key: self._body_of(task, *own, known, loop) for (key, task), own in lifted}
        between: dict[tuple[int, Var], Value] = {}
        away: dict[tuple[int, int], dict[Var, Value]] = {}  # what a stage has offloaded
        again: dict[tuple[int, Var, int], Value] = {}  # what a stage makes or moves for itself
        order = [task for _, task in schedules.execution_order(table, loop.dependencies)]
        kept_alone = functools.cache(functools.partial(self._kept_alone, loop))
        later = _kinds_after_offload(order)
        for task in order:
            direction, stage = table.direction_of[task.microbatch], task.stage
            rank = self.ranks_of[loop.stage_number(stage, direction)]
            own = dataclasses.replace(task, stage=self.stages_before + stage)
            mb = length - 1 - task.microbatch if loop.reverse else task.microbatch
            if task.kind is Kind.O:
                for v in kept_alone(stage, direction, later[task]):
                    if value := again.get((mb, v, stage)) or between.get((mb, v)):
                        away.setdefault((mb, stage), {})[v] = value
            if (moved := away.get((mb, stage))) and task.kind in (Kind.O, Kind.L):
                inputs = [again.get((mb, v, stage), value) for v, value in moved.items()]
                new = self._copy(inputs, task, own, rank, number)
                again |= {(mb, v, stage): value for v, value in zip(moved, new, strict=True)}
            if (key := (task.kind, stage)) not in tasks:
                continue
            body, constants, is_indexed = bodies[key]
            inputs = [
                again.get((mb, v, stage)) or between.get((mb, v)) or known[v, direction]
                for v in _jaxprs.variables(tasks[key].invars)
            ]
            inputs += constants
            if is_indexed:
                inputs.append(self._constant(_jaxprs.literal_of(np.int32(mb))))
            outputs = []
            for v in tasks[key].outvars:
                if (kept := kept_in.get(v)) is None:
                    aval = rows_type(v.aval, loop.replicas) if loop.replicas > 1 else v.aval
                    value = Value(aval, "edge", str(task))
                    if task.kind is Kind.R:
                        again[mb, v, stage] = value
                    else:
                        between[mb, v] = value
                else:
                    if kept is v:
                        inputs.append(known[v, direction])
                    kind = "gathered" if kept is v else "gradient"
                    value = self._add(results[v, direction], kind, f"result of {task.kind}{stage}")
                    value.memory, known[kept, direction] = (number, kept, direction), value
                outputs.append(value)
            self.tasks.append(
                GraphTask(rank, body, tuple(inputs), tuple(outputs), str(task), own, number)
            )
        self.stages_before += table.num_stages

    def _kept_alone(
        self, loop: ScheduledLoop, stage: int, direction: int, kinds: Collection[Kind]
    ) -> list[Var]:
        """Finds the values that later tasks of a stage read, and no other stage of its rank.

        A number needs no copy: it has about no bytes. Nor does what a policy has offloaded already.
        """
        ranks = self.ranks_of[loop.stage_number(0, direction) :]
        made = {v for task in loop.tasks for v in task.outvars}
        found: dict[Var, tuple[bool, bool]] = {}
        for task in loop.tasks:
            key = task.params["key"]
            for v in _jaxprs.variables(task.invars):
                moves = v in made and v.aval.size > 1 and _compat.memory_kind(v.aval) is None
                if moves and ranks[key.stage] == ranks[stage]:
                    alone, wanted = found.get(v, (True, False))
                    own = key.stage == stage
                    found[v] = alone and own, wanted or (own and key.kind in kinds)
        return [v for v, (alone, wanted) in found.items() if alone and wanted]

    def _copy(
        self, inputs: Sequence[Value], task: Task, own: Task, rank: int, loop: int
    ) -> list[Value]:
        """Adds a task that copies values to the memory of the host, or of the device."""
        key = "copy", task.kind, tuple(value.aval for value in inputs)
        if (body := self.bodies.get(key)) is None:
            space = jax.memory.Space.Host if task.kind is Kind.O else jax.memory.Space.Device
            made = jax.make_jaxpr(lambda *xs: [jax.device_put(x, space) for x in xs])
            body = self.bodies[key] = Body(f"{task.kind}{task.stage}", made(*key[2]), ())
        outputs = [Value(aval, "edge", str(task)) for aval in body.jaxpr.out_avals]
        self.tasks.append(
            GraphTask(rank, body, tuple(inputs), tuple(outputs), str(task), own, loop)
        )
        return outputs

    def _operands_of(
        self, eqn: Eqn, loop: ScheduledLoop, number: int
    ) -> dict[tuple[Var, int], Value]:
        """Finds the values of a loop's operands, and of the buffers of its results.

        They are by their variable of the body and their direction. Tasks replace those of
        accumulators and results. Nothing reads the first value of a carry that has none.
        """
        carries, buffers = {*loop.carries}, loop.results[loop.num_directions * loop.num_carry :]
        known = {}
        for (v, d), atom in zip([*loop.operands, *buffers], eqn.invars, strict=True):
            if v in carries and (_jaxprs.is_literal(atom) or atom not in self.values):
                continue
            value = self._operand(atom)
            known |= {(v, n): value for n in (range(loop.num_directions) if d is None else [d])}
            if d is not None:
                value.memory, value.begins = (number, v, d), True
        return known

    def _body_of(
        self,
        task: Eqn,
        jaxpr: jex.ClosedJaxpr,
        constants: Sequence[Literal],
        known: Mapping[tuple[Var, int], Value],
        loop: ScheduledLoop,
    ) -> tuple[Body, list[Value], bool]:
        """Makes the body of a loop's task: it slices its microbatch, and updates buffers in place.

        `jaxpr` is that of the task, and takes `constants` after the task's inputs. Also gives their
        values, and whether it takes the number of its microbatch next. The buffers come last.
        """
        further = list(map(self._operand, constants))
        length, replicas = loop.table.num_microbatches, loop.replicas
        own = row_type if replicas > 1 else lambda aval: aval
        consts, slices, buffered = {*loop.consts}, {*loop.xs}, {*loop.ys}
        xs = [own(known[v, 0].aval) if v in slices else None for v in task.invars]
        xs += [None] * (len(jaxpr.in_avals) - len(xs))
        y_avals = [own(known[v, 0].aval) for v in task.outvars if v in buffered]
        indexed = bool(y_avals) or not slices.isdisjoint(task.invars)
        taken = set() if task.params["key"].kind is Kind.R else {*loop.carries}
        carries = tuple(i for i, v in enumerate(task.invars) if v in taken)
        pattern = (
            tuple(v in slices for v in task.invars),
            carries,
            tuple(v in buffered for v in task.outvars),
            tuple(str(a) for a in y_avals),
            length if indexed else None,
            replicas,
            tuple(v in consts for v in task.invars) if replicas > 1 else (),
        )
        key = _jaxprs.structure(jaxpr), pattern
        if key in self.bodies:
            return self.bodies[key], further, indexed

        def read(x, index):
            return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)

        def write(y, index, buffer):
            return as_weak_as(buffer, jax.lax.dynamic_update_index_in_dim(buffer, y, index, 0))

        invars = [v if a is None else Var(a) for v, a in zip(jaxpr.jaxpr.invars, xs, strict=True)]
        index = Var(jax.typeof(np.int32(0)))
        before = [
            e
            for x, v, a in zip(invars, jaxpr.jaxpr.invars, xs, strict=True)
            if a is not None
            for e in _jaxprs.splice(read, [x, index], [v])
        ]
        buffers = list(map(Var, y_avals))
        outvars, after = list(jaxpr.jaxpr.outvars), []
        made = [i for i, v in enumerate(task.outvars) if v in buffered]
        for i, buffer in zip(made, buffers, strict=True):
            y, outvars[i] = outvars[i], Var(buffer.aval)
            after += _jaxprs.splice(write, [y, index, buffer], [outvars[i]])
        first = len(invars) + indexed
        whole = _compat.make_closed_jaxpr(
            [*invars, *[index] * indexed, *buffers], outvars, [*before, *jaxpr.eqns, *after]
        )
        donated = (*carries, *range(first, first + len(y_avals)))
        if replicas > 1:
            has_rows = [v not in consts for v in task.invars]
            has_rows += [False] * (first - len(has_rows)) + [True] * len(y_avals)
            whole = self._on_rows(whole, has_rows, replicas)
        name = str(task.params["key"])
        self.bodies[key] = Body(name, _jaxprs.with_kept_constants(whole), donated)
        return self.bodies[key], further, indexed

    def _on_rows(
        self, jaxpr: jex.ClosedJaxpr, has_rows: Sequence[bool], replicas: int
    ) -> jex.ClosedJaxpr:
        """Makes the computation of all replicas of that of one."""
        run = on_rows(jaxpr, has_rows, replicas, self.step.inside)
        avals = [
            rows_type(v.aval, replicas) if own else v.aval
            for v, own in zip(jaxpr.jaxpr.invars, has_rows, strict=True)
        ]
        made, constants = _jaxprs.without_constants(jax.make_jaxpr(run)(*avals))
        assert not constants
        return made


def _check_kinds(table: Table, kinds: Iterable[Kind]) -> None:
    """Checks that the tasks of each kind of a user's have work in some stage.

    Raises:
        ValueError: those of one kind have none.
    """
    for kind in sorted(table.kinds.difference(kinds)):
        if not kind.is_own:
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
        own = later.get((task.stage, task.microbatch), frozenset())
        if task.kind is Kind.O:
            found[task] = own
        later[task.stage, task.microbatch] = own | {task.kind}
    return found


def _lifted(tasks: Sequence[Eqn]) -> list[tuple[jex.ClosedJaxpr, tuple[Literal, ...]]]:
    """Turns arrays in tasks, and numbers in which they differ, into inputs; also gives these."""
    found = []
    for part, numbers in _numbers.lift_differing([_whole(t.params["jaxpr"]) for t in tasks]):
        part, arrays = _jaxprs.lift_arrays(part)
        found.append((part.jaxpr, (*numbers, *arrays)))
    return found


def _whole(jaxpr: jex.ClosedJaxpr) -> _jaxprs.Part:
    """Inlines the calls in a task that close over arrays, or have derivative rules of their own.

    A task is differentiated no more.
    """

    def closes_over(eqn) -> bool:
        is_plain = eqn.primitive.name in _primitives.PLAIN_CALLS
        return is_plain and bool(_compat.constants_of(_jaxprs.called_jaxpr(eqn)))

    def is_opened(eqn) -> bool:
        name = eqn.primitive.name
        return name in _primitives.CUSTOM_RULES or (
            name in _primitives.PLAIN_CALLS and _jaxprs.contains(eqn, closes_over)
        )

    plain = _jaxprs.inline(jaxpr, is_opened)
    return _jaxprs.Part(plain, tuple(plain.jaxpr.invars), tuple(plain.jaxpr.outvars))


def _origin(eqn) -> str:
    """Says which equation made a value, and where in the user's code."""
    if eqn is None:
        return "value"
    call = stage_of_call(eqn)
    name = eqn.primitive.name if call is None else f"stage {call[0]}"
    return name + _compat.at_source_line(eqn)
