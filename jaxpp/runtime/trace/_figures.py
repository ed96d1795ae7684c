"""Figures from the clocked tasks of a step: typical times, transfers, timelines."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpp._program import Bundle, Free, Receive, Run, Send
from jaxpp.schedules import Dependencies, Kind, Table, Task, Timeline

#: A kind of task of a stage.
Key = tuple[Kind, int]
#: A device, the task that it ran, if it was one, and the run's start and end (seconds).
Clocked = tuple[int, Task | None, float, float]


def tasks_of(bundle: Bundle) -> frozenset[Task]:
    """The tasks of a step's loops; the stages of several loops are numbered on: see `Run`."""
    runs = (i for p in bundle.programs for i in p.instructions if isinstance(i, Run))
    return frozenset(run.task for run in runs if run.task)


def dependencies_of(bundle: Bundle) -> Dependencies:
    """Finds the kinds of task whose results each kind reads, directly or through a message.

    What a loop reads of another one is left out: it depends on more than one microbatch.
    """
    needs: dict[Key, dict[Key, None]] = {(t.kind, t.stage): {} for t in tasks_of(bundle)}
    sent: dict[tuple[int, int], Any] = {}  # the maker of each array of a message, by its tag
    reads: list[tuple[Run, Any]] = []
    for program in bundle.programs:
        made: dict[int, Any] = {}  # of each slot: a run, or the tag and the place in a message
        for instruction in program.instructions:
            match instruction:
                case Run():
                    reads += [(instruction, made.get(slot)) for slot in instruction.inputs]
                    made.update(dict.fromkeys(instruction.outputs, instruction))
                case Send(slots, message):
                    sent.update({(message.tag, n): made.get(slot) for n, slot in enumerate(slots)})
                case Receive(slots, message):
                    made.update({slot: (message.tag, n) for n, slot in enumerate(slots)})
                case Free(slots):
                    for slot in slots:
                        made.pop(slot, None)
    for run, maker in reads:
        while isinstance(maker, tuple):
            maker = sent[maker]
        reader, task = run.task, maker and maker.task
        if not reader or not task or maker.loop != run.loop:
            continue
        # An offload comes after tasks of its rank that read the same. Windows are the table's.
        if reader.kind is Kind.O or task.kind.of_stage:
            continue
        if task.microbatch == reader.microbatch:
            needs[reader.kind, reader.stage][task.kind, task.stage] = None
            if task.kind is Kind.L:  # of another microbatch it may read what the forward made
                needs[reader.kind, reader.stage][Kind.F, task.stage] = None
    return {key: tuple(found) for key, found in needs.items()}


def typical_times(calls: Iterable[Sequence[Clocked]]) -> dict[Key, float]:
    """Returns the time of each kind of task of each stage: its mean in a call, the median of calls.

    A step takes as long as its tasks together, and so their mean counts. A call that something
    else disturbed does not.
    """
    means: dict[Key, list[float]] = defaultdict(list)
    for runs in calls:
        times: dict[Key, list[float]] = defaultdict(list)
        for _, task, start, end in runs:
            if task:
                times[task.kind, task.stage].append(end - start)
        for key, own in times.items():
            means[key].append(statistics.fmean(own))
    return {key: statistics.median(own) for key, own in sorted(means.items())}


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits the latency and bandwidth of transfers: a line through the median time of each size."""
    if not points:
        return 0.0, float("inf")
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, seconds in points:
        by_size[size].append(seconds)
    sizes = sorted(by_size)
    times = [statistics.median(by_size[size]) for size in sizes]
    if len(sizes) > 1:
        slope, latency = np.polyfit(sizes, times, 1)
        if slope > 0 and latency >= 0:
            return float(latency), float(1 / slope)
    return statistics.median(times), float("inf")


def table_of(orders: Sequence[Sequence[Task]]) -> Table:
    """Makes the table of all tasks of a step, in the order of each device."""
    tasks = [task for own in orders for task in own]
    sizes = 1 + max(t.stage for t in tasks), 1 + max(t.microbatch for t in tasks)
    return Table(tuple(map(tuple, orders)), *sizes)


def timeline_of(table: Table, runs: Sequence[Clocked]) -> Timeline:
    """Makes the timeline that was clocked; its first task starts at 0."""
    spans = {task: (start, end) for _, task, start, end in runs if task}
    zero = min(start for start, _ in spans.values())
    return Timeline(
        table,
        tuple(tuple(spans[task][0] - zero for task in order) for order in table.ranks),
        tuple(tuple(spans[task][1] - zero for task in order) for order in table.ranks),
        unit="s",
    )
