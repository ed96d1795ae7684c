"""`TaskGraph`: the runs of all ranks in a step, as tasks over typed values.

The tasks of loops and the segments around them both become tasks of the graph: each runs a body on
a rank. They stand in an order in which they can run. So a rank that runs its own tasks in this
order never waits for one that stands later.
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
        kind: its kind in a message (see `Message`).
        name: its name in a message: what made it.
        argument: the argument of the step that it is; None for any other value.
        constant: its array, if it is there before the step; else None.
        memory: the buffer that it is in; the values of one accumulator share a buffer.
        begins: whether it is the first value in the buffer.
        spec: its spec inside a rank, where one is given.
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
    """The jaxpr of a task; tasks that compute the same share a body.

    `donated` are the inputs whose memory the outputs take; None for all inputs that nothing reads
    any more.
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
        tasks: the tasks, in an order in which they can run.
        arguments: the arguments of the step, each with the ranks that read it.
        results: the results of the step, each with the ranks that it is left on.
        stages: the stages of each rank.
    """

    tasks: tuple[GraphTask, ...]
    arguments: tuple[tuple[Value, tuple[int, ...]], ...]
    results: tuple[tuple[Value, tuple[int, ...]], ...]
    stages: tuple[tuple[int, ...], ...]


def build(step: Step, placement: _placement.Placement) -> TaskGraph:
    """Builds the graph of a step whose equations are placed."""
    builder = _Builder(step, placement)
    for part in placement.steps:
        if isinstance(part, _placement.Segment):
            builder.segment(part)
        else:
            builder.loop(part)
    return builder.graph()


class _Builder:
    """Adds tasks in order; `values` has the current value of each variable."""

    def __init__(self, step: Step, placement: _placement.Placement):
        self.step = step
        self.placement = placement
        #: The rank of each stage, in one direction after the other.
        self.ranks_of = sum(placement.directions, ())
        #: For each variable that is sent to be put together with others, the reason.
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
        """Gives the ranks of a place."""
        return tuple(sorted({self.ranks_of[s] for s in place}))

    def graph(self) -> TaskGraph:
        """Makes the graph of all tasks added so far."""
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
        """Makes the value that a variable has from now on; `kind` is for one that is no scalar."""
        if why := self.why_gathered.get(var):
            kind, name = "gathered", f"{name} {why}"
        scalar = var.aval.size == 1
        self.values[var] = value = Value(var.aval, "scalar" if scalar else kind, name)
        return value

    def _operand(self, atom: Any) -> Value:
        """Gives the value of an atom; that of a literal is a constant."""
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
        # The current values of operands; tasks replace those of accumulators and results.
        known: dict[str, list[Any]] = {
            "const": [self._operand(v) for v in loop.consts],
            "x": [self._operand(v) for v in loop.xs],
            # Nothing reads the first value of some carries.
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
        """Makes the body of a loop's task: it slices its microbatch, and updates buffers in place.

        `jaxpr` takes the arrays that it closes over after its other inputs.
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
    """Inlines calls with custom derivative rules in a task, which is differentiated no more."""
    plain = _jaxprs.inline(jaxpr, lambda e: e.primitive.name in _primitives.CUSTOM_RULES)
    return _jaxprs.Part(plain, tuple(plain.jaxpr.invars), tuple(plain.jaxpr.outvars))


def _origin(eqn) -> str:
    """Says which equation made a value, and where in the user's code."""
    if eqn is None:
        return "value"
    call = stage_of_call(eqn)
    name = eqn.primitive.name if call is None else f"stage {call[0]}"
    return name + _compat.at_source_line(eqn)


def _is_indexed(body: TaskBody) -> bool:
    """Tells whether a task needs the number of its microbatch: it reads a slice, or makes one."""
    return any(r.source == "x" for r in body.inputs) or any(r.source == "y" for r in body.outputs)
