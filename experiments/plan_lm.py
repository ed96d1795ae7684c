"""Plans the training of a language model on two worker processes, and tries what it did not take.

    python -m experiments.plan_lm
    python -m experiments.plan_lm --model=mixed --parts=sweep --json=sweep.json

Each worker is pinned to a core. The model is a GPT with a large vocabulary, whose head takes as
long as several layers, or one with layers of different kinds. By part:

- `train`: the plan is made from a profile that a worker takes, and run. Every `--replan_every`
  steps the last ones are traced, and the plan is made again from the times of their tasks. Where
  that moves cuts, the training goes on from the same state, with the new step. Prints what was
  predicted and measured;
- `sweep`: the time of a step of the plan over that of every schedule of the catalogue at an even
  cut, and over the best of some schedules at all cuts, each of which is run;
- `slow`: another process takes `--busy` of the second worker's core. How much of the time that the
  best other cut wins back, do two new plans win back?

What is compared at the end takes turns, and medians count.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tqdm
from absl import app, flags

import jaxpp
from experiments.training.plans import (
    RANKS,
    Run,
    loss_fn,
    make_step,
    planned,
    step_from,
    step_of,
)
from jaxpp import Plan
from jaxpp.schedules import CATALOGUE, by_name

PARTS = ["train", "sweep", "slow"]
_MODEL = flags.DEFINE_enum("model", "vocabulary", ["vocabulary", "mixed"], "Which model.")
_PARTS = flags.DEFINE_multi_enum("parts", PARTS, PARTS, "What to do.")
_WIDTH = flags.DEFINE_integer("width", 128, "Features of each position.", 8)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 2048, "Different tokens.", 256)
_BATCH = flags.DEFINE_integer("batch_size", 64, "Sequences in a step.", 1)
_LENGTH = flags.DEFINE_integer("sequence_length", 64, "Tokens of a sequence.", 1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Slices of the batch.", 1)
_SCHEDULES = flags.DEFINE_list(
    "schedules",
    ["1f1b", "eager_1f1b", "zb_h1", "interleaved_1f1b", "zb_v"],
    "The schedules that are run at every cut. The plan chooses from all.",
)
_STEPS = flags.DEFINE_integer("steps", 40, "Steps of a training.", 1)
_REPLAN_EVERY = flags.DEFINE_integer("replan_every", 20, "Steps after which to plan again.", 4)
_BUSY = flags.DEFINE_float("busy", 0.23, "The share of a core that another process takes.", 0, 1)
_BLOCKS = flags.DEFINE_integer("blocks", 7, "How often what is compared takes turns.", 1)
_TRIED = flags.DEFINE_string(
    "tried", None, "The --json of an earlier sweep: only its fastest cuts are run again."
)
_JSON = flags.DEFINE_string("json", None, "A file to write the figures to.")


class Training:
    """A training whose step may be replaced; it keeps its state."""

    def __init__(self, run: Run, step: Any):
        self.run, self.step = run, step
        self.state, self.number = run.start(), 0

    def __call__(self, steps: int) -> list[float]:
        """Runs some steps; gives their losses."""
        losses = []
        for _ in range(steps):
            *state, loss = self.step(*self.state, self.run.batch(self.number))
            self.state, self.number = tuple(state), self.number + 1
            losses.append(loss)
        return [float(loss) for loss in losses]

    def seconds(self, steps: int) -> float:
        """The time of a step, of some in a row."""
        batch = self.run.batch(0)
        start, loss = time.perf_counter(), 0.0
        for _ in range(steps):
            *state, loss = self.step(*self.state, batch)
            self.state = tuple(state)
        float(loss)
        return (time.perf_counter() - start) / steps


def traced(training: Training, mesh: Any, steps: int = 4) -> jaxpp.Trace:
    """The trace of some steps."""
    with tempfile.TemporaryDirectory() as folder:
        mesh.start_trace(folder)
        training.seconds(steps)
        return mesh.stop_trace()


def links_of(run: Run, mesh: Any) -> dict[str, float]:
    """What messages take, for `jaxpp.plan`: of a step that is cut by its operations.

    Chimera sends some between tasks, and others, which are larger, when it sums gradients.
    """
    staged = jaxpp.split_stages(loss_fn, RANKS)
    training = Training(run, step_from(run, staged, jaxpp.schedules.Chimera(), mesh))
    training.seconds(2)
    trace = traced(training, mesh, 8)
    costs: Any = trace.costs()
    edges = [m for m in trace.messages if "edge" in m.message.kinds]
    kept = statistics.median((m.sent - m.start + m.end - m.arriving) / 2 for m in edges)
    whole = costs.latency + edges[0].message.nbytes / costs.bandwidth
    return {
        "latency": costs.latency,
        "bandwidth": costs.bandwidth,
        "overhead": min(0.5, kept / whole),
    }


# ---- the parts ----------------------------------------------------------------------------------


def make_plan(run: Run, mesh: Any, **options: Any) -> Plan:
    """Plans on all workers at once, which then compute as in a step, and prints a plan."""
    plan = mesh.apply(functools.partial(planned, **options), dict.fromkeys(range(RANKS), (run,)))[0]
    print(plan)
    return plan


def train(run: Run, options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Trains, and plans again from what steps take."""
    plan = make_plan(run, mesh, **options)
    training = Training(run, step_of(run, plan, mesh))
    losses, plans = [], [plan]
    while training.number < _STEPS.value:
        losses += training(min(_REPLAN_EVERY.value, _STEPS.value - training.number))
        found, measured = traced(training, mesh), training.seconds(4)
        predicted = jaxpp.predict(training.step, *training.state, run.batch(0), costs=found)
        print(
            f"step {training.number}: loss {losses[-1]:.4f}, planned {plans[-1].seconds:.4f} s, "
            f"predicted from the trace {predicted.seconds:.4f} s, measured {measured:.4f} s"
        )
        new = plans[-1].again(found)
        if (new.units, new.schedule) != (plans[-1].units, plans[-1].schedule):
            print(f"planned again: {new.schedule}, units {new.units}, was {plans[-1].units}")
            training.step = step_of(run, new, mesh)
        plans.append(new)
    return {"losses": losses, "units": [p.units for p in plans]}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A schedule at a cut, and the seconds of a step."""

    schedule: str
    units: tuple[int, ...]
    seconds: float


def stages_of(name: str, microbatches: int) -> int:
    """The number of stages of a schedule on the ranks; none where it has no table for them."""
    try:
        return by_name(name).table_for_ranks(RANKS, microbatches).num_stages
    except ValueError:
        return 0


def every_cut(name: str, run: Run, units: int) -> list[tuple[int, ...]]:
    """The units of each stage, of a schedule at every cut."""
    stages = stages_of(name, run.microbatches)
    every = itertools.combinations(range(1, units), stages - 1)
    return [tuple(np.diff((0, *cuts, units)).tolist()) for cuts in every]


def even_cut(stages: int, units: int) -> tuple[int, ...]:
    """Stages of equally many units, as far as they can be."""
    return tuple(np.diff([round(units * n / stages) for n in range(stages + 1)]).tolist())


def choices(run: Run, units: int) -> list[tuple[str, tuple[int, ...]]]:
    """Some schedules at every cut, and all of the catalogue at an even one."""
    found = [(name, own) for name in _SCHEDULES.value for own in every_cut(name, run, units)]
    for name in CATALOGUE:
        if name not in ("forward_only", "seq1f1b"):
            if 0 < (stages := stages_of(name, run.microbatches)) <= units:
                found.append((name, even_cut(stages, units)))
    return list(dict.fromkeys(found))


def at_cut(run: Run, plan: Plan, name: str, units: Sequence[int], mesh: Any) -> Training:
    """The training with a schedule at a cut."""
    cuts = dataclasses.replace(plan.cuts, firsts=tuple(itertools.accumulate(units[:-1])))
    return Training(run, make_step(run, cuts, by_name(name), mesh))


def clocked(training: Training) -> float:
    """The time of a step, once it has been compiled and has run."""
    training.seconds(1)
    return min(training.seconds(2) for _ in range(2))


def in_turns(trainings: Sequence[Training]) -> list[float]:
    """The median time of a step of each training; each turn begins with another one."""
    times: list[list[float]] = [[] for _ in trainings]
    for block in range(_BLOCKS.value):
        for n in range(len(trainings)):
            at = (block + n) % len(trainings)
            times[at].append(trainings[at].seconds(3))
    return [statistics.median(own) for own in times]


def sweep(run: Run, options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Compares the plan with all cuts and schedules, each of which is run."""
    plan = make_plan(run, mesh, **options)
    tried = []
    if _TRIED.value:
        before = json.loads(pathlib.Path(_TRIED.value).read_text())["sweep"]["tried"]
        tried = [Choice(name, tuple(units), seconds) for name, units, seconds in before]
    else:
        for name, units in tqdm.tqdm(
            choices(run, sum(plan.units)), desc="cuts and schedules", disable=None
        ):
            tried.append(Choice(name, units, clocked(at_cut(run, plan, name, units, mesh))))
    tried.sort(key=lambda choice: choice.seconds)
    even = [c for c in tried if c.units == even_cut(len(c.units), sum(c.units))]
    finalists = [*tried[:3], even[0]]
    trainings = [at_cut(run, plan, c.schedule, c.units, mesh) for c in finalists]
    trainings.append(Training(run, step_of(run, plan, mesh)))
    for training in trainings:
        training.seconds(2)
    *seconds, own = in_turns(trainings)
    print(f"plan: {plan.schedule}, units {plan.units}: {own:.4f} s, planned {plan.seconds:.4f} s")
    for choice, measured in zip(finalists, seconds, strict=True):
        print(f"  {choice.schedule} {choice.units}: {measured:.4f} s")
    best = min(seconds[:3])
    print(f"best of {len(tried)} cuts and schedules over the plan: {best / own:.3f}; "
          f"best schedule at an even cut over the plan: {seconds[3] / own:.3f}")  # fmt: skip
    for choice in even:
        print(f"  even cut, {choice.schedule}: {choice.seconds / own:.3f} of the plan")
    return {
        "plan": [plan.schedule, plan.units, own],
        "finalists": [dataclasses.astuple(c) for c in finalists],
        "seconds": seconds,
        "tried": [dataclasses.astuple(c) for c in tried],
    }


