"""What a delay of the gradients costs optimizers, and what corrections give back: a small model.

    python -m experiments.delayed_optimizers
    python -m experiments.delayed_optimizers --optimizers=adamw,muon --rates=0.003,0.01 --seeds=8

The model learns a teacher from fresh batches. Prints as Markdown, for each optimizer and rate, the
loss after so many steps, in thousandths, in the mean of `--seeds`: without a delay, with gradients
of the weights of `--delay` steps ago, and with these and error feedback (see `with_feedback`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from optax import contrib

import jaxpp

#: The optimizers of a rate, by name. `nadamw` has Nesterov's momentum, and more of it.
OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": lambda rate: optax.sgd(30 * rate, momentum=0.9),
    "adamw": lambda rate: optax.adamw(rate),
    "nadamw": lambda rate: optax.nadamw(rate, b1=0.98),
    "muon": lambda rate: contrib.muon(rate),
}
_OPTIMIZERS = flags.DEFINE_list("optimizers", list(OPTIMIZERS), "Which optimizers.")
_RATES = flags.DEFINE_list("rates", ["0.001", "0.003", "0.01", "0.03"], "Their learning rates.")
_DELAY = flags.DEFINE_integer("delay", 1, "Of how many steps ago the weights are.", 1)
_STEPS = flags.DEFINE_integer("steps", 1000, "How many steps to train.", 20)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Of weights, teacher and batches.", 1)
#: The loss is a mean of so many steps, the last ones.
LAST = 20
LAYERS, WIDTH, ROWS, MICROBATCHES = 4, 16, 32, 4


def with_feedback(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adds to each update by how much it differs from the one before.

    With a delay of one step, an update is the one that would have been right a step ago. By how
    much that one was wrong is known now, and is fed back: `2 u[t] - u[t - 1]` in the place of
    `u[t]`. So the sum of all updates has the newest one twice, in the place of the next one, which
    is not known yet. It takes the memory of one more update.
    """

    def init(params):
        return optimizer.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        before, (new, inner) = state[1], optimizer.update(updates, state[0], params)
        fed_back = jax.tree.map(lambda a, b: 2 * a - b, new, before)
        return fed_back, (inner, new)

    return optax.GradientTransformation(init, update)


def loss_fn(weights, batch):
    x, y = batch
    for n, w in enumerate(weights):
        x = jaxpp.pipeline_enter_stage(x) if n == LAYERS // 2 else x
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def step_of(optimizer: optax.GradientTransformation) -> Callable:
    """The train step, of which `jaxpp.delay` makes a delayed one."""
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    grad_fn = jaxpp.microbatch(grad_fn, MICROBATCHES)

    def train_step(weights, state, batch):
        loss, grads = grad_fn(weights, batch)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    return train_step


def losses(optimizer: optax.GradientTransformation, delay: int, steps: int, seeds: int) -> Any:
    """The loss of each step, for each seed."""
    step = jaxpp.delay(step_of(optimizer), delay)

    def train(key):
        *keys, teacher_key, data_key = jax.random.split(key, LAYERS + 2)
        weights = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]
        teacher = jax.random.normal(teacher_key, (WIDTH, WIDTH)) / WIDTH**0.5

        def one(carry, n):
            x = jax.random.normal(jax.random.fold_in(data_key, n), (ROWS, WIDTH))
            *carry, loss = step(*carry, (x, jnp.tanh(x @ teacher)))
            return tuple(carry), loss

        start = (weights,) * (delay + 1), optimizer.init(weights)
        return jax.lax.scan(one, start, jnp.arange(steps))[1]

    return jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), seeds))


def last_loss(optimizer: optax.GradientTransformation, delay: int) -> float:
    """The mean loss of the last steps, in thousandths; infinite where a seed has diverged."""
    found = losses(optimizer, delay, _STEPS.value, _SEEDS.value)
    mean = float(1e3 * jnp.mean(found[:, -LAST:]))
    return mean if np.isfinite(mean) else np.inf


def main(_):
    d = _DELAY.value
    print(f"| optimizer | rate | no delay | delay {d} | with feedback |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in _OPTIMIZERS.value:
        for rate in map(float, _RATES.value):
            optimizer = OPTIMIZERS[name](rate)
            found = [last_loss(optimizer, 0), last_loss(optimizer, d)]
            found.append(last_loss(with_feedback(optimizer), d))
            cells = " | ".join(f"{own:.1f}" for own in found)
            print(f"| {name} | {rate:g} | {cells} |", flush=True)


if __name__ == "__main__":
    app.run(main)
