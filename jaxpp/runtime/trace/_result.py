"""The result of a trace: the times of each run and each message of the calls, on one clock."""

import dataclasses
import functools
import pathlib
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from jaxpp._program import Bundle, Message, Receive, Run, Send
from jaxpp.runtime.trace import _figures
from jaxpp.runtime.trace._clock import Offset
from jaxpp.runtime.trace._recorder import Records
from jaxpp.schedules import Costs, Task, Timeline, simulate

#: A run: its call, its rank, and its position in the rank's program; None where there is no such.
Where = tuple[int, int, int | None]


@dataclasses.dataclass(frozen=True, slots=True)
class TracedRun:
    """A task, or another part of a step, that a rank ran in a call; times are seconds.

    `position` is that of the instruction in the rank's program. A run is `dispatched` before it
    starts: it waits for its inputs, and for the runs before it on its device. `task` is the task of
    a loop that it is, if it is one; in a step of several loops, the stages of each are numbered on
    from those of the loops before.
    """

    call: int
    rank: int
    position: int
    label: str
    dispatched: float
    start: float
    end: float
    task: Task | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TracedMessage:
    """A message between two ranks in a call; times are seconds.

    The sending rank was busy with it from `start` to `sent`, and the receiving rank from `arriving`
    to `end`. `maker` is the position, in the sender's program, of the last run before the send.
    `reader` is the position, in the receiver's program, of the first run after the receive.
    """

    call: int
    message: Message
    maker: int | None
    reader: int | None
    start: float
    sent: float
    arriving: float
    end: float

    @property
    def made_by(self) -> Where:
        """The call, rank and position of the last run before the send."""
        return self.call, self.message.source, self.maker

    @property
    def read_by(self) -> Where:
        """The call, rank and position of the first run after the receive."""
        return self.call, self.message.target, self.reader


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace of ranks, made by `stop_trace`; times are seconds from its start.

    Args:
        runs: each run of each call, by the time of its start.
        messages: each message between devices, by the time at which its sending started.
        steps: for each call, the programs that it ran.
        device_of: for each rank, the number of its device.
        timeline_path: the timeline as a file that ui.perfetto.dev and chrome://tracing open.
        picture_path: the picture of a typical call beside its simulation; None where no call had
            a scheduled loop.
        profile_paths: the folders of JAX's own profiles, for each process; none without `profiler`.
        errors: what kept some runs from being known, such as a step that failed.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, tempfile
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> mesh = jaxpp.MpmdMesh((1,))
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mesh.start_trace(folder, profiler=False)
        ...     gradient = step(jnp.eye(2), jnp.ones((4, 2)))
        ...     trace = mesh.stop_trace()
        >>> print(*trace.timeline().table.ranks[0])
        F0.0 B0.0 F0.1 B0.1
    """

    runs: tuple[TracedRun, ...]
    messages: tuple[TracedMessage, ...]
    steps: Mapping[int, Bundle]
    device_of: tuple[int, ...]
    timeline_path: pathlib.Path | None = None
    picture_path: pathlib.Path | None = None
    profile_paths: tuple[pathlib.Path, ...] = ()
    errors: tuple[str, ...] = ()

    def __repr__(self):
        where = f" in {str(self.timeline_path)!r}" if self.timeline_path else ""
        wrong = f", {len(self.errors)} errors" if self.errors else ""
        return (
            f"Trace({len(self.calls)} calls of {len(self.device_of)} ranks: {len(self.runs)} runs, "
            f"{len(self.messages)} messages{wrong}{where})"
        )

    @property
    def calls(self) -> tuple[int, ...]:
        """The numbers of the calls, in order."""
        return tuple(self.steps)

    @functools.cached_property
    def typical_call(self) -> int | None:
        """The call to look at: of the step called most often, the one of median duration.

        None where no call has a scheduled loop with all of its tasks recorded.
        """
        whole = [call for call in self.calls if self._is_whole(call)]
        if not whole:
            return None
        most = Counter(id(self.steps[call]) for call in whole).most_common(1)[0][0]
        whole = [call for call in whole if id(self.steps[call]) == most]
        return sorted(whole, key=lambda call: self.timeline(call).makespan)[(len(whole) - 1) // 2]

    def timeline(self, call: int | None = None) -> Timeline:
        """Returns the times of each task of a call; the first task starts at 0.

        The rows of the timeline are devices: a rank, or the ranks that share a device.

        Args:
            call: which; by default a typical one.

        Raises:
            ValueError: the call was not traced, or not whole, or has no scheduled loop.
        """
        call = self._chosen(call)
        clocked = [(self.device_of[r.rank], r.task, r.start, r.end) for r in self._by_call[call]]
        orders = [
            [task for device, task, *_ in clocked if device == d and task]
            for d in range(1 + max(self.device_of))
        ]
        return _figures.timeline_of(_figures.table_of(orders), clocked)

    def simulated(self, call: int | None = None) -> Timeline:
        """Simulates the tasks of a call with the costs of the trace.

        Args:
            call: which; by default a typical one.

        Raises:
            ValueError: as `timeline` does.
        """
        call = self._chosen(call)
        bundle = self.steps[call]
        needs = _figures.dependencies_of(bundle)
        return simulate(self.timeline(call).table, self.costs(call), dependencies=needs)

    def costs(self, call: int | None = None) -> Costs:
        """Returns the costs of tasks and transfers, of all calls of the step.

        A task's time lasts until its device is free for the next one, where that one's messages are
        there; else a message's time lasts from the end of the task that made it until the task that
        waited for it starts. The time of a task, and of a message of a size, is its mean in a call,
        and the median of the calls.

        Args:
            call: a call of the step; by default a typical one.

        Raises:
            ValueError: as `timeline` does.
        """
        call = self._chosen(call)
        bundle = self.steps[call]
        calls: list[list[_figures.Clocked]] = []
        edges: dict[_figures.Key, int] = {}
        points: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
        for number in self.calls:
            if self.steps[number] is not bundle:
                continue
            runs, waited = self._until_the_next(number)
            calls.append(runs)
            own: dict[tuple[bool, int], list[float]] = {}
            tasks: dict[tuple[int, int | None], Task | None] = {
                (run.rank, run.position): run.task for run in self._by_call[number]
            }
            for sent in self._messages_by_call[number]:
                maker = tasks.get((sent.message.source, sent.maker))
                if maker is not None and "edge" in sent.message.kinds:
                    key = maker.kind, maker.stage
                    edges[key] = max(edges.get(key, 0), sent.message.nbytes)
                alike = sent.message.tag in waited, sent.message.nbytes
                seconds = waited.get(sent.message.tag, sent.end - sent.start)
                own.setdefault(alike, []).append(seconds)
            for (late, nbytes), times in own.items():
                points[late].append((nbytes, statistics.fmean(times)))
        latency, bandwidth = _figures.fit_line(points[True] or points[False])
        return Costs.measured(
            _figures.typical_times(calls),
            latency=latency,
            bandwidth=bandwidth,
            edge_bytes=lambda task: edges.get((task.kind, task.stage), 0),
        )

    def _until_the_next(self, call: int) -> tuple[list[_figures.Clocked], dict[int, float]]:
        """Returns the runs of a call, and by their tags the times of messages that runs waited for.

        A run lasts until its device goes on, where the next one waits for no message; a copy, until
        it has ended.
        """
        runs = self._by_call[call]
        ends: dict[tuple[int, int | None], float] = {
            (run.rank, run.position): run.end for run in runs
        }
        last: dict[tuple[int, int | None], TracedMessage] = {}
        for sent in sorted(self._messages_by_call[call], key=lambda m: m.end):
            last[sent.message.target, sent.reader] = sent
        clocked: list[_figures.Clocked] = []
        waited: dict[int, float] = {}
        clocked += [
            (r.rank, r.task, r.start, r.end) for r in runs if r.task and r.task.kind.lane == "copy"
        ]
        computed = [run for run in runs if not run.task or run.task.kind.lane == "compute"]
        for device in set(self.device_of):
            own = [run for run in computed if self.device_of[run.rank] == device]
            for run, after in zip(own, [*own[1:], None], strict=True):
                end, sent = run.end, after and last.get((after.rank, after.position))
                if sent and after and sent.end > end:
                    made = ends.get((sent.message.source, sent.maker), sent.start)
                    waited[sent.message.tag] = after.start - made
                elif after:
                    end = after.start
                clocked.append((run.rank, run.task, run.start, end))
        return clocked, waited

    def _chosen(self, call: int | None) -> int:
        if call is None:
            call = self.typical_call
            if call is None:
                raise ValueError(
                    "The trace has no call of a step with a scheduled loop from its start to its "
                    "end; call such a step between start_trace and stop_trace."
                )
        if call not in self.steps:
            raise ValueError(
                f"Call {call} was not traced; those that were are {self.calls}, in Trace.calls."
            )
        if not self._tasks(call):
            raise ValueError(f"Call {call} is of a step without a scheduled loop: it has no tasks.")
        if not self._is_whole(call):
            raise ValueError(
                f"Call {call} was not traced to its end: {'; '.join(self.errors) or 'it failed'}."
            )
        return call

    def _tasks(self, call: int) -> frozenset[Task]:
        """Returns the tasks of a call's step."""
        bundle, known = self.steps[call], self._known_tasks
        if id(bundle) not in known:
            known[id(bundle)] = _figures.tasks_of(bundle)
        return known[id(bundle)]

    @functools.cached_property
    def _known_tasks(self) -> dict[int, frozenset[Task]]:
        return {}

    @functools.cached_property
    def _by_call(self) -> dict[int, list[TracedRun]]:
        runs: dict[int, list[TracedRun]] = {call: [] for call in self.calls}
        for run in self.runs:
            runs[run.call].append(run)
        return runs

    @functools.cached_property
    def _messages_by_call(self) -> dict[int, list[TracedMessage]]:
        messages: dict[int, list[TracedMessage]] = {call: [] for call in self.calls}
        for sent in self.messages:
            messages[sent.call].append(sent)
        return messages

    def _is_whole(self, call: int) -> bool:
        tasks = self._tasks(call)
        return bool(tasks) and tasks <= {run.task for run in self._by_call[call]}


