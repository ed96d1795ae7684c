"""Llama 2 and Mistral, two names for one architecture.

RMSNorm before each half of a block, rotary positions, grouped-query attention, SwiGLU, no biases
(Touvron et al., "Llama 2", arXiv 2307.09288, section 2.2); Mistral's attention is limited to a
sliding window (Jiang et al., "Mistral 7B", arXiv 2310.06825, section 2).
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from experiments.models import language

INITIAL_DEVIATION = 0.02


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a Llama 2 or a Mistral.

    Args:
        layers: number of blocks.
        width: features of each position.
        heads: query heads of each block.
        kv_heads: key and value heads of each block, each shared by `heads / kv_heads` query heads.
        head_width: features of a head, an even number; need not be `width / heads`.
        mlp_width: features inside the feed-forward half of a block.
        vocabulary: number of different tokens.
        window: how many tokens a position attends to, itself included; None for all before it.
        rope_theta: the base of the wavelengths of the rotary positions.
        norm_epsilon: what is added to the mean square of the features that are normalised.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocabulary: int = 32000
    window: int | None = None
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads must divide heads, got heads={self.heads} and "
                f"kv_heads={self.kv_heads}; use kv_heads=1, or as many as heads."
            )
        if self.head_width % 2:
            raise ValueError(
                f"Rotary positions turn pairs of features, got head_width={self.head_width}; use "
                f"an even number."
            )


#: Llama 2: the tables of arXiv 2307.09288 and the `params.json` of Meta's release.
#: Mistral: Table 1 of arXiv 2310.06825.
CONFIGS = {
    "llama2_7b": Config(32, 4096, heads=32, kv_heads=32, head_width=128, mlp_width=11008),
    "llama2_13b": Config(40, 5120, heads=40, kv_heads=40, head_width=128, mlp_width=13824),
    "llama2_70b": Config(80, 8192, heads=64, kv_heads=8, head_width=128, mlp_width=28672),
    "mistral_7b": Config(
        32, 4096, heads=32, kv_heads=8, head_width=128, mlp_width=14336, window=4096
    ),
}


def rotate(
    x: Float[Array, "time heads features"], theta: float
) -> Float[Array, "time heads features"]:
    """Turns pairs of features by angles that grow with the position.

    Rotary positions (Su et al., "RoFormer", arXiv 2104.09864, section 3.2.2); the pairs are a
    feature of the first half and the one as far in the second half.
    """
    # Equinox's RotaryPositionalEmbedding caches its angles without regard to theta.
    time, _, features = x.shape
    frequencies = theta ** (-jnp.arange(0, features, 2) / features)
    angles = jnp.arange(time)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(eqx.Module):
    """Causal attention, in which groups of query heads share their keys and values.

    Grouped-query attention: Ainslie et al., "GQA", arXiv 2305.13245, section 2.2.
    """

    queries: eqx.nn.Linear
    keys: eqx.nn.Linear
    values: eqx.nn.Linear
    out: eqx.nn.Linear
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.float32, key: Key[Array, ""]):
        keys = jax.random.split(key, 4)
        width = config.width
        inside, shared = config.heads * config.head_width, config.kv_heads * config.head_width
        self.queries = linear(width, inside, dtype=dtype, key=keys[0])
        self.keys = linear(width, shared, dtype=dtype, key=keys[1])
        self.values = linear(width, shared, dtype=dtype, key=keys[2])
        self.out = linear(inside, width, dtype=dtype, key=keys[3])
        self.config = config

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        """Mixes each position of `x` with the positions before it; keeps shape and dtype."""
        config, time = self.config, x.shape[0]
        queries = jax.vmap(self.queries)(x).reshape(time, config.heads, config.head_width)
        keys = jax.vmap(self.keys)(x).reshape(time, config.kv_heads, config.head_width)
        values = jax.vmap(self.values)(x).reshape(time, config.kv_heads, config.head_width)
        mixed = jax.nn.dot_product_attention(
            rotate(queries, config.rope_theta),
            rotate(keys, config.rope_theta),
            values,
            is_causal=True,
            local_window_size=None if config.window is None else (config.window - 1, 0),
        )
        return jax.vmap(self.out)(mixed.reshape(time, -1))


class SwiGLU(eqx.Module):
    """A feed-forward layer with a gate (Shazeer, "GLU Variants", arXiv 2002.05202, equation 6)."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.float32, key: Key[Array, ""]):
        gate_key, up_key, down_key = jax.random.split(key, 3)
        width, inside = config.width, config.mlp_width
        self.gate = linear(width, inside, dtype=dtype, key=gate_key)
        self.up = linear(width, inside, dtype=dtype, key=up_key)
        self.down = linear(inside, width, dtype=dtype, key=down_key)

    def __call__(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        """Transforms the features of one position; keeps shape and dtype."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(eqx.Module):
    """One transformer layer: each half normalises, transforms and adds."""

    attention_norm: eqx.nn.RMSNorm
    attention: Attention
    mlp_norm: eqx.nn.RMSNorm
    mlp: SwiGLU

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.float32, key: Key[Array, ""]):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = rms_norm(config, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, key=attention_key)
        self.mlp_norm = rms_norm(config, dtype=dtype)
        self.mlp = SwiGLU(config, dtype=dtype, key=mlp_key)

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        """Applies the layer to one sequence; keeps shape and dtype."""
        x = x + self.attention(jax.vmap(self.attention_norm)(x))
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class Llama(eqx.Module):
    """The language model.

    Example:
        >>> import equinox as eqx, jax
        >>> model = eqx.filter_eval_shape(Llama, CONFIGS["mistral_7b"], key=jax.random.key(0))
        >>> sum(x.size for x in jax.tree.leaves(model) if hasattr(x, "size"))
        7241732096
    """

    embed: eqx.nn.Embedding
    blocks: tuple[Block, ...] | Block
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear
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
        embed_key, blocks_key, head_key = jax.random.split(key, 3)
        self.embed = language.normal_embedding(
            config.vocabulary, config.width, INITIAL_DEVIATION, dtype=dtype, key=embed_key
        )
        self.blocks = language.make_blocks(
            lambda key: Block(config, dtype=dtype, key=key),
            config.layers,
            stacked=stacked,
            key=blocks_key,
        )
        self.norm = rms_norm(config, dtype=dtype)
        self.head = linear(config.width, config.vocabulary, dtype=dtype, key=head_key)
        self.config = config
        self.remat = remat

    def __call__(self, tokens: Int[Array, " time"]) -> Float[Array, "time vocabulary"]:
        """Predicts the token after each position.

        Args:
            tokens: one sequence, [time], any integer type, of any length.

        Returns:
            logits, [time, vocabulary], in the dtype of the parameters.
        """
        hidden, _ = language.run_blocks(
            lambda block, hidden, _: (block(hidden), None),
            jax.vmap(self.embed)(tokens),
            self.blocks,
            remat=self.remat,
        )
        return jax.vmap(self.head)(jax.vmap(self.norm)(hidden))


def loss_fn(model: Llama, tokens: Int[Array, "batch time_plus_1"]) -> Float[Array, ""]:
    """Mean cross-entropy of the next token.

    Args:
        model: the model.
        tokens: a batch of sequences, [batch, time + 1]; each position predicts the one after it.

    Returns:
        the loss in nats a token, a float32 scalar.
    """
    return language.cross_entropy(jax.vmap(model)(tokens[:, :-1]), tokens[:, 1:])


def linear(
    in_width: int, out_width: int, *, dtype: DTypeLike = jnp.float32, key: Key[Array, ""]
) -> eqx.nn.Linear:
    """A linear layer without a bias."""
    make_key, redraw_key = jax.random.split(key)
    layer = eqx.nn.Linear(in_width, out_width, use_bias=False, dtype=dtype, key=make_key)
    return language.with_normal_weights(layer, INITIAL_DEVIATION, key=redraw_key)


def rms_norm(config: Config, *, dtype: DTypeLike = jnp.float32) -> eqx.nn.RMSNorm:
    """Root-mean-square normalisation with a weight and no bias."""
    return eqx.nn.RMSNorm(config.width, eps=config.norm_epsilon, use_bias=False, dtype=dtype)
