"""A second simulator, written for tests alone: slow, plain, and task by task."""

from collections.abc import Callable, Iterable

from jaxpp.schedules import Kind, Table, Task

Times = dict[Task, tuple[float, float]]


def inputs(table: Table) -> Callable[[Task], list[Task]]:
    """What a task needs: forwards of the stages it reads from, backwards of those that read it."""
    reads = table.stage_inputs or [[s - 1] if s else [] for s in range(table.num_stages)]
    readers = [[s for s, own in enumerate(reads) if stage in own] for stage in range(len(reads))]

    def needs(task: Task) -> list[Task]:
        kind, stage, i = task.kind, task.stage, task.microbatch
        if kind is Kind.F:
            return [Task(Kind.F, s, i) for s in reads[stage]]
        if kind is Kind.R:
            return [Task(Kind.F, stage, i)]
        if kind is Kind.W:
            return [Task(Kind.I, stage, i)]
        backwards = [Task(k, s, i) for s in readers[stage] for k in (Kind.B, Kind.I)]
        forms = [*backwards, Task(Kind.R, stage, i)]
        return [Task(Kind.F, stage, i), *(task for task in forms if task in table.tasks)]

    return needs


def simulate(
    table: Table,
    time: Callable[[Task], float],
    delay: Callable[[Task, int, int], float] = lambda task, source, target: 0.0,
    needs: Callable[[Task], Iterable[Task]] | None = None,
    overlap: str = "none",
) -> Times:
    """The start and end of each task; two that overlap take as long together as apart.

    Args:
      table: the table.
      time: how long a task takes.
      delay: how long what a task makes takes from one rank to another.
      needs: the tasks that one comes after; by default `inputs(table)`.
      overlap: "atomic", "free" or "none", as for the simulator.
    """
    needs = needs or inputs(table)
    rank_of = {task: rank for rank, tasks in enumerate(table.ranks) for task in tasks}
    done: Times = {}
    left = [list(tasks) for tasks in table.ranks]
    clock = [0.0] * table.num_ranks

    def ready(task: Task, rank: int) -> float:
        arrivals = [
            done[need][1] + (delay(need, rank_of[need], rank) if rank_of[need] != rank else 0.0)
            for need in needs(task)
        ]
        return max([clock[rank], *arrivals])

    def step(rank: int) -> bool:
        if not left[rank]:
            return False
        pair = overlap != "none" and left[rank][0] in table.overlaps
        unit = left[rank][: 2 if pair else 1]
        if any(need not in done for task in unit for need in needs(task)):
            return False
        starts = [ready(task, rank) for task in unit]
        if overlap == "atomic":
            starts = [max(starts)] * len(starts)
        end = min(starts) + sum(map(time, unit))
        end = max([end, *(s + time(task) for s, task in zip(starts, unit, strict=True))])
        done.update({task: (s, end) for s, task in zip(starts, unit, strict=True)})
        clock[rank] = end
        del left[rank][: len(unit)]
        return True

    while any([step(rank) for rank in range(table.num_ranks)]):
        pass
    assert not any(left), "the table deadlocks"
    return done
