"""A byte-level GPT in plain Equinox: code for one device, with no line about pipelines in it.

Pre-norm blocks, learned positions, causal attention (Radford et al., "Language Models are
Unsupervised Multitask Learners", 2019, section 2.3).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from experiments.models.language import cross_entropy, split_or_none

NUM_BYTES = 256


class Attention(eqx.Module):
    """Causal self-attention with `heads` heads of `width // heads` features."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, dtype: DTypeLike, key: Key[Array, ""]):
        qkv_key, out_key = jax.random.split(key)
        # Without biases: that of the keys would cancel in the softmax, and only gather noise.
        self.qkv = eqx.nn.Linear(width, 3 * width, use_bias=False, dtype=dtype, key=qkv_key)
        self.out = eqx.nn.Linear(width, width, dtype=dtype, key=out_key)
        self.heads = heads

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        """Mixes each position of `x` with the positions before it; keeps shape and dtype."""
        time, width = x.shape
        qkv = jax.vmap(self.qkv)(x).reshape(time, 3, self.heads, width // self.heads)
        mixed = jax.nn.dot_product_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], is_causal=True)
        return jax.vmap(self.out)(mixed.reshape(time, width))


class MLP(eqx.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, *, dtype: DTypeLike, key: Key[Array, ""]):
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(width, 4 * width, dtype=dtype, key=up_key)
        self.down = eqx.nn.Linear(4 * width, width, dtype=dtype, key=down_key)

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        """Transforms the features of one position; keeps shape and dtype."""
        return self.down(jax.nn.gelu(self.up(x)))


class Block(eqx.Module):
    """One transformer layer: each half normalises, transforms, drops out and adds."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    mlp_norm: eqx.nn.LayerNorm
    mlp: MLP
    dropout: eqx.nn.Dropout

    def __init__(
        self, width: int, heads: int, dropout: float, *, dtype: DTypeLike, key: Key[Array, ""]
    ):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.LayerNorm(width, dtype=dtype)
        self.attention = Attention(width, heads, dtype=dtype, key=attention_key)
        self.mlp_norm = eqx.nn.LayerNorm(width, dtype=dtype)
        self.mlp = MLP(width, dtype=dtype, key=mlp_key)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(
        self, x: Float[Array, "time width"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "time width"]:
        """Applies the layer to one sequence; keeps shape and dtype. No key: no dropout."""
        attention_key, mlp_key = split_or_none(key, 2)
        mixed = self.attention(jax.vmap(self.attention_norm)(x))
        x = x + self.dropout(mixed, key=attention_key, inference=key is None)
        transformed = jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))
        return x + self.dropout(transformed, key=mlp_key, inference=key is None)


class GPT(eqx.Module):
    """A language model over bytes.

    `model.blocks` is a tuple, so that `blocks.2` names the third layer.
    """

    embed: eqx.nn.Embedding
    position: Float[Array, "context width"]
    dropout: eqx.nn.Dropout
    blocks: tuple[Block, ...]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear | None

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        context: int,
        dropout: float = 0.0,
        tied: bool = False,
        dtype: DTypeLike = jnp.float32,
        key: Key[Array, ""],
    ):
        """Draws the parameters.

        Args:
            layers: number of blocks.
            width: features of each position; a multiple of `heads`.
            heads: attention heads of each block.
            context: the longest sequence, in bytes.
            dropout: probability of dropping a feature, after the embedding and in each block.
            tied: whether the output layer uses `embed.weight` instead of its own `head`.
            dtype: floating type of all parameters, and so of the activations.
            key: the random key.

        Raises:
            ValueError: when `heads` does not divide `width`.
        """
        if width % heads:
            raise ValueError(
                f"width must be a multiple of heads, got width={width} and heads={heads}; "
                f"use width={width - width % heads + heads}, or a divisor of {width} as heads."
            )
        embed_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + layers)
        scale = jnp.asarray(0.02, dtype)
        self.embed = eqx.nn.Embedding(
            weight=scale * jax.random.normal(embed_key, (NUM_BYTES, width), dtype)
        )
        self.position = scale * jax.random.normal(position_key, (context, width), dtype)
        self.dropout = eqx.nn.Dropout(dropout)
        self.blocks = tuple(Block(width, heads, dropout, dtype=dtype, key=k) for k in block_keys)
        self.norm = eqx.nn.LayerNorm(width, dtype=dtype)
        self.head = None
        if not tied:
            self.head = eqx.nn.Linear(width, NUM_BYTES, use_bias=False, dtype=dtype, key=head_key)

    def __call__(
        self, tokens: Int[Array, " time"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "time bytes"]:
        """Predicts the byte after each position.

        Args:
            tokens: one sequence of bytes, [time], any integer type; at most `context` long.
            key: the key of this sequence's dropout; without one, nothing is dropped.

        Returns:
            logits, [time, 256], in the dtype of the parameters.
        """
        embed_key, *block_keys = split_or_none(key, 1 + len(self.blocks))
        hidden = self.embed_tokens(tokens, key=embed_key)
        for block, block_key in zip(self.blocks, block_keys, strict=True):
            hidden = block(hidden, key=block_key)
        return self.predict(hidden)

    def embed_tokens(
        self, tokens: Int[Array, " time"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "time width"]:
        """What enters the first block: bytes [time] to features [time, width]."""
        hidden = jax.vmap(self.embed)(tokens) + self.position[: tokens.shape[0]]
        return self.dropout(hidden, key=key, inference=key is None)

    def predict(self, hidden: Float[Array, "time width"]) -> Float[Array, "time bytes"]:
        """What follows the last block: features [time, width] to logits [time, 256]."""
        hidden = jax.vmap(self.norm)(hidden)
        if self.head is None:
            return hidden @ self.embed.weight.T
        return jax.vmap(self.head)(hidden)


def loss_fn(
    model: GPT, tokens: Int[Array, "batch time_plus_1"], keys: Key[Array, " batch"] | None = None
) -> Float[Array, ""]:
    """Mean cross-entropy of the next byte.

    Args:
        model: the model.
        tokens: a batch of sequences, [batch, time + 1]; each position predicts the one after it.
        keys: a dropout key for each sequence, [batch]; without them, nothing is dropped.

    Returns:
        the loss in nats a byte, a float32 scalar.
    """
    logits = jax.vmap(lambda sequence, key: model(sequence, key=key))(tokens[:, :-1], keys)
    return cross_entropy(logits, tokens[:, 1:])
