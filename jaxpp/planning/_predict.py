"""`predict`: the time and the memory of a placed step, before it runs."""

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpp import _messages
from jaxpp._program import REDUCTION, Bundle, Program, Run, Send
from jaxpp.planning._device import Device, device_of
from jaxpp.planning._measure import Measurement
from jaxpp.runtime.executor import (
    HOST,
    Inspected,
    array_bytes,
    format_bytes,
    held_bytes,
    over_time,
)
from jaxpp.runtime.trace import Key, Trace, dependencies_of, table_of, tasks_of
from jaxpp.schedules import Costs, Kind, Task, Timeline, plot, simulate
from jaxpp.transforms.inside import propagate
from jaxpp.transforms.place import Compiled, Placed

#: The rows of a comparison that are not of a kind of task.
_WHOLE = ("step", "tasks")
#: A task that takes so many times as long as predicted does not have its cores to itself.
SHARED = 1.5


@dataclasses.dataclass(frozen=True)
class Moment:
    """The bytes that a device of a rank holds from a time on.

    Args:
        seconds: the time since the start of the step.
        bytes: by what they are: `"parameters"`, `"optimizer"`, `"batch"`, `"other"` arguments and
            results, `"accumulators"`, `"activations"`, `"messages"` that nothing has read yet, and
            what XLA needs beside arrays, `"temporary"`; and all that is in the memory of the host
            instead, `"host"`.
        running: the task, or the part of the step around the tasks, that runs then.
    """

    seconds: float
    bytes: Mapping[str, int]
    running: str

    @property
    def total(self) -> int:
        """All bytes of the device: those of the host are no part of them."""
        return sum(n for kind, n in self.bytes.items() if kind != HOST)

    def __str__(self) -> str:
        kinds = sorted(self.bytes.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {format_bytes(n)}" for kind, n in kinds if n)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The time and the memory of a step, made by `predict`.

    Times are seconds, of a step whose ranks have a device, or devices, of their own.

    Args:
        timeline: the tasks, from the first one's start on.
        start: when the first task starts: what comes before it is done.
        seconds: the time of the step.
        memory: for each rank, the moments at which its bytes change, in order.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        ...     return jnp.mean((h @ w[1]) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> mesh = jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
        >>> shapes = jax.eval_shape(lambda: ([jnp.eye(8), jnp.eye(8)], jnp.ones((16, 8))))
        >>> prediction = jaxpp.predict(step, *shapes, costs=jaxpp.Device(1e9, 1e9))
        >>> [peak.bytes["parameters"] for peak in prediction.peaks]
        [256, 256]
    """

    timeline: Timeline
    start: float
    seconds: float
    memory: tuple[tuple[Moment, ...], ...]

    @functools.cached_property
    def peaks(self) -> tuple[Moment, ...]:
        """For each rank, the moment at which it holds most."""
        return tuple(max(own, key=lambda moment: moment.total) for own in self.memory)

    def beside(self, found: Measurement | Trace) -> "Beside":
        """Puts the prediction beside what was measured: a table, and a picture.

        Args:
            found: what `measure` or a trace found of the step.
        """
        _, measured = costs_found(found)
        assert measured is not None
        rows = [("tasks", self.timeline.makespan, measured.makespan)]
        if isinstance(found, Measurement):
            rows.insert(0, ("step", self.seconds, found.step))
        times = _medians(self.timeline), _medians(measured)
        for key in sorted(times[0].keys() & times[1].keys()):
            rows.append((f"{key[0]}{key[1]}", times[0][key], times[1][key]))
        return Beside(tuple(rows), {"predicted": self.timeline, "measured": measured})

    def __str__(self) -> str:
        lines = [f"{self.seconds:.6g} s, bubble {self.timeline.bubble_fraction:.1%} of the tasks"]
        for rank, peak in enumerate(self.peaks):
            lines.append(f"rank {rank}: {format_bytes(peak.total)} in {peak.running}: {peak}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Beside:
    """A prediction beside a measurement, made by `Prediction.beside`; a notebook shows the table.

    Args:
        rows: what it is, its predicted seconds, and its measured ones: the step, where it was
            measured as a whole; its `tasks`, from the first one's start to the last one's end; and
            each kind of task of each stage, by its median.
        timelines: both timelines by name, as `jaxpp.schedules.plot` takes them.
    """

    rows: tuple[tuple[str, float, float], ...]
    timelines: Mapping[str, Timeline]

    def _cells(self) -> list[list[str]]:
        return [
            [name, *(f"{1e3 * t:.3f}" for t in times), f"{times[1] / (times[0] or math.nan):.3f}"]
            for name, *times in self.rows
        ]

    @property
    def note(self) -> str:
        """Says what the row `tasks` is, and where a step or tasks take longer than predicted."""
        note = "tasks: from the start of the first one to the end of the last one"
        longer = {name: after / before for name, before, after in self.rows if before}
        own = [ratio for name, ratio in longer.items() if name not in _WHOLE]
        task, together = statistics.median(own) if own else 1.0, longer.get("tasks", 1.0)
        if task >= SHARED:
            return (
                f"{note}\nA task takes {task:.1f} times as long as predicted: ranks, or other "
                f"processes, share cores or a device. Give each its own, or predict and plan with "
                f"what was measured: predict(costs=measured), Plan.again(measured)."
            )
        if together >= SHARED:
            return (
                f"{note}\nTasks take {together:.1f} times as long together as predicted, and "
                f"{task:.1f} times each: ranks wait between them, for messages, which latency= and "
                f"bandwidth= tell of, or for cores that other processes use meanwhile."
            )
        return note

    def __str__(self) -> str:
        header = ["", "predicted ms", "measured ms", "ratio"]
        rows = [f"{a:6}{b:>14}{c:>14}{d:>8}" for a, b, c, d in [header, *self._cells()]]
        return "\n".join([*rows, self.note])

    def _repr_html_(self) -> str:
        return _messages.html_table(
            ["", "predicted ms", "measured ms", "ratio"], self._cells(), self.note
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws both timelines on one axis.

        Args:
            path: the file; its suffix gives the format, `.png` or `.svg` for instance.
        """
        plot(self.timelines, path)


def _medians(timeline: Timeline) -> dict[Key, float]:
    """Returns the median time of each kind of task of each stage."""
    times: dict[Key, list[float]] = {}
    for span in timeline.spans:
        key = span.task.kind, span.task.stage
        times.setdefault(key, []).append(span.end - span.start)
    return {key: statistics.median(own) for key, own in times.items()}


def predict(
    step: Any,
    *args: Any,
    costs: Costs | Measurement | Trace | Device | str,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    reduction_bandwidth: float = math.inf,
    memory_limit: float | Sequence[float] | None = None,
) -> Prediction:
    """Predicts the time and the memory of a placed step; compiles it, and runs nothing.

    Args:
        step: what `place` gave, with a scheduled loop; or what `lower(*args).compile()` of it
            gave.
        *args: its arguments, or `jax.ShapeDtypeStruct`s that stand for their arrays.
        costs: the times of tasks, in seconds, as `simulate` takes them, such as `Plan.costs`; those
            that `measure` or a trace found, of this step or of another one with the same stages; or
            a `Device`, or the name of one, whose figures bound the times of what XLA counts.
        latency: the seconds of a message, whatever its size; but for a `Device` costs have that.
        bandwidth: the bytes of messages that go from one rank to another in a second; the same.
        reduction_bandwidth: the bytes of gradients that a device exchanges with its replicas in a
            second, after the tasks; a measurement has the time of that.
        memory_limit: the bytes that a device of each rank has, or of all ranks; by default those of
            the `Device`.

    Returns:
        The prediction.

    Raises:
        TypeError: `step` is not a placed function.
        ValueError: the step has no scheduled loop; the measurement lacks tasks of it; there is no
            device of that name; or a rank needs more than its limit.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()))
        >>> found = jaxpp.predict(step, jnp.eye(2), jnp.ones((4, 2)), costs="h100")
        >>> found.peaks[0].bytes["parameters"]
        16
    """
    compiled = _compiled(step, args)
    bundle, ranks = compiled.bundle, compiled.inspect()
    if not tasks_of(bundle):
        raise ValueError(
            "predict: the step has no scheduled loop, so that there are no tasks to predict; wrap "
            "its loop: jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())."
        )
    device = None if isinstance(costs, Costs | Measurement | Trace) else device_of(costs)
    if device is not None:
        model = _costs_on(device, bundle, ranks, latency, bandwidth, reduction_bandwidth)
    elif isinstance(costs, Costs):
        model = _for_each_loop(costs, bundle)
    else:
        model, _ = costs_found(costs)  # pyright: ignore[reportArgumentType]: of no device
        _check_tasks(model, tasks_of(bundle))
    needs = dependencies_of(bundle)
    table = table_of([[run.tasks for run in _runs(p)] for p in bundle.programs], needs)
    timeline = simulate(table, dataclasses.replace(model, unit="s"), dependencies=needs)
    around = _Around(bundle, ranks, device or _times_around(costs), reduction_bandwidth)
    prediction = _predicted(bundle, ranks, timeline, around)
    limit = device.memory if memory_limit is None and device is not None else memory_limit
    if limit is not None:
        _check_memory(prediction, limit)
    return prediction


def _predicted(
    bundle: Bundle, ranks: Sequence[Inspected], timeline: Timeline, around: "_Around"
) -> Prediction:
    """Puts what a step does around its tasks beside them, and finds what its ranks hold."""
    start = max(around.before)
    spans = {span.task: (start + span.start, start + span.end) for span in timeline.spans}
    runs: list[list[tuple[float, str]]] = [[] for _ in bundle.programs]
    # The runs of ranks between tasks so far, such as the update between two loops.
    between = [-own for own in around.before]

    def when(rank: int, run: Run, clock: float) -> tuple[float, float]:
        if run.task:
            begin, end = (time + max(0.0, between[rank]) for time in spans[run.task])
        else:
            begin, end = clock, clock + around.seconds(rank, run)
            between[rank] += end - begin
        runs[rank].append((begin, run.label))
        return begin, end

    held = held_bytes(bundle, ranks, when)
    memory = tuple(
        tuple(_moments([h for h in held if h.rank == rank], sorted(own)))
        for rank, own in enumerate(runs)
    )
    return Prediction(timeline, start, max(h.end for h in held), memory)


def costs_found(found: Costs | Measurement | Trace) -> tuple[Costs, Timeline | None]:
    """Returns the costs that are known of a step, and its timeline where it was measured."""
    if isinstance(found, Measurement):
        return found.costs, found.timeline
    if isinstance(found, Trace):
        return found.costs(), found.timeline()
    return found, None


def _compiled(step: Any, args: Sequence[Any]) -> Compiled:
    if isinstance(step, Placed):
        return step.lower(*args).compile()
    if isinstance(step, Compiled):
        return step
    raise TypeError(
        f"predict needs a step that place made, got {step!r}; use jaxpp.place(step, mesh)."
    )


def _runs(program: Program) -> list[Run]:
    return [i for i in program.instructions if isinstance(i, Run)]


def _for_each_loop(costs: Costs, bundle: Bundle) -> Costs:
    """Lets costs of stages count for those of each loop of a step, which are numbered on."""
    each = [(r.loop, t.stage) for p in bundle.programs for r in _runs(p) for t in r.tasks]
    firsts = {loop: min(s for other, s in each if other == loop) for loop in dict(each)}
    if len(firsts) < 2:
        return costs
    first = {stage: firsts[loop] for loop, stage in each}
    of_loop = {stage: costs.by_stage(_placement(bundle, loop)) for loop, stage in each}

    def own(task: Task) -> Task:
        return dataclasses.replace(task, stage=task.stage - first[task.stage])

    def field(kind: Kind) -> Any:
        return lambda task: of_loop[task.stage].of(own(task)) if task.kind == kind else 0.0

    named: dict[str, Any] = {kind.field: field(kind) for kind in Kind if kind.field}
    other = {kind: field(kind) for kind in Kind if not kind.field}
    sent = dataclasses.replace(costs, bandwidth=1.0, latency=0.0)
    return dataclasses.replace(
        costs,
        **named,
        other=other,
        per="stage",
        edge_bytes=lambda task: sent.transfer(own(task), 0, 1),
    )


def _placement(bundle: Bundle, loop: Any) -> list[int]:
    """Returns the rank of each stage of a loop."""
    ranks = {
        task.stage: rank
        for rank, program in enumerate(bundle.programs)
        for run in _runs(program)
        for task in run.tasks
        if run.loop == loop
    }
    return [ranks[stage] for stage in sorted(ranks)]


def _costs_on(
    device: Device,
    bundle: Bundle,
    ranks: Sequence[Inspected],
    latency: float,
    bandwidth: float,
    reduction_bandwidth: float,
) -> Costs:
    """Makes the costs of tasks from what XLA counts in them, and of what moves from its bytes.

    Raises:
        ValueError: the step offloads, and nobody knows how fast the device copies.
    """
    times: dict[Key, float] = {}
    joined: dict[Key, float] = {}  # of tasks that run as one: equal parts of its time
    sent: dict[Key, int] = {}
    for program, own in zip(bundle.programs, ranks, strict=True):
        last: list[Key] = []
        for instruction in program.instructions:
            if isinstance(instruction, Run):
                task = instruction.task
                last = [(t.kind, t.stage) for t in instruction.tasks]
                if task and task.kind.lane == "collective":
                    found = own.analyses[instruction.computation]
                    of = _reduced_bytes if task.kind.takes else _gathered_bytes
                    moved = of(bundle, own, instruction) / reduction_bandwidth
                    times[last[0]] = device.seconds(found.flops, found.accessed_bytes) + moved
                elif task and task.kind.lane == "copy":
                    if not device.host_bandwidth:
                        raise ValueError(
                            f"predict: {task.describe()} copies to host memory or back, and the "
                            f"device has no host_bandwidth; give the bytes of a second: "
                            f"dataclasses.replace(device, host_bandwidth=...)."
                        )
                    copied = bundle.computations[instruction.computation]
                    specs = copied.out_specs or ((),) * len(copied.jaxpr.out_avals)
                    each = zip(copied.jaxpr.out_avals, specs, strict=True)
                    nbytes = sum(array_bytes(aval, spec, own.axes) for aval, spec in each)
                    times[last[0]] = nbytes / device.host_bandwidth
                else:
                    found = own.analyses[instruction.computation]
                    seconds = device.seconds(found.flops, found.accessed_bytes) / (len(last) or 1)
                    known = times if len(last) == 1 else joined
                    known.update(dict.fromkeys(last, seconds))
            elif isinstance(instruction, Send):
                for key in last:
                    sent[key] = max(sent.get(key, 0), instruction.message.nbytes)
    return Costs.measured(
        {**joined, **times},
        latency=latency,
        bandwidth=bandwidth,
        edge_bytes=lambda task: sent.get((task.kind, task.stage), 0),
    )


def _gathered_bytes(bundle: Bundle, rank: Inspected, run: Run) -> int:
    """Finds the bytes that a device receives where a run gathers what it makes of its inputs."""
    own = bundle.computations[run.computation]
    if not own.in_specs:
        return 0
    _, split = propagate(own.jaxpr, own.in_specs, rank.axes)
    each = zip(own.jaxpr.out_avals, own.out_specs, split, strict=True)
    sizes = (
        array_bytes(aval, whole, rank.axes) - array_bytes(aval, made or whole, rank.axes)
        for aval, whole, made in each
    )
    return sum(sizes)


def _reduced_bytes(bundle: Bundle, rank: Inspected, run: Run) -> float:
    """Finds the bytes that a device sends to its replicas in a reduction.

    They are summed in a ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC
    69(2), 2009): each sends its parts while they are summed, and while the sums go round.
    """
    own, axes = bundle.computations[run.computation], rank.axes
    over = next((spec[0] for spec in own.in_specs if spec), ())
    devices, sent = math.prod(axes[a] for a in over), 0.0
    for v, spec in zip(own.jaxpr.jaxpr.outvars, own.out_specs, strict=False):
        whole = tuple(tuple(a for a in entry if a not in over) for entry in spec)
        # A sum that is scattered goes round once.
        turns = 1 if whole == spec else 0.5
        sent += 2 * turns * array_bytes(v.aval, whole, axes) * (devices - 1) / devices
    return sent


def _check_tasks(measured: Costs, tasks: Iterable[Task]) -> None:
    def is_known(task: Task) -> bool:
        try:
            return measured.of(task) > 0
        except ValueError:  # a stage that it does not have
            return False

    missing = {(t.kind, t.stage) for t in tasks if not is_known(t)}
    if missing:
        names = ", ".join(sorted(f"{kind}{stage}" for kind, stage in missing))
        raise ValueError(
            f"predict: the measurement has no times of {names}, which the step runs: it is of a "
            f"step with other stages. Measure this one, or one with the same cut."
        )


def _times_around(source: Any) -> Sequence[tuple[float, float]]:
    """Returns for each rank the time of what it ran before its first task, and after it."""
    if isinstance(source, Measurement):
        return list(zip(source.before, source.after, strict=True))
    if not isinstance(source, Trace):
        return []
    call = source.typical_call
    found = []
    for rank in range(len(source.device_of)):
        runs = [r for r in source.runs if r.call == call and r.rank == rank]
        first = next((r.start for r in runs if r.task), math.inf)
        parts = [[], []]
        for run in runs:
            if not run.task:
                parts[run.start > first].append(run.end - run.start)
        found.append((sum(parts[0]), sum(parts[1])))
    return found


class _Around:
    """The times of what a step does around its tasks, on each rank."""

    def __init__(
        self,
        bundle: Bundle,
        ranks: Sequence[Inspected],
        source: Device | Sequence[tuple[float, float]],
        reduction_bandwidth: float,
    ):
        self._ranks, self._device = ranks, source if isinstance(source, Device) else None
        self._bundle, self._bandwidth = bundle, reduction_bandwidth
        self._shares: dict[tuple[int, int], float] = {}  # by rank and the identity of a run
        self.before: list[float] = []
        for program in bundle.programs:
            rank, runs = program.rank, _runs(program)
            first = next((n for n, r in enumerate(runs) if r.task), len(runs))
            parts = runs[:first], [r for r in runs[first:] if not r.task]
            if not isinstance(source, Device) and len(source) == len(bundle.programs):
                for part, seconds in zip(parts, source[rank], strict=True):
                    for run in part:
                        self._shares[rank, id(run)] = seconds / len(part)
            self.before.append(sum(self.seconds(rank, run) for run in parts[0]))

    def seconds(self, rank: int, run: Run) -> float:
        """Returns the time of a run that is no task."""
        if (rank, id(run)) in self._shares:
            return self._shares[rank, id(run)]
        seconds = 0.0
        if run.label == REDUCTION:
            seconds = _reduced_bytes(self._bundle, self._ranks[rank], run) / self._bandwidth
        if self._device is not None:
            found = self._ranks[rank].analyses[run.computation]
            seconds += self._device.seconds(found.flops, found.accessed_bytes)
        return seconds


def _moments(held: Sequence[Any], runs: Sequence[tuple[float, str]]) -> list[Moment]:
    """Returns the moments of a rank; each has the name of the run that began last."""
    moments, n = [], 0
    for seconds, now in over_time(held):
        while n + 1 < len(runs) and runs[n + 1][0] <= seconds:
            n += 1
        moments.append(Moment(max(0.0, seconds), dict(now), runs[n][1] if runs else ""))
    return moments


def _check_memory(prediction: Prediction, limit: float | Sequence[float]) -> None:
    peaks = prediction.peaks
    limits = [float(limit)] * len(peaks) if isinstance(limit, int | float) else list(limit)
    if len(limits) != len(peaks) or not all(own > 0 for own in limits):
        raise ValueError(
            f"predict: memory_limit is a positive number of bytes, or one for each of the "
            f"{len(peaks)} ranks, got {limit!r}."
        )
    for rank, (peak, most) in enumerate(zip(peaks, limits, strict=True)):
        if peak.total > most:
            state = sum(peak.bytes.get(kind, 0) for kind in ("parameters", "optimizer"))
            alone = " Parameters and optimizer state alone exceed it." if state > most else ""
            raise ValueError(
                f"predict: rank {rank} needs {format_bytes(peak.total)} in {peak.running}, "
                f"{peak.seconds:.3g} s after the start, {format_bytes(peak.total - most)} more "
                f"than its limit of {format_bytes(most)}: {peak}.{alone} Compute activations again "
                f"(wrap_forward(f, policy=), or jaxpp.schedules.Recompute), take a "
                f"schedule that holds fewer microbatches or more of them that are smaller, or "
                f"split what is there all the time (zero1=, zero3=, more ranks)."
            )
