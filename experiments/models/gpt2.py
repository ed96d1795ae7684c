"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

Pre-norm blocks, learned positions, dropout, and an output layer that is the embedding's matrix;
what section 2.3 of the paper leaves open is as in `src/model.py` of github.com/openai/gpt-2.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from experiments.models import language


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a GPT-2.

    Args:
        layers: number of blocks.
        width: features of each position.
        heads: attention heads of each block; they divide `width`.
        context: the longest sequence, in tokens.
        vocabulary: number of different tokens.
        dropout: probability of dropping a feature or an attention weight.
    """

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.1

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide width, got width={self.width} and heads={self.heads}; use "
                f"width={self.width - self.width % self.heads + self.heads}, or a divisor of "
                f"{self.width} as heads."
            )


#: Table 2 of the paper, by the numbers of parameters that github.com/openai/gpt-2 corrected.
CONFIGS = {
    "gpt2_124m": Config(layers=12, width=768, heads=12),
    "gpt2_355m": Config(layers=24, width=1024, heads=16),
    "gpt2_774m": Config(layers=36, width=1280, heads=20),
    "gpt2_1558m": Config(layers=48, width=1600, heads=25),
}


class Block(eqx.Module):
    """One transformer layer: each half normalises, transforms, drops out and adds."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.float32, key: Key[Array, ""]):
        attention_key, up_key, down_key, *redraw_keys = jax.random.split(key, 6)
        width = config.width
        attention = eqx.nn.MultiheadAttention(
            config.heads,
            width,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            dropout_p=config.dropout,
            dtype=dtype,
            key=attention_key,
        )
        up = eqx.nn.Linear(width, 4 * width, dtype=dtype, key=up_key)
        down = eqx.nn.Linear(4 * width, width, dtype=dtype, key=down_key)
        attention = language.with_normal_weights(attention, 0.02, key=redraw_keys[0])
        # "We scale the weights of residual layers at initialization by a factor of 1/sqrt(N)
        # where N is the number of residual layers" (section 2.3).
        residual = functools.partial(
            language.with_normal_weights, deviation=0.02 / (2 * config.layers) ** 0.5
        )
        out = residual(attention.output_proj, key=redraw_keys[1])
        self.attention_norm = eqx.nn.LayerNorm(width, dtype=dtype)
        self.attention = eqx.tree_at(lambda attention: attention.output_proj, attention, out)
        self.mlp_norm = eqx.nn.LayerNorm(width, dtype=dtype)
        up_key, down_key = jax.random.split(redraw_keys[2])
        self.up = language.with_normal_weights(up, 0.02, key=up_key)
        self.down = residual(down, key=down_key)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self, x: Float[Array, "time width"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "time width"]:
        """Applies the layer to one sequence; keeps shape and dtype. No key: no dropout."""
        weights_key, attention_key, mlp_key = language.split_or_none(key, 3)
        inference = key is None
        h = jax.vmap(self.attention_norm)(x)
        causal = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        h = self.attention(h, h, h, mask=causal, key=weights_key, inference=inference)
        x = x + self.dropout(h, key=attention_key, inference=inference)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.mlp_norm)(x)))
        h = jax.vmap(self.down)(h)
        return x + self.dropout(h, key=mlp_key, inference=inference)


class GPT2(eqx.Module):
    """The language model.

    Example:
        >>> import equinox as eqx, jax
        >>> model = eqx.filter_eval_shape(GPT2, CONFIGS["gpt2_124m"], key=jax.random.key(0))
        >>> sum(x.size for x in jax.tree.leaves(model) if hasattr(x, "size"))
        124439808
    """

    embed: eqx.nn.Embedding
    position: Float[Array, "context width"]
    dropout: eqx.nn.Dropout
    blocks: tuple[Block, ...] | Block
    norm: eqx.nn.LayerNorm
    config: Config = eqx.field(static=True)
    remat: bool = eqx.field(static=True)

    def __init__(
        self,
        config: Config,
        *,
        stacked: bool = False,
        remat: bool = False,
        dtype: DTypeLike = jnp.float32,
        key: Key[Array, ""],
    ):
        """Draws the parameters.

        Args:
            config: the sizes.
            stacked: whether the layers are one module whose arrays have a layer axis.
            remat: whether the backward pass computes each layer again.
            dtype: floating type of all parameters, and so of the activations.
            key: the random key.
        """
        embed_key, position_key, blocks_key = jax.random.split(key, 3)
        self.embed = language.normal_embedding(
            config.vocabulary, config.width, 0.02, dtype=dtype, key=embed_key
        )
        shape = (config.context, config.width)
        self.position = 0.01 * jax.random.normal(position_key, shape, dtype)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.blocks = language.make_blocks(
            lambda key: Block(config, dtype=dtype, key=key),
            config.layers,
            stacked=stacked,
            key=blocks_key,
        )
        self.norm = eqx.nn.LayerNorm(config.width, dtype=dtype)
        self.config = config
        self.remat = remat

    def __call__(
        self, tokens: Int[Array, " time"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "time vocabulary"]:
        """Predicts the token after each position.

        Args:
            tokens: one sequence, [time], any integer type; at most `context` long.
            key: the key of this sequence's dropout; without one, nothing is dropped.

        Returns:
            logits, [time, vocabulary], in the dtype of the parameters.
        """
        embed_key, blocks_key = language.split_or_none(key, 2)
        keys = None if blocks_key is None else jax.random.split(blocks_key, self.config.layers)
        hidden = jax.vmap(self.embed)(tokens) + self.position[: tokens.shape[0]]
        hidden = self.dropout(hidden, key=embed_key, inference=key is None)
        hidden, _ = language.run_blocks(
            lambda block, hidden, key: (block(hidden, key=key), None),
            hidden,
            self.blocks,
            keys=keys,
            remat=self.remat,
        )
        return jax.vmap(self.norm)(hidden) @ self.embed.weight.T


def loss_fn(
    model: GPT2, tokens: Int[Array, "batch time_plus_1"], keys: Key[Array, " batch"] | None = None
) -> Float[Array, ""]:
    """Mean cross-entropy of the next token.

    Args:
        model: the model.
        tokens: a batch of sequences, [batch, time + 1]; each position predicts the one after it.
        keys: a dropout key for each sequence, [batch]; without them, nothing is dropped.

    Returns:
        the loss in nats a token, a float32 scalar.
    """
    logits = jax.vmap(lambda sequence, key: model(sequence, key=key))(tokens[:, :-1], keys)
    return language.cross_entropy(logits, tokens[:, 1:])
