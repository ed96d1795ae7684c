"""A residual network in Haiku, with state and dropout; cut at the names of its modules.

python -m examples.libraries.dm_haiku --schedule=zb_h1
"""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from examples.libraries import training
from jaxpp.schedules import Schedule

WIDTH, CLASSES = 16, 5

# The large epsilon keeps the noise of gradients near zero from becoming a whole step.
OPTIMIZER = optax.adam(1e-2, eps=1e-3)


class State(NamedTuple):
    params: optax.Params
    statistics: hk.State
    opt_state: optax.OptState


class Block(hk.Module):
    def __call__(self, x):
        norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
        inner = jax.nn.gelu(hk.Linear(4 * WIDTH, name="up")(norm(x, is_training=True)))
        inner = hk.Linear(WIDTH, name="down")(inner)
        return x + hk.dropout(hk.next_rng_key(), 0.1, inner)


def make_net(layers: int) -> hk.TransformedWithState:
    def forward(x):
        x = hk.Linear(WIDTH, name="embed")(x)
        for i in range(layers):
            x = Block(name=f"block_{i}")(x)
        return hk.Linear(CLASSES, name="head")(x)

    return hk.transform_with_state(forward)


def make_train_step(schedule: Schedule | None, num_stages: int, num_microbatches: int):
    """The train step, as a pipeline or on one device; see `training.Example`."""
    net = make_net(num_stages)
    cuts = [f"block_{i}" for i in range(1, num_stages)]

    def loss_fn(params, statistics, batch):
        logits, statistics = net.apply(params, statistics, batch["key"][0], batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), statistics

    if schedule is None:
        grad_fn = training.in_a_loop_with_state(loss_fn, num_microbatches)
    else:
        staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, at=cuts))
        grad_fn = jaxpp.microbatch(
            jax.value_and_grad(staged, has_aux=True),
            num_microbatches,
            in_axes=(None, "carry", 0),
            reduce=(("mean", "carry"), "mean"),
        )
        grad_fn = jaxpp.schedule(grad_fn, schedule)

    def train_step(state: State, batch):
        (loss, statistics), grads = grad_fn(state.params, state.statistics, batch)
        updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), statistics, opt_state), loss

    return train_step


def make_state(num_stages: int) -> State:
    params, statistics = jax.jit(make_net(num_stages).init)(
        jax.random.key(0), jnp.zeros((1, WIDTH))
    )
    return State(params, statistics, OPTIMIZER.init(params))


def draw_batch(step: int, num_microbatches: int):
    """Points near the corners of a cube, labelled by the corner; a key each."""
    random = np.random.default_rng(step)
    label = random.integers(CLASSES, size=4 * num_microbatches)
    x = np.eye(CLASSES, WIDTH)[label] + 0.3 * random.normal(size=(len(label), WIDTH))
    return {
        "x": x.astype(np.float32),
        "label": label.astype(np.int32),
        "key": jax.random.split(jax.random.key(step), len(label)),
    }


EXAMPLE = training.Example(make_state, make_train_step, draw_batch)

if __name__ == "__main__":
    training.run(EXAMPLE)
