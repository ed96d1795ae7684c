"""Lets the loops of a step overlap, so that ranks do not drain between them where they need not."""

import collections
import dataclasses
import heapq
from collections.abc import Sequence

from jaxpp import _compat
from jaxpp.transforms.graph import GraphTask, TaskGraph, Value


def join_loops(graph: TaskGraph) -> TaskGraph:
    """Lets a rank begin a loop before it has ended the loop before it.

    A rank runs the tasks of each loop in the loop's order. If a later loop has one that can run,
    such as a forward, and the rank will never hold more activations than it would without, it
    takes that; else that of the earliest loop that can run. A loop that reads what an update makes
    begins after the update. The tasks stay as they are where this gains nothing, by a clock on
    which they take the times of their kinds, and what is around the loops takes none.

    Args:
        graph: the tasks of a step, one loop after the other.
    """
    if len({task.loop for task in graph.tasks if task.task}) < 2:
        return graph
    joined, apart = (_Joining(graph, has_room) for has_room in (True, False))
    if joined.run() >= apart.run():
        return graph
    return dataclasses.replace(graph, tasks=tuple(graph.tasks[n] for n in joined.order))


class _Joining:
    """The tasks of a graph, by their numbers, while its ranks take them.

    Args:
        graph: the graph.
        has_room: whether the ranks have room for tasks of a later loop.
    """

    def __init__(self, graph: TaskGraph, has_room: bool):
        self.tasks = graph.tasks
        self.behind = _behind(graph.tasks)
        self.readers: list[list[int]] = [[] for _ in self.tasks]
        for n, before in enumerate(self.behind):
            for other in before:
                self.readers[other].append(n)
        #: For each task, how many of those behind it have not ended.
        self.waits = list(map(len, self.behind))
        self.ranks = [_Rank(graph, rank, has_room) for rank in range(len(graph.stages))]
        #: The tasks that have their place.
        self.order: dict[int, None] = {}

    def run(self) -> float:
        """Puts the tasks in the order in which ranks take them; returns when the last one ends."""
        now = 0.0
        ending = [n for n, count in enumerate(self.waits) if not count and not self.tasks[n].task]
        for n in ending:  # no loop is behind them: they come before the first task that reads them
            ending += self._end(n)
        running: list[tuple[float, int]] = []  # when tasks end
        while True:
            for rank in self.ranks:
                while rank.free_at <= now and (n := rank.take(self.waits)) is not None:
                    self._place(n)
                    heapq.heappush(running, (rank.run(self.tasks[n], now), n))
            if not running:
                break
            now = running[0][0]
            ending = []
            while running and running[0][0] == now:
                ending.append(heapq.heappop(running)[1])
            for n in ending:
                self._place(n)
                ending += self._end(n)
        for n in range(len(self.tasks)):
            self._place(n)
        return now

    def _end(self, number: int) -> list[int]:
        """Notes that a task has ended; returns what is around the loops and can then run."""
        for n in self.readers[number]:
            self.waits[n] -= 1
        return [n for n in self.readers[number] if not self.waits[n] and not self.tasks[n].task]

    def _place(self, number: int) -> None:
        """Gives a task its place, after all that are behind it."""
        todo = [number]
        while todo:
            lacking = [n for n in self.behind[todo[-1]] if n not in self.order]
            if not lacking:
                self.order.setdefault(todo.pop())
            todo += lacking


class _Rank:
    """What a rank has left to run: tasks by their numbers, in a row for each loop.

    Args:
        graph: the tasks of all ranks.
        number: that of the rank.
        has_room: whether it may hold as much as its loops do, one after the other.
    """

    def __init__(self, graph: TaskGraph, number: int, has_room: bool):
        rows: dict[int, list[int]] = {}
        for n, task in enumerate(graph.tasks):
            if task.task and task.rank == number:
                rows.setdefault(task.loop, []).append(n)
        self.rows = [collections.deque(row) for row in rows.values()]
        self.change = _changes(graph.tasks, number)
        #: By how much what the rank holds grows at most from a task to the end of its loop.
        self.rise: dict[int, int] = {}
        for row in rows.values():
            most = 0
            for n in reversed(row):
                self.rise[n] = most = max(0, self.change[n] + most)
        most = max((self.rise[row[0]] for row in rows.values()), default=0)
        self.limit = most if has_room else -1
        self.held = 0
        self.free_at = 0.0

    def take(self, waits: Sequence[int]) -> int | None:
        """Takes what the rank runs next; None where nothing can run, or has room."""
        taken: collections.deque[int] | None = None
        rise = 0  # in what is left of the loops before
        for place, row in enumerate(filter(None, self.rows)):
            n = row[0]
            has_room = not place or self.held + self.change[n] + rise <= self.limit
            if has_room and not waits[n] and (taken is None or self.change[n] > 0):
                taken = row
            rise += self.rise[n]
        if taken is None:
            return None
        self.held += self.change[taken[0]]
        return taken.popleft()

    def run(self, task: GraphTask, now: float) -> float:
        """Runs a task of a loop from now on; returns when it ends."""
        assert task.task is not None
        end = now + task.task.kind.cost
        if task.task.kind.lane == "compute":
            self.free_at = end
        return end


def _behind(tasks: Sequence[GraphTask]) -> list[list[int]]:
    """Finds for each task those that come before it in any order."""
    made: dict[Value, dict[int, int]] = {}
    read: dict[tuple[int, Value], list[int]] = {}
    for n, task in enumerate(tasks):
        for value in task.outputs:
            made.setdefault(value, {})[task.rank] = n
    ordered: int | None = None  # the last task with ordered effects
    found = []
    for n, task in enumerate(tasks):
        behind = [
            makers.get(task.rank, makers[min(makers)])
            for makers in (made[value] for value in task.inputs if value in made)
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
    own = [n for n, task in enumerate(tasks) if task.task and task.rank == rank]
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for n in own:
        for value in (*tasks[n].inputs, *tasks[n].outputs):
            if value.kind == "edge":
                first.setdefault(value, n)
                last[value] = n
    change = dict.fromkeys(own, 0)
    for value, n in first.items():
        size = value.aval.size * value.aval.dtype.itemsize
        change[n] += size
        change[last[value]] -= size
    return change
