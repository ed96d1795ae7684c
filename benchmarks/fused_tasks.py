"""Measures steps whose tasks are fused (`place(fuse=)`), against the same steps without that.

    python -m benchmarks.fused_tasks
    python -m benchmarks.fused_tasks --width=512 --examples=128

Prints for each schedule, and by turns in one run: the computations that a step dispatches and those
that it compiles; the time that the dispatching thread works in a step, and that until the step
ends, both over those of the step with nothing fused, with the quartiles; the first call's time,
over the same; the peak bytes of a rank, over the same; and whether the results have the same bits.
"""

import statistics
import sys
import time
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from absl import app, flags

import jaxpp
from benchmarks.equal_blocks import Loop, draw, placed_step
from jaxpp._program import Run
from jaxpp.runtime.executor import _compile
from jaxpp.runtime.transport import _near

_SCHEDULES = flags.DEFINE_list("schedules", "dualpipe,dualpipe_v,interleaved_1f1b", "Which.")
_RANKS = flags.DEFINE_integer("ranks", 4, "Ranks.", 2)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 16, "Microbatches.", 2)
_WIDTH = flags.DEFINE_integer("width", 16, "The width of the blocks; small ones show the host.", 1)
_EXAMPLES = flags.DEFINE_integer("examples", 4, "The examples of a microbatch.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 15, "How often to measure; the median counts.", 2)
WAYS: tuple[Any, ...] = ("none", "pairs", "chains")


def clocked(loop: Loop) -> tuple[float, float]:
    """The seconds that this thread works to dispatch a step, and those until the step ends."""
    jax.block_until_ready(loop.state)
    worked, start = time.thread_time(), time.perf_counter()
    results = loop()
    worked = time.thread_time() - worked
    jax.block_until_ready((results, loop.state))
    return worked, time.perf_counter() - start


def over(times: list[float], base: list[float]) -> str:
    """The median of ratios of neighbouring measurements, and the quartiles beside it."""
    low, middle, high = statistics.quantiles(np.divide(times, base).tolist(), n=4)
    return f"{middle:.2f} ({low:.2f}, {high:.2f})"


def compare(name: str) -> None:
    """Prints the lines of a schedule."""
    schedule = jaxpp.schedules.by_name(name)
    ranks, count = _RANKS.value, _MICROBATCHES.value
    stages, optimizer = ranks * schedule.stages_per_rank, optax.sgd(0.1)
    state, batch = draw(stages, _WIDTH.value, _EXAMPLES.value * count, optimizer)
    loops, rows, firsts, results = [], [], [], []
    for way in WAYS:
        mesh = jaxpp.MpmdMesh((ranks,))
        step = placed_step(schedule, stages, count, optimizer, mesh, fuse=way)
        loops.append(Loop(step, state, batch))
        _compile.clear_cache()
        start = time.perf_counter()
        jax.block_until_ready((loops[-1](), loops[-1].state))
        firsts.append(time.perf_counter() - start)
        results.append(jax.tree.leaves(eqx.filter(jax.device_get(loops[-1].state), eqx.is_array)))
        runs = [i for p in step.programs for i in p.instructions if isinstance(i, Run)]
        peak = max(own.peak_bytes for own in step.describe().ranks)
        rows.append((len(runs), len(step.bundle.computations), peak))
    times = [list(map(clocked, loops)) for _ in range(1 + _REPEATS.value)][1:]
    for n, (way, (runs, computations, peak)) in enumerate(zip(WAYS, rows, strict=True)):
        host, whole = (over([t[n][k] for t in times], [t[0][k] for t in times]) for k in (0, 1))
        same = all(x.tobytes() == y.tobytes() for x, y in zip(results[n], results[0], strict=True))
        print(
            f"{name:18}{way:8}{runs:6}{computations:6}  {host:20}{whole:20}"
            f"{firsts[n] / firsts[0]:6.2f}{peak / rows[0][2]:6.2f}  {'same' if same else 'OTHER'}",
            flush=True,
        )


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", _RANKS.value)
    _near.RUN_AHEAD = sys.maxsize  # or the host waits for devices that lag behind
    columns = f"{'runs':>6}{'comp.':>6}  {'host':20}{'step':20}{'first':>6}{'peak':>6}  bits"
    print(f"{'schedule':18}{'fuse':8}{columns}")
    for name in _SCHEDULES.value:
        compare(name)


if __name__ == "__main__":
    app.run(main)
