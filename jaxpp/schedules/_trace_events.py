"""The events of a trace that Perfetto, ui.perfetto.dev, and chrome://tracing open.

The events are the JSON of the Trace Event Format document of the Chromium project: processes
have threads, threads have slices, and arrows go from slice to slice. Times are microseconds.
"""

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = dict[str, Any]

#: The number of the first thread. Perfetto takes thread 0 of any process, and the thread with the
#: number of its process, for the same thread, and drops slices that overlap there.
FIRST_THREAD = 1000


def name_process(process: int, name: str) -> list[Event]:
    """Names a process, and sorts it by its number, not by its first event."""
    at = {"ph": "M", "pid": process}
    return [
        {**at, "name": "process_name", "args": {"name": name}},
        {**at, "name": "process_sort_index", "args": {"sort_index": process}},
    ]


def name_thread(process: int, thread: int, name: str, order: int) -> list[Event]:
    """Names a thread of a process, and sets its place among the process's threads."""
    at = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**at, "name": "thread_name", "args": {"name": name}},
        {**at, "name": "thread_sort_index", "args": {"sort_index": order}},
    ]


def make_slice(
    process: int,
    thread: int,
    name: str,
    category: str,
    start: float,
    end: float,
    args: Mapping[str, Any],
) -> Event:
    """Makes a slice that lasts from `start` to `end`, in microseconds."""
    start, end = ticks(start), ticks(end)
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": start,
        "dur": end - start,
        "args": dict(args),
    }


def make_counter(process: int, name: str, time: float, **values: float) -> Event:
    """Makes an event of a counter: its values from a time on, in microseconds."""
    return {"ph": "C", "pid": process, "name": name, "ts": ticks(time), "args": values}


def make_arrow(number: int, name: str, slices: Sequence[Event]) -> Iterable[Event]:
    """Makes an arrow from slice to slice; no other arrow in the trace may have its number.

    An arrow goes from middle to middle, where no rounding can bind its ends to the slice before or
    after. It leaves the middles only where it would go back in time: several clocks may differ.
    """
    times: list[float] = []
    latest = float("inf")
    for at in reversed(slices):
        latest = min(latest, at["ts"] + at["dur"])
        times.insert(0, min(at["ts"] + at["dur"] / 2, latest))
    for n, at in enumerate(slices):
        times[n] = min(max(at["ts"], *times[: n + 1]), at["ts"] + at["dur"])
    for n, (at, time) in enumerate(zip(slices, times, strict=True)):
        phase = "s" if n == 0 else "f" if n == len(slices) - 1 else "t"
        yield {
            "ph": phase,
            "pid": at["pid"],
            "tid": at["tid"],
            "name": name,
            "cat": name,
            "id": number,
            "ts": time,
            **({"bp": "e"} if phase == "f" else {}),
        }


def ticks(time: float) -> float:
    """Rounds to eighths of a microsecond: binary fractions that are whole nanoseconds.

    So `ts + dur` of a slice is exactly the `ts` of the next one, however a reader rounds each to
    nanoseconds. If the end were later by a nanosecond, the next slice would not fit beside it.
    """
    return round(time * 8) / 8


def write_events(
    events: Iterable[Event],
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a trace, compressed where the path ends in `.gz`."""
    trace = {"traceEvents": list(events), "displayTimeUnit": "ms", "metadata": dict(metadata or {})}
    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with opened(path, "wt", encoding="utf-8") as file:
        json.dump(trace, file)


def read_events(path: str | os.PathLike[str]) -> tuple[list[Event], dict[str, Any]]:
    """Reads the events and the metadata of a trace.

    Raises:
      ValueError: the file holds no trace.
    """
    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        # JAX's profiles end in an empty event.
        return [event for event in trace["traceEvents"] if event], trace.get("metadata") or {}
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{os.fspath(path)} holds no trace in the Trace Event Format: {error}; give a "
            f"timeline.json of stop_trace, or a *.trace.json.gz of the JAX profiler."
        ) from error
