"""Puts what processes have recorded on one clock."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from jaxpp._program import Bundle, Message, Receive, Run, Send
from jaxpp.runtime.trace._clock import Offset
from jaxpp.runtime.trace._records import MessageRecord, Records, RunRecord, Where
from jaxpp.runtime.trace._result import Trace, TracedMessage, TracedRun

#: A device, and what of it runs something: what it computes with, or what it copies with.
Lane = tuple[int, str]
_Record = TypeVar("_Record", RunRecord, MessageRecord)


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
    noted, sent, received = [], [], []
    for process, own in records.items():
        noted += [_in_seconds(r, offsets[process], zero) for r in own.runs]
        sent += [_in_seconds(r, offsets[process], zero) for r in own.sent]
        received += [_in_seconds(r, offsets[process], zero) for r in own.received]
    step_of = {run.call: run.step for run in noted}
    calls = {call: steps[step] for call, step in sorted(step_of.items()) if step in steps}
    messages = _messages(sent, received, calls)
    runs = _runs(noted, messages, calls, device_of)
    by_place = {run.where: run for run in runs}
    messages = [_between(m, by_place) for m in messages]
    return Trace(
        tuple(sorted(runs, key=lambda run: (run.start, run.end))),
        tuple(sorted(messages, key=lambda m: (m.start, m.message.tag))),
        MappingProxyType(calls),
        tuple(device_of),
        errors=tuple(dict.fromkeys(error for own in records.values() for error in own.errors)),
    )


def _in_seconds(record: _Record, offset: Offset, zero: int) -> _Record:
    """Returns a record whose times are seconds since the start of the trace."""
    times = {name: getattr(record, name, None) for name in ("dispatched", "start", "end")}
    moved = {n: (offset.to_driver(t) - zero) / 1e9 for n, t in times.items() if t is not None}
    return dataclasses.replace(record, **moved)


# ---- runs ----------------------------------------------------------------------------------------


def _runs(
    records: Iterable[RunRecord],
    messages: Sequence[TracedMessage],
    calls: Mapping[int, Bundle],
    device_of: Sequence[int],
) -> list[TracedRun]:
    """Makes the runs of all ranks from their records.

    A run whose start is not known started when it could: when it had been dispatched, its lane was
    free and its messages were there.
    """
    known = {r.where: r for r in sorted(records, key=lambda r: r.dispatched) if r.call in calls}
    runs = {where: _run_of(record, calls) for where, record in known.items()}
    lanes = {where: (device_of[r.rank], runs[where].lane) for where, r in known.items()}
    ends = _ends(known, lanes, messages)
    arrived: dict[Where, float] = {}
    for m in messages:
        arrived[m.read_by] = max(arrived.get(m.read_by, m.end), m.end)
    free: dict[Lane, float] = {}
    traced = []
    for where, r in known.items():
        run, lane, start, end = runs[where], lanes[where], r.start, ends.get(where)
        if start is None:
            ready = free.get(lane, r.dispatched), arrived.get(where, r.dispatched)
            start = max(r.dispatched, *ready)
            start = start if end is None else min(start, end)
        free[lane] = end = start if end is None else end
        times = min(r.dispatched, start), start, end
        traced.append(TracedRun(r.call, r.rank, r.position, run.label, *times, run.task))
    return traced


def _run_of(record: RunRecord, calls: Mapping[int, Bundle]) -> Run:
    run = calls[record.call].programs[record.rank].instructions[record.position]
    assert isinstance(run, Run)
    return run


def _ends(
    known: Mapping[Where, RunRecord],
    lanes: Mapping[Where, Lane],
    messages: Sequence[TracedMessage],
) -> dict[Where, float]:
    """Corrects ends that a thread has noted, for it may be woken late.

    A run has ended before the next one of its lane, before a message that it has made has left, and
    before the run that reads the message. All of these were dispatched later.
    """
    made: dict[Where, list[TracedMessage]] = defaultdict(list)
    for m in messages:
        made[m.made_by].append(m)
    ends: dict[Where, float] = {}
    next_end: dict[Lane, float] = {}
    for where, r in reversed(list(known.items())):
        if r.end is None:
            continue
        bounds = [r.end]
        if r.start is None:  # noted by a thread
            bounds += [t for m in made[where] for t in (m.sent, m.end)]
            bounds += [ends[m.read_by] for m in made[where] if m.read_by in ends]
            bounds.append(next_end.get(lanes[where], r.end))
        ends[where] = next_end[lanes[where]] = min(bounds)
    return ends


# ---- messages ------------------------------------------------------------------------------------


def _messages(
    sent: Iterable[MessageRecord], received: Iterable[MessageRecord], calls: Mapping[int, Bundle]
) -> list[TracedMessage]:
    """Joins the records of both ends of each message of the calls."""
    targets = {(r.call, r.tag): r for r in received}
    known = {id(bundle): _ends_of_messages(bundle) for bundle in calls.values()}
    messages = []
    for (call, tag), here in {(r.call, r.tag): r for r in sent}.items():
        there = targets.get((call, tag))
        ends = known[id(calls[call])].get(tag) if call in calls else None
        if there is not None and ends is not None:
            times = here.start, here.end, there.start, there.end
            messages.append(TracedMessage(call, *ends, *times))
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
