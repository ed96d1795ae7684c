"""Writes timelines as traces for Perfetto, ui.perfetto.dev."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

from jaxpp.schedules._drawing._styles import Cell, by_title, lay_out, shared_unit
from jaxpp.schedules._execute import number
from jaxpp.schedules._simulation import Timeline
from jaxpp.schedules._table import Task
from jaxpp.schedules._trace_events import (
    FIRST_THREAD,
    Event,
    make_arrow,
    make_counter,
    make_slice,
    name_process,
    name_thread,
    write_events,
)

_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}


def to_trace(
    timelines: Timeline | Mapping[str, Timeline],
    path: str | os.PathLike[str],
    *,
    unit: Literal["s", "ms", "us"] | None = None,
    transfers: bool = True,
) -> None:
    """Writes timelines as a trace that ui.perfetto.dev and chrome://tracing open.

    A timeline is a process, and each of its ranks a thread, with a second thread for tasks that run
    together with those of the first, and one for copies. Slices have the kind, the stage, the
    microbatch and, where there are two, the direction of their tasks. Each rank has a counter of
    its memory.

    The format is the JSON of the Trace Event Format document of the Chromium project.

    Args:
      timelines: a timeline, or several by title.
      path: where to write, a `.json` file.
      unit: what one unit of the timelines' costs is; by default their `Costs.unit`, or else a
        second. Times are rounded to an eighth of a microsecond.
      transfers: whether to draw an arrow for each result that goes from one rank to another, as
        the table's stages are connected.

    Raises:
      ValueError: the unit is none of these.

    >>> import json, pathlib, tempfile
    >>> from jaxpp.schedules import OneFOneB, simulate
    >>> timeline = simulate(OneFOneB().table(num_stages=2, num_microbatches=1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "trace.json")
    ...     to_trace(timeline, path, unit="ms")
    ...     events = json.loads(path.read_text())["traceEvents"]
    >>> for event in events:
    ...     if event["ph"] == "X":
    ...         print(event["name"], "on thread", event["tid"], "at", event["ts"], "us")
    F0.0 on thread 1000 at 0.0 us
    B0.0 on thread 1000 at 4000.0 us
    F1.0 on thread 1001 at 1000.0 us
    B1.0 on thread 1001 at 2000.0 us
    """
    titled = by_title(timelines)
    unit = unit or cast(Any, shared_unit(titled) or "s")
    if unit not in _MICROSECONDS:
        raise ValueError(f"unit is one of {', '.join(map(repr, _MICROSECONDS))}, got {unit!r}.")
    scale = _MICROSECONDS[unit]
    events: list[Event] = []
    for process, (title, timeline) in enumerate(titled.items()):
        rows = lay_out(timeline)
        slices = {
            cell.span.task: _slice(process, timeline, cell, scale)
            for cells in rows
            for cell in cells
        }
        events += name_process(process, title or "schedule")
        events += _name_threads(process, rows)
        events += slices.values()
        events += _counters(process, timeline, scale)
        if transfers:
            events += _arrows(timeline, slices, first=len(events))
    write_events(events, path)


def _name_threads(process: int, rows: tuple[tuple[Cell, ...], ...]) -> Iterable[Event]:
    num_lanes = max((cell.num_lanes for cells in rows for cell in cells), default=1)
    for rank, cells in enumerate(rows):
        for lane in range(max((cell.num_lanes for cell in cells), default=1)):
            kinds = {c.span.task.kind.lane for c in cells if c.lane == lane} - {"compute"}
            beside = {"copy": ", copies", "collective": ", collectives"}
            own = beside[kinds.pop()] if kinds else ", at the same time" * (lane > 0)
            name = f"rank {rank}{own}"
            thread = FIRST_THREAD + lane * len(rows) + rank
            yield from name_thread(process, thread, name, rank * num_lanes + lane)


def _slice(process: int, timeline: Timeline, cell: Cell, scale: float) -> Event:
    task, table, span = cell.span.task, timeline.table, cell.span
    args: dict[str, Any] = {
        "kind": str(task.kind),
        "stage": task.stage,
        "microbatch": task.microbatch,
    }
    if len(table.placement) > 1:
        args["direction"] = table.direction_of[task.microbatch]
    thread = FIRST_THREAD + cell.lane * timeline.num_ranks + span.rank
    start, end = span.start * scale, span.end * scale
    return make_slice(process, thread, str(task), str(task.kind), start, end, args)


def _counters(process: int, timeline: Timeline, scale: float) -> Iterable[Event]:
    for rank in range(timeline.num_ranks):
        for time, held in [(0.0, 0.0), *timeline.memory_over_time(rank)]:
            yield make_counter(process, f"memory of rank {rank}", time * scale, held=held)


def _arrows(timeline: Timeline, slices: Mapping[Task, Event], first: int) -> Iterable[Event]:
    """Makes an arrow from each slice to those on other ranks that read its result."""
    numbered = number(timeline.table)
    for n, needs in enumerate(numbered.needs):
        for need in needs:
            if numbered.rank_of[need] == numbered.rank_of[n]:
                continue
            first += 1
            ends = [slices[numbered.tasks[need]], slices[numbered.tasks[n]]]
            yield from make_arrow(first, "transfer", ends)
