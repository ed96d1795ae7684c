"""Puts what processes have recorded on one clock."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from jaxpp._program import Bundle, Message, Receive, Run, Send
from jaxpp.runtime.trace._clock import Offset
from jaxpp.runtime.trace._records import Records
from jaxpp.runtime.trace._result import Trace, TracedMessage, TracedRun, Where

#: Gives the seconds since the start of the trace of a time of a process's clock.
Seconds = Callable[[int, int], float]


def assemble(
    records: Mapping[int, Records],
    offsets: Mapping[int, Offset],
    zero: int,
    steps: Mapping[int, Bundle],
    device_of: Sequence[int],
) -> Trace:
    """Puts the records of processes on one clock.

    Args:
        records: those of each process.
        offsets: for each process, what its clock is behind that of the driver.
        zero: the driver's time, in nanoseconds, from which times count.
        steps: the programs of each step by its number.
        device_of: for each rank, the number of its device.
    """

    def seconds(process: int, time: int) -> float:
        return (offsets[process].to_driver(time) - zero) / 1e9

    step_of = {run.call: run.step for own in records.values() for run in own.runs}
    calls = {call: steps[step] for call, step in sorted(step_of.items()) if step in steps}
    messages = _messages(records, calls, seconds)
    runs = _runs(records, calls, seconds, messages, device_of)
    messages = [_between(m, runs) for m in messages]
    return Trace(
        tuple(sorted(runs.values(), key=lambda run: (run.start, run.end, run.rank))),
        tuple(sorted(messages, key=lambda m: (m.start, m.message.tag))),
        MappingProxyType(calls),
        tuple(device_of),
        errors=tuple(dict.fromkeys(error for own in records.values() for error in own.errors)),
    )


# ---- runs ----------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Noted:
    """What was noted of a run, in seconds: its dispatch, and its start and end where known."""

    run: Run
    dispatched: float
    start: float | None
    end: float | None


def _runs(
    records: Mapping[int, Records],
    calls: Mapping[int, Bundle],
    seconds: Seconds,
    messages: Sequence[TracedMessage],
    device_of: Sequence[int],
) -> dict[Where, TracedRun]:
    """Makes the runs of all ranks, each lane of each device by itself."""
    lanes: dict[tuple[int, str], dict[Where, _Noted]] = defaultdict(dict)
    for process, own in records.items():
        for record in own.runs:
            if record.call not in calls:
                continue
            run = calls[record.call].programs[record.rank].instructions[record.position]
            assert isinstance(run, Run)
            times = (
                None if time is None else seconds(process, time)
                for time in (record.start, record.end)
            )
            noted = _Noted(run, seconds(process, record.dispatched), *times)
            where = record.call, record.rank, record.position
            lanes[device_of[record.rank], run.lane][where] = noted
    arrived: dict[Where, float] = {}
    left: dict[Where, float] = {}
    for m in messages:
        arrived[m.read_by] = max(arrived.get(m.read_by, m.end), m.end)
        left[m.made_by] = min(left.get(m.made_by, m.end), m.sent, m.end)
    runs: dict[Where, TracedRun] = {}
    for lane in lanes.values():
        order = sorted(lane, key=lambda where: (lane[where].dispatched, where))
        _correct_ends(lane, order, left)
        before = float("-inf")
        for where in order:
            runs[where] = _run(where, lane[where], before, arrived.get(where, before))
            before = runs[where].end
    return runs


def _run(where: Where, noted: _Noted, before: float, arrived: float) -> TracedRun:
    """Makes a run whose lane was free since `before`, and whose messages were there at `arrived`.

    Where its start is not known, it started when it could: when it had been dispatched, its lane
    was free and its messages were there.
    """
    call, rank, position = where
    assert position is not None
    start, end = noted.start, noted.end
    if start is None:
        start = max(noted.dispatched, before, arrived)
        start = start if end is None else min(start, end)
    end = start if end is None else end
    run, dispatched = noted.run, min(noted.dispatched, start)
    return TracedRun(call, rank, position, run.label, dispatched, start, end, run.task)


def _correct_ends(
    lane: Mapping[Where, _Noted], order: Sequence[Where], left: Mapping[Where, float]
) -> None:
    """Corrects ends that a thread has noted, for it may be woken late.

    A run has ended before the next one of its lane, and before a message that it has made has left.
    """
    after = float("inf")
    for where in reversed(order):
        noted = lane[where]
        if noted.start is None and noted.end is not None:
            noted.end = after = min(noted.end, after, left.get(where, after))


# ---- messages ------------------------------------------------------------------------------------


def _messages(
    records: Mapping[int, Records], calls: Mapping[int, Bundle], seconds: Seconds
) -> list[TracedMessage]:
    """Joins the records of both ends of each message of the calls."""
    ends: tuple[dict[tuple[int, int], tuple[float, float]], ...] = ({}, {})
    for process, own in records.items():
        for found, kept in zip((own.sent, own.received), ends, strict=True):
            for r in found:
                kept[r.call, r.tag] = seconds(process, r.start), seconds(process, r.end)
    known = {id(bundle): _ends_of_messages(bundle) for bundle in calls.values()}
    messages = []
    for (call, tag), (start, sent) in ends[0].items():
        ends_of = known[id(calls[call])].get(tag) if call in calls else None
        if ends_of is not None and (call, tag) in ends[1]:
            messages.append(TracedMessage(call, *ends_of, start, sent, *ends[1][call, tag]))
    return messages


def _between(sent: TracedMessage, runs: Mapping[Where, TracedRun]) -> TracedMessage:
    """Corrects the times of a message: sent after its maker ends, there before its reader starts.

    The thread that notes a copy may be woken late, and a send begins with the wait for its maker.
    """
    maker, reader = runs.get(sent.made_by), runs.get(sent.read_by)
    made = sent.start if maker is None else maker.end
    read = sent.end if reader is None else max(reader.start, made)
    start = min(max(sent.start, made), read)
    end = max(min(sent.end, read), start)
    arriving = min(max(sent.arriving, start), end)
    done = max(min(sent.sent, end), start)
    return dataclasses.replace(sent, start=start, sent=done, arriving=arriving, end=end)


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