def _run_at(where: Where, calls: Mapping[int, Bundle]) -> Run:
    """Returns the instruction that a record is of."""
    call, rank, position = where
    assert position is not None
    instruction = calls[call].programs[rank].instructions[position]
    assert isinstance(instruction, Run)
    return instruction


def assemble(
    records: Mapping[int, Records],
    offsets: Mapping[int, Offset],
    zero: int,
    steps: Mapping[int, Bundle],
    device_of: Sequence[int],
) -> Trace:
    """Puts the records of processes on one clock.

    A run starts when it has been dispatched, the run before it on its lane of its device has ended,
    and its messages are there, whichever comes last. The threads that note ends have to be woken,
    one a little later than another, so ends are corrected: a run has ended before the message after
    it has left, and before that message has come in, which the receiver may note first; a message
    has come in before the run that reads it has ended.

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
    dispatched: dict[Where, float] = {}
    ended: dict[Where, float] = {}
    for process, own in records.items():
        for run in own.runs:
            if run.call in calls:
                where = run.call, run.rank, run.position
                dispatched[where] = seconds(process, run.dispatched)
                ended[where] = seconds(process, run.end)
    for m in messages:
        if m.made_by in ended:
            ended[m.made_by] = min(ended[m.made_by], m.sent, m.end)
    by_lane: dict[tuple[int, str], list[Where]] = {}
    for where in sorted(ended, key=lambda where: (dispatched[where], ended[where])):
        lane = _run_at(where, calls).lane
        by_lane.setdefault((device_of[where[1]], lane), []).append(where)
    _bring_forward(ended, list(by_lane.values()), messages)
    arrived: dict[Where, float] = {}
    for m in messages:
        arrived[m.read_by] = max(arrived.get(m.read_by, m.end), m.end)
    runs = []
    for own in by_lane.values():
        before = float("-inf")
        for where in own:
            call, rank, position = where
            assert position is not None
            instruction = _run_at(where, calls)
            begun, end = dispatched[where], ended[where]
            start = min(max(begun, before, arrived.get(where, before)), end)
            label, task = instruction.label, instruction.task
            runs.append(TracedRun(call, rank, position, label, begun, start, end, task))
            before = end
    messages = [_between(m, ended) for m in messages]
    return Trace(
        tuple(sorted(runs, key=lambda run: (run.start, run.end, run.rank))),
        tuple(sorted(messages, key=lambda m: (m.start, m.message.tag))),
        MappingProxyType(calls),
        tuple(device_of),
        errors=tuple(dict.fromkeys(error for own in records.values() for error in own.errors)),
    )


def _messages(
    records: Mapping[int, Records],
    calls: Mapping[int, Bundle],
    seconds: Callable[[int, int], float],
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


def _bring_forward(
    ended: dict[Where, float],
    orders: Sequence[Sequence[Where]],
    messages: Sequence[TracedMessage],
) -> None:
    """Corrects ends that were noted too late: a run ends no later than the runs that need it.

    These are the next run on its device, and the readers of its messages.
    """
    pairs: list[tuple[Where, Where]] = [
        (a, b) for own in orders for a, b in zip(own, own[1:], strict=False)
    ][::-1]
    pairs += [(m.made_by, m.read_by) for m in reversed(messages)]
    pairs = [(a, b) for a, b in pairs if a in ended and b in ended]
    late = True
    while late:
        late = [(a, b) for a, b in pairs if ended[b] < ended[a]]
        for a, b in late:
            ended[a] = min(ended[a], ended[b])


def _between(sent: TracedMessage, ended: Mapping[Where, float]) -> TracedMessage:
    """Corrects the times of a message: sent after its maker ends, there before its reader ends."""
    maker = ended.get(sent.made_by, sent.start)
    reader = ended.get(sent.read_by, sent.end)
    start = min(max(sent.start, maker), sent.sent, reader)
    end = max(min(sent.end, reader), start)
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
