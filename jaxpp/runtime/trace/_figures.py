"""Figures from the clocked tasks of a step: typical times, transfers, timelines."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp._program import Bundle, Free, Receive, Run, Send
from jaxpp.schedules import Dependencies, Kind, Table, Task, Timeline

#: A kind of task of a stage.
Key = tuple[Kind, int]
#: A device, the label of its run, and the run's start and end (seconds).
Clocked = tuple[int, str, float, float]


def tasks_of(bundle: Bundle, caller: str) -> dict[str, Task]:
    """Finds the task of each label that names one.

    Args:
        bundle: the step.
        caller: the function that asks, for the error.

    Raises:
        ValueError: the step has several scheduled loops, so that a label names several tasks.
    """
    labels = [i.label for p in bundle.programs for i in p.instructions if isinstance(i, Run)]
    found = {}
    for label in labels:
        if task := Task.from_text(label):
            found[label] = task
    twice = [label for label, count in Counter(labels).items() if count > 1 and label in found]
    if twice:
        raise ValueError(
            f"{caller}: the step runs {twice[0]} more than once, as a step with several scheduled "
            f"loops does; {caller} one loop at a time, each in a placed function of its own."
        )
    return found


def dependencies_of(bundle: Bundle, tasks: Mapping[str, Task]) -> Dependencies:
    """Finds the kinds of task whose results each kind reads, directly or through a message."""
    needs: dict[Key, dict[Key, None]] = {(t.kind, t.stage): {} for t in tasks.values()}
    messages: dict[int, list[Task | None]] = {}
    reads: dict[Task, list[Any]] = {}
    for program in bundle.programs:
        made: dict[int, Any] = {}
        for instruction in program.instructions:
            match instruction:
                case Run(_, inputs, outputs, label):
                    task = tasks.get(label)
                    if task is not None:
                        reads[task] = [made.get(slot) for slot in inputs]
                    made.update(dict.fromkeys(outputs, task))
                case Send(slots, message):
                    messages[message.tag] = [made.get(slot) for slot in slots]
                case Receive(slots, message):
                    # The maker of the result is found once the program of its sender has been read.
                    made.update({s: (message.tag, i) for i, s in enumerate(slots)})
                case Free(slots):
                    for slot in slots:
                        made.pop(slot, None)
    for task, makers in reads.items():
        for maker in makers:
            while isinstance(maker, tuple):
                maker = messages[maker[0]][maker[1]]
            if maker is not None and maker.microbatch == task.microbatch:
                needs[task.kind, task.stage][maker.kind, maker.stage] = None
    return {key: tuple(own) for key, own in needs.items()}


def typical_times(
    calls: Iterable[Sequence[Clocked]], tasks: Mapping[str, Task]
) -> dict[Key, float]:
    """Gives the time of each kind of task of each stage: its mean in a call, the median of calls.

    A step takes as long as its tasks together, and so their mean counts. A call that something
    else disturbed does not.
    """
    means: dict[Key, list[float]] = defaultdict(list)
    for runs in calls:
        times: dict[Key, list[float]] = defaultdict(list)
        for _, label, start, end in runs:
            if label in tasks:
                times[tasks[label].kind, tasks[label].stage].append(end - start)
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


def timeline_of(table: Table, runs: Sequence[Clocked], tasks: Mapping[str, Task]) -> Timeline:
    """Makes the timeline that was clocked; its first task starts at 0."""
    spans = {tasks[label]: (start, end) for _, label, start, end in runs if label in tasks}
    zero = min(start for start, _ in spans.values())
    return Timeline(
        table,
        tuple(tuple(spans[task][0] - zero for task in order) for order in table.ranks),
        tuple(tuple(spans[task][1] - zero for task in order) for order in table.ranks),
    )
