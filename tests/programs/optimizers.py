"""The updates of random steps: `init(params)`, and `update(grads, state, params)`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Optimizer:
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]  # gives new parameters and a new state


def of_optax(transformation: optax.GradientTransformation) -> Optimizer:
    def update(grads, state, params):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Optimizer(transformation.init, update)


def _move(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads)


def _average(params, average):
    return jax.tree.map(lambda a, p: (0.9 * a + 0.1 * p).astype(p.dtype), average, params)


def _ema(grads, average, params):
    params = _move(params, grads)
    return params, _average(params, average)


def _every_second(grads, state, params):
    """An update that is taken in every second step, by a conditional around it."""
    count, momentum = state
    momentum = jax.tree.map(lambda m, g: (0.5 * m + g).astype(m.dtype), momentum, grads)
    params = jax.lax.cond(count % 2 == 0, lambda: _move(params, momentum), lambda: params)
    return params, (count + 1, momentum)


def _dynamic_scale(grads, state, params):
    """Skips an update whose gradients are not finite, and halves a scale, as loss scaling does."""
    scale, skipped = state
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    new = _move(params, grads)
    params = jax.tree.map(lambda n, p: jnp.where(finite, n, p), new, params)
    return params, (jnp.where(finite, scale * 2, scale / 2), skipped + (~finite))


def _plain_number(params):
    return jnp.zeros((), jnp.int32)


def _decay_by_step(grads, count, params):
    """A learning rate that falls with a counter, and a global norm by hand."""
    norm = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(grads)))
    rate = 0.1 / (1 + count) / jnp.maximum(1.0, norm)
    return _move(params, grads, rate), count + 1


def _copies(params):
    return jax.tree.map(jnp.array, params)


EPS = 1e-3  # a large one keeps the noise of gradients near zero from becoming a whole step

OPTIMIZERS: dict[str, Optimizer] = {
    "by hand": Optimizer(lambda params: (), lambda g, s, p: (_move(p, g), s)),
    "sgd": of_optax(optax.sgd(0.1, momentum=0.9)),
    "adam": of_optax(optax.adam(1e-2, eps=EPS)),
    "adamw": of_optax(optax.adamw(1e-2, eps=EPS)),
    "clipped": of_optax(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=EPS))),
    "if finite": of_optax(optax.apply_if_finite(optax.sgd(0.1), 2)),
    "multi steps": of_optax(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
    "ema": Optimizer(_copies, _ema),
    "every second": Optimizer(
        lambda p: (jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, p)), _every_second
    ),
    "dynamic scale": Optimizer(
        lambda p: (jnp.float32(8.0), jnp.zeros((), jnp.int32)), _dynamic_scale
    ),
    "decay by step": Optimizer(_plain_number, _decay_by_step),
    "schedule": of_optax(optax.sgd(optax.cosine_decay_schedule(0.1, 10))),
}
