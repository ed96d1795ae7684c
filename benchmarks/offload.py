"""The time and the memory of a step with activations in host memory, against the step without.

    python -m benchmarks.offload
    python -m benchmarks.offload --schedules=1f1b --width=4096 --batch=8192

Four ranks share the devices that there are. For each schedule, and the schedule with `Offload`, it
prints the time of a step, the most bytes of activations of a rank by `predict`, and the peak of
the first device, where it tells that: the peak is that of the process so far, so the step with
less comes first.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

import jaxpp
from jaxpp.schedules import Costs, Offload, by_name

_SCHEDULES = flags.DEFINE_list("schedules", ["1f1b", "interleaved_1f1b", "zb_h1"], "Which.")
_WIDTH = flags.DEFINE_integer("width", 64, "The width of a layer.", 1)
_BATCH = flags.DEFINE_integer("batch", 64, "The rows of a microbatch.", 1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 16, "The microbatches of a step.", 1)
_AHEAD = flags.DEFINE_integer("ahead", 1, "How many tasks a load is ahead of its backward.", 0)
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often to measure; the median counts.", 1)
RANKS = 4


def loss_fn(weights, x):
    """A stage for each pair of weights: a residual layer."""
    for n, (first, second) in enumerate(weights):
        x = jaxpp.pipeline_enter_stage(x) if n else x
        x = x + jax.nn.gelu(x @ first) @ second
    return jnp.mean(x**2)


def measured(schedule) -> tuple[float, int, int, float]:
    """The seconds of a step, bytes of activations, the device's peak, and the loss."""
    width, stages = _WIDTH.value, RANKS * schedule.stages_per_rank
    keys = jax.random.split(jax.random.key(0), 2 * stages + 1)
    shapes = [(width, 4 * width), (4 * width, width)] * stages
    flat = [
        jax.random.normal(key, shape) / width for key, shape in zip(keys[1:], shapes, strict=True)
    ]
    weights = list(zip(flat[::2], flat[1::2], strict=True))
    x = jax.random.normal(keys[0], (_MICROBATCHES.value * _BATCH.value, width))
    grad = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    grad = jaxpp.schedule(jaxpp.microbatch(grad, _MICROBATCHES.value), schedule)

    def train(weights, x):
        loss, grads = grad(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    devices = [jax.devices()[rank % len(jax.devices())] for rank in range(RANKS)]
    step = jaxpp.place(train, jaxpp.MpmdMesh((RANKS,), devices=devices), donate_argnums=0)
    found = jaxpp.predict(step, weights, x, costs=Costs(offload=0.0, load=0.0))
    held = max(m.bytes.get("activations", 0) for own in found.memory for m in own)
    weights, loss = step(weights, x)
    times = []
    for _ in range(_REPEATS.value):
        start = time.perf_counter()
        weights, loss = jax.block_until_ready(step(weights, x))
        times.append(time.perf_counter() - start)
    peak = (devices[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return statistics.median(times), held, peak, float(loss)


def main(_: list[str]) -> None:
    print(f"{'schedule':20}{'':9}{'ms':>10}{'activations MB':>16}{'device peak MB':>16}  loss")
    for name in _SCHEDULES.value:
        for title, schedule in (
            ("offload", Offload(name, ahead=_AHEAD.value)),
            ("base", by_name(name)),
        ):
            seconds, held, peak, loss = measured(schedule)
            shown = f"{peak / 1e6:16.1f}" if peak else f"{'-':>16}"
            print(f"{name:20}{title:9}{1e3 * seconds:10.2f}{held / 1e6:16.3f}{shown}  {loss:.9g}")


if __name__ == "__main__":
    app.run(main)
