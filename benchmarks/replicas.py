"""Compares a step with replicas with the same step whose devices share each microbatch.

    python -m benchmarks.replicas
    python -m benchmarks.replicas --width=512 --rows=64 --repeats=40

Two ranks have two devices each along `data`. With replicas a device has microbatches of its own,
and gradients are reduced once a step; without, each backward task has an all-reduce. For replicas,
and for replicas with ZeRO-1, it prints the ratios of the time of a step to that without replicas,
by the wall clock and by the processor time of all threads: medians and quartiles of calls that take
turns.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from absl import app, flags
from jax.sharding import PartitionSpec

import jaxpp
from benchmarks.equal_blocks import Loop, draw, placed_step

_WIDTH = flags.DEFINE_integer("width", 256, "Features of an example.", 1)
_ROWS = flags.DEFINE_integer("rows", 64, "Examples of a microbatch on a device.", 1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches of a replica.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 20, "Calls of each step.", 2)

SHARED = "without replicas"
STEPS: dict[str, dict[str, Any]] = {
    SHARED: {"replicas": 1},
    "replicas": {"replicas": 2},
    "replicas, ZeRO-1": {"replicas": 2, "zero1": "data"},
}


def clocked(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that a call takes until its result is ready, and those of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return time.perf_counter() - wall, time.process_time() - cpu


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    jax.config.update("jax_num_cpu_devices", 4)
    warnings.filterwarnings("ignore", message="place: the microbatches")
    mesh, optimizer = jaxpp.MpmdMesh((2, 2), ("mpmd", "data")), optax.adam(1e-3)
    count = _MICROBATCHES.value
    state, batch = draw(4, _WIDTH.value, 2 * count * _ROWS.value, optimizer)
    specs = (None, None, PartitionSpec("data"))
    schedule = jaxpp.schedules.OneFOneB()
    loops = {
        name: Loop(
            placed_step(schedule, 2, count, optimizer, mesh, 4, in_specs=specs, **own), state, batch
        )
        for name, own in STEPS.items()
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for turn in range(_REPEATS.value + 1):
        for name in list(loops)[:: 1 if turn % 2 else -1]:
            found = clocked(loops[name])
            if turn:  # the first call compiles
                times[name].append(found)
    print(f"{SHARED}: {1e3 * statistics.median(wall for wall, _ in times[SHARED]):.1f} ms")
    for name in list(STEPS)[1:]:
        print(f"{name}: {', '.join(ratios(times[name], times[SHARED]))}", flush=True)


def ratios(own: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> list[str]:
    """Writes the ratios of two steps, by the wall clock and by processor time."""
    lines = []
    for clock, name in enumerate(("of its time", "of its processor time")):
        found = [a[clock] / b[clock] for a, b in zip(own, other, strict=True)]
        low, middle, high = statistics.quantiles(found, n=4)
        lines.append(f"{middle:.2f} {name} (quartiles {low:.2f}, {high:.2f})")
    return lines


if __name__ == "__main__":
    app.run(main)
