"""Runs a table as its ranks would: each in its own order, each task after what it depends on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxpp.schedules._table import Kind, Table, Task

Dependencies = Callable[[Task], Iterable[Task]]


@dataclass(frozen=True, slots=True)
class Span:
    """One task on its rank, from `start` to `end`, in the units of the cost model.

    >>> from jaxpp.schedules import OneFOneB, simulate
    >>> simulate(OneFOneB().table(num_stages=1, num_microbatches=1)).spans[0]
    Span(rank=0, task=Task(kind=<Kind.F: 'F'>, stage=0, microbatch=0), start=0.0, end=1.0)
    """

    rank: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Block:
    """A rank that cannot go on: `task` is its next one, and `needs` has not been run."""

    rank: int
    task: Task
    needs: Task


def stage_dependencies(
    table: Table, edges: Iterable[tuple[int, int]] | None = None
) -> Dependencies:
    """Gives the dependencies of a table's tasks from the graph of its stages.

    `F` needs the `F` of each stage that it reads from; `B` and `I` need the `F` of their own stage
    and the `B`, or the `I` where the backward is split, of each stage that reads from it; `W` needs
    the `I` of its own stage.

    Args:
      table: the table.
      edges: (producer, consumer) pairs of stages; by default the chain 0 -> 1 -> ... of its stages.

    Returns:
      The tasks that a task must come after.

    >>> from jaxpp.schedules import OneFOneB
    >>> needs = stage_dependencies(OneFOneB().table(num_stages=4, num_microbatches=2))
    >>> print(*needs(Task(Kind.B, stage=1, microbatch=0)))
    F1.0 B2.0
    """
    if edges is None:
        edges = [(stage, stage + 1) for stage in range(table.num_stages - 1)]
    producers: dict[int, list[int]] = {}
    consumers: dict[int, list[int]] = {}
    for producer, consumer in dict.fromkeys(edges):
        producers.setdefault(consumer, []).append(producer)
        consumers.setdefault(producer, []).append(consumer)
    tasks = table.tasks

    def dependencies(task: Task) -> list[Task]:
        stage, microbatch = task.stage, task.microbatch
        if task.kind is Kind.F:
            return [Task(Kind.F, s, microbatch) for s in producers.get(stage, ())]
        if task.kind is Kind.W:
            return [Task(Kind.I, stage, microbatch)]
        needs = [Task(Kind.F, stage, microbatch)]
        for s in consumers.get(stage, ()):
            half = Task(Kind.I, s, microbatch)
            needs.append(half if half in tasks else Task(Kind.B, s, microbatch))
        return needs

    return dependencies


def execute(
    table: Table,
    cost: Callable[[Task], float],
    delay: Callable[[Task], float],
    dependencies: Dependencies,
) -> tuple[list[Span], list[Block]]:
    """Runs each rank's tasks in order, each as soon as the rank is free and its inputs are there.

    Args:
      table: the table.
      cost: the time of a task.
      delay: the time for what a task makes to reach another rank.
      dependencies: the tasks that a task must come after.

    Returns:
      The span of each task that ran, and the ranks left stuck: none where the table is sound.
    """
    rank_of = {task: rank for rank, tasks in enumerate(table.ranks) for task in tasks}
    cursors = [0] * table.num_ranks
    free = [0.0] * table.num_ranks
    ends: dict[Task, float] = {}
    waiting: dict[Task, list[int]] = {}
    spans: list[Span] = []
    runnable = list(range(table.num_ranks))
    while runnable:
        rank = runnable.pop()
        for task in table.ranks[rank][cursors[rank] :]:
            needs = tuple(dependencies(task))
            missing = next((need for need in needs if need not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = free[rank]
            for need in needs:
                start = max(start, ends[need] + (delay(need) if rank_of[need] != rank else 0.0))
            free[rank] = ends[task] = start + cost(task)
            spans.append(Span(rank, task, start, ends[task]))
            cursors[rank] += 1
            runnable += waiting.pop(task, ())
    blocks = [
        Block(rank, table.ranks[rank][cursors[rank]], missing)
        for missing, ranks in waiting.items()
        for rank in ranks
    ]
    return spans, sorted(blocks, key=lambda block: block.rank)
