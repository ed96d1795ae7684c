"""A train step that has types below a byte wherever a step has arrays."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxpp

DTYPES = ["int4", "int2", "float4_e2m1fn", "uint4", "uint2"]
M = 4


def numbers(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Makes whole numbers that a type of two bits or more has."""
    low = 0 if dtype.startswith("u") else -1
    return jax.random.randint(jax.random.key(seed), shape, low, 2).astype(dtype)


def arguments(dtype: str) -> tuple[Any, ...]:
    """Makes weights, frozen ones, a state, examples, and their labels."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = [jax.random.normal(k, (4, 4)) / 2 for k in keys[:2]]
    frozen = [numbers(n, (4, 4), dtype) for n in (1, 2)]
    x = jax.random.normal(keys[2], (8, 4))
    return ws, frozen, numbers(3, (4, 4), dtype), x, numbers(4, (8, 4), dtype)


def make_step(dtype: str, wrap: Any = jaxpp.wrap_forward, order: Any = None) -> Any:
    """Makes the step; a `schedule` of None leaves the loop as it is."""
    closed_over = numbers(5, (4, 4), dtype)

    def loss(ws, frozen, x, y):
        h = jnp.tanh(x @ (ws[0] + frozen[0].astype(jnp.float32)))
        code = jnp.clip(jnp.round(jax.lax.stop_gradient(h)), 0, 1).astype(dtype)
        h, code = jaxpp.pipeline_enter_stage((h, code))
        h = h @ (ws[1] * frozen[1].astype(jnp.float32)) + code.astype(jnp.float32)
        h = h @ closed_over.astype(jnp.float32) - y.astype(jnp.float32)
        return jnp.mean(h**2), {"last": code, "all": y[:, :2] + code[:, :2]}

    grad = jaxpp.microbatch(
        jax.value_and_grad(wrap(loss), has_aux=True),
        M,
        in_axes=(None, None, 0, 0),
        reduce=(("mean", {"last": "last", "all": "concat"}), "mean"),
    )
    grad = jaxpp.schedule(grad, order) if order else grad

    def step(ws, frozen, state, x, y):
        (value, aux), gradients = grad(ws, frozen, x, y)
        ws = jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients)
        seen = jnp.clip(jnp.round(gradients[1] * 3), 0, 1).astype(dtype)
        frozen = [frozen[1], jnp.where(gradients[0] > 0, frozen[0], frozen[1])]
        return ws, frozen, jnp.where(seen == 1, state, seen), value, aux

    return step
