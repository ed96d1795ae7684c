"""`TaskGraph`: what all ranks run, as tasks over typed values; and its lowering to programs.

The tasks stand in an order in which they can run. So a rank that runs its own tasks in this order
never waits for one that stands later. In the programs each value that is read on a rank that did
not make it gets a send right after it is made and a receive right before its first use, and each
slot is freed after its last use.
"""

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp._program import (
    Argument,
    Bundle,
    Computation,
    Free,
    Instruction,
    Message,
    Program,
    Receive,
    Run,
    Send,
    Wait,
)
from jaxpp._specs import Spec, replicated
from jaxpp.jaxprs import Aval
from jaxpp.schedules import Task
from jaxpp.transforms._step import Step
from jaxpp.transforms.inside import propagate


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GraphValue:
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

    aval: Aval
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
    """A run of a body on a rank; `task`, `loop` and `others` are those of `Run`.

    Once it is dispatched, the rank waits until `waits` are made. `beside` is the task that the
    table has run together with it; None for none.
    """

    rank: int
    body: Body
    inputs: tuple[GraphValue, ...]
    outputs: tuple[GraphValue, ...]
    label: str
    task: Task | None = None
    loop: int = 0
    waits: tuple[GraphValue, ...] = ()
    beside: Task | None = None
    others: tuple[Task, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class TaskGraph:
    """The tasks of all ranks.

    Args:
        tasks: the tasks, in an order in which they can run. Each has its `rank`, its `label`, its
            `inputs` and `outputs`, which are values, and the `task` of a loop that it is; None for
            what is around the loops.
        arguments: the arguments of the step, each with the ranks that read it.
        results: the results of the step, each with the ranks that it is left on.
        stages: the stages of each rank.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x))
        >>> def show(graph):
        ...     print(*(task.label for task in graph.tasks if task.task))
        ...     return graph
        >>> lowered = jaxpp.extend.edit_tasks(step, show).lower(jnp.eye(2), jnp.ones((4, 2)))
        F0.0 B0.0 F0.1 B0.1
    """

    tasks: tuple[GraphTask, ...]
    arguments: tuple[tuple[GraphValue, tuple[int, ...]], ...]
    results: tuple[tuple[GraphValue, tuple[int, ...]], ...]
    stages: tuple[tuple[int, ...], ...]


# ---- lowering ------------------------------------------------------------------------------------


#: The number of a task and a rank: sends come after that task, receives before it.
_At = tuple[int, int]


def lower(step: Step, graph: TaskGraph, specs: Mapping[GraphValue, Spec]) -> Bundle:
    """Lowers the tasks of a step to programs, with the specs that `assign` gave."""
    uses = _Uses(graph)
    routes = _routes(uses)
    numbers, computations = _computations(uses, specs)
    sends, receives = _messages(routes, specs)
    end = len(graph.tasks)
    writers = [_ProgramWriter(rank, uses) for rank in range(len(graph.stages))]
    for n, (value, ranks) in enumerate(graph.arguments):
        for rank in ranks:
            writers[rank].inputs.append((n, writers[rank].slot(value)))
    for rank, writer in enumerate(writers):
        writer.send(sends.get((-1, rank), ()))
    for index, (task, number) in enumerate(zip(graph.tasks, numbers, strict=True)):
        writer = writers[task.rank]
        writer.receive(receives.get((index, task.rank), ()))
        writer.run(index, task, number, computations[number].donated)
        writer.send(sends.get((index, task.rank), ()))
        writer.free()
        if task.waits:
            writer.instructions.append(Wait(tuple(map(writer.slot, task.waits))))
    for rank, writer in enumerate(writers):
        writer.receive(receives.get((end, rank), ()))
    for n, (value, ranks) in enumerate(graph.results):
        for rank in ranks:
            writers[rank].outputs.append((n, writers[rank].slot(value)))
    results = (
        dataclasses.replace(result, spec=specs.get(value, ()))
        for result, (value, _) in zip(step.results, graph.results, strict=True)
    )
    return Bundle(
        tuple(w.program(stages) for w, stages in zip(writers, graph.stages, strict=True)),
        tuple(computations),
        step.arguments,
        tuple(results),
        step.inside and step.inside.mesh,
    )


class _Uses:
    """The tasks that make and read each value, by number; -1 is before all tasks.

    The number of tasks stands for the caller, who reads the results after all tasks. For each value
    and rank, `made` has the task that makes the value there, `readers` the first task that reads
    it, and `last` the last one. `kept` has the values that are sent, received or results: no task
    may take their memory.
    """

    def __init__(self, graph: TaskGraph):
        self.graph = graph
        self.made: dict[GraphValue, dict[int, int]] = {
            value: dict.fromkeys(ranks, -1) for value, ranks in graph.arguments
        }
        self.readers: dict[GraphValue, dict[int, int]] = {}
        self.last: dict[tuple[int, GraphValue], int] = {}
        self.kept = {(rank, value) for value, ranks in graph.results for rank in ranks}
        for index, task in enumerate(graph.tasks):
            for value in task.outputs:
                self.made.setdefault(value, {})[task.rank] = index
            for value in task.inputs:
                self._read(value, task.rank, index)
        for value, ranks in graph.results:
            for rank in ranks:
                self._read(value, rank, len(graph.tasks))

    def _read(self, value: GraphValue, rank: int, index: int) -> None:
        self.readers.setdefault(value, {}).setdefault(rank, index)
        self.last[rank, value] = index

    def send(self, value: GraphValue, source: int, target: int) -> None:
        """Notes that a value is sent from a rank to another."""
        self.last.setdefault((source, value), self.made[value][source])
        self.kept |= {(source, value), (target, value)}


def _routes(uses: _Uses) -> dict[tuple[int, int, int], tuple[list[GraphValue], int]]:
    """Finds the values to send and the first task that reads them, by (maker, source, target)."""
    wanted: dict[tuple[int, int, int], list[GraphValue]] = {}
    first_read: dict[tuple[int, int, int], int] = {}
    for value, by_rank in uses.readers.items():
        if value.constant is not None:
            continue
        makers = uses.made[value]
        for rank, index in by_rank.items():
            if rank in makers:
                continue
            source = min(makers)
            route = (makers[source], source, rank)
            wanted.setdefault(route, []).append(value)
            first_read[route] = min(first_read.get(route, index), index)
            uses.send(value, source, rank)
    return {route: (wanted[route], first_read[route]) for route in sorted(wanted)}


def _messages(routes, specs: Mapping[GraphValue, Spec]):
    """Makes the sends after each task and the receives before each, by (task, rank)."""
    sends: dict[_At, list[tuple[list[GraphValue], Message]]] = {}
    receives: dict[_At, list[tuple[list[GraphValue], Message]]] = {}
    for tag, ((index, source, target), (values, first_read)) in enumerate(routes.items()):
        message = Message(
            tag,
            source,
            target,
            tuple(v.name for v in values),
            tuple(v.kind for v in values),
            tuple(v.aval for v in values),
            tuple(specs[v] for v in values) if specs else (),
        )
        sends.setdefault((index, source), []).append((values, message))
        receives.setdefault((first_read, target), []).append((values, message))
    return sends, receives


def _computations(
    uses: _Uses, specs: Mapping[GraphValue, Spec]
) -> tuple[list[int], list[Computation]]:
    """Numbers the computations of the tasks, equal ones once; also gives each task's number."""
    found: dict[Hashable, int] = {}
    computations: list[Computation] = []
    numbers = []
    for index, task in enumerate(uses.graph.tasks):
        in_specs, out_specs = (
            tuple(specs[v] for v in values) if specs else ()
            for values in (task.inputs, task.outputs)
        )
        donated = _donated(index, task, uses, specs)
        key = task.body, donated, in_specs, out_specs
        if key not in found:
            found[key] = len(computations)
            jaxpr = jaxprs.without_devices(task.body.jaxpr)
            specs_of = in_specs, out_specs
            computations.append(Computation(task.body.name, jaxpr, donated, *specs_of))
        numbers.append(found[key])
    return numbers, computations


def _donated(
    index: int, task: GraphTask, uses: _Uses, specs: Mapping[GraphValue, Spec]
) -> tuple[int, ...]:
    """Finds the inputs of a task whose memory outputs take, which are of their types and specs."""

    def kind(value: GraphValue) -> Hashable:
        memory = _compat.memory_kind(value.aval)
        return value.aval.shape, value.aval.dtype, memory, specs.get(value)

    def is_unread(value: GraphValue) -> bool:
        is_ours = value.argument is None or value.argument.donated
        is_last = uses.last[task.rank, value] == index and (task.rank, value) not in uses.kept
        return is_last and is_ours and value.constant is None

    wanted, taken = collections.Counter(map(kind, task.outputs)), []
    given = task.body.donated
    for i in range(len(task.inputs)) if given is None else given:
        value = task.inputs[i]
        if wanted[kind(value)] > 0 and (given is not None or is_unread(value)):
            wanted[kind(value)] -= 1
            taken.append(i)
    return tuple(taken)


class _ProgramWriter:
    """Writes one rank's program: gives values slots, and frees them."""

    def __init__(self, rank: int, uses: _Uses):
        self.rank = rank
        self.instructions: list[Instruction] = []
        self.inputs: list[tuple[int, int]] = []
        self.outputs: list[tuple[int, int]] = []
        self.constant_slots: list[tuple[int, Any]] = []
        self.uses = uses
        self.slots: dict[GraphValue, int] = {}
        self.vacant: list[int] = []
        self.num_slots = 0
        #: The values that nothing uses after the last run.
        self.ending: list[GraphValue] = []
        #: The last computation of the device, if nothing has waited for it.
        self.computed: tuple[GraphValue, ...] = ()

    def slot(self, value: GraphValue) -> int:
        """Returns the slot of a value, a new one if it has none; a constant keeps its own."""
        if value not in self.slots:
            if self.vacant and value.constant is None:
                self.slots[value] = self.vacant.pop()
            else:
                self.slots[value] = self.num_slots
                self.num_slots += 1
            if value.constant is not None:
                self.constant_slots.append((self.slots[value], value.constant))
        return self.slots[value]

    def run(self, index: int, task: GraphTask, computation: int, donated: Sequence[int]) -> None:
        if task.task and task.task.kind.lane == "copy":
            self._wait_for_computed()
        else:
            self.computed = task.outputs
        inputs = tuple(map(self.slot, task.inputs))
        gone = dict.fromkeys(task.inputs[i] for i in donated)
        for value in gone:
            self._vacate(value)
        outputs = tuple(map(self.slot, task.outputs))
        self.instructions.append(
            Run(computation, inputs, outputs, task.label, task.task, task.loop, task.others)
        )
        self.ending = [
            value
            for value in dict.fromkeys([*task.inputs, *task.outputs])
            if value.constant is None
            and value not in gone
            and self.uses.last.get((self.rank, value), -2) <= index
        ]

    def _wait_for_computed(self) -> None:
        """Waits for what the device computes, before a copy.

        A device takes the memory of what is dispatched at once, and gives that of a copied value
        back when the copy ends. So tasks dispatched far ahead would hold what offload should free.
        """
        if slots := [self.slots[value] for value in self.computed if value in self.slots]:
            self.instructions.append(Wait((slots[0],)))
        self.computed = ()

    def free(self) -> None:
        """Frees the slots of the values that nothing uses after the last run and its sends."""
        slots = tuple(self.slots[value] for value in self.ending)
        for value in self.ending:
            self._vacate(value)
        if slots:
            self.instructions.append(Free(slots))

    def _vacate(self, value: GraphValue) -> None:
        self.vacant.append(self.slots.pop(value))

    def send(self, messages) -> None:
        for values, message in messages:
            self.instructions.append(Send(tuple(map(self.slot, values)), message))

    def receive(self, messages) -> None:
        for values, message in messages:
            self.instructions.append(Receive(tuple(map(self.slot, values)), message))

    def program(self, stages: tuple[int, ...]) -> Program:
        return Program(
            self.rank,
            stages,
            tuple(self.instructions),
            self.num_slots,
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.constant_slots),
        )


