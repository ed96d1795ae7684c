"""A language model whose layers are of different kinds: code for one device.

Attention blocks as those of `gpt.py`, and feed-forward layers of different widths.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from experiments.models import gpt


class Dense(eqx.Module):
    """A residual layer that is `factor` times as wide inside."""

    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, factor: int, key: Key[Array, ""]):
        up, down = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, factor * width, key=up)
        self.down = eqx.nn.Linear(factor * width, width, key=down)

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        """Transforms each position; keeps shape and dtype."""
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm)(x))))


class Model(eqx.Module):
    """A language model whose layers may be of different kinds."""

    embed: eqx.nn.Embedding
    layers: tuple[gpt.Block | Dense, ...]
    head: eqx.nn.Linear

    def __init__(self, kinds: Sequence[int], width: int, vocabulary: int, key: Key[Array, ""]):
        """Draws the parameters.

        Args:
            kinds: for each layer 0 for attention and a feed-forward layer, or how many times as
                wide a `Dense` layer is inside.
            width: features of each position.
            vocabulary: different tokens.
            key: the random key.
        """
        embed, head, *keys = jax.random.split(key, 2 + len(kinds))
        self.embed = eqx.nn.Embedding(vocabulary, width, key=embed)
        self.layers = tuple(
            Dense(width, kind, k) if kind
            else gpt.Block(width, 4, 0.0, dtype=jnp.float32, key=k)
            for kind, k in zip(kinds, keys, strict=True)
        )  # fmt: skip
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=head)

    def __call__(self, tokens: Int[Array, " time"]) -> Float[Array, "time vocabulary"]:
        """Gives the logits of each position's next token."""
        x = jax.vmap(self.embed)(tokens)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.head)(x)
