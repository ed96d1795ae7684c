"""The synthesizer's problem in numbers: the time, memory and inputs of a table's tasks."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxpp.schedules._costs import Costs, Memory
from jaxpp.schedules._execute import stage_dependencies
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task

#: The value to minimise: `"wall"`, the makespan, or `"span"`, the longest span of a rank.
Objective = Literal["wall", "span"]
#: For each rank, the numbers of its tasks, in order.
Orders = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """All tasks of a pipeline, numbered: task `op * num_microbatches + microbatch`.

    An op is a kind of task of a stage. Where there are several directions, each has its own stages,
    numbered on from those of the one before it, and its own microbatches: so the directions are
    parts of one graph of stages. The numbers are in plain lists, for speed; nothing changes them.

    Args:
      table: the table with no order: sizes, placement, and the graph of its stages.
      objective: what to minimise.
      ops: the kind and stage of each op.
      rank_ops: for each rank, its ops: forwards by stage, then backwards from the last stage.
      op_rank: the rank of each op.
      time: the time of each task.
      change: what each task adds to what its rank holds.
      limits: the most that each rank may hold, with room for rounding.
      local: for each op, the ops of its rank that it comes after, for the same microbatch.
      remote: for each task, the (task, transfer time) pairs of other ranks that it waits for.
      readers: for each task, the (task, transfer time) pairs of other ranks that wait for it.
    """

    table: Table
    objective: Objective
    ops: list[tuple[Kind, int]]
    rank_ops: list[list[int]]
    op_rank: list[int]
    time: list[float]
    change: list[float]
    limits: list[float]
    local: list[list[int]]
    remote: list[tuple[tuple[int, float], ...]]
    readers: list[list[tuple[int, float]]]

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of each direction."""
        return self.table.num_microbatches // len(self.table.placement)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.rank_ops)

    @property
    def splits(self) -> bool:
        """Tells whether the backward is in two halves."""
        return any(kind is Kind.W for kind, _ in self.ops)

    def task(self, n: int) -> Task:
        """Returns the task of a number."""
        return _task(self.table, *self.ops[n // self.num_microbatches], n % self.num_microbatches)

    def to_table(self, orders: Orders) -> Table:
        """Makes the table in which the ranks have these orders."""
        ranks = tuple(tuple(map(self.task, order)) for order in orders)
        return dataclasses.replace(self.table, ranks=ranks)

    def to_orders(self, table: Table) -> list[list[int]]:
        """Returns the numbers of a table's tasks."""
        at = {op: n for n, op in enumerate(self.ops)}
        m, directions = self.num_microbatches, table.direction_of
        which = [directions[:i].count(own) for i, own in enumerate(directions)]
        return [
            [
                at[t.kind, directions[t.microbatch] * table.num_stages + t.stage] * m
                + which[t.microbatch]
                for t in order
            ]
            for order in table.ranks
        ]

    def fits(self, orders: Orders) -> bool:
        """Tells whether no rank holds more than its limit."""
        return all(p <= limit for p, limit in zip(self.peaks(orders), self.limits, strict=True))

    def peaks(self, orders: Orders) -> list[float]:
        """Returns the most that each rank holds at once."""
        change = self.change
        peaks = []
        for order in orders:
            held = peak = 0.0
            for n in order:
                held += change[n]
                if held > peak:
                    peak = held
            peaks.append(peak)
        return peaks


def _task(table: Table, kind: Kind, stage: int, microbatch: int) -> Task:
    """Returns a task, from a stage and a microbatch of its direction: these take turns."""
    direction, own = divmod(stage, table.num_stages)
    return Task(kind, own, microbatch * len(table.placement) + direction)


def make_problem(
    costs: Costs,
    placement: Sequence[Sequence[int]],
    num_microbatches: int,
    memory: Memory,
    limits: Sequence[float],
    objective: Objective,
    stage_inputs: tuple[tuple[int, ...], ...] | None,
    split: bool,
) -> Problem:
    """Numbers the tasks of a pipeline, with the backward whole or split.

    The placement has the rank of each stage, for each direction; microbatches take turns.
    """
    count, num_stages = len(placement), len(placement[0])
    m, ranks = num_microbatches // count, [rank for own in placement for rank in own]
    halves = (Kind.I, Kind.W) if split else (Kind.B,)
    ops = [(Kind.F, s) for s in range(len(ranks))]
    ops += [(kind, s) for kind in halves for s in reversed(range(len(ranks)))]
    at = {op: n for n, op in enumerate(ops)}
    table = Table(
        (), num_stages, num_microbatches, tuple(map(tuple, placement)), stage_inputs,
        direction_of=tuple(i % count for i in range(num_microbatches)),
    )  # fmt: skip
    tasks = [_task(table, *op, i) for op in ops for i in range(m)]
    op_rank = [ranks[stage] for _, stage in ops]
    graph = stage_inputs or tuple((s - 1,) if s else () for s in range(num_stages))
    whole = tuple(
        tuple(first + need for need in own)
        for first in range(0, len(ranks), num_stages)
        for own in graph
    )
    sample = (tuple(Task(*op, 0) for op in ops),)
    needs = stage_dependencies(Table(sample, len(ranks), 1, stage_inputs=whole))
    local: list[list[int]] = [[] for _ in ops]
    remote: list[list[tuple[int, float]]] = [[] for _ in tasks]
    readers: list[list[tuple[int, float]]] = [[] for _ in tasks]
    for op, key in enumerate(ops):
        for need in (at[need] for need in needs[key] if need in at):
            if op_rank[need] == op_rank[op]:
                local[op].append(need)
                continue
            for i in range(m):
                delay = costs.transfer(tasks[need * m + i], op_rank[need], op_rank[op])
                remote[op * m + i].append((need * m + i, delay))
                readers[need * m + i].append((op * m + i, delay))
    return Problem(
        table,
        objective,
        ops,
        [[op for op in range(len(ops)) if op_rank[op] == r] for r in range(max(ranks) + 1)],
        op_rank,
        [costs.of(task) for task in tasks],
        [memory.of(task) for task in tasks],
        [limit + 1e-9 * abs(limit) for limit in limits],
        local,
        [tuple(pairs) for pairs in remote],
        readers,
    )


@dataclasses.dataclass(frozen=True)
class Times:
    """The end of each task, and the value of the objective.

    Args:
      value: the objective's.
      ends: the end of each task.
      sequence: the tasks that were run, each after what it waits for.
    """

    value: float
    ends: list[float]
    sequence: list[int] = dataclasses.field(default_factory=list, repr=False)


def evaluate(
    problem: Problem,
    orders: Orders,
    known: Sequence[float] = (),
    cursors: Sequence[int] = (),
) -> Times | None:
    """Runs orders as `simulate` would, for the objective alone; None where they deadlock.

    The orders must respect the dependencies within a rank: tasks wait here only for other ranks.

    Args:
      problem: the tasks.
      orders: the order of each rank.
      known: when tasks end that are as they were.
      cursors: for each rank, how many of its tasks are; by default none.
    """
    time, remote = problem.time, problem.remote
    ends = [-1.0] * len(time)
    at, free = [0] * len(orders), [0.0] * len(orders)
    for rank, cursor in enumerate(cursors):
        order = orders[rank]
        for n in order[:cursor]:
            ends[n] = known[n]
        at[rank], free[rank] = cursor, known[order[cursor - 1]] if cursor else 0.0
    waiting: dict[int, list[int]] = {}
    sequence: list[int] = []
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        now, cursor = free[rank], at[rank]
        order = orders[rank]
        for n in order[cursor:] if cursor else order:
            for need, delay in remote[n]:
                ready = ends[need]
                if ready < 0.0:
                    waiting.setdefault(need, []).append(rank)
                    break
                ready += delay
                if ready > now:
                    now = ready
            else:
                now += time[n]
                ends[n] = now
                sequence.append(n)
                cursor += 1
                if n in waiting:
                    runnable += waiting.pop(n)
                continue
            break
        free[rank], at[rank] = now, cursor
    if waiting:
        return None
    return Times(value_of(problem, orders, ends), ends, sequence)


def value_of(problem: Problem, orders: Orders, ends: list[float]) -> float:
    """Returns the value of the objective for orders whose tasks end at these times."""
    if problem.objective == "wall":
        return max(ends[order[-1]] for order in orders)
    return max(ends[order[-1]] - (ends[order[0]] - problem.time[order[0]]) for order in orders)
