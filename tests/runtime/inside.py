"""A training step whose ranks are meshes: tensor-parallel layers, and a batch that is split."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpp
from tests.helpers import train_step_of

AXES = ("mpmd", "data", "model")
LAYERS, WIDTH = 4, 8
RULES = [(r"up$", P(None, "model")), (r"down$", P("model", None))]


def axes_of(shape):
    """The axes of a mesh of this shape: `(2,)` is one without others than the pipeline's."""
    return AXES[: len(shape)]


def local(shape, **options):
    return jaxpp.MpmdMesh(shape, axes_of(shape), **options)


def params():
    layers = []
    for key in jax.random.split(jax.random.key(0), LAYERS):
        up, down, bias = jax.random.split(key, 3)
        layers.append(
            {
                "up": jax.random.normal(up, (WIDTH, 2 * WIDTH)) / 3,
                "down": jax.random.normal(down, (2 * WIDTH, WIDTH)) / 4,
                "bias": jax.random.normal(bias, (WIDTH,)),
            }
        )
    return layers


OPTIMIZER = optax.adam(1e-2)


def start():
    """Parameters and optimizer state, new arrays each time."""
    layers = params()
    return [layers, OPTIMIZER.init(layers)]


def batch(number=0):
    rng = np.random.default_rng(number)
    return rng.normal(size=(8, WIDTH)).astype("f4"), rng.normal(size=(8, WIDTH)).astype("f4")


def loss_of(ranks, split, layer):
    def loss(layers, x, y):
        for n, own in enumerate(layers):
            if n and n % (LAYERS // ranks) == 0:
                x = jaxpp.pipeline_enter_stage(x)
            x = x + layer(own, x, split)
        return jnp.mean((x - y) ** 2)

    return loss


def dense(own, x, split):
    """A layer whose hidden values are split by a constraint."""
    h = jnp.tanh(x @ own["up"])
    if split:
        h = jax.lax.with_sharding_constraint(h, P("data", "model"))
    return h @ own["down"] + own["bias"]


def placed(
    mesh,
    layer=dense,
    schedule=jaxpp.schedules.OneFOneB(),  # noqa: B008
    microbatches=2,
    replicas=1,
    **options,
):
    """The step on a mesh, whose layers are split over the axes inside a rank if it has any."""
    split = mesh.inside is not None
    stages = mesh.num_ranks * getattr(schedule, "stages_per_rank", 1)
    loss = jaxpp.wrap_forward(loss_of(stages, split, layer))
    grad = jaxpp.microbatch(
        jax.value_and_grad(loss), microbatches, in_axes=(None, 0, 0), replicas=replicas
    )
    step = train_step_of(OPTIMIZER, jaxpp.schedule(grad, schedule))
    specs = (RULES, RULES, P("data"), P("data")) if split else None
    options = {"donate_argnums": (0, 1), "in_specs": specs} | options
    return jaxpp.place(step, mesh, **options)


def train(step, state, numbers):
    """Some steps, each on its own batch; gives the state and the losses."""
    losses = []
    for number in numbers:
        *state, loss = step(*state, *batch(number))
        losses.append(loss)
    return state, jax.device_get(losses)


def assert_same_descriptions(found, expected):
    """Of two meshes; the local one holds the messages that came last a little longer."""
    for own, other in zip(found.ranks, expected.ranks, strict=True):
        assert own.sent_bytes
        assert own.peak_bytes <= other.peak_bytes
        same = dict(devices=(), peak_bytes=0)
        assert dataclasses.replace(own, **same) == dataclasses.replace(other, **same)
