"""Writes timelines as traces for Perfetto, ui.perfetto.dev."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxpp.schedules._drawing._styles import Cell, by_title, lay_out
from jaxpp.schedules._execute import number
from jaxpp.schedules._simulate import Timeline
from jaxpp.schedules._table import Task

_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}


def to_trace(
    timelines: Timeline | Mapping[str, Timeline],
    path: str | os.PathLike[str],
    *,
    unit: Literal["s", "ms", "us"] = "s",
    transfers: bool = True,
) -> None:
    """Writes timelines as a trace that ui.perfetto.dev and chrome://tracing open.

    A timeline is a process, and each of its ranks a thread, with a second one for tasks that run
    together with those of the first. Slices have the kind, the stage, the microbatch and, where
    there are two, the direction of their tasks. Each rank has a counter of what it holds.

    The format is the JSON of the Trace Event Format document of the Chromium project.

    Args:
      timelines: a timeline, or several by title.
      path: where to write, a `.json` file.
      unit: what one unit of the timelines' costs is. Times are rounded to an eighth of a
        microsecond.
      transfers: whether to draw an arrow for each result that goes from one rank to another, as
        the table's stages are connected.

    Raises:
      ValueError: the unit is none of these.

    >>> import pathlib, tempfile
    >>> from jaxpp.schedules import OneFOneB, simulate
    >>> timeline = simulate(OneFOneB().table(num_stages=2, num_microbatches=1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "trace.json")
    ...     to_trace(timeline, path, unit="ms")
    ...     events = json.loads(path.read_text())["traceEvents"]
    >>> for event in events:
    ...     if event["ph"] == "X":
    ...         print(event["name"], "on thread", event["tid"], "at", event["ts"], "us")
    F0.0 on thread 0 at 0.0 us
    B0.0 on thread 0 at 4000.0 us
    F1.0 on thread 1 at 1000.0 us
    B1.0 on thread 1 at 2000.0 us
    """
    if unit not in _MICROSECONDS:
        raise ValueError(f"unit is one of {', '.join(map(repr, _MICROSECONDS))}, got {unit!r}.")
    scale = _MICROSECONDS[unit]
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(by_title(timelines).items()):
        rows = lay_out(timeline)
        slices = {cell.span.task: _slice(timeline, cell, scale) for cells in rows for cell in cells}
        own = [*_names(title or "schedule", rows), *slices.values()]
        own += _counters(timeline, scale)
        if transfers:
            own += _arrows(timeline, slices, first=len(events))
        events += [{"pid": process, **event} for event in own]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _names(title: str, rows: tuple[tuple[Cell, ...], ...]) -> Iterable[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "args": {"name": title}}
    num_lanes = max((cell.num_lanes for cells in rows for cell in cells), default=1)
    for rank, cells in enumerate(rows):
        for lane in range(max((cell.num_lanes for cell in cells), default=1)):
            thread = lane * len(rows) + rank
            name = f"rank {rank}" + ", at the same time" * (lane > 0)
            order = {"sort_index": rank * num_lanes + lane}
            yield {"ph": "M", "name": "thread_name", "tid": thread, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "tid": thread, "args": order}


def _slice(timeline: Timeline, cell: Cell, scale: float) -> dict[str, Any]:
    task, table = cell.span.task, timeline.table
    start, end = _ticks(cell.span.start, scale), _ticks(cell.span.end, scale)
    args: dict[str, Any] = {
        "kind": str(task.kind),
        "stage": task.stage,
        "microbatch": task.microbatch,
    }
    if len(table.placement) > 1:
        args["direction"] = table.direction_of[task.microbatch]
    return {
        "ph": "X",
        "name": str(task),
        "cat": str(task.kind),
        "tid": cell.lane * timeline.num_ranks + cell.span.rank,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def _ticks(time: float, scale: float) -> float:
    """Rounds to eighths of a microsecond: binary fractions that are whole nanoseconds.

    So `ts + dur` of a slice is exactly the `ts` of the next one, however a reader rounds each to
    nanoseconds; were the end later by one, the next slice would not fit beside it.
    """
    return round(time * scale * 8) / 8


def _counters(timeline: Timeline, scale: float) -> Iterable[dict[str, Any]]:
    for rank in range(timeline.num_ranks):
        for time, held in [(0.0, 0.0), *timeline.memory_over_time(rank)]:
            yield {
                "ph": "C",
                "name": f"memory of rank {rank}",
                "ts": _ticks(time, scale),
                "args": {"held": held},
            }


def _arrows(
    timeline: Timeline, slices: Mapping[Task, dict[str, Any]], first: int
) -> Iterable[dict[str, Any]]:
    """An arrow from the middle of each slice to the middle of those on other ranks that read it.

    In the middle, no rounding can bind an arrow's end to the slice before or after.
    """
    numbered = number(timeline.table)
    for n, needs in enumerate(numbered.needs):
        for need in needs:
            if numbered.rank_of[need] == numbered.rank_of[n]:
                continue
            first += 1
            ends = (("s", numbered.tasks[need]), ("f", numbered.tasks[n]))
            for phase, task in ends:
                at = slices[task]
                yield {
                    "ph": phase,
                    "name": "transfer",
                    "cat": "transfer",
                    "id": first,
                    "tid": at["tid"],
                    "ts": at["ts"] + at["dur"] / 2,
                    **({"bp": "e"} if phase == "f" else {}),
                }
