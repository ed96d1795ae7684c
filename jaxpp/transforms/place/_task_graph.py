"""`TaskGraph`: what the ranks run in a step, as tasks over typed values.

The tasks of loops and the segments around them are tasks alike: each runs a body on a rank. They
stand in an order in which they can happen, so that a rank that takes its own in this order never
waits for what another runs later.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat, _jaxprs, _primitives, schedules
from jaxpp._program import Argument
from jaxpp._specs import Spec, replicated
from jaxpp.transforms._step import Step
from jaxpp.transforms.place import _placement
from jaxpp.transforms.stages import stage_of_call
from jaxpp.transforms.tasks import TaskBody


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array that tasks make and read; it is the same one on every rank that has it.

    Args:
        aval: its type.
        kind: what it is to a message, as `Message` has it.
        name: what made it, for messages.
        argument: the argument of the step that it is; None for what is none.
        constant: its value, if it is there before the step; else None.
        memory: the buffer that it is in; an accumulator is the same from task to task.
        begins: whether it is the first that is in the buffer.
        spec: how it is split inside a rank, where that is given.
    """

    aval: Any
    kind: str
    name: str
    argument: Argument | None = None
    constant: Any = None
    memory: Hashable = None
    begins: bool = False
    spec: Spec | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """What tasks compute; those that compute the same have the same body.

    `donated` are the inputs whose memory the outputs take; None where these are all that nothing
    reads any more.
    """

    name: str
    jaxpr: jex.ClosedJaxpr
    donated: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GraphTask:
    """A run of a body on a rank."""

    rank: int
    body: Body
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    label: str


@dataclasses.dataclass(frozen=True, eq=False)
class TaskGraph:
    """The tasks of all ranks.

    Args:
        tasks: in an order in which they can happen.
        arguments: of the step, with the ranks that read each.
        results: of the step, with the ranks that each is left on.
        stages: those of each rank.
    """

    tasks: tuple[GraphTask, ...]
    arguments: tuple[tuple[Value, tuple[int, ...]], ...]
    results: tuple[tuple[Value, tuple[int, ...]], ...]
    stages: tuple[tuple[int, ...], ...]


def build(step: Step, placement: _placement.Placement) -> TaskGraph:
    """The tasks of a step whose equations are placed."""
    builder = _Builder(step, placement)
    for part in placement.steps:
        if isinstance(part, _placement.Segment):
            builder.segment(part)
        else:
            builder.loop(part)
    return builder.graph()


