"""Two workers against one, each pinned to a core: how much of what a schedule promises is there?

What `remote_step.py` measures, as functions that its worker processes can import. The model
has a block on each of two stages, and the baseline is the faster of two ways to train it on one
worker: the plain jitted step, which accumulates its gradients by a scan inside of the worker, and
the placed step with both stages on one rank.
"""

import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import optax

import jaxpp
from benchmarks import equal_blocks
from jaxpp.schedules import Costs, Interleaved1F1B, Kind, OneFOneB, Schedule, simulate

STAGES = 2
WIDTH = 512


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The training step: examples of a microbatch set the time of its tasks."""

    examples: int
    microbatches: int = 16
    width: int = WIDTH


@dataclasses.dataclass(frozen=True)
class TaskTimes:
    """Seconds of each kind of task of each stage, and of all that a step does around them."""

    tasks: dict[tuple[Kind, int], float]
    around: float

    @property
    def shortest(self) -> float:
        return min(self.tasks.values())

    def predicted_step(self, schedule: Schedule, microbatches: int) -> float:
        """Seconds of a step by the schedule's simulation, with a rank for each stage.

        Transfers take nothing. Around the tasks are mostly the optimizer's updates, which the
        ranks do side by side.
        """
        tasks = simulated(Costs.measured(self.tasks), schedule, microbatches)
        return tasks + self.around / STAGES


def simulated(costs: Costs, schedule: Schedule, microbatches: int) -> float:
    """Seconds of the tasks of a step by the schedule's simulation."""
    return simulate(schedule.table(STAGES, microbatches), costs).makespan


@dataclasses.dataclass(frozen=True)
class Speedup:
    """Medians over blocks of steps of a schedule, which take turns; all times are seconds.

    Two cores that compute at once share what lies behind them, so tasks take longer then, whatever
    dispatches them, and no two runs of a task take the same time. So there are three predictions:
    of tasks measured on one core while the other was idle; of the tasks that a trace of the
    pipeline has, by their medians; and of each of these tasks by its own time, over the traced step
    itself (`efficiency`): what is missing there is what lies between the tasks.
    """

    schedule: Schedule
    sizes: Sizes
    shortest_task: float
    longest_task: float
    plain_step: float
    placed_on_one: float
    placed_on_two: float
    predicted_alone: float
    predicted_traced: float
    efficiency: float

    @property
    def measured(self) -> float:
        """The speed-up over the faster way to train on one worker."""
        return min(self.plain_step, self.placed_on_one) / self.placed_on_two

    def predicted(self, step: float) -> float:
        """The speed-up of a step that takes what is predicted."""
        return min(self.plain_step, self.placed_on_one) / step


# ---- what runs in a worker ----------------------------------------------------------------------


@functools.cache
def _optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


@functools.cache
def plain_loop(sizes: Sizes) -> equal_blocks.Loop:
    state, batch = start(sizes)
    step = equal_blocks.plain_step(sizes.microbatches, _optimizer(), state)
    return equal_blocks.Loop(step, state, batch)


def plain_seconds(process: Any, sizes: Sizes, steps: int) -> float:
    """Seconds of a step of the plain loop, which nobody dispatches from outside."""
    del process
    return equal_blocks.elapsed(plain_loop(sizes), steps) / steps


def task_times(process: Any, sizes: Sizes, repeats: int) -> TaskTimes:
    """Measures the tasks of the step with both stages on this worker's device."""
    mesh = jaxpp.MpmdMesh((STAGES,), ("mpmd",), devices=[process.home] * STAGES)
    step = placed(sizes, OneFOneB(), mesh)
    state, batch = start(sizes)
    found = jaxpp.measure(step, *state, batch, repeats=repeats)
    return TaskTimes(dict(found.times_alone), sum(found.before) + sum(found.after))


# ---- what the driver does -----------------------------------------------------------------------


def start(sizes: Sizes) -> tuple[Any, Any]:
    examples = sizes.examples * sizes.microbatches
    return equal_blocks.draw(STAGES, sizes.width, examples, _optimizer())


def placed(sizes: Sizes, schedule: Schedule, mesh: Any) -> Any:
    return equal_blocks.placed_step(schedule, STAGES, sizes.microbatches, _optimizer(), mesh)


def placed_seconds(sizes: Sizes, schedule: Schedule, mesh: Any) -> Callable:
    """A function from a number of steps to the seconds of each, called one after the other."""
    state, batch = start(sizes)
    loop = equal_blocks.Loop(placed(sizes, schedule, mesh), state, batch)
    equal_blocks.elapsed(loop, 2)
    return lambda steps: equal_blocks.elapsed(loop, steps) / steps


