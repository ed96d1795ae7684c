"""Sends what goes from stage to stage as int8: activations, and the gradients that come back.

    grad_fn = int8_edges(jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB()))

The stage itself goes on with what it computed; who reads it elsewhere gets it back from the code.
"""

import jax.numpy as jnp

from jaxpp import extend


def encode(x):
    """A number of eight bits for each element, and a scale for each row."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-30) / 127.0
    return jnp.round(x / scale).astype(jnp.int8), scale.astype(jnp.float32)


def decode(code, scale):
    return code.astype(scale.dtype) * scale


def int8_edges(fun, kinds="FBI"):
    """Codes the matrices that tasks of some kinds send to other stages."""

    def rule(loop):
        for value in loop.values:
            far = [key for key in value.readers if key.stage != value.maker.stage]
            if value.maker.kind not in kinds or not far:
                continue
            if value.aval.ndim < 2 or value.aval.dtype != jnp.float32:
                continue
            loop, code = loop.after(value.maker, encode, [value])
            for key in far:
                loop = loop.before(key, decode, code, of=value)
        return loop

    return extend.edit_loops(fun, rule)
