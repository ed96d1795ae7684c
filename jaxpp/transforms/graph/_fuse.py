"""`fuse`: tasks of a rank become one task, of one computation."""

import collections
import contextlib
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import jax

from jaxpp import _compat, jaxprs
from jaxpp.schedules import Kind, Task
from jaxpp.transforms.graph._graph import Body, GraphTask, GraphValue, TaskGraph

#: The tasks that become one: none; two that the table has run together; and all without a message
#: between them, too.
Fuse = Literal["none", "pairs", "chains"]


def fuse(graph: TaskGraph, which: Fuse) -> tuple[TaskGraph, tuple[str, ...]]:
    """Fuses tasks of a rank that are neighbours in its order.

    What is fused starts when the inputs of all are there, and what any of them makes is sent after
    it. Each task is a call in the new computation; equal ones share a computation. Also says why
    some pairs stay apart, a line for each reason.
    """
    notes: tuple[str, ...] = ()
    bodies: dict[Hashable, Body] = {}
    if which != "none":
        graph, notes = _with_pairs(graph, bodies)
    if which == "chains":
        graph = _with_chains(graph, bodies)
    return graph, notes


def _with_pairs(
    graph: TaskGraph, bodies: dict[Hashable, Body]
) -> tuple[TaskGraph, tuple[str, ...]]:
    """Fuses each task with the next one of its rank where the table has the two run together.

    Tasks of other ranks that stood between the two, and need the first, come after the pair.
    """
    order, readers = list(graph.tasks), _readers(graph)
    apart: dict[str, list[str]] = {}
    for first in (task for task in graph.tasks if task.beside):
        at = order.index(first)
        after = (n for n in range(at + 1, len(order)) if order[n].rank == first.rank)
        if (end := next(after, None)) is None or not _is_wanted(order[end].task, first.beside):
            pair = f"{first.label} and {first.beside}"
            apart.setdefault("they are no neighbours", []).append(pair)
            continue
        second, between = order[end], order[at + 1 : end]
        late = _waiting(first, between)
        if reason := _problem(first, second, late):
            apart.setdefault(reason, []).append(f"{first.label} and {second.label}")
            continue
        early = [task for task in between if task not in late]
        order[at : end + 1] = [*early, _fused((first, second), readers, bodies), *late]
    notes = tuple(f"not fused, for {why}: {', '.join(pairs)}" for why, pairs in apart.items())
    return TaskGraph(tuple(order), graph.arguments, graph.results, graph.stages), notes


def _is_wanted(task: Task | None, wanted: Task | None) -> bool:
    """Tells whether a task is the wanted one, or the half of it that has work."""
    return bool(
        task
        and wanted
        and (task.stage, task.microbatch) == (wanted.stage, wanted.microbatch)
        and (task.kind == wanted.kind or {task.kind, wanted.kind} == {Kind.I, Kind.W})
    )


def _waiting(first: GraphTask, others: Sequence[GraphTask]) -> list[GraphTask]:
    """Finds which of some tasks of other ranks wait for a task, or stand behind one that does."""
    waiting, unready, ranks = list[GraphTask](), set(first.outputs), set[int]()
    for task in others:
        if task.rank in ranks or not unready.isdisjoint(task.inputs):
            waiting.append(task)
            unready.update(task.outputs)
            ranks.add(task.rank)
    return waiting


def _problem(first: GraphTask, second: GraphTask, late: Sequence[GraphTask] = ()) -> str:
    """Says why two tasks cannot be one; empty where they can."""
    for task in late:
        if not set(task.outputs).isdisjoint(second.inputs):
            return f"the second reads what {task.label} of rank {task.rank} makes of the first"
    for task in first, second:
        jaxpr = task.body.jaxpr
        if jaxpr.effects or any(jaxprs.contains(e, _calls_back) for e in jaxpr.eqns):
            return f"{task.body.name} calls back to Python, or has another effect"
        if task.waits or not task.task or task.task.kind.lane != "compute":
            return f"{task.body.name} copies or is a collective, or is no task of a loop"
    return "they are of two loops" if first.loop != second.loop else ""


def _calls_back(eqn: Any) -> bool:
    return eqn.primitive.name.endswith("callback")


