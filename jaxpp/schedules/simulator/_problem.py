"""A problem in numbers: what the tasks of a pipeline take, hold and wait for, with no order yet."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task, chain
from jaxpp.schedules.simulator._run import run

#: The value to minimise: `"wall"`, the makespan, or `"span"`, the longest span of a rank.
Objective = Literal["wall", "span"]
#: For each rank, the numbers of its tasks, in order.
Orders = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, eq=False)
class OrderProblem:
    """All tasks of a pipeline, numbered: task `op * num_microbatches + microbatch`.

    An op is a kind of task of a stage. Where there are several directions, each has its own stages,
    numbered on from those of the one before it, and its own microbatches: so the directions are
    parts of one graph of stages. The numbers are in plain lists, for speed; nothing changes them.

    Args:
      table: the table with no order: sizes, placement, and the graph of its stages.
      ops: the kind and stage of each op: forwards by stage, then backwards from the last stage.
      op_rank: the rank of each op.
      time: the time of each task.
      change: what each task adds to what its rank holds.
      limits: the most that each rank may hold, with room for rounding.
      outputs: for each op, the ops that wait for it, with the transfer time of each microbatch.
      objective: what to minimise.
    """

    table: Table
    ops: Sequence[tuple[Kind, int]]
    op_rank: list[int]
    time: list[float]
    change: list[float]
    limits: list[float]
    outputs: list[list[tuple[int, Sequence[float]]]]
    objective: Objective = "wall"

    @functools.cached_property
    def num_microbatches(self) -> int:
        """The number of microbatches of each direction."""
        return self.table.num_microbatches // len(self.table.placement)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.limits)

    @functools.cached_property
    def rank_ops(self) -> list[list[int]]:
        """For each rank, its ops."""
        own: list[list[int]] = [[] for _ in self.limits]
        for op, rank in enumerate(self.op_rank):
            own[rank].append(op)
        return own

    @functools.cached_property
    def inputs(self) -> list[list[tuple[int, Sequence[float]]]]:
        """For each op, the ops that it waits for, with the transfer time of each microbatch."""
        inputs: list[list[tuple[int, Sequence[float]]]] = [[] for _ in self.ops]
        for op, readers in enumerate(self.outputs):
            for reader, delays in readers:
                inputs[reader].append((op, delays))
        return inputs

    @functools.cached_property
    def sorted_ops(self) -> list[int]:
        """The ops, each after those that it waits for."""
        missing = [len(own) for own in self.inputs]
        order = [op for op, count in enumerate(missing) if not count]
        for op in order:
            for reader, _ in self.outputs[op]:
                missing[reader] -= 1
                if not missing[reader]:
                    order.append(reader)
        return order

    @functools.cached_property
    def local(self) -> list[list[int]]:
        """For each op, the ops of its rank that it comes after, for the same microbatch."""
        rank = self.op_rank
        return [
            [n for n, _ in needs if rank[n] == rank[op]] for op, needs in enumerate(self.inputs)
        ]

    @functools.cached_property
    def remote(self) -> list[tuple[tuple[int, float], ...]]:
        """For each task, the (task, transfer time) pairs of other ranks that it waits for."""
        m, rank = self.num_microbatches, self.op_rank
        return [
            tuple((n * m + i, delays[i]) for n, delays in needs if rank[n] != rank[op])
            for op, needs in enumerate(self.inputs)
            for i in range(m)
        ]

    @functools.cached_property
    def readers(self) -> list[list[tuple[int, float]]]:
        """For each task, the (task, transfer time) pairs of other ranks that wait for it."""
        readers: list[list[tuple[int, float]]] = [[] for _ in self.time]
        for n, pairs in enumerate(self.remote):
            for need, delay in pairs:
                readers[need].append((n, delay))
        return readers

    @property
    def splits(self) -> bool:
        """Tells whether the backward is in two halves."""
        return any(kind is Kind.W for kind, _ in self.ops)

    def task(self, n: int) -> Task:
        """Returns the task of a number: microbatches take the directions in turns."""
        (kind, stage), i = self.ops[n // self.num_microbatches], n % self.num_microbatches
        direction, own = divmod(stage, self.table.num_stages)
        return Task(kind, own, i * len(self.table.placement) + direction)

    def to_table(self, orders: Orders) -> Table:
        """Makes the table in which the ranks have these orders."""
        ranks = tuple(tuple(map(self.task, order)) for order in orders)
        return dataclasses.replace(self.table, ranks=ranks)

    def to_orders(self, table: Table) -> list[list[int]]:
        """Returns the numbers of a table's tasks; those of its halves for a whole backward."""
        at = {op: n for n, op in enumerate(self.ops)}
        directions, orders = table.direction_of, []
        which = [directions[:i].count(own) for i, own in enumerate(directions)]
        for order in table.ranks:
            orders.append([])
            for task in order:
                stage = directions[task.microbatch] * table.num_stages + task.stage
                whole = (task.kind, stage) in at
                for kind in (task.kind,) if whole else map(Kind, task.kind.parts):
                    op = at[kind, stage]
                    orders[-1].append(op * self.num_microbatches + which[task.microbatch])
        return orders

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

    def value_of(self, orders: Orders, starts: Sequence[float], ends: Sequence[float]) -> float:
        """Returns the value of the objective for orders whose tasks have these times."""
        if self.objective == "wall":
            return max(ends[order[-1]] for order in orders)
        return max(ends[order[-1]] - starts[order[0]] for order in orders)


