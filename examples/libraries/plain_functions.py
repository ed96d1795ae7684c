"""A causal transformer of plain functions on dictionaries of arrays, cut at `jax.named_scope`s.

python -m examples.libraries.plain_functions --schedule=zb_h1
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp
from examples.libraries import training
from jaxpp.schedules import Schedule

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 8, 16, 2

# The large epsilon keeps the noise of gradients near zero from becoming a whole step.
OPTIMIZER = optax.adam(1e-2, eps=1e-3)


def init_params(key, layers: int):
    def matrix(*shape):
        nonlocal key
        key, own = jax.random.split(key)
        return jax.random.normal(own, shape) / np.sqrt(shape[0])

    def layer():
        return {
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }

    return {
        "embed": matrix(VOCABULARY, WIDTH),
        "layers": [layer() for _ in range(layers)],
        "head": matrix(WIDTH, VOCABULARY),
    }


def normalise(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def attend(layer, x):
    heads = (*x.shape[:-1], 3, HEADS, WIDTH // HEADS)
    query, key, value = jnp.moveaxis((normalise(x) @ layer["qkv"]).reshape(heads), -3, 0)
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return attended.reshape(x.shape) @ layer["out"]


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = x + attend(layer, x)
            x = x + jax.nn.gelu(normalise(x) @ layer["up"]) @ layer["down"]
    logits = normalise(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def make_train_step(schedule: Schedule | None, num_stages: int, num_microbatches: int):
    """The train step, as a pipeline or on one device; see `training.Example`."""
    if schedule is None:
        grad_fn = training.in_a_loop(loss_fn, num_microbatches)
    else:
        cuts = [f"layer_{i}" for i in range(1, num_stages)]
        staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, at=cuts))
        grad_fn = jaxpp.microbatch(jax.value_and_grad(staged), num_microbatches, in_axes=(None, 0))
        grad_fn = jaxpp.schedule(grad_fn, schedule)

    def train_step(state, tokens):
        params, opt_state = state
        loss, grads = grad_fn(params, tokens)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step


def make_state(num_stages: int):
    params = jax.jit(init_params, static_argnums=1)(jax.random.key(0), num_stages)
    return params, OPTIMIZER.init(params)


def draw_batch(step: int, num_microbatches: int):
    """Counting sequences."""
    starts = np.random.default_rng(step).integers(VOCABULARY, size=(2 * num_microbatches, 1))
    return ((starts + np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)


EXAMPLE = training.Example(make_state, make_train_step, draw_batch)

if __name__ == "__main__":
    training.run(EXAMPLE)
