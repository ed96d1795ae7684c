"""The result of a trace: the times of each run and each message of the calls, on one clock."""

import dataclasses
import functools
import pathlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from jaxpp._program import Bundle, Message, Run
from jaxpp.runtime.trace import _figures
from jaxpp.schedules import Costs, Task, Timeline, simulate

#: A run: its call, its rank, and its position in the rank's program; None where there is no such.
Where = tuple[int, int, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class TracedRun:
    """A task, or another part of a step, that a rank ran in a call; times are seconds.

    `position` is that of the instruction in the rank's program. A run is `dispatched` before it
    starts: it waits for its inputs, and for the runs before it on its device. `task` is the task of
    a loop that it is, if it is one; in a step of several loops, the stages of each are numbered on
    from those of the loops before. `others` are the tasks that ran in it as well.
    """

    call: int
    rank: int
    position: int
    label: str
    dispatched: float
    start: float
    end: float
    task: Task | None = None
    others: tuple[Task, ...] = ()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks that it is."""
        return (self.task, *self.others) if self.task else ()

    @property
    def where(self) -> Where:
        """The call, the rank and the position."""
        return self.call, self.rank, self.position


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
        profile_paths: the folders of JAX's own profiles, for each process; in TensorBoard's form.
        errors: what kept some runs from being known, such as a step that failed.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, tempfile
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> mesh = jaxpp.MpmdMesh((1,))
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mesh.start_trace(folder)
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

        def duration(call: int) -> float:
            tasks = [run for run in self._by_call[call][0] if run.task]
            return max(run.end for run in tasks) - min(run.start for run in tasks)

        return sorted(whole, key=duration)[(len(whole) - 1) // 2]

    def timeline(self, call: int | None = None) -> Timeline:
        """Returns the times of each task of a call, by default a typical one.

        The first task starts at 0. The rows of the timeline are devices: a rank, or the ranks that
        share a device.

        Raises:
            ValueError: the call was not traced, or not whole, or has no scheduled loop.
        """
        call = self._chosen(call)
        runs = self._by_call[call][0]
        clocked = [(self.device_of[r.rank], r.tasks, r.start, r.end) for r in runs]
        orders = [
            [tasks for device, tasks, *_ in clocked if device == d]
            for d in range(1 + max(self.device_of))
        ]
        needs = _figures.dependencies_of(self.steps[call])
        return _figures.timeline_of(_figures.table_of(orders, needs), clocked)

    def simulated(self, call: int | None = None) -> Timeline:
        """Simulates the tasks of a call, by default a typical one, with the costs of the trace.

        Raises:
            ValueError: as `timeline` does.
        """
        call = self._chosen(call)
        needs = _figures.dependencies_of(self.steps[call])
        return simulate(self.timeline(call).table, self.costs(call), dependencies=needs)

    def costs(self, call: int | None = None) -> Costs:
        """Returns the costs of tasks and transfers, of all calls of the step of a call.

        A task's time lasts until its device is free for the next one, where that one's messages are
        there; else a message's time lasts from the end of the task that made it until the task that
        waited for it starts. The time of a task, and of a message of a size, is its mean in a call,
        and the median of the calls.

        Raises:
            ValueError: as `timeline` does.
        """
        bundle = self.steps[self._chosen(call)]
        calls: list[list[_figures.Clocked]] = []
        edges: dict[_figures.Key, int] = {}
        points: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
        for number in (n for n in self.calls if self.steps[n] is bundle):
            runs, waited = self._until_the_next(number)
            calls.append(runs)
            alike: dict[tuple[bool, int], list[float]] = defaultdict(list)
            for sent in self._by_call[number][1]:
                tag, nbytes = sent.message.tag, sent.message.nbytes
                alike[tag in waited, nbytes].append(waited.get(tag, sent.end - sent.start))
                maker = self._run_at.get(sent.made_by)
                for task in maker.tasks if maker and "edge" in sent.message.kinds else ():
                    key = task.kind, task.stage
                    edges[key] = max(edges.get(key, 0), nbytes)
            for (late, nbytes), times in alike.items():
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
        own, messages = self._by_call[call]
        last = {m.read_by: m for m in sorted(messages, key=lambda m: m.end)}
        clocked: list[_figures.Clocked] = []
        waited: dict[int, float] = {}
        of_device: dict[int, list[TracedRun]] = defaultdict(list)
        for run in own:
            if run.task and run.task.kind.lane == "copy":
                clocked.append((run.rank, run.tasks, run.start, run.end))
            else:
                of_device[self.device_of[run.rank]].append(run)
        for runs in of_device.values():
            for run, after in zip(runs, [*runs[1:], None], strict=True):
                end, sent = run.end, after and last.get(after.where)
                if sent and after and sent.end > end:
                    maker = self._run_at.get(sent.made_by)
                    made = sent.start if maker is None else maker.end
                    waited[sent.message.tag] = after.start - made
                elif after:
                    end = after.start
                clocked.append((run.rank, run.tasks, run.start, end))
        return clocked, waited

    def _chosen(self, call: int | None) -> int:
        call = self.typical_call if call is None else call
        if call is None:
            raise ValueError(
                "The trace has no call of a step with a scheduled loop from its start to its end; "
                "call such a step between start_trace and stop_trace."
            )
        if call not in self.steps:
            raise ValueError(
                f"Call {call} was not traced; those that were are {self.calls}, in Trace.calls."
            )
        if not _figures.tasks_of(self.steps[call]):
            raise ValueError(f"Call {call} is of a step without a scheduled loop: it has no tasks.")
        if not self._is_whole(call):
            raise ValueError(
                f"Call {call} was not traced to its end: {'; '.join(self.errors) or 'it failed'}."
            )
        return call

    @functools.cached_property
    def _run_at(self) -> dict[Where, TracedRun]:
        return {run.where: run for run in self.runs}

    @functools.cached_property
    def _by_call(self) -> dict[int, tuple[list[TracedRun], list[TracedMessage]]]:
        found: dict[int, Any] = {call: ([], []) for call in self.calls}
        for run in self.runs:
            found[run.call][0].append(run)
        for sent in self.messages:
            found[sent.call][1].append(sent)
        return found

    def _is_whole(self, call: int) -> bool:
        """Tells whether a call has a scheduled loop, and all of its runs are known."""
        bundle = self.steps[call]
        runs = sum(isinstance(i, Run) for p in bundle.programs for i in p.instructions)
        return bool(_figures.tasks_of(bundle)) and runs == len(self._by_call[call][0])
