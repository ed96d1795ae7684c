"""Puts what processes of several hosts have recorded on one clock."""

import dataclasses
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxpp._program import Bundle, Message, Receive, Run, Send
from jaxpp.runtime.trace._recorder import Records
from jaxpp.runtime.trace._result import Trace, TracedMessage, TracedRun, Where
from jaxpp.runtime.transport import host_identity

#: The number of times that a clock is asked; the shortest of so many round trips has little delay.
ROUND_TRIPS = 10
#: Names the clock of this process; one of its own where the system does not name it.
_CLOCK = host_identity("time") if sys.platform == "linux" else f"{platform.node()} {time.time_ns()}"
#: A time of another clock, and what to add to it to have the driver's, in nanoseconds.
Offset = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The times of the clock of a host, which it names, and of the day, in nanoseconds."""

    host: str
    monotonic_ns: int
    unix_ns: int


def read_clock(process: Any = None) -> Reading:
    """Reads the clocks of this process."""
    return Reading(_CLOCK, time.monotonic_ns(), time.time_ns())


def measure_offset(mesh: Any, number: int) -> Offset:
    """Measures how far the clock of a process is behind that of this one, the driver's.

    The process is taken to read its clock in the middle of a round trip. This is wrong by half a
    round trip at most, so the shortest one counts: the clock filter of NTP (D. Mills et al., RFC
    5905, sections 8 and 10). The offset is 0 where the clock is the same one.
    """
    readings = []
    for _ in range(ROUND_TRIPS):
        before = time.monotonic_ns()
        reading: Reading = mesh.apply(read_clock, {number: ()}, ordered=False)[number]
        after = time.monotonic_ns()
        if reading.host == _CLOCK:
            return reading.monotonic_ns, 0
        there = reading.monotonic_ns
        readings.append((after - before, there, (before + after) // 2 - there))
    _, there, offset = min(readings)
    return there, offset


def to_driver(time: int, offsets: Sequence[Offset]) -> int:
    """Returns the driver's time at a time of another clock.

    Clocks do not run equally fast. The offset is on the line through those at two moments.
    """
    (t0, first), (t1, last) = offsets
    return time + first + round((last - first) * (time - t0) / ((t1 - t0) or 1))


def assemble(
    records: Mapping[int, Records],
    offsets: Mapping[int, Sequence[Offset]],
    zero: int,
    steps: Mapping[int, Bundle],
    device_of: Sequence[int],
) -> Trace:
    """Puts the records of processes on one clock, in seconds since the driver's time `zero`.

    At two moments the clock of each process was behind that of the driver by its `offsets`.
    """
    seen: dict[Where, tuple[float, Any, Any]] = {}
    sent: dict[Any, tuple[float, float]] = {}
    received: dict[Any, tuple[float, float]] = {}
    numbers: dict[int, int] = {}
    for process, own in records.items():
        for found, noted in ((seen, own.runs), (sent, own.sent), (received, own.received)):
            found |= {key: _seconds(times, offsets[process], zero) for key, times in noted.items()}
        numbers |= own.calls
    calls = {call: steps[step] for call, step in sorted(numbers.items()) if step in steps}
    ends = {id(bundle): _ends_of_messages(bundle) for bundle in calls.values()}
    messages = [
        TracedMessage(call, *ends[id(calls[call])][tag], *times, *received[call, tag])
        for (call, tag), times in sent.items()
        if call in calls and tag in ends[id(calls[call])] and (call, tag) in received
    ]
    seen = {where: s for where, s in seen.items() if where[0] in calls}
    runs = _runs(dict(sorted(seen.items(), key=lambda r: r[1][0])), messages, calls, device_of)
    by_place = {run.where: run for run in runs}
    messages = [_between(m, by_place.get(m.made_by), by_place.get(m.read_by)) for m in messages]
    return Trace(
        tuple(sorted(runs, key=lambda run: (run.start, run.end))),
        tuple(sorted(messages, key=lambda m: (m.start, m.message.tag))),
        MappingProxyType(calls),
        tuple(device_of),
        errors=tuple(dict.fromkeys(error for own in records.values() for error in own.errors)),
    )


def _seconds(times: Sequence[int | None], offsets: Sequence[Offset], zero: int) -> Any:
    return tuple(None if t is None else (to_driver(t, offsets) - zero) / 1e9 for t in times)


def _runs(
    seen: Mapping[Where, tuple[float, Any, Any]],
    messages: Sequence[TracedMessage],
    calls: Mapping[int, Bundle],
    device_of: Sequence[int],
) -> list[TracedRun]:
    """Makes the runs of all ranks, in the order of their dispatch.

    A run whose start was not seen started when it could: when it had been dispatched, its lane was
    free and its messages were there. Its end was noted by a thread, which may have been woken late:
    it ended before the next one of its lane, before a message that it has made has left, and before
    the run that reads the message. All of these were dispatched later.
    """
    runs: dict[Where, Run] = {}
    lanes: dict[Where, tuple[int, str]] = {}  # a device, and what of it runs something
    for where in seen:
        call, rank, position = where
        runs[where] = run = calls[call].programs[rank].instructions[position]
        lanes[where] = device_of[rank], run.lane
    made: dict[Where, list[TracedMessage]] = defaultdict(list)
    arrived: dict[Where, float] = {}
    for m in messages:
        made[m.made_by].append(m)
        arrived[m.read_by] = max(arrived.get(m.read_by, m.end), m.end)

    ends: dict[Where, float] = {}
    next_end: dict[Any, float] = {}
    for where, (_, start, end) in reversed(list(seen.items())):
        if end is None:
            continue
        if start is None:
            bounds = [end, next_end.get(lanes[where], end)]
            for m in made[where]:
                bounds += [m.sent, m.end, ends.get(m.read_by, end)]
            end = min(bounds)
        ends[where] = next_end[lanes[where]] = end

    free: dict[Any, float] = {}
    traced: list[TracedRun] = []
    for where, (dispatched, start, _) in seen.items():
        run, lane = runs[where], lanes[where]
        if start is None:
            start = max(dispatched, free.get(lane, dispatched), arrived.get(where, dispatched))
            start = min(start, ends.get(where, start))
        free[lane] = end = ends.get(where, start)
        times = min(dispatched, start), start, end
        traced.append(TracedRun(*where, run.label, *times, run.task, run.others))
    return traced


def _between(m: TracedMessage, maker: TracedRun | None, reader: TracedRun | None) -> TracedMessage:
    """Corrects the times of a message: sent after its maker ends, there before its reader starts.

    The thread that notes a copy may be woken late, and a send begins with the wait for its maker.
    """
    made = m.start if maker is None else maker.end
    read = m.end if reader is None else max(reader.start, made)
    start = min(max(m.start, made), read)
    end = max(min(m.end, read), start)
    sent, arriving = max(min(m.sent, end), start), min(max(m.arriving, start), end)
    return TracedMessage(m.call, m.message, m.maker, m.reader, start, sent, arriving, end)


def _ends_of_messages(bundle: Bundle) -> dict[int, tuple[Message, int | None, int | None]]:
    """Finds for each tag the message, the run before its send, and the first run that reads it."""
    makers: dict[int, tuple[Message, int | None]] = {}
    readers: dict[int, int] = {}
    for program in bundle.programs:
        last, waiting = None, []
        for position, instruction in enumerate(program.instructions):
            match instruction:
                case Run():
                    readers.update(dict.fromkeys(waiting, position))
                    last, waiting = position, []
                case Send(message=message):
                    makers[message.tag] = message, last
                case Receive(message=message):
                    waiting.append(message.tag)
    return {tag: (*made, readers.get(tag)) for tag, made in makers.items()}