class _Builder:
    """Adds tasks in order; `values` are those of variables so far."""

    def __init__(self, step: Step, placement: _placement.Placement):
        self.step = step
        self.placement = placement
        #: The rank of each place: of each stage, in one direction after the other.
        self.ranks_of = sum(placement.directions, ())
        #: Why values are sent to be put together with others.
        self.why_gathered = {
            v: why
            for e in step.jaxpr.eqns
            if e.outvars and (why := step.fact(e.outvars[0]).gathered)
            for v in _jaxprs.variables(e.invars)
        }
        self.values: dict[Any, Value] = {}
        for v, own in zip(step.jaxpr.jaxpr.invars, step.arguments, strict=True):
            value = self._add(v, "argument", f"args{own.name}")
            value.argument, value.spec = own, own.spec if step.inside else None
        self.constants: dict[Hashable, Value] = {}
        self.bodies: dict[Hashable, Body] = {}
        self.tasks: list[GraphTask] = []
        self.loop_number = itertools.count()

    def ranks(self, place: _placement.Place) -> tuple[int, ...]:
        """The ranks of some stages."""
        return tuple(sorted({self.ranks_of[s] for s in place}))

    def graph(self) -> TaskGraph:
        """All that has been added."""
        homes, final = self.placement.homes, self.placement.final
        for (v, _), result in zip(final, self.step.results, strict=True):
            if self.values[v].spec is None:
                self.values[v].spec = result.spec
        homes_of = list(zip(*self.placement.directions, strict=True))
        return TaskGraph(
            tuple(self.tasks),
            tuple((self.values[v], self.ranks(homes[v])) for v in self.step.jaxpr.jaxpr.invars),
            tuple((self.values[v], self.ranks(place)) for v, place in final),
            tuple(
                tuple(s for s, ranks in enumerate(homes_of) if rank in ranks)
                for rank in range(max(self.ranks_of) + 1)
            ),
        )

    def _add(self, var: Any, kind: str, name: str) -> Value:
        """The value that a variable is from now on; `kind` where it is not a scalar."""
        if why := self.why_gathered.get(var):
            kind, name = "gathered", f"{name} {why}"
        scalar = var.aval.size == 1
        self.values[var] = value = Value(var.aval, "scalar" if scalar else kind, name)
        return value

    def _operand(self, atom: Any) -> Value:
        """The value of an atom; a literal is there before the step."""
        if not _jaxprs.is_literal(atom):
            return self.values[atom]
        if not _jaxprs.is_array_literal(atom):
            return self._number(_jaxprs.literal_array(atom))
        return self._constant(("array", id(atom.val)), lambda: _jaxprs.literal_array(atom))

    def _number(self, value: Any) -> Value:
        return self._constant((str(value.dtype), np.asarray(value).tobytes()), lambda: value)

    def _constant(self, key: Hashable, make: Callable[[], Any]) -> Value:
        if key not in self.constants:
            array = make()
            spec = replicated(np.ndim(array)) if self.step.inside else None
            self.constants[key] = Value(
                jax.typeof(array), "gathered", "constant", constant=array, spec=spec
            )
        return self.constants[key]

    # ---- segments -------------------------------------------------------------------------------

    def segment(self, segment: _placement.Segment) -> None:
        """Adds a segment on each rank of its place."""
        maker = {v: e for e in segment.part.jaxpr.eqns for v in e.outvars}
        for v in segment.part.outputs:
            call = stage_of_call(maker[v]) if v in maker else None
            if v not in self.values:
                kind = "gathered" if call is None else "edge"
                self._add(v, kind, f"{segment.label} {_origin(maker.get(v))}")
        part, constants = _jaxprs.lift_arrays(segment.part)
        inputs = tuple(map(self._operand, [*part.inputs, *constants]))
        outputs = tuple(map(self._operand, part.outputs))
        name = f"{segment.label}_{'_'.join(map(str, sorted(segment.place)))}"
        body = self.bodies.setdefault(_jaxprs.structure(part.jaxpr), Body(name, part.jaxpr, None))
        for rank in self.ranks(segment.place):
            self.tasks.append(GraphTask(rank, body, inputs, outputs, segment.label))

    # ---- loops ----------------------------------------------------------------------------------

    def loop(self, loop: _placement.Loop) -> None:
        """Adds the tasks of a loop in an order in which the ranks can run them."""
        number = next(self.loop_number)
        tasks, table = loop.tasks, loop.tasks.table
        order = [t for _, t in schedules.execution_order(table, tasks.dependencies)]
        several = tasks.num_directions > 1
        taken = table.direction_of if several else (0,) * table.num_microbatches
        found = [(task, tasks.body(task, taken[task.microbatch])) for task in order]
        runs = [(task, body) for task, body in found if body is not None]
        lifted = {body: _jaxprs.lift_arrays(_whole(body.jaxpr)) for body in tasks.bodies}
        bodies = {body: self._body_of(body, part.jaxpr, loop) for body, (part, _) in lifted.items()}
        between: dict[tuple[int, int], Value] = {}
        # Where operands are; accumulators and results move on as tasks update them.
        known: dict[str, list[Any]] = {
            "const": [self._operand(v) for v in loop.consts],
            "x": [self._operand(v) for v in loop.xs],
            # Of some carries nothing reads the beginning.
            "carry": [None if _jaxprs.is_literal(v) else self.values.get(v) for v in loop.carries],
            "y": [self.values[v] for v in loop.ys],
        }
        results = {"carry": loop.carry_outs, "y": loop.y_outs}
        for source in results:
            for i, value in enumerate(known[source]):
                if value is not None:
                    value.memory, value.begins = (number, source, i), True
        for task, body in runs:
            mb = task.microbatch
            if loop.eqn.params["reverse"]:
                mb = table.num_microbatches - 1 - mb
            inputs = [
                between[mb, r.index] if r.source == "value" else known[r.source][r.index]
                for r in body.inputs
            ]
            inputs += map(self._operand, lifted[body][1])
            if _is_indexed(body):
                inputs.append(self._number(np.int32(mb)))
            outputs = []
            for ref, v in zip(body.outputs, body.jaxpr.jaxpr.outvars, strict=True):
                if ref.source == "value":
                    value = between[mb, ref.index] = Value(v.aval, "edge", str(task))
                else:
                    if ref.source == "y":
                        inputs.append(known["y"][ref.index])
                    result = results[ref.source][ref.index]
                    kind = {"carry": "gradient", "y": "gathered"}[ref.source]
                    value = self._add(result, kind, f"result of {task.kind}{task.stage}")
                    value.memory = number, ref.source, ref.index
                    known[ref.source][ref.index] = value
                outputs.append(value)
            rank = self.ranks_of[body.stage]
            self.tasks.append(
                GraphTask(rank, bodies[body], tuple(inputs), tuple(outputs), str(task))
            )

    def _body_of(self, body: TaskBody, jaxpr: jex.ClosedJaxpr, loop: _placement.Loop) -> Body:
        """A task of a loop, which slices its microbatch, and updates accumulators in place.

        Its `jaxpr` takes the arrays that it closes over after its other inputs.
        """
        xs = [loop.xs[r.index].aval if r.source == "x" else None for r in body.inputs]
        xs += [None] * (len(jaxpr.in_avals) - len(xs))
        y_avals = [loop.y_outs[r.index].aval for r in body.outputs if r.source == "y"]
        indexed = _is_indexed(body)
        pattern = (
            tuple(r.source == "x" for r in body.inputs),
            tuple(r.source == "carry" for r in body.inputs),
            tuple(r.source == "y" for r in body.outputs),
            tuple(str(a) for a in y_avals),
            loop.tasks.table.num_microbatches if indexed else None,
        )
        carries = tuple(i for i, r in enumerate(body.inputs) if r.source == "carry")
        key = _jaxprs.structure(jaxpr), pattern
        if key in self.bodies:
            return self.bodies[key]

        def run(*operands):
            own = list(operands[: len(xs)])
            index = operands[len(xs)] if indexed else None
            buffers = iter(operands[len(xs) + indexed :])
            own = [
                x if a is None else jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
                for x, a in zip(own, xs, strict=True)
            ]
            outputs = _jaxprs.run(jaxpr, *own)
            return [
                jax.lax.dynamic_update_index_in_dim(next(buffers), y, index, 0)
                if r.source == "y" else y
                for r, y in zip(body.outputs, outputs, strict=True)
            ]  # fmt: skip

        avals = [v.aval if a is None else a for v, a in zip(jaxpr.jaxpr.invars, xs, strict=True)]
        if indexed:
            avals.append(jax.ShapeDtypeStruct((), jnp.int32))
        first = len(avals)
        whole, consts = _jaxprs.without_constants(jax.make_jaxpr(run)(*avals, *y_avals))
        assert not consts
        self.bodies[key] = Body(body.name, whole, (*carries, *range(first, first + len(y_avals))))
        return self.bodies[key]


def _whole(jaxpr: jex.ClosedJaxpr) -> _jaxprs.Part:
    """A task's jaxpr, the calls of functions with derivative rules opened: no more are needed."""
    plain = _jaxprs.inline(jaxpr, lambda e: e.primitive.name in _primitives.CUSTOM_RULES)
    return _jaxprs.Part(plain, tuple(plain.jaxpr.invars), tuple(plain.jaxpr.outvars))


def _origin(eqn) -> str:
    """What made a value, and where in the user's code."""
    if eqn is None:
        return "value"
    call = stage_of_call(eqn)
    name = eqn.primitive.name if call is None else f"stage {call[0]}"
    return name + _compat.at_source_line(eqn)


def _is_indexed(body: TaskBody) -> bool:
    """Whether a task needs the number of its microbatch: it reads a slice, or makes one."""
    return any(r.source == "x" for r in body.inputs) or any(r.source == "y" for r in body.outputs)
