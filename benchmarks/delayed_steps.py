"""What delayed steps gain on two workers: several in one program, which do not drain, over calls.

    python -m benchmarks.delayed_steps
    python -m benchmarks.delayed_steps --microbatches=2,4,8 --schedules=1f1b,eager_1f1b

Each task sleeps for a set time, so that the order of tasks decides, and not what else the cores do:
a forward for `--task_ms`, a backward for twice that. Prints for each schedule and number of
microbatches the milliseconds of a step: in calls that follow each other without a wait, and as one
of `--steps` in one program, measured, as the median of `--blocks` that take turns, and simulated.
"""

import contextlib
import json
import statistics
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import jaxpp
from benchmarks.equal_blocks import Loop, elapsed, sleeping
from jaxpp.schedules import Costs, by_name

RANKS = 2

_SCHEDULES = flags.DEFINE_list("schedules", ["1f1b"], "Which schedules.")
_MICROBATCHES = flags.DEFINE_list("microbatches", ["2", "4", "8"], "Of a step.")
_TASK_MS = flags.DEFINE_float("task_ms", 100.0, "What a forward takes.")
_STEPS = flags.DEFINE_integer("steps", 8, "Steps in one program.", 2)
_BLOCKS = flags.DEFINE_integer("blocks", 3, "How often what is compared takes turns.", 1)
_LOCAL = flags.DEFINE_boolean("local", False, "On the mesh of one process, in place of workers.")


def steps_of(schedule: str, microbatches: int, seconds: float, steps: int) -> tuple[Any, Any]:
    """A delayed step, and several of them as one function of all their batches."""
    sleep = sleeping(seconds)

    def loss_fn(weights, x):
        for n, w in enumerate(weights):
            x = jaxpp.pipeline_enter_stage(x) if n else x
            x = sleep(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), microbatches)
    grad = jaxpp.schedule(grad, by_name(schedule))

    def train_step(weights, x):
        loss, grads = grad(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss

    delayed = jaxpp.delay(train_step)

    def in_one(versions, x):
        losses = []
        for _ in range(steps):
            versions, loss = delayed(versions, x)
            losses.append(loss)
        return versions, losses

    return delayed, in_one


def measured(mesh: Any, schedule: str, microbatches: int) -> dict[str, Any]:
    """Seconds of a step, in calls and in one program, measured and simulated."""
    count, seconds = _STEPS.value, _TASK_MS.value / 1e3
    weights = [jnp.eye(8)] * RANKS
    x = jnp.ones((microbatches, 8))
    functions = steps_of(schedule, microbatches, seconds, count)
    placed = [jaxpp.place(fun, mesh, donate_argnums=0) for fun in functions]
    costs = Costs(forward=seconds, backward=2 * seconds, per="stage")
    given = (weights, weights)
    predicted = [jaxpp.predict(step, given, x, costs=costs).seconds for step in placed]
    versions = jax.tree.map(jnp.array, given)
    calls, in_one = (Loop(step, (versions,), x) for step in placed)
    for loop in (calls, in_one):
        elapsed(loop)
    pairs = [(elapsed(calls, count) / count, elapsed(in_one) / count) for _ in range(_BLOCKS.value)]
    apart, joined = (statistics.median(own) for own in zip(*pairs, strict=True))
    return dict(
        schedule=schedule,
        microbatches=microbatches,
        calls_ms=round(1e3 * apart, 1),
        in_one_ms=round(1e3 * joined, 1),
        gain=round(apart / joined, 2),
        simulated_calls_ms=round(1e3 * predicted[0], 1),
        simulated_in_one_ms=round(1e3 * predicted[1] / count, 1),
        simulated_gain=round(predicted[0] * count / predicted[1], 2),
    )


def main(_):
    with contextlib.ExitStack() as stack:
        mesh: Any = jaxpp.MpmdMesh((RANKS,))
        if not _LOCAL.value:
            mesh = stack.enter_context(jaxpp.RemoteMpmdMesh((RANKS,)))
        for schedule in _SCHEDULES.value:
            for microbatches in map(int, _MICROBATCHES.value):
                print(json.dumps(measured(mesh, schedule, microbatches)), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", RANKS)
    app.run(main)
