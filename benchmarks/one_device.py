"""Compares a scheduled step under `jax.jit` with the plain one: what a single device runs.

    python -m benchmarks.one_device
    python -m benchmarks.one_device --sizes=256:64 --schedules=1f1b --repeats=60

Both accumulate the same gradients by a scan. For each schedule, and each width and rows of a
microbatch, it prints the ratio of the times of a call, as the median and the quartiles of calls
that take turns, and the ratio of the peaks of memory that XLA plans.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import optax
from absl import app, flags

import jaxpp
from benchmarks.equal_blocks import copy, draw, elapsed, loss_fn, planned_bytes, train_step_of

_SIZES = flags.DEFINE_list("sizes", ["64:16", "256:64"], "Widths, and rows of a microbatch.")
_SCHEDULES = flags.DEFINE_list("schedules", ["1f1b", "zb_h1"], "Names of schedules.")
_STAGES = flags.DEFINE_integer("stages", 4, "Stages, a block each.", 2)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches of a step.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 40, "Calls of each step.", 2)


def compiled(grad_fn: Callable, optimizer: Any, state: Any, batch: Any) -> jax.stages.Compiled:
    """Compiles a train step of the arrays of its state."""
    step, static = train_step_of(grad_fn, optimizer), eqx.partition(state, eqx.is_array)[1]

    def on_arrays(arrays, batch):
        *new, loss = step(*eqx.combine(arrays, static), batch)
        return eqx.filter(tuple(new), eqx.is_array), loss

    arrays = eqx.filter(state, eqx.is_array)
    return jax.jit(on_arrays, donate_argnums=0).lower(arrays, batch).compile()


def measure(width: int, rows: int) -> None:
    """Measures a model of a width; prints a line for each schedule."""
    optimizer, count = optax.adam(1e-3), _MICROBATCHES.value
    state, batch = draw(_STAGES.value, width, rows * count, optimizer)
    at = [f"blocks.{i}" for i in range(1, _STAGES.value)]
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, at=at))

    def looped(loss):
        return jaxpp.microbatch(eqx.filter_value_and_grad(loss), count)

    functions = {"plain": looped(loss_fn)} | {
        name: jaxpp.schedule(looped(staged), jaxpp.schedules.by_name(name))
        for name in _SCHEDULES.value
    }
    steps = {n: compiled(fun, optimizer, state, batch) for n, fun in functions.items()}
    states = {name: copy(eqx.filter(state, eqx.is_array)) for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}

    def call(name: str) -> Any:
        states[name], loss = steps[name](states[name], batch)
        return states[name], loss

    for turn in range(_REPEATS.value + 1):
        order = list(steps)[:: 1 if turn % 2 else -1]
        for name in order:
            seconds = elapsed(lambda: call(name))  # noqa: B023
            if turn:  # the first call warms up
                times[name].append(seconds)
    for name in _SCHEDULES.value:
        ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        memory = planned_bytes(steps[name]) / planned_bytes(steps["plain"])
        print(
            f"width {width}, {rows} rows, {name}: {1e3 * statistics.median(times[name]):.2f} ms, "
            f"{middle:.3f} of plain (quartiles {low:.3f}, {high:.3f}); memory {memory:.3f} of "
            f"plain",
            flush=True,
        )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    for size in _SIZES.value:
        measure(*map(int, size.split(":")))


if __name__ == "__main__":
    app.run(main)
