"""Gives a table a clock."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from jaxpp.schedules._check import explain_blocks
from jaxpp.schedules._execute import Dependencies, Span, execute, stage_dependencies
from jaxpp.schedules._table import Kind, Table, Task

Cost = float | Callable[[Task], float]


@dataclass(frozen=True)
class Timeline:
    """When each task of a table runs, in the units of the cost model.

    >>> from jaxpp.schedules import GPipe
    >>> timeline = simulate(GPipe().table(num_stages=4, num_microbatches=8))
    >>> timeline.makespan, round(timeline.bubble_fraction, 3)
    (33.0, 0.273)
    """

    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def makespan(self) -> float:
        """The time from the first start, at 0, to the last end."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The share of the ranks' time, from 0 to the makespan, in which they do nothing."""
        if not self.makespan:
            return 0.0
        busy = sum(span.end - span.start for span in self.spans)
        return 1 - busy / (self.num_ranks * self.makespan)


def simulate(
    table: Table,
    *,
    forward: Cost = 1.0,
    backward: Cost | None = None,
    input_grad: Cost = 1.0,
    weight_grad: Cost = 1.0,
    communication: Cost = 0.0,
    dependencies: Dependencies | None = None,
) -> Timeline:
    """Runs a table under a cost model: each task as early as its rank and its inputs allow.

    A cost is a number, or a function of the task. It is that of one task: where a rank has `v`
    stages, 1/v of what the rank computes for a microbatch.

    Args:
      table: the table.
      forward: the time of an `F`.
      backward: the time of a `B`; by default twice that of the `F`.
      input_grad: the time of an `I`.
      weight_grad: the time of a `W`.
      communication: the time for what a task makes to reach another rank; ranks do not wait for it.
      dependencies: the tasks that a task must come after; by default those of a chain of stages.

    Returns:
      The timeline, its spans by start, then by rank.

    Raises:
      ScheduleError: the table deadlocks.

    >>> from jaxpp.schedules import ZeroBubbleH1
    >>> simulate(ZeroBubbleH1().table(num_stages=4, num_microbatches=8)).makespan
    27.0
    """
    costs: dict[Kind, Cost] = {
        Kind.F: forward,
        Kind.B: _twice(forward) if backward is None else backward,
        Kind.I: input_grad,
        Kind.W: weight_grad,
    }
    spans, blocks = execute(
        table,
        lambda task: _evaluate(costs[task.kind], task),
        lambda task: _evaluate(communication, task),
        dependencies or stage_dependencies(table),
    )
    if blocks:
        raise explain_blocks(table, blocks)
    spans.sort(key=lambda span: (span.start, span.rank))
    return Timeline(tuple(spans), table.num_ranks)


def _evaluate(cost: Cost, task: Task) -> float:
    return float(cost(task) if callable(cost) else cost)


def _twice(forward: Cost) -> Cost:
    return lambda task: 2 * _evaluate(forward, dataclasses.replace(task, kind=Kind.F))