def calibrated(mesh: Any, task_seconds: float, microbatches: int) -> Sizes:
    """Sizes whose shortest task takes about as long as is asked for, on one worker."""
    examples = 64
    for _ in range(3):
        times = on_worker(mesh, task_times, Sizes(examples, 2), 3)
        examples = max(1, round(examples * task_seconds / times.shortest))
    return Sizes(examples, microbatches)


def on_worker(mesh: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of this file on the only rank of a mesh."""
    return mesh.apply(function, {0: args})[0]


def measure(
    one: Any,
    two: Any,
    schedules: Sequence[Schedule],
    task_seconds: float,
    microbatches: int,
    blocks: int,
) -> list[Speedup]:
    """Measures the speed-up for tasks of a given length, with each of some schedules.

    Args:
        one: a mesh of a worker pinned to a core.
        two: a mesh of two workers, each pinned to a core of its own.
        schedules: of the step on two workers.
        task_seconds: how long the shortest task should take.
        microbatches: of a step.
        blocks: how often each step is measured, in turns with the others.
    """
    sizes = calibrated(one, task_seconds, microbatches)
    on_one = placed_seconds(sizes, Interleaved1F1B(stages_per_rank=STAGES), one)
    on_two = [placed_seconds(sizes, schedule, two) for schedule in schedules]
    on_worker(one, plain_seconds, sizes, 2)
    steps = max(2, round(1.0 / (3 * STAGES * microbatches * task_seconds)))
    alone: list[TaskTimes] = []
    on_single: list[tuple[float, float]] = []
    pipelined: list[list[tuple[float, Traced]]] = [[] for _ in schedules]
    for _ in range(blocks):
        alone.append(on_worker(one, task_times, sizes, 1))
        on_single.append((on_worker(one, plain_seconds, sizes, steps), on_one(steps)))
        for schedule, run, found in zip(schedules, on_two, pipelined, strict=True):
            found.append((run(steps), traced_tasks(two, run, schedule, microbatches)))
    times = middle(alone)
    plain, placed_one = map(statistics.median, zip(*on_single, strict=True))
    return [
        Speedup(
            schedule,
            sizes,
            times.shortest,
            max(times.tasks.values()),
            plain,
            placed_one,
            statistics.median(seconds for seconds, _ in found),
            times.predicted_step(schedule, microbatches),
            statistics.median(t.by_medians for _, t in found) + times.around / STAGES,
            statistics.median(t.by_own / t.step for _, t in found),
        )
        for schedule, found in zip(schedules, pipelined, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Traced:
    """Seconds of a traced step: measured, and what the simulation makes of its tasks.

    `by_medians` is that of the tasks alone, with transfers; `by_own` that of each task's own time
    and of what a rank computes around its tasks, without transfers.
    """

    step: float
    by_medians: float
    by_own: float


def traced_tasks(
    mesh: Any, run: Callable[[int], float], schedule: Schedule, microbatches: int
) -> Traced:
    """Traces some steps of the pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        mesh.start_trace(folder)
        seconds = run(4)
        trace = mesh.stop_trace()
    own = []
    for call in {r.call for r in trace.runs}:
        runs = [r for r in trace.runs if r.call == call]
        costs, around = costs_of(runs)
        own.append(simulated(costs, schedule, microbatches) + around)
    by_medians = simulated(trace.costs(), schedule, microbatches)
    return Traced(seconds, by_medians, statistics.mean(own))


def costs_of(runs: Sequence[Any]) -> tuple[Costs, float]:
    """The costs of the tasks of one call, each its own, and the most that a rank does besides."""
    times = {r.label: r.end - r.start for r in runs}
    tasks = {f"{kind}{s}.{n}" for kind in "FB" for s in range(STAGES) for n in range(len(runs))}
    besides = [0.0] * STAGES
    for r in runs:
        if r.label not in tasks:
            besides[r.rank] += r.end - r.start

    def of(task: Any) -> float:
        return times[str(task)]

    return Costs(forward=of, backward=of), max(besides)


def middle(times: list[TaskTimes]) -> TaskTimes:
    """The medians of what was measured several times."""
    tasks = {key: statistics.median(t.tasks[key] for t in times) for key in times[0].tasks}
    return TaskTimes(tasks, statistics.median(t.around for t in times))
