"""Figures from the clocked tasks of a step: typical times, transfers, timelines."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxpp._program import Bundle, Free, Receive, Run, Send
from jaxpp.schedules import Dependencies, Kind, Table, Task, Timeline

#: A kind of task of a stage.
Key = tuple[Kind, int]
#: A device, the tasks that it ran as one, if it ran any, and the run's start and end (seconds).
Clocked = tuple[int, tuple[Task, ...], float, float]


def tasks_of(bundle: Bundle) -> frozenset[Task]:
    """The tasks of a step's loops; the stages of several loops are numbered on: see `Run`."""
    runs = (i for p in bundle.programs for i in p.instructions if isinstance(i, Run))
    return frozenset(task for run in runs for task in run.tasks)


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
    runs = [i for p in bundle.programs for i in p.instructions if isinstance(i, Run)]
    # A value that a task reads of another one in the same run is in no slot.
    read = [pair[::-1] for run in runs for pair in itertools.combinations(run.tasks, 2)]
    for run, maker in reads:
        while isinstance(maker, tuple):
            maker = sent[maker]
        if maker and maker.loop == run.loop:
            read.extend(itertools.product(run.tasks, maker.tasks))
    for reader, task in read:
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
    else disturbed does not. Tasks that ran as one have equal parts of its time.
    """
    means: dict[Key, list[float]] = defaultdict(list)
    for runs in calls:
        times: dict[Key, list[float]] = defaultdict(list)
        for _, tasks, start, end in runs:
            for task in tasks:
                times[task.kind, task.stage].append((end - start) / len(tasks))
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


def table_of(runs: Sequence[Sequence[Sequence[Task]]], dependencies: Dependencies) -> Table:
    """Makes the table of all tasks of a step, of the tasks of each run of each device."""
    orders = [list(itertools.chain(*own)) for own in runs]
    # Tasks that ran as one but need each other, which are of one microbatch, do not overlap.
    pairs = (pair for own in runs for joined in own for pair in itertools.pairwise(joined))
    overlaps = frozenset(a for a, b in pairs if a.microbatch != b.microbatch)
    tasks = list(itertools.chain(*orders))
    sizes = 1 + max(t.stage for t in tasks), 1 + max(t.microbatch for t in tasks)
    graph = tuple(
        tuple(sorted(s for kind, s in dependencies.get((Kind.F, stage), ()) if kind is Kind.F))
        for stage in range(sizes[0])
    )
    return Table(tuple(map(tuple, orders)), *sizes, stage_inputs=graph, overlaps=overlaps)


def timeline_of(table: Table, runs: Sequence[Clocked]) -> Timeline:
    """Makes the timeline that was clocked; its first task starts at 0."""
    spans = {task: (start, end) for _, tasks, start, end in runs for task in tasks}
    zero = min(start for start, _ in spans.values())
    return Timeline(
        table,
        tuple(tuple(spans[task][0] - zero for task in order) for order in table.ranks),
        tuple(tuple(spans[task][1] - zero for task in order) for order in table.ranks),
        unit="s",
    )
