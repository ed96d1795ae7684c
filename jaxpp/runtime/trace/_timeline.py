"""Writes a trace as files: a timeline for Perfetto, one for TensorBoard, and a picture."""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from jaxpp.runtime.trace import _xspace
from jaxpp.runtime.trace._clock import Reading
from jaxpp.runtime.trace._result import Trace, TracedMessage
from jaxpp.schedules import Timeline, plot
from jaxpp.schedules._drawing._trace_events import (
    FIRST_THREAD,
    Event,
    make_arrow,
    make_slice,
    name_process,
    name_thread,
    sort_process,
    ticks,
    write_events,
)

#: The first threads of a rank's tasks, sends and receives; several may go on at a time.
TASKS, SENDS, RECEIVES = FIRST_THREAD, 2 * FIRST_THREAD, 3 * FIRST_THREAD
#: The key of `metadata` under which a timeline has the clocks at its time 0.
METADATA = "jaxpp"


def write_trace(trace: Trace, folder: pathlib.Path, started: Reading) -> Trace:
    """Writes all files of a trace into a folder; returns the trace with their paths.

    Args:
        trace: the trace.
        folder: where they go; files of an earlier trace are replaced.
        started: what the driver's clocks said at the trace's time 0.
    """
    events = make_events(trace)
    timeline = folder / "timeline.json"
    write_events(events, timeline, {METADATA: dataclasses.asdict(started)})
    _xspace.write(events, folder, started.unix_ns)
    picture = folder / "timeline.png"
    picture.unlink(missing_ok=True)
    if trace.typical_call is None:
        return dataclasses.replace(trace, timeline_path=timeline)
    measured, simulated = trace.timeline(), trace.simulated()
    plot(
        {
            f"measured, call {trace.typical_call}": _in_milliseconds(measured),
            "simulated, with the measured times of tasks": _in_milliseconds(simulated),
        },
        picture,
        unit="ms",
    )
    return dataclasses.replace(trace, timeline_path=timeline, picture_path=picture)


def make_events(trace: Trace) -> list[Event]:
    """Makes the events of a trace: a process for each rank, its runs and messages, and arrows."""
    events: list[Event] = []
    runs: dict[tuple[int, int, int], Event] = {}
    for rank in range(len(trace.device_of)):
        events += [name_process(rank, f"rank {rank}"), sort_process(rank)]
        events += name_thread(rank, TASKS, "tasks", TASKS)
    for run in trace.runs:
        event = make_slice(
            run.rank,
            TASKS,
            run.label,
            run.label[:1] if run.label[-1:].isdigit() else "other",
            1e6 * run.start,
            1e6 * run.end,
            {"call": run.call, "waited_us": ticks(1e6 * (run.start - run.dispatched))},
        )
        runs[run.call, run.rank, run.position] = event
    sends = {id(m): _message_slice(m, "send") for m in trace.messages}
    receives = {id(m): _message_slice(m, "receive") for m in trace.messages}
    for rank in range(len(trace.device_of)):
        for name, own, first in (("sends", sends, SENDS), ("receives", receives, RECEIVES)):
            slices = [event for event in own.values() if event["pid"] == rank]
            for lane in range(_put_in_lanes(slices, first)):
                title = name + ", at the same time" * (lane > 0)
                events += name_thread(rank, first + lane, title, first + lane)
    events += [*runs.values(), *sends.values(), *receives.values()]
    for number, m in enumerate(trace.messages):
        maker = None if m.maker is None else runs.get((m.call, m.message.source, m.maker))
        reader = None if m.reader is None else runs.get((m.call, m.message.target, m.reader))
        path = [maker, sends[id(m)], receives[id(m)], reader]
        events += make_arrow(number, "message", [event for event in path if event is not None])
    return events


def _message_slice(sent: TracedMessage, side: str) -> Event:
    message = sent.message
    if side == "send":
        rank, other, start, end = message.source, message.target, sent.start, sent.sent
    else:
        rank, other, start, end = message.target, message.source, sent.arriving, sent.end
    args: dict[str, Any] = {
        "call": sent.call,
        "to" if side == "send" else "from": f"rank {other}",
        "bytes": message.nbytes,
        "arrays": [
            f"{kind} {name} {aval.str_short()}"
            for kind, name, aval in zip(message.kinds, message.names, message.avals, strict=True)
        ],
    }
    # A slice needs some length, so that an arrow can be bound to it.
    start, end = 1e6 * start, max(1e6 * end, 1e6 * start + 0.25)
    return make_slice(rank, 0, message.names[0], side, start, end, args)


def _put_in_lanes(slices: Sequence[Event], first: int) -> int:
    """Gives slices threads on which they do not overlap, from `first` on; returns their number."""
    free: list[float] = []
    for event in sorted(slices, key=lambda event: event["ts"]):
        lane = next((n for n, end in enumerate(free) if end <= event["ts"]), len(free))
        free[lane : lane + 1] = [event["ts"] + event["dur"]]
        event["tid"] = first + lane
    return len(free)


def _in_milliseconds(timeline: Timeline) -> Timeline:
    def scaled(rows: Iterable[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(1e3 * time for time in row) for row in rows)

    return dataclasses.replace(timeline, starts=scaled(timeline.starts), ends=scaled(timeline.ends))
