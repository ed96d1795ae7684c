"""Prints what windows of gathers and reductions cost a GPT-2: collectives of a step, and bytes.

    python -m benchmarks.windows
    python -m benchmarks.windows --orders=gpipe --layers=8 --width=64

There are two ranks of two devices along `data`, two replicas, Adam. For each schedule and window
a line has, of the first rank in a step: the all-gathers and the reduce-scatters over `data`; the
most bytes of parameters and of sums of gradients that a device holds, by `predict`, as a share of
the bytes of the rank's parameters; and of all ranks the bytes that a device holds at its peak,
those measured over those predicted, where the two are furthest apart.
"""

from typing import Any

import equinox as eqx
import jax
from absl import app, flags
from jax.sharding import PartitionSpec as P

import jaxpp
from benchmarks.prediction import memory_peaks
from experiments import train_lm
from experiments.hlo_collectives import count_collectives
from experiments.training import data
from experiments.training.config import Config
from jaxpp.schedules import Costs, Gather, Reduce, Schedule

_ORDERS = flags.DEFINE_list(
    "orders", ["gpipe(stages_per_rank=2)", "interleaved_1f1b(stages_per_rank=2)"], "Which."
)
_LAYERS = flags.DEFINE_integer("layers", 4, "Blocks.", 4)
_WIDTH = flags.DEFINE_integer("width", 64, "Features.", 16)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "Microbatches of a replica.", 2)


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


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
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
