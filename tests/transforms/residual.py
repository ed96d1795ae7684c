"""Residual layers whose matrices are split over an axis `model`: parameters, rules and batches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

AXES = ("mpmd", "data", "model")
RULES = [(r"up$", P(None, "model")), (r"down$", P("model", None))]
WIDTH = 8


def parameters():
    """Four layers: x + f(x @ up) @ down + bias."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        {
            "up": jax.random.normal(key, (WIDTH, 2 * WIDTH)) / WIDTH**0.5,
            "down": jax.random.normal(key, (2 * WIDTH, WIDTH)) / WIDTH,
            "bias": jnp.full(WIDTH, 0.1 * n),
        }
        for n, key in enumerate(keys)
    ]


def batch(seed=0):
    """Inputs and targets of 16 examples."""
    return np.random.default_rng(seed).normal(size=(2, 16, WIDTH)).astype(np.float32)
