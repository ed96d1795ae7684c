"""A GPT whose ranks share one device, against `jax.jit`: step, first call, and the device's memory.

    python -m benchmarks.one_gpu
    python -m benchmarks.one_gpu --schedules=1f1b --width=64 --sequence_length=64  # on a CPU

The plain step accumulates the same gradients in a loop. `predicted` adds up the peaks of the ranks
by `predict`. `peak` is the device's own figure, of the process so far: put schedules that need less
first. A CPU has no such figure. On one device nothing runs side by side, so a ratio of 1 says that
tasks, which XLA compiles apart, take no longer than the whole.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from absl import app, flags

import jaxpp
from experiments import train_lm
from experiments.training import data
from experiments.training.config import Config

_SCHEDULES = flags.DEFINE_list("schedules", ["1f1b", "zb_h1", "interleaved_1f1b"], "Which.")
_RANKS = flags.DEFINE_integer("ranks", 4, "Ranks.", 1)
_WIDTH = flags.DEFINE_integer("width", 1024, "The width of the model of 8 layers.", 16)
_LENGTH = flags.DEFINE_integer("sequence_length", 512, "Tokens of each of 32 sequences.", 2)
_REPEATS = flags.DEFINE_integer("repeats", 10, "How often to measure; the median counts.", 1)


def timed(step: Callable[..., Any], state: Any, batch: Any) -> tuple[float, float, Any]:
    """The seconds of the first call and of a later one, and the state after them."""
    times = []
    for _ in range(1 + _REPEATS.value):
        start = time.perf_counter()
        *state, loss = step(*state, *batch)
        jax.block_until_ready([loss, eqx.filter(state, eqx.is_array)])
        times.append(time.perf_counter() - start)
    return times[0], statistics.median(times[1:]), state


def main(_: list[str]) -> None:
    device, ranks = jax.devices()[0], _RANKS.value
    mesh = jaxpp.MpmdMesh((ranks,), devices=[device] * ranks)
    print(f"{'schedule':20}{'step':>8}{'first call':>12}{'predicted MB':>14}{'peak MB':>10}")
    for name in _SCHEDULES.value:
        config = Config(
            ranks=ranks, schedule=name, layers=8, width=_WIDTH.value, heads=16, dtype="bfloat16",
            sequence_length=_LENGTH.value, batch_size=32, microbatches=8,
        )  # fmt: skip
        batch: Any = next(train_lm.training_batches(config, data.load()))
        step = train_lm.make_pipeline(config, mesh)[0]
        first, seconds, state = timed(step, train_lm.initial_state(config), batch)
        found = jaxpp.predict(step, *state, *batch, costs=jaxpp.Device(1e15, 1e12))
        predicted = sum(peak.total for peak in found.peaks)
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        grad_fn = eqx.filter_value_and_grad(train_lm.split(config))
        grad_fn = jaxpp.microbatch(grad_fn, config.microbatches, in_axes=(None, 0, 0))
        plain = eqx.filter_jit(train_lm.make_train_step(config, grad_fn))
        of_plain = timed(plain, train_lm.initial_state(config), batch)
        print(
            f"{name:20}{seconds / of_plain[1]:8.2f}{first / of_plain[0]:12.2f}"
            f"{predicted / 1e6:14.0f}{peak / 1e6 if peak else float('nan'):10.0f}",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