# ---- how values are split ------------------------------------------------------------------------


def assign(step: Step, graph: TaskGraph) -> dict[GraphValue, Spec]:
    """Decides how each value of a step is split; there is nothing to decide without axes.

    What may be split in any way (zeros, positions) is split as the first task that reads it wants,
    and the first value of an accumulator as what is added to it.
    """
    if step.inside is None:
        return {}
    known = _Known(graph)
    answers: dict[tuple[Body, tuple[Spec | None, ...]], Any] = {}
    for task in graph.tasks:
        if None not in map(known.get, (*task.inputs, *task.outputs)):
            continue
        given = tuple(map(known.get, task.inputs))
        if (task.body, given) not in answers:
            answers[task.body, given] = propagate(task.body.jaxpr, given, step.inside.sizes)
        inputs, outputs = answers[task.body, given]
        for value, spec in zip((*task.inputs, *task.outputs), (*inputs, *outputs), strict=True):
            known.add(value, spec)
        # The next microbatch has the same answer: its accumulators are split as this one left them.
        pairs = zip(task.inputs, given, strict=True)
        again = tuple(spec if v.memory is None else known.get(v) for v, spec in pairs)
        answers.setdefault((task.body, again), (inputs, outputs))
    return {v: known.get(v) or replicated(len(v.aval.shape)) for v in known.values}


class _Known:
    """The specs of values as far as they are known; the values of a buffer share one."""

    def __init__(self, graph: TaskGraph):
        of_tasks = (v for task in graph.tasks for v in (*task.inputs, *task.outputs))
        self.values = dict.fromkeys([*(value for value, _ in graph.arguments), *of_tasks])
        self._specs: dict[Hashable, Spec] = {}
        for value in self.values:
            self.add(value, value.spec if value.aval.shape else ())

    def get(self, value: GraphValue) -> Spec | None:
        """Returns the spec of a value; None while it may be split in any way."""
        return self._specs.get(value if value.memory is None else value.memory)

    def add(self, value: GraphValue, spec: Spec | None) -> None:
        """Notes the spec of a value that may be split in any way so far."""
        if spec is not None and not value.begins:
            self._specs.setdefault(value if value.memory is None else value.memory, spec)