@functools.lru_cache(maxsize=512)
def shape_of(
    stages: int,
    directions: int,
    microbatches: int,
    graph: tuple[tuple[int, ...], ...] | None,
    splits: bool,
) -> tuple[Table, list[tuple[Kind, int]], list[list[int]]]:
    """Returns what problems of a size have in common.

    Args:
      stages: the number of stages.
      directions: the number of directions.
      microbatches: their number, in all directions together.
      graph: for each stage the stages that it reads from; None for a chain.
      splits: whether backwards are in halves.

    Returns:
      A table without orders, the ops, and for each op those that wait for it.
    """
    count = stages * directions
    last = (2 + splits) * count - 1  # of a backward's end; stages go back from it
    kinds = (Kind.I, Kind.W) if splits else (Kind.B,)
    ops = [(Kind.F, stage) for stage in range(count)]
    ops += [(kind, stage) for kind in kinds for stage in reversed(range(count))]
    readers: list[list[int]] = [[] for _ in ops]
    for forward in range(count):
        first, stage = forward - forward % stages, forward % stages
        back = 2 * count - 1 - forward
        for source in (graph or chain(stages))[stage]:
            readers[first + source].append(forward)
            readers[back].append(2 * count - 1 - first - source)
        readers[forward].append(back)
        if splits:
            readers[back].append(last - forward)
    turns = tuple(n % directions for n in range(microbatches))
    placement = ((0,) * stages,) * directions
    return Table((), stages, microbatches, placement, graph, direction_of=turns), ops, readers


@dataclasses.dataclass(frozen=True)
class Times:
    """The times of orders, and the value of the objective.

    Args:
      value: the objective's.
      starts: the start of each task.
      ends: the end of each task.
      sequence: the tasks that were run, each after what it waits for.
    """

    value: float
    starts: list[float]
    ends: list[float]
    sequence: list[int] = dataclasses.field(default_factory=list, repr=False)


def evaluate(problem: OrderProblem, orders: Orders) -> Times | None:
    """Runs orders as `simulate` would, for the objective alone; None where they deadlock.

    The orders must respect the dependencies within a rank: tasks wait here only for other ranks.
    """
    starts, ends, sequence, stuck = run(problem.time, problem.remote, orders)
    if stuck:
        return None
    return Times(problem.value_of(orders, starts, ends), starts, ends, sequence)
