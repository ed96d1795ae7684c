"""Prints what windows of gathers and reductions cost a GPT-2: collectives of a step, and bytes.

    python -m benchmarks.windows
    python -m benchmarks.windows --orders=gpipe --layers=8 --width=64
    python -m benchmarks.windows --plan --width=512
    python -m benchmarks.windows --plan --width=512 --microbatches=4 --task_ms=200 --repeats=3

There are two ranks of two devices along `data`, two replicas, Adam. For each schedule and window
a line has, of the first rank in a step: the all-gathers and the reduce-scatters over `data`; the
most bytes of parameters and of sums of gradients that a device holds, by `predict`, as a share of
the bytes of the rank's parameters; and of all ranks the bytes that a device holds at its peak,
those measured over those predicted, where the two are furthest apart.

`--plan` plans a model of products with parameters split over replicas (ZeRO-3), for a memory that
neither windows alone nor offload alone keep, from a profile and the speed of the gathers of a step
that was measured. It runs the plan, and prints its bytes and its times. With `--task_ms` each layer
sleeps, too, as if its device were not the cores of this machine, and the plan also runs on two
worker processes: within a process, XLA runs the programs of several devices of a CPU one by one.
"""

import dataclasses
import functools
import itertools
import os
import statistics
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import PartitionSpec as P

import jaxpp
from benchmarks import equal_blocks
from benchmarks.prediction import memory_peaks
from experiments import train_lm
from experiments.hlo_collectives import count_collectives
from experiments.training import data
from experiments.training.config import Config
from jaxpp.planning._plan import solve
from jaxpp.planning.search import Choice
from jaxpp.schedules import Costs, Gather, Kind, Reduce, Schedule, Task, by_name

_ORDERS = flags.DEFINE_list(
    "orders", ["gpipe(stages_per_rank=2)", "interleaved_1f1b(stages_per_rank=2)"], "Which."
)
_LAYERS = flags.DEFINE_integer("layers", 4, "Blocks.", 4)
_WIDTH = flags.DEFINE_integer("width", 64, "Features.", 16)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches of a replica.", 2)
_TASK_MS = flags.DEFINE_float(
    "task_ms", 0.0, "What a layer of `--plan` sleeps in a forward; twice that in a backward."
)
_PLAN = flags.DEFINE_bool("plan", False, "Whether to plan, and to run the plan.")


def windows(base: Schedule) -> dict[str, tuple[Schedule, dict[str, Any]]]:
    """The schedules, and the options of `place`, by what a table calls them."""
    one, three = dict(zero1="data"), dict(zero3="data")
    return {
        "`zero1`": (base, one),
        "`zero1`, `Reduce(every=1)`": (Reduce(base, every=1), one),
        "`zero1`, `Reduce()`": (Reduce(base), one),
        "`zero3`": (base, three),
        "`zero3`, `Gather(held=0)`": (Gather(base, held=0), three),
        "`zero3`, `Gather(held=1)`": (Gather(base, held=1), three),
        "`zero3`, `Gather()`": (Gather(base), three),
        "`zero3`, `Gather(held=1)`, `Reduce()`": (Reduce(Gather(base, held=1)), three),
    }


