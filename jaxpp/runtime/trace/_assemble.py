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
    runs = _runs(_note(records, calls, seconds, device_of), messages)
    by_place: dict[Where, TracedRun] = {(r.call, r.rank, r.position): r for r in runs}
    messages = [_between(m, by_place) for m in messages]
    return Trace(
        tuple(sorted(runs, key=lambda run: (run.start, run.end))),
        tuple(sorted(messages, key=lambda m: (m.start, m.message.tag))),
        MappingProxyType(calls),
        tuple(device_of),
        errors=tuple(dict.fromkeys(error for own in records.values() for error in own.errors)),
    )


# ---- runs ----------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Noted:
    """What was noted of a run, in seconds: its dispatch, and its start and end where known.

    `lane` is the device with the lane that runs it.
    """

    run: Run
    lane: tuple[int, str]
    dispatched: float
    start: float | None
    end: float | None


def _runs(noted: Mapping[Where, _Noted], messages: Sequence[TracedMessage]) -> list[TracedRun]:
    """Makes the runs of all ranks from what was noted, which is in the order of dispatch.

    A run whose start is not known started when it could: when it had been dispatched, its lane was
    free and its messages were there.
    """
    _correct_ends(noted, messages)
    arrived: dict[Where, float] = {}
    for m in messages:
        arrived[m.read_by] = max(arrived.get(m.read_by, m.end), m.end)
    free: dict[tuple[int, str], float] = {}
    runs = []
    for where, own in noted.items():
        start, end = own.start, own.end
        if start is None:
            begin = own.dispatched
            start = max(begin, free.get(own.lane, begin), arrived.get(where, begin))
            start = start if end is None else min(start, end)
        free[own.lane] = end = start if end is None else end
        call, rank, position = where
        assert position is not None
        times = min(own.dispatched, start), start, end
        runs.append(TracedRun(call, rank, position, own.run.label, *times, own.run.task))
    return runs


def _note(
    records: Mapping[int, Records],
    calls: Mapping[int, Bundle],
    seconds: Seconds,
    device_of: Sequence[int],
) -> dict[Where, _Noted]:
    """Puts the records of the calls' runs on one clock, in the order of dispatch."""
    noted: dict[Where, _Noted] = {}
    for process, own in records.items():
        for r in own.runs:
            if r.call not in calls:
                continue
            run = calls[r.call].programs[r.rank].instructions[r.position]
            assert isinstance(run, Run)
            start, end = (t if t is None else seconds(process, t) for t in (r.start, r.end))
            lane = device_of[r.rank], run.lane
            dispatched = seconds(process, r.dispatched)
            noted[r.call, r.rank, r.position] = _Noted(run, lane, dispatched, start, end)
    return dict(sorted(noted.items(), key=lambda item: item[1].dispatched))


def _correct_ends(noted: Mapping[Where, _Noted], messages: Sequence[TracedMessage]) -> None:
    """Corrects ends that a thread has noted, for it may be woken late.

    A run has ended before the next one of its lane, before a message that it has made has left, and
    before the run that reads the message. All of these were dispatched later.
    """
    made: dict[Where, list[TracedMessage]] = defaultdict(list)
    for m in messages:
        made[m.made_by].append(m)
    after: dict[tuple[int, str], float] = {}
    for where, own in reversed(list(noted.items())):
        end = own.end
        if end is None:
            continue
        if own.start is None:
            readers = [noted[m.read_by].end for m in made[where] if m.read_by in noted]
            bounds = [t for m in made[where] for t in (m.sent, m.end)]
            bounds += [read for read in readers if read is not None]
            own.end = end = min([end, after.get(own.lane, end), *bounds])
        after[own.lane] = end


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
