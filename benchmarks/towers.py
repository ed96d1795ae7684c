"""CLIP on two worker processes, a tower on each: as a chain of stages, and as the graph that it is.

    python -m benchmarks.towers
    python -m benchmarks.towers --layers=2 --width=64 --microbatches=4 --turns=3

As a chain the text tower and the loss are one stage, which waits for the image tower. As a graph
the loss is a stage of its own, and the order is made for these stages (`Synthesized`), from what
their tasks take alone. The steps take turns; it prints medians, quartiles of the ratio, and what
the simulation says. Their first losses are the same, to rounding.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jaxpp
from benchmarks.equal_blocks import Loop, elapsed, train_step_of
from experiments.models import clip
from experiments.models.language import cross_entropy
from jaxpp.schedules import Costs, Kind, OneFOneB, Schedule, Synthesized, simulate

_LAYERS = flags.DEFINE_integer("layers", 3, "Layers of each tower.", 1)
_WIDTH = flags.DEFINE_integer("width", 128, "Width of each tower.", 1)
_ROWS = flags.DEFINE_integer("rows", 16, "Pairs of a microbatch.", 1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 4, "Their number.", 1)
_TURNS = flags.DEFINE_integer("turns", 10, "How often what is compared takes turns.", 2)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps in a turn.", 1)

OPTIMIZER = optax.sgd(1e-3)


def loss_of(is_graph: bool) -> Callable[..., jax.Array]:
    """The loss of CLIP with a mark after each tower, or after that of images."""

    def loss(model, batch):
        images, tokens = batch
        seen = jaxpp.pipeline_enter_stage(jax.vmap(model.image)(images))
        read = jax.vmap(model.text)(tokens)
        read = jaxpp.pipeline_enter_stage(read) if is_graph else read
        seen, read = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (seen, read))
        logits, own = jnp.exp(model.log_scale) * seen @ read.T, jnp.arange(len(images))
        return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2

    return loss


def step_of(is_graph: bool, schedule: Schedule, mesh: Any) -> Any:
    grad_fn = eqx.filter_value_and_grad(jaxpp.wrap_forward(loss_of(is_graph)))
    grad_fn = jaxpp.schedule(jaxpp.microbatch(grad_fn, _MICROBATCHES.value), schedule)
    return jaxpp.place(train_step_of(grad_fn, OPTIMIZER), mesh, donate_argnums=(0, 1))


def draw() -> tuple[tuple[Any, Any], tuple[jax.Array, jax.Array]]:
    tower = clip.Tower(_LAYERS.value, _WIDTH.value, heads=4)
    config = clip.Config(tower, tower, 64, patch=8, image=64, vocabulary=512, context=65)
    model = clip.CLIP(config, key=jax.random.key(0))
    keys, count = jax.random.split(jax.random.key(1)), _ROWS.value * _MICROBATCHES.value
    images = jax.random.normal(keys[0], (count, 3, 64, 64))
    batch = images, jax.random.randint(keys[1], (count, 65), 0, 512)
    return (model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))), batch


def times_alone(state: Any, batch: Any) -> dict[tuple[Kind, int], float]:
    """Seconds of the tasks of the graph, one after the other on the device of this process."""
    mesh = jaxpp.MpmdMesh((3,), devices=jax.devices()[:1] * 3)
    found = jaxpp.measure(step_of(True, OneFOneB(), mesh), *state, batch, repeats=5)
    return dict(found.times_alone)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SystemExit(f"unexpected arguments: {argv[1:]}")
    (state, batch), m = draw(), _MICROBATCHES.value
    alone = times_alone(state, batch)
    together = {(kind, s): alone[kind, s] for kind, s in alone if s < 2}
    for kind in (Kind.F, Kind.B):
        together[kind, 1] += alone[kind, 2]
    two, three = Costs.measured(together), Costs.measured(alone)
    order = Synthesized(three, (0, 1, 1), split_backward=False)
    as_graph = dataclasses.replace(order, graph=((), (), (0, 1)))
    schedules: dict[str, Schedule] = {"chain": OneFOneB(), "graph": order}
    predicted = {
        "chain": simulate(OneFOneB().table(2, m), two).makespan,
        "graph": as_graph.synthesis(3, m).value,
    }
    with jaxpp.RemoteMpmdMesh((2,), ("mpmd",)) as mesh:
        loops = {
            name: Loop(step_of(name == "graph", schedule, mesh), state, batch)
            for name, schedule in schedules.items()
        }
        losses = [float(np.asarray(loop()[-1])) for loop in loops.values()]
        np.testing.assert_allclose(losses, losses[0], rtol=1e-4)
        times: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(_TURNS.value):
            for name in list(loops)[:: 1 if turn % 2 else -1]:
                times[name].append(elapsed(loops[name], _STEPS.value) / _STEPS.value)
    for name, own in times.items():
        print(
            f"{name}: {1e3 * statistics.median(own):.0f} ms, {1e3 * predicted[name]:.0f} by "
            f"simulation of tasks that run alone"
        )
    ratios = [a / b for a, b in zip(times["graph"], times["chain"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"the graph takes {middle:.2f} of the time of the chain (quartiles {low:.2f}, {high:.2f}), "
        f"{predicted['graph'] / predicted['chain']:.2f} by simulation"
    )


if __name__ == "__main__":
    app.run(main)