def _with_chains(graph: TaskGraph, bodies: dict[Hashable, Body]) -> TaskGraph:
    """Fuses the tasks of a rank that have no message between them."""
    readers, ranks = _readers(graph), collections.defaultdict[GraphValue, set[int]](set)
    for task in graph.tasks:
        for value in task.inputs:
            ranks[value].add(task.rank)
    for value, homes in graph.results:
        ranks[value].update(homes)
    there = {(rank, value) for value, homes in graph.arguments for rank in homes}
    chains: list[list[GraphTask]] = []
    last: dict[int, list[GraphTask]] = {}
    for task in graph.tasks:
        rank, chain = task.rank, last.get(task.rank)
        is_fed = all((rank, v) in there or v.constant is not None for v in task.inputs)
        sends = chain and any(ranks[v] - {rank} for v in chain[-1].outputs)
        if chain and is_fed and not sends and not _problem(chain[-1], task):
            chain.append(task)
        else:
            last[rank] = [task]
            chains.append(last[rank])
        there |= {(rank, v) for v in (*task.inputs, *task.outputs)}
    order = (c[0] if len(c) == 1 else _fused(c, readers, bodies) for c in chains)
    return TaskGraph(tuple(order), graph.arguments, graph.results, graph.stages)


def _readers(graph: TaskGraph) -> collections.Counter[GraphValue]:
    """Counts for each value the tasks that read it, and the results that it is."""
    read = (v for task in graph.tasks for v in dict.fromkeys(task.inputs))
    return collections.Counter([*read, *(value for value, _ in graph.results)])


def _fused(
    tasks: Sequence[GraphTask], readers: Mapping[GraphValue, int], bodies: dict[Hashable, Body]
) -> GraphTask:
    """Makes one task of several; those with the same bodies, joined alike, share one.

    What only they read of each other is inside it.
    """
    results = dict.fromkeys(v for task in tasks for v in task.outputs)
    read = collections.Counter(v for task in tasks for v in dict.fromkeys(task.inputs))
    taken = {task.inputs[i] for task in tasks for i in task.body.donated or ()}
    inputs = [v for v in read if v not in results]
    outputs = [v for v in results if not 0 < readers[v] == read[v]]
    # JAX gives the memory of donated inputs to outputs of their type in this order.
    places = {v.memory: n for n, v in enumerate(inputs) if v.memory is not None and v in taken}
    outputs.sort(key=lambda v: places.get(v.memory, len(places)))
    donated = tuple(n for n, v in enumerate(inputs) if v in taken)
    number = {v: n for n, v in enumerate([*inputs, *results])}
    values = [v for task in tasks for v in (*task.inputs, *task.outputs)]
    key = tuple(task.body for task in tasks), donated, *map(number.get, [*values, *outputs])
    if key not in bodies:
        name = "_".join(task.body.name for task in tasks)
        bodies[key] = Body(name, _jaxpr_of(tasks, inputs, outputs), donated)
    first, *others = [t for task in tasks for t in (task.task, *task.others) if t]
    label = "+".join(task.label for task in tasks)
    fields = bodies[key], tuple(inputs), tuple(outputs), label, first, tasks[0].loop
    return GraphTask(tasks[0].rank, *fields, others=tuple(others))


def _jaxpr_of(
    tasks: Sequence[GraphTask], inputs: Sequence[GraphValue], outputs: Sequence[GraphValue]
) -> Any:
    """Makes the jaxpr of several tasks: a call of each, which XLA does not mix with the others."""
    types = {v: a for t in tasks for v, a in zip(t.inputs, t.body.jaxpr.in_avals, strict=True)}

    def run(*arrays: jax.Array) -> list[jax.Array]:
        known = dict(zip(inputs, arrays, strict=True))
        for task in tasks:
            operands = jax.lax.optimization_barrier(list(map(known.__getitem__, task.inputs)))
            called = functools.partial(jaxprs.run, task.body.jaxpr)
            results = _compat.call_apart(called, task.body.name, *operands)
            known |= zip(task.outputs, results, strict=True)
        return list(map(known.__getitem__, outputs))

    with contextlib.ExitStack() as stack:
        for task in tasks:
            stack.enter_context(jaxprs.with_its_types(task.body.jaxpr))
        jaxpr, constants = jaxprs.without_constants(jax.make_jaxpr(run)(*map(types.get, inputs)))
    assert not constants
    return jaxpr
