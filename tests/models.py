"""Small models for the tests: each with its loss, a batch of data for every step, and its axes.

Every loss is a mean over the batch, so that microbatches change nothing but rounding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from experiments.models import gpt as gpt_model

WIDTH = 8
BATCH = 24  # 1, 2, 3 and 8 microbatches divide it


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss `loss(model, *data(step))`, and the axes of the data (None: not sliced)."""

    model: Any
    loss: Callable[..., jax.Array]
    data: Callable[[int], tuple[Any, ...]]
    axes: tuple[int | None, ...]

    @property
    def in_axes(self) -> tuple[int | None, ...]:
        """The axes of all arguments of the loss, for `jaxpp.microbatch`."""
        return (None, *self.axes)


def _matrix(key, rows=WIDTH, columns=WIDTH, dtype=jnp.float32):
    return jax.random.normal(key, (rows, columns), dtype) / jnp.sqrt(columns).astype(dtype)


def _keys(step: int, number: int):
    return jax.random.split(jax.random.fold_in(jax.random.key(1), step), number)


def mlp(dtype=jnp.float32) -> Case:
    """Eight linear layers; integer labels, and a boolean mask that drops some of the examples."""
    model = eqx.nn.MLP(
        WIDTH, WIDTH, WIDTH, 7, activation=jnp.tanh, dtype=dtype, key=jax.random.key(0)
    )

    def loss(model, x, labels, keep):
        logits = jax.vmap(model)(x).astype(jnp.float32)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
        return jnp.mean(jnp.where(keep, losses, 0.0))

    def data(step):
        x, labels, keep = _keys(step, 3)
        return (
            jax.random.normal(x, (BATCH, WIDTH), dtype),
            jax.random.randint(labels, (BATCH,), 0, WIDTH),
            jax.random.bernoulli(keep, 0.8, (BATCH,)),
        )

    return Case(model, loss, data, (0, 0, 0))


def gpt(dtype=jnp.float32) -> Case:
    """A byte-level GPT with dropout: a random key for each example."""
    model = gpt_model.GPT(
        layers=1, width=WIDTH, heads=2, context=6, dropout=0.1, dtype=dtype, key=jax.random.key(0)
    )

    def data(step):
        tokens, dropout = _keys(step, 2)
        return (
            jax.random.randint(tokens, (BATCH, 7), 0, gpt_model.NUM_BYTES),
            jax.random.split(dropout, BATCH),
        )

    return Case(model, gpt_model.loss_fn, data, (0, 0))


def encoder_decoder(dtype=jnp.float32) -> Case:
    """A U-shaped net of plain dictionaries: each level's features skip to the other side.

    A mask that is computed once is read by every layer.
    """
    levels = 4
    keys = jax.random.split(jax.random.key(0), 2 * levels)
    model = {
        side: [{"w": _matrix(k, dtype=dtype), "b": jnp.zeros(WIDTH, dtype)} for k in own]
        for side, own in (("down", keys[:levels]), ("up", keys[levels:]))
    }

    def loss(model, x, y, visible):
        mask = visible.astype(dtype)[:, None] * 0.5 + 0.5
        skips = []
        for layer in model["down"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"]) * mask
            skips.append(x)
        for layer in model["up"]:
            x = jnp.tanh((x + skips.pop()) @ layer["w"] + layer["b"]) * mask
        return jnp.mean((x - y).astype(jnp.float32) ** 2)

    def data(step):
        x, y, visible = _keys(step, 3)
        return (
            jax.random.normal(x, (BATCH, WIDTH), dtype),
            jax.random.normal(y, (BATCH, WIDTH), dtype),
            jax.random.bernoulli(visible, 0.5, (BATCH,)),
        )

    return Case(model, loss, data, (0, 0, 0))


class _Tied(eqx.Module):
    ends: jax.Array
    gate: jax.Array
    layers: list[jax.Array]


def tied(dtype=jnp.float32) -> Case:
    """Two tied weights: one is transposed at the other end, one is read in another shape."""
    ends, gate, *layers = jax.random.split(jax.random.key(0), 6)
    model = _Tied(
        _matrix(ends, 12, WIDTH, dtype),
        _matrix(gate, 2 * WIDTH, WIDTH, dtype),
        [_matrix(k, dtype=dtype) for k in layers],
    )

    def loss(model, tokens, targets):
        x = model.ends[tokens]
        x = jnp.tanh(x @ model.layers[0])
        x = x + jnp.tanh(x @ model.gate.T)[:, ::2]
        x = jnp.tanh(x @ model.layers[1])
        x = jnp.tanh(x @ model.layers[2])
        x = x + jnp.tanh(x @ model.gate.reshape(WIDTH, 2 * WIDTH))[:, WIDTH:]
        x = jnp.tanh(x @ model.layers[3])
        logits = (x @ model.ends.T).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1))

    def data(step):
        return tuple(jax.random.randint(k, (BATCH,), 0, 12) for k in _keys(step, 2))

    return Case(model, loss, data, (0, 0))