def make(config: Config, order: Schedule, options: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The step of a training with the tasks of a schedule, and its arguments."""
    grad_fn = eqx.filter_value_and_grad(jaxpp.wrap_forward(train_lm.split(config)))
    grad_fn = jaxpp.microbatch(grad_fn, config.microbatches, in_axes=(None, 0, 0), replicas=2)
    train_step = train_lm.make_train_step(config, jaxpp.schedule(grad_fn, order))
    mesh = jaxpp.MpmdMesh((config.ranks, 2), ("mpmd", "data"))
    specs = dict(in_specs=(None, None, P("data"), P("data")), donate_argnums=(0, 1))
    batch: Any = next(train_lm.training_batches(config, data.load()))
    step = jaxpp.place(train_step, mesh, **specs, **options)
    return step, (*train_lm.initial_state(config), *batch)


def figures(step: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The numbers of a line: collectives of two kinds, bytes of two kinds, and a ratio."""
    measured, predicted = memory_peaks(step, args)
    first = count_collectives(step)[0].all
    held = jaxpp.predict(step, *args, costs=Costs(gather=0, reduce=0)).memory[0]
    parameters, sums = (
        max(moment.bytes.get(kind, 0) for moment in held) for kind in ("parameters", "accumulators")
    )
    ratios = [a / b for a, b in zip(measured, predicted, strict=True)]
    counts = (first[f"{kind} over data"] for kind in ("all-gather", "reduce-scatter"))
    return *counts, parameters, sums, max(ratios, key=lambda ratio: abs(ratio - 1))


def products(weights: list[jax.Array], x: jax.Array, wait: Any = lambda x: x) -> jax.Array:
    """A loss whose layers are equal; `wait` is what each does besides its product."""
    for weight in weights:
        x = wait(jnp.tanh(x @ weight))
    return jnp.mean(x**2)


def problem(
    width: int, microbatches: int, fun: Any = products, **machine: Any
) -> tuple[jaxpp.Plan, tuple[Any, ...]]:
    """A plan without a limit for four products of two replicas, and the arguments of a step."""
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]
    args = weights, jax.random.normal(keys[0], (2 * microbatches * width // 4, width))
    order = "gpipe(stages_per_rank=2)"
    options: Any = dict(schedules=[order], state_bytes=2.0, zero=3, replicas=2, at_least=4)
    options |= machine
    return jaxpp.plan(fun, *args, ranks=2, microbatches=microbatches, **options), args


def alone(plan: jaxpp.Plan) -> tuple[float, float]:
    """The least bytes of a rank by windows alone, and by offload or recomputation alone."""
    p = plan.problem
    cutter = p.cutter(plan.microbatches, by_name(p.schedules[0]))

    def peak(choice: Choice) -> float:
        return max(cutter.timeline(choice).peak_memory)

    ways = itertools.product(("", "R", "O"), repeat=cutter.even.num_stages)
    kept = (dataclasses.replace(cutter.even, ways=own) for own in ways)
    return min(map(peak, cutter.windows(cutter.even))), min(map(peak, kept))


def limited(free: jaxpp.Plan) -> jaxpp.Plan:
    """The plan for less memory than windows alone need, or offload and recomputation alone."""
    limit = 0.97 * min(alone(free))
    return solve(dataclasses.replace(free.problem, memory_limit=limit))


def step_of(plan: jaxpp.Plan, order: Schedule, fun: Any = products, mesh: Any = None) -> Any:
    """A step with the cuts of a plan, whose state is split."""
    mesh = mesh or jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(jaxpp.split_stages(fun, at=plan.cuts)))
    grad_fn = jaxpp.microbatch(grad_fn, plan.microbatches, replicas=2)
    grad_fn = jaxpp.schedule(grad_fn, order)

    def train(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = grad_fn(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    specs: Any = dict(in_specs=(None, P("data")), donate_argnums=0, zero3="data")
    return jaxpp.place(train, mesh, **specs)


def planned() -> None:
    """Plans, runs the plan, and prints its bytes and times."""
    width, microbatches = _WIDTH.value, _MICROBATCHES.value
    seconds, fun = _TASK_MS.value / 1e3, products
    if seconds:
        fun = functools.partial(products, wait=equal_blocks.sleeping(seconds))
    free, args = problem(width, microbatches, fun, reduction_bandwidth=1e9)
    first = step_of(free, Gather("gpipe(stages_per_rank=2)"), fun)
    first = jaxpp.measure(first, *args, repeats=3)
    gather = statistics.median(first.costs.of(Task(Kind.G, stage, 0)) for stage in range(4))
    speed = 4 * width**2 / 2 / gather
    free = solve(dataclasses.replace(free.problem, reduction_bandwidth=speed))
    plan = limited(free)
    print(plan, f"alone: {alone(free)} bytes; gathers of {speed:.3g} bytes a second", sep="\n")
    step = step_of(plan, plan.order, fun)
    measured, predicted = memory_peaks(step, args)
    print(f"bytes measured: {measured}, predicted: {predicted}")
    found = jaxpp.measure(step, *args, repeats=flags.FLAGS.repeats)
    predicted = jaxpp.predict(step, *args, costs=found).seconds
    times = {"measured": found.step, "by the plan": plan.seconds, "by predict": predicted}
    if seconds:
        with jaxpp.RemoteMpmdMesh((2, 2), ("mpmd", "data")) as workers:
            loop = equal_blocks.Loop(step_of(plan, plan.order, fun, workers), args[:1], args[1])
            times["on workers"] = equal_blocks.seconds(loop, flags.FLAGS.repeats)
    print("ms", *(f"{name}: {1e3 * own:.2f}" for name, own in times.items()), sep="  ")


def main(_: list[str]) -> None:
    # A callback waits for a copy, for which XLA needs another thread than those that wait.
    os.environ.setdefault("PJRT_NPROC", "16")
    jax.config.update("jax_num_cpu_devices", 4)
    if _PLAN.value:
        planned()
        return
    print("| schedule | window | all-gathers | reduce-scatters | parameters | sums | bytes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in _ORDERS.value:
        sizes: dict[str, Any] = dict(layers=_LAYERS.value, width=_WIDTH.value, vocabulary=512)
        config = Config(
            model="gpt2", ranks=2, schedule=name, dp=2, microbatches=_MICROBATCHES.value,
            batch_size=4 * _MICROBATCHES.value, **sizes,
        )  # fmt: skip
        whole = 0
        for window, (order, options) in windows(config.order).items():
            gathers, scatters, *held, ratio = figures(*make(config, order, options))
            whole = whole or held[0]  # those of `zero1`
            shares = " | ".join(f"{nbytes / whole:.2f}" for nbytes in held)
            line = f"| `{name}` | {window} | {gathers} | {scatters} | {shares} | {ratio:.3f} |"
            print(line, flush=True)


if __name__ == "__main__":
    app.run(main)
