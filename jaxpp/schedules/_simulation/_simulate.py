"""Returns a table a clock: a start and an end for each task."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxpp.schedules._check import explain_blocks
from jaxpp.schedules._costs import Costs, Memory, of_each, placement_of
from jaxpp.schedules._execute import Dependencies, Sends, execute, number
from jaxpp.schedules._simulation._machine import Machine
from jaxpp.schedules._table import Table, Task


@dataclass(frozen=True, slots=True)
class Span:
    """One task on its rank, from `start` to `end`, in the units of the cost model.

    >>> from jaxpp.schedules import OneFOneB
    >>> simulate(OneFOneB().table(num_stages=1, num_microbatches=1)).spans[0]
    Span(rank=0, task=Task(kind=Kind('F'), stage=0, microbatch=0), start=0.0, end=1.0)
    """

    rank: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of a table's tasks, in the units of the cost model.

    `simulate` makes it, or measured times do. For each rank it has the start and the end of each
    task, in order. `gates` has for each task the rank and the index of the task that it waited
    for last, or None. `machine` says what each rank does after its last task, and `unit` what the
    times are in.

    >>> from jaxpp.schedules import GPipe
    >>> timeline = simulate(GPipe().table(num_stages=4, num_microbatches=8))
    >>> timeline.makespan, timeline.longest_span, round(timeline.bubble_fraction, 3)
    (33.0, 33.0, 0.273)
    """

    table: Table
    starts: tuple[Sequence[float], ...]
    ends: tuple[Sequence[float], ...]
    gates: tuple[Sequence[tuple[int, int] | None], ...] = ()
    memory: Memory = Memory()
    machine: Machine = Machine()
    unit: str = ""

    def __repr__(self) -> str:
        return f"Timeline({self.table!r}, makespan={self.makespan:.6g})"

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.table.num_ranks

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """The span of each task, by start, then by rank."""
        spans = [
            Span(rank, task, start, end)
            for rank, (tasks, starts, ends) in enumerate(
                zip(self.table.ranks, self.starts, self.ends, strict=True)
            )
            for task, start, end in zip(tasks, starts, ends, strict=True)
        ]
        return tuple(sorted(spans, key=lambda span: (span.start, span.rank)))

    @functools.cached_property
    def makespan(self) -> float:
        """The time from the first start, at 0, to the last end of a rank's step."""
        ended = (max(ends, default=0.0) for ends in self.ends)
        return max(map(sum, zip(ended, self.update, strict=True)), default=0.0)

    @property
    def update(self) -> tuple[float, ...]:
        """For each rank, the time of its reduction and its optimizer, after its last task."""
        return self.machine.update(self.num_ranks)

    @functools.cached_property
    def longest_span(self) -> float:
        """The longest time of a rank from its first start to its last end.

        A step takes this time where the next step may start on a rank before this one has ended on
        another. With a barrier between steps, a step takes the makespan.
        """
        each = zip(self.starts, self.ends, self.update, strict=True)
        spans = (max(ends) - min(starts) + update for starts, ends, update in each if len(ends))
        return max(spans, default=0.0)

    @functools.cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the time in which it computes; time with two tasks counts once."""
        times = [0.0] * self.num_ranks
        for rank, tasks in enumerate(self.table.ranks):
            each = zip(tasks, self.starts[rank], self.ends[rank], strict=True)
            spans = [(start, end) for task, start, end in each if task.kind.lane == "compute"]
            times[rank] = _covered(spans) + self.update[rank]
        return tuple(times)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """For each rank, the share of the makespan in which it does something."""
        return tuple(busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The share of the ranks' time, from 0 to the makespan, in which they do nothing."""
        return self._idle(self.makespan)

    @property
    def span_bubble_fraction(self) -> float:
        """The bubble fraction with the longest span in the place of the makespan.

        This is the bubble rate of Qi et al., arXiv 2401.10241, section 5.3.
        """
        return self._idle(self.longest_span)

    def _idle(self, time: float) -> float:
        return 1 - sum(self.busy) / (self.num_ranks * time) if time else 0.0

    @functools.cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """For each rank, the most that it holds at once, in the units of the memory model.

        What is offloaded counts until its copy has ended.
        """
        if self.table.lanes:
            each = map(self.memory_over_time, range(self.num_ranks))
            return tuple(max((held for _, held in own), default=0.0) for own in each)
        peaks, resident = self.memory.peaks(self.table), self.machine.held(self.num_ranks)
        return tuple(map(sum, zip(peaks, resident, strict=True)))

    def memory_over_time(self, rank: int) -> list[tuple[float, float]]:
        """Returns the memory that a rank holds over time: (time, held) pairs where it changes."""
        changes: dict[float, list[float]] = {}
        each = self.memory.changes(self.table, rank)
        for own, *times in zip(each, self.starts[rank], self.ends[rank], strict=True):
            for change, time in zip(own, times, strict=True):
                if change:
                    changes.setdefault(time, []).append(change)
        held, steps = self.machine.held(self.num_ranks)[rank], []
        for time, here in sorted(changes.items()):
            held += sum(here)
            steps.append((time, held))
        return steps

    @functools.cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of tasks that the last one to end has waited for, from the first to the last.

        Raises:
          ValueError: the timeline was measured, so that nobody knows what its tasks waited for.
        """
        if not self.gates:
            raise ValueError("a measured timeline has no critical path; simulate one instead.")
        # Of two tasks that end together, the one that started later decides the end.
        last = [
            (end, self.starts[r][n], r, n)
            for r, (own, update) in enumerate(zip(self.ends, self.update, strict=True))
            for n, end in enumerate(own)
            if end + update == self.makespan
        ]
        path: list[Span] = []
        at: tuple[int, int] | None = max(last)[2:] if last else None
        while at is not None:
            r, n = at
            path.append(Span(r, self.table.ranks[r][n], self.starts[r][n], self.ends[r][n]))
            at = self.gates[r][n]
        return tuple(reversed(path))


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Returns the time that intervals cover; time that two cover counts once."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


def simulate(
    table: Table,
    costs: Costs | None = None,
    *,
    memory: Memory | None = None,
    overlap: Literal["atomic", "free", "none"] = "atomic",
    dependencies: Dependencies | None = None,
    machine: Machine | None = None,
) -> Timeline:
    """Runs a table under a cost model: each task as early as its rank and its inputs allow.

    A rank has three lanes: one that computes, one that copies and one of collectives. A copy, such
    as an `O`, or a collective, such as a `G`, starts once the computing task before it in the
    rank's order has ended, those before it in its lane have ended, and its inputs are there; tasks
    that do not read what it makes go on beside it.

    By default ranks are equal and do not wait until the results that they send have arrived, links
    take any number of transfers at once, and a step ends with its last task. `machine` says
    otherwise.

    Args:
      table: the table.
      costs: the time of tasks and transfers; a number is that of a rank's whole share of a
        microbatch. By default 1 for its `F`, `I` or `W`, 2 for its `B`.
      memory: what tasks hold; by default activations.
      overlap: what the table's pairs of overlapping tasks do. `"atomic"`: the two start together,
        once the inputs of both are there, and end together, after the costs' `overlapped` time.
        `"free"`: each starts as its own inputs are there, and they end together, that time after
        the first start or when the later of them is done. `"none"`: one runs after the other.
      dependencies: for each kind and stage what it must come after; by default as the table's
        stages are connected.
      machine: the ranks' speeds, the links, and the end of a step.

    Returns:
      The timeline.

    Raises:
      ScheduleError: the table deadlocks.
      ValueError: a cost is negative or not finite.

    >>> from jaxpp.schedules import ZeroBubbleH1
    >>> table = ZeroBubbleH1().table(num_stages=4, num_microbatches=8)
    >>> simulate(table).makespan, simulate(table, Costs(latency=0.5)).makespan
    (27.0, 33.0)
    """
    costs, memory, machine = costs or Costs(), memory or Memory(), machine or Machine()
    if overlap not in ("atomic", "free", "none"):
        raise ValueError(f"overlap is 'atomic', 'free' or 'none', got {overlap!r}.")
    placement = placement_of(table)
    costs, memory = costs.by_stage(placement), memory.by_stage(placement)
    if overlap == "none" and table.overlaps:
        table = dataclasses.replace(table, overlaps=frozenset())
    numbered = number(table, dependencies, join=True)
    tasks, rank_of = numbered.tasks, numbered.rank_of
    machine.check(table.num_ranks)
    speeds = machine.speeds(table.num_ranks)
    times, sends = of_each(costs, tasks), None
    if set(speeds) != {1.0}:
        times = [time / speeds[rank] for time, rank in zip(times, rank_of, strict=True)]
    if (machine.shared_links or machine.blocking_sends) and not costs.moves_for_free:
        sends = Sends(
            lambda n, target: costs.link(tasks[n], rank_of[n], target),
            machine.shared_links,
            machine.blocking_sends,
        )
    result = execute(
        numbered,
        times,
        None if costs.moves_for_free else _delays(costs, tasks, rank_of),
        lambda a, b: costs.together(tasks[a], tasks[b]) / speeds[rank_of[a]],
        wait_for_both=overlap == "atomic",
        sends=sends,
        lanes=table.lanes,
    )
    if result.blocks:
        raise explain_blocks(table, result.blocks)
    firsts = [0]
    for order in table.ranks:
        firsts.append(firsts[-1] + len(order))
    where = [(rank_of[n], n - firsts[rank_of[n]]) for n in range(len(tasks))]
    cut = [slice(a, b) for a, b in zip(firsts, firsts[1:], strict=False)]
    gates = [None if gate < 0 else where[gate] for gate in result.gates]
    return Timeline(
        table,
        tuple(tuple(result.starts[own]) for own in cut),
        tuple(tuple(result.ends[own]) for own in cut),
        tuple(tuple(gates[own]) for own in cut),
        memory,
        machine,
        costs.unit,
    )


def _delays(costs: Costs, tasks: Sequence[Task], rank_of: Sequence[int]):
    if not callable(costs.edge_bytes):
        by_stage: dict[tuple[int, int, int], float] = {}

        def delay(n: int, target: int) -> float:
            key = (tasks[n].stage, rank_of[n], target)
            if key not in by_stage:
                by_stage[key] = costs.transfer(tasks[n], rank_of[n], target)
            return by_stage[key]

        return delay
    return lambda n, target: costs.transfer(tasks[n], rank_of[n], target)
