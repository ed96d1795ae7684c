"""`fuse`: tasks that a table has run together become one task, of one computation."""

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jaxpp import jaxprs
from jaxpp.schedules import Kind, Task
from jaxpp.transforms.graph._graph import Body, GraphTask, TaskGraph, Value


def fuse(graph: TaskGraph) -> tuple[TaskGraph, tuple[str, ...]]:
    """Fuses each task with the next one of its rank, where the table has the two run together.

    A pair starts when the inputs of both are there, and what either makes is sent after it. Tasks
    of other ranks that stood between the two, and need the first, come after the pair.

    Args:
        graph: the tasks.

    Returns:
        The tasks with their pairs fused, and why some stay apart, a line each.
    """
    order, bodies = list(graph.tasks), dict[Hashable, Body]()
    apart: dict[str, list[str]] = {}
    for first in (task for task in graph.tasks if task.beside):
        at = order.index(first)
        after = (n for n in range(at + 1, len(order)) if order[n].rank == first.rank)
        if (end := next(after, None)) is None or not _are_of_one(order[end].task, first.beside):
            reason = f"{first.beside} does not come after it"
            apart.setdefault(reason, []).append(first.label)
            continue
        second, between = order[end], order[at + 1 : end]
        late = _waiting(first, between)
        if reason := _problem(first, second, late):
            apart.setdefault(reason, []).append(f"{first.label} and {second.label}")
            continue
        early = [task for task in between if task not in late]
        order[at : end + 1] = [*early, _fused(first, second, bodies), *late]
    notes = [f"not fused, for {reason}: {', '.join(which)}" for reason, which in apart.items()]
    return TaskGraph(tuple(order), graph.arguments, graph.results, graph.stages), tuple(notes)


def _are_of_one(task: Task | None, wanted: Task | None) -> bool:
    """Tells whether a task is the wanted one, or the half of it that has work."""
    return bool(
        task
        and wanted
        and (task.stage, task.microbatch) == (wanted.stage, wanted.microbatch)
        and (task.kind == wanted.kind or {task.kind, wanted.kind} == {Kind.I, Kind.W})
    )


def _waiting(first: GraphTask, others: Sequence[GraphTask]) -> list[GraphTask]:
    """Finds which of some tasks of other ranks wait for a task, or stand behind one that does."""
    waiting, made, ranks = list[GraphTask](), set(first.outputs), set[int]()
    for task in others:
        if task.rank in ranks or not made.isdisjoint(task.inputs):
            waiting.append(task)
            made.update(task.outputs)
            ranks.add(task.rank)
    return waiting


def _problem(first: GraphTask, second: GraphTask, late: Sequence[GraphTask]) -> str:
    """Says why two tasks cannot be one; empty where they can."""
    for task in late:
        if not set(task.outputs).isdisjoint(second.inputs):
            return f"the second reads what {task.label} of rank {task.rank} makes of the first"
    for task in first, second:
        if task.body.jaxpr.effects or any(
            jaxprs.contains(e, _calls_back) for e in task.body.jaxpr.eqns
        ):
            return f"{task.body.name} calls back to Python, or has another effect"
        if task.waits or (task.task and task.task.kind.lane == "copy"):
            return f"{task.body.name} copies to another memory, or waits"
    return ""


def _calls_back(eqn: Any) -> bool:
    return eqn.primitive.name.endswith("callback")


def _fused(first: GraphTask, second: GraphTask, bodies: dict[Hashable, Body]) -> GraphTask:
    """Makes one task of two; those with the same bodies, which share the same values, share one.

    What the first one makes and the second one takes the memory of is inside it.
    """
    taken = [task.inputs[i] for task in (first, second) for i in task.body.donated or ()]
    inside = {v for v in first.outputs if v in taken}
    inputs = list(
        dict.fromkeys([*first.inputs, *(v for v in second.inputs if v not in first.outputs)])
    )
    outputs = [v for v in (*first.outputs, *second.outputs) if v not in inside]
    # JAX gives the memory of donated inputs to outputs of their type in this order.
    places = {v.memory: n for n, v in enumerate(inputs) if v.memory is not None and v in taken}
    outputs.sort(key=lambda v: places.get(v.memory, len(places)))
    donated = tuple(n for n, v in enumerate(inputs) if v in taken)
    number = {v: n for n, v in enumerate(dict.fromkeys([*inputs, *first.outputs, *second.outputs]))}
    values = (*first.inputs, *first.outputs, *second.inputs, *second.outputs, *outputs)
    key = first.body, second.body, donated, tuple(number[v] for v in values)
    if key not in bodies:
        bodies[key] = Body(
            f"{first.body.name}_{second.body.name}",
            _jaxpr_of((first, second), inputs, outputs),
            donated,
        )
    assert second.task is not None
    return GraphTask(
        first.rank,
        bodies[key],
        tuple(inputs),
        tuple(outputs),
        f"{first.label}+{second.label}",
        first.task,
        first.loop,
        others=(second.task,),
    )


def _jaxpr_of(tasks: Sequence[GraphTask], inputs: Sequence[Value], outputs: Sequence[Value]) -> Any:
    """Makes the jaxpr of several tasks: a call of each."""
    types = {v: a for t in tasks for v, a in zip(t.inputs, t.body.jaxpr.in_avals, strict=True)}

    def run(*arrays: jax.Array) -> list[jax.Array]:
        known = dict(zip(inputs, arrays, strict=True))
        for task in tasks:
            own = jax.lax.optimization_barrier(list(map(known.__getitem__, task.inputs)))
            called = functools.partial(jaxprs.run, task.body.jaxpr)
            called.__name__ = task.body.name
            results = jax.jit(called)(*own)
            known |= zip(task.outputs, results, strict=True)
        return list(map(known.__getitem__, outputs))

    with contextlib.ExitStack() as stack:
        for task in tasks:
            stack.enter_context(jaxprs.with_its_types(task.body.jaxpr))
        made, constants = jaxprs.without_constants(jax.make_jaxpr(run)(*map(types.get, inputs)))
    assert not constants
    return made
