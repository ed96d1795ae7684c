"""Lets the loops of a step overlap, so that ranks do not drain between them where they need not."""

import dataclasses
from collections.abc import Sequence

from jaxpp import _compat
from jaxpp.schedules.simulator import join
from jaxpp.transforms.graph import GraphTask, GraphValue, TaskGraph


def join_loops(graph: TaskGraph) -> TaskGraph:
    """Lets a rank begin a loop before it has ended the loop before it.

    Tasks are put in one order as by `jaxpp.schedules.simulator.join`, where what a rank holds is
    the bytes of its activations. A loop that reads what an update makes begins after the update.
    The tasks stay as they are where this gains nothing, by a clock on which they take the times of
    their kinds, and what is around the loops takes none.

    Args:
        graph: the tasks of a step, one loop after the other.
    """
    if len({task.loop for task in graph.tasks if task.task}) < 2:
        return graph
    change, time, loops = [0] * len(graph.tasks), [0.0] * len(graph.tasks), []
    beside = set()
    for rank in range(len(graph.stages)):
        rows: dict[int, list[int]] = {}
        for n, task in enumerate(graph.tasks):
            if task.task and task.rank == rank:
                rows.setdefault(task.loop, []).append(n)
                time[n] = task.task.kind.cost
                if task.task.kind.lane != "compute":
                    beside.add(n)
        loops.append(list(rows.values()))
        for n, nbytes in _changes(graph.tasks, rank).items():
            change[n] = nbytes
    order = join(loops, _behind(graph.tasks), change, time, beside)
    return dataclasses.replace(
        graph, tasks=tuple(graph.tasks[n] for n in order or range(len(time)))
    )


def _behind(tasks: Sequence[GraphTask]) -> list[list[int]]:
    """Finds for each task those that come before it in any order."""
    ranks_of: dict[GraphValue, dict[int, int]] = {}
    read: dict[tuple[int, GraphValue], list[int]] = {}
    for n, task in enumerate(tasks):
        for value in task.outputs:
            ranks_of.setdefault(value, {})[task.rank] = n
    ordered: int | None = None  # the last task with ordered effects
    found = []
    for n, task in enumerate(tasks):
        behind = [
            makers.get(task.rank, makers[min(makers)])
            for makers in (ranks_of[value] for value in task.inputs if value in ranks_of)
        ]
        for i in task.body.donated or ():  # whose memory the task takes
            behind += read.get((task.rank, task.inputs[i]), ())
        for value in task.inputs:
            read.setdefault((task.rank, value), []).append(n)
        if any(map(_compat.is_ordered, task.body.jaxpr.eqns)):
            behind += [] if ordered is None else [ordered]
            ordered = n
        found.append(list(dict.fromkeys(behind)))
    return found


def _changes(tasks: Sequence[GraphTask], rank: int) -> dict[int, int]:
    """Finds by how many bytes each task of a rank's loops changes the activations that it holds."""
    positions = [n for n, task in enumerate(tasks) if task.task and task.rank == rank]
    first: dict[GraphValue, int] = {}
    last: dict[GraphValue, int] = {}
    for n in positions:
        for value in (*tasks[n].inputs, *tasks[n].outputs):
            if value.kind == "edge":
                first.setdefault(value, n)
                last[value] = n
    change = dict.fromkeys(positions, 0)
    for value, n in first.items():
        size = value.aval.size * value.aval.dtype.itemsize
        change[n] += size
        change[last[value]] -= size
    return change