class _Experts(eqx.Module):
    router: jax.Array
    up: jax.Array
    down: jax.Array


def mixture_of_experts(dtype=jnp.float32) -> Case:
    """Layers of experts, each token sent to one, with a loss that balances them (per sequence)."""
    experts, layers, time = 3, 4, 4

    def layer(key):
        router, up, down = jax.random.split(key, 3)
        return _Experts(
            _matrix(router, WIDTH, experts, dtype),
            jnp.stack([_matrix(k, dtype=dtype) for k in jax.random.split(up, experts)]),
            jnp.stack([_matrix(k, dtype=dtype) for k in jax.random.split(down, experts)]),
        )

    model = [layer(k) for k in jax.random.split(jax.random.key(0), layers)]

    def apply(layer, x):
        shares = jax.nn.softmax(x @ layer.router)
        chosen = jax.nn.one_hot(jnp.argmax(shares, axis=-1), experts, dtype=x.dtype)
        hidden = jnp.tanh(jnp.einsum("btd,edh->bteh", x, layer.up))
        mixed = jnp.einsum("bteh,ehd,bte->btd", hidden, layer.down, chosen * shares)
        balance = experts * jnp.sum(chosen.mean(axis=1) * shares.mean(axis=1), axis=-1)
        return x + mixed, jnp.mean(balance)

    def loss(model, x, y):
        balance = jnp.zeros((), jnp.float32)
        for layer in model:
            x, extra = apply(layer, x)
            balance = balance + extra.astype(jnp.float32)
        return jnp.mean((x - y).astype(jnp.float32) ** 2) + 0.01 * balance

    def data(step):
        return tuple(jax.random.normal(k, (BATCH, time, WIDTH), dtype) for k in _keys(step, 2))

    return Case(model, loss, data, (0, 0))


def with_backward(factor):
    """`2 * x`, whose backward multiplies by `factor`."""
    fun = jax.custom_vjp(lambda w: 2 * w)
    fun.defvjp(lambda w: (2 * w, None), lambda _, g: (factor * g,))
    return fun


def with_tangent(factor):
    """`2 * x`, whose tangent is multiplied by `factor`."""
    fun = jax.custom_jvp(lambda w: 2 * w)
    fun.defjvp(lambda primals, tangents: (2 * primals[0], factor * tangents[0]))
    return fun


@jax.custom_vjp
def half_tanh(x):
    """The tanh, with half its derivative."""
    return jnp.tanh(x)


half_tanh.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, ct: (0.5 * ct * (1 - y * y),))


def control_flow(dtype=jnp.float32) -> Case:
    """A scan over layers, a branch on an integer argument, a custom derivative and a checkpoint."""
    keys = iter(jax.random.split(jax.random.key(0), 12))
    model = {
        "first": _matrix(next(keys), dtype=dtype),
        "scanned": jnp.stack([_matrix(next(keys), dtype=dtype) for _ in range(2)]),
        "branches": [_matrix(next(keys), dtype=dtype) for _ in range(2)],
        "custom": _matrix(next(keys), dtype=dtype),
        "kept": [_matrix(next(keys), dtype=dtype) for _ in range(2)],
        "last": _matrix(next(keys), dtype=dtype),
    }

    @jax.checkpoint
    def recomputed(layers, x):
        return x + jnp.tanh(jnp.tanh(x @ layers[0]) @ layers[1])

    def loss(model, x, y, phase):
        x = jnp.tanh(x @ model["first"])
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, model["scanned"])
        x = jax.lax.cond(
            phase % 2 == 0,
            lambda ws, h: jnp.tanh(h @ ws[0]),
            lambda ws, h: h + jnp.sin(h @ ws[1]),
            model["branches"],
            x,
        )
        x = half_tanh(x @ model["custom"])
        x = recomputed(model["kept"], x)
        return jnp.mean((x @ model["last"] - y).astype(jnp.float32) ** 2)

    def data(step):
        x, y = (jax.random.normal(k, (BATCH, WIDTH), dtype) for k in _keys(step, 2))
        return x, y, jnp.int32(step)

    return Case(model, loss, data, (0, 0, None))


CASES = {
    "mlp": mlp,
    "tied": tied,
    "gpt": gpt,
    "encoder_decoder": encoder_decoder,
    "mixture_of_experts": mixture_of_experts,
    "control_flow": control_flow,
}
