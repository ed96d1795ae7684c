"""What tracing costs: a step with and without it, in turns, for tasks of several lengths.

    python -m benchmarks.tracing
    python -m benchmarks.tracing --task_ms=1,5 --rounds=20 --times=waits
    python -m benchmarks.tracing --mesh=ray

Ranks are devices of this process, or worker processes, each bound to a core. Each round calls the
step a few times without tracing and a few times with it, in an order that alternates; the figure is
the median of the rounds' ratios, with the quartiles beside it. The width of the model is chosen so
that a forward takes about the time asked for while nothing else runs.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import jaxpp

_TASK_MS = flags.DEFINE_list("task_ms", ["1", "5"], "Times of a forward of a stage.")
_RANKS = flags.DEFINE_integer("ranks", 2, "Ranks, each a CPU device.", 1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches of a step.", 1)
_CALLS = flags.DEFINE_integer("calls", 5, "Calls of the step in a turn.", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Pairs of turns.", 1)
_MESH = flags.DEFINE_enum("mesh", "local", ["local", "ray"], "Devices or worker processes.")
_TIMES = flags.DEFINE_enum("times", "profile", ["profile", "waits"], "Where times come from.")
_SCHEDULE = flags.DEFINE_string("schedule", "1f1b", "For jaxpp.schedules.by_name.")

_WIDTH = 128
_LAYERS = 8


def stage(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(_LAYERS):
        x = jnp.tanh(x @ w)
    return x


def examples_for(seconds: float) -> int:
    """The examples of a microbatch with which a stage takes so long."""
    w, run = jnp.eye(_WIDTH), jax.jit(stage)

    def time_of(examples: int) -> float:
        x = jnp.ones((examples, _WIDTH))
        run(w, x).block_until_ready()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            run(w, x).block_until_ready()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    examples = 32
    while time_of(2 * examples) < seconds:
        examples *= 2
    return max(1, round(examples * seconds / time_of(examples)))


def compare(mesh: Any, task_seconds: float) -> tuple[list[float], list[float], float]:
    """The times of a call without and with tracing, and that of a traced forward."""
    ranks, microbatches = _RANKS.value, _MICROBATCHES.value
    schedule = jaxpp.schedules.by_name(_SCHEDULE.value)

    def loss_fn(params, x):
        for i, w in enumerate(params):
            x = stage(w, x if i == 0 else jaxpp.pipeline_enter_stage(x))
        return jnp.mean(x**2)

    grad_fn = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss_fn)), microbatches)
    grad_fn = jaxpp.schedule(grad_fn, schedule)

    def train_step(params, x):
        return [w - 0.1 * g for w, g in zip(params, grad_fn(params, x), strict=True)]

    step = jaxpp.place(train_step, mesh, donate_argnums=0)
    params = [jnp.eye(_WIDTH) for _ in range(ranks * schedule.stages_per_rank)]
    x = jnp.ones((examples_for(task_seconds) * microbatches, _WIDTH))

    def turn() -> float:
        nonlocal params
        start = time.perf_counter()
        for _ in range(_CALLS.value):
            params = step(params, x)
        jax.block_until_ready(params)
        return (time.perf_counter() - start) / _CALLS.value

    off, on, forward = [], [], 0.0
    turn()
    for n in range(_ROUNDS.value + 1):
        times = {}
        for traced in (n % 2 == 0, n % 2 == 1):
            if not traced:
                times[traced] = turn()
                continue
            with tempfile.TemporaryDirectory() as folder:
                mesh.start_trace(f"{folder}/trace", times=_TIMES.value)
                times[traced] = turn()
                trace = mesh.stop_trace()
                tasks = [run.end - run.start for run in trace.runs if run.label[0] == "F"]
                forward = statistics.median(tasks)
        if n:  # the first one loads what reads profiles, and compiles marks
            off.append(times[False])
            on.append(times[True])
    return off, on, forward


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_num_cpu_devices", _RANKS.value)
    ranks = (_RANKS.value,)
    with contextlib.ExitStack() as stack:
        if _MESH.value == "ray":
            mesh = stack.enter_context(jaxpp.RemoteMpmdMesh(ranks, cores=1))
        else:
            mesh = jaxpp.MpmdMesh(ranks)
        for given in _TASK_MS.value:
            report(*compare(mesh, float(given) / 1e3))


def report(off: list[float], on: list[float], forward: float) -> None:
    """Prints what tracing costs."""
    ratios = [b / a for a, b in zip(off, on, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    print(
        f"forward {1e3 * forward:.2f} ms, step {1e3 * statistics.median(off):.1f} ms: tracing "
        f"costs {100 * (middle - 1):+.1f}% (quartiles {100 * (low - 1):+.1f}%, "
        f"{100 * (high - 1):+.1f}%)",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
