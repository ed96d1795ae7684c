"""The time and the memory of a step with activations in host memory, against the step without.

    python -m benchmarks.offload
    python -m benchmarks.offload --schedules=1f1b --width=4096 --batch=8192
    python -m benchmarks.offload --plan

Four ranks share the devices that there are. For each schedule, and the schedule with `Offload`, it
prints the time of a step, the most bytes of activations of a rank by `predict`, and the peak of
the first device, where it tells that: the peak is that of the process so far, so the step with
less comes first.

`--plan` plans two models on two ranks, with too little memory for what the stages keep: one of
products, which take long to compute again, and one of short operations that keep much. It prints
what each plan chose, what the plan chose after a measurement, and the measured times of the two.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import jaxpp
from jaxpp.planning._plan import solve
from jaxpp.schedules import Costs, Offload, Recompute, by_name

_SCHEDULES = flags.DEFINE_list("schedules", ["1f1b", "interleaved_1f1b", "zb_h1"], "Which.")
_WIDTH = flags.DEFINE_integer("width", 64, "The width of a layer.", 1)
_BATCH = flags.DEFINE_integer("batch", 64, "The rows of a microbatch.", 1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 16, "The microbatches of a step.", 1)
_AHEAD = flags.DEFINE_integer("ahead", 1, "How many tasks a load is ahead of its backward.", 0)
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often to measure; the median counts.", 1)
_PLAN = flags.DEFINE_bool("plan", False, "Whether to plan, and to measure what plans choose from.")
RANKS = 4
MICROBATCHES = 8


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


def products(weights, x):
    """Layers that take long to compute again."""
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def short(weights, x):
    """Layers that keep much for what they compute."""
    for weight in weights:
        x = x * (weight - x)
    return jnp.mean(x**2)


def models():
    """By name: a loss, its weights, and a batch."""
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (512, 512)) / 22 for key in keys[1:]]
    scales = [jnp.full((1024,), 1.9, jnp.float32)] * 4
    return {
        "products": (products, weights, jax.random.normal(keys[0], (MICROBATCHES * 512, 512))),
        "short": (short, scales, jax.random.uniform(keys[0], (MICROBATCHES * 1024, 1024))),
    }


def step_of(plan, order, loss):
    """A training step with the cuts of a plan, and another order."""
    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss, at=plan.cuts))
    grad = jaxpp.schedule(jaxpp.microbatch(jax.value_and_grad(staged), MICROBATCHES), order)

    def train(weights, x):
        loss, grads = grad(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), loss

    devices = [jax.devices()[rank % len(jax.devices())] for rank in range(2)]
    return jaxpp.place(train, jaxpp.MpmdMesh((2,), devices=devices), donate_argnums=0)


def planned(name, loss, weights, x) -> None:
    """Plans with too little memory, and measures recomputation and offload in turns."""
    options: Any = dict(schedules=["gpipe"], state_bytes=2.0, at_least=4, repeats=_REPEATS.value)
    free = jaxpp.plan(loss, weights, x, ranks=2, microbatches=MICROBATCHES, **options)
    limit = 0.7 * max(free.peak_bytes)
    plan = solve(dataclasses.replace(free.problem, memory_limit=limit))
    print(f"{name}: the limit is {limit / 1e6:.1f} MB of {max(free.peak_bytes) / 1e6:.1f} MB")
    print(f"  the plan: {plan.activations}, {1e3 * plan.seconds:.1f} ms")
    measured = jaxpp.measure(step_of(plan, plan.order, loss), weights, x, repeats=_REPEATS.value)
    again = plan.again(measured)
    print(f"  the plan after a measurement: {again.activations}, {1e3 * again.seconds:.1f} ms")
    stages = [stage for stage, way in enumerate(plan.activations) if way]
    orders = {
        "offloaded": Offload("gpipe", stages=stages, ahead=plan.ahead),
        "recomputed": Recompute("gpipe", stages=stages),
    }
    steps = {way: step_of(plan, order, loss) for way, order in orders.items()}
    state = {way: step([jnp.copy(w) for w in weights], x)[0] for way, step in steps.items()}
    times = {way: [] for way in orders}
    for _ in range(5 * _REPEATS.value):
        for way, step in steps.items():
            start = time.perf_counter()
            state[way], _ = jax.block_until_ready(step(state[way], x))
            times[way].append(time.perf_counter() - start)
    for way, own in times.items():
        print(f"  {way}: {1e3 * statistics.median(own):.1f} ms, stages {stages}")
    ratio = [a / b for a, b in zip(times["recomputed"], times["offloaded"], strict=True)]
    print(f"  recomputed over offloaded: {statistics.median(ratio):.2f}")


def main(_: list[str]) -> None:
    if _PLAN.value:
        for name, model in models().items():
            planned(name, *model)
        return
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
