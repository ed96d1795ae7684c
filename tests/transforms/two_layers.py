"""Two layers in two stages, on two ranks that share a device: the least that is a pipeline."""

import jax
import jax.numpy as jnp

import jaxpp
from tests.helpers import mesh_of

KEYS = jax.random.split(jax.random.key(0), 3)
WEIGHTS = [jax.random.normal(KEYS[0], (4, 6)), jax.random.normal(KEYS[1], (6, 4))]
X = jax.random.normal(KEYS[2], (8, 4))
MICROBATCHES = 4


def loss(weights, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ weights[0]))
    return jnp.mean((h @ weights[1]) ** 2)


def scheduled(fun=loss, schedule=None):
    """Value and gradient of a loss, microbatch by microbatch, as a scheduled loop."""
    loop = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(fun)), MICROBATCHES)
    return jaxpp.schedule(loop, schedule or jaxpp.schedules.OneFOneB())


def accumulated(fun=loss):
    """The same by a loop of Python, with nothing of this library but marks, which do nothing."""

    def grad_fn(weights, x):
        parts = jnp.split(x, MICROBATCHES)
        losses, grads = zip(*(jax.value_and_grad(fun)(weights, p) for p in parts), strict=True)
        mean = jax.tree.map(lambda *gs: sum(gs) / MICROBATCHES, *grads)
        return sum(losses) / MICROBATCHES, mean

    return grad_fn


def mesh():
    return mesh_of(2, shared=True)


def place(step, **options):
    return jaxpp.place(step, mesh(), **options)