# ---- a busy core --------------------------------------------------------------------------------


def core_of(process: Any) -> set[int]:
    """The cores of a worker."""
    del process
    return os.sched_getaffinity(0)


def take_core(cores: set[int], share: float) -> None:
    """Computes for a share of the time, for ever."""
    os.sched_setaffinity(0, cores)
    period = 0.004  # shorter than a task, so that each is slowed
    while True:
        end = time.perf_counter() + share * period
        while time.perf_counter() < end:
            pass
        time.sleep((1 - share) * period)


@contextlib.contextmanager
def busy(cores: set[int], share: float) -> Iterator[None]:
    """Has another process take a share of some cores."""
    process = multiprocessing.get_context("spawn").Process(target=take_core, args=(cores, share))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def slow(run: Run, options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Slows the second worker, and plans again twice."""
    plan = make_plan(run, mesh, schedules=_SCHEDULES.value, **options)
    cores = mesh.apply(core_of, dict.fromkeys(range(RANKS), ()))[1]
    with busy(cores, _BUSY.value):
        plans, trainings = [plan], [Training(run, step_of(run, plan, mesh))]
        for _ in range(2):
            trainings[-1].seconds(2)
            plans.append(plans[-1].again(traced(trainings[-1], mesh, 8)))
            trainings.append(Training(run, step_of(run, plans[-1], mesh)))
            print(f"planned again: {plans[-1].schedule}, units {plans[-1].units}, "
                  f"speed {[round(x, 3) for x in plans[-1].problem.speeds]}")  # fmt: skip
        units = sum(plan.units)
        tried = [
            Choice(name, own, clocked(at_cut(run, plan, name, own, mesh)))
            for name in dict.fromkeys(p.schedule for p in plans)
            for own in tqdm.tqdm(
                every_cut(name, run, units), desc=f"other cuts, {name}", disable=None
            )
        ]
        best = sorted(tried, key=lambda c: c.seconds)[:2]
        trainings += [at_cut(run, plan, c.schedule, c.units, mesh) for c in best]
        for training in trainings:
            training.seconds(2)
        before, first, second, *recut = in_turns(trainings)
    least = min(recut)
    share = (before - second) / (before - least) if before > least else 1.0
    print(f"a busy core: {before:.4f} s as planned, {first:.4f} s and {second:.4f} s planned again")
    print(f"at the best cut {least:.4f} s: won back {share:.2f} of what a cut can win back")
    return {
        "before": before, "again": [first, second], "best": least, "recovered": share,
        "units": [p.units for p in plans], "speed": [p.problem.speed for p in plans],
    }  # fmt: skip


def main(argv: list[str]) -> None:
    """Plans, and runs the parts that were asked for."""
    del argv
    run = Run(_MODEL.value, _WIDTH.value, _VOCABULARY.value, _BATCH.value, _LENGTH.value,
              _MICROBATCHES.value)  # fmt: skip
    parts = {"train": train, "sweep": sweep, "slow": slow}
    with jaxpp.RemoteMpmdMesh((RANKS,), cores=1) as mesh:
        options = links_of(run, mesh)
        figures = {name: parts[name](run, options, mesh) for name in _PARTS.value}
    if _JSON.value:
        pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)
