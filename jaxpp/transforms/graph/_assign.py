"""Decides how each value of a graph is split inside a rank, before anything is compiled.

The specs of the arguments are propagated through the tasks in the order in which they run, and
every computation is compiled with its specs. So a rank sends an array as the next one expects it,
without asking the compiler, on any mesh and for any schedule.
"""

from collections.abc import Hashable
from typing import Any

from jaxpp._specs import Spec, replicated
from jaxpp.transforms._step import Step
from jaxpp.transforms.graph._graph import Body, TaskGraph, Value
from jaxpp.transforms.inside import propagate


def assign(step: Step, graph: TaskGraph) -> dict[Value, Spec]:
    """Decides how each value of a step is split; there is nothing to decide without axes.

    What may be split in any way (zeros, positions) is split as the first task that reads it wants,
    and the first value of an accumulator as what is added to it.

    Args:
        step: the step.
        graph: its tasks.
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

    def get(self, value: Value) -> Spec | None:
        """Returns the spec of a value; None while it may be split in any way."""
        return self._specs.get(value if value.memory is None else value.memory)

    def add(self, value: Value, spec: Spec | None) -> None:
        """Notes the spec of a value that may be split in any way so far."""
        if spec is not None and not value.begins:
            self._specs.setdefault(value if value.memory is None else value.memory, spec)
