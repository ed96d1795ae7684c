"""T5 in plain Equinox: an encoder and a decoder with relative positions and one embedding.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
arXiv 1910.10683, section 2.1: pre-norm blocks with a norm that only rescales, no biases, a bias on
the attention of each distance that all layers of a stack share, and one embedding for both inputs
and the output. The first version: ReLU, dropout, and no scale in the attention.
"""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from experiments.models.language import cross_entropy, split_or_none

#: The token before the first of the target, which pads too.
START = 0


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a T5: `layers` of the encoder and as many of the decoder.

    `head` is the width of an attention head, `mlp` that inside the feed-forward half of a block;
    distances from `distance` on share the last of `buckets`.
    """

    layers: int
    width: int
    heads: int
    head: int
    mlp: int
    vocabulary: int = 32128
    buckets: int = 32
    distance: int = 128
    dropout: float = 0.1


#: Raffel et al., sections 3.1.1 (base) and 3.7 (small, large).
CONFIGS = {
    "t5_small": Config(layers=6, width=512, heads=8, head=64, mlp=2048),
    "t5_base": Config(layers=12, width=768, heads=12, head=64, mlp=3072),
    "t5_large": Config(layers=24, width=1024, heads=16, head=64, mlp=4096),
}


class Attention(eqx.Module):
    """Attention from one sequence to itself or another; its queries are not scaled."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    heads: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        inner = config.heads * config.head
        query_key, key_key, value_key, out_key = jax.random.split(key, 4)
        # Small queries take the place of the scale.
        query = eqx.nn.Linear(config.width, inner, use_bias=False, key=query_key)
        self.query = eqx.tree_at(lambda m: m.weight, query, query.weight * config.head**-0.5)
        self.key = eqx.nn.Linear(config.width, inner, use_bias=False, key=key_key)
        self.value = eqx.nn.Linear(config.width, inner, use_bias=False, key=value_key)
        self.out = eqx.nn.Linear(inner, config.width, use_bias=False, key=out_key)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.heads = config.heads

    def __call__(
        self,
        x: Float[Array, "time width"],
        source: Float[Array, "source width"],
        bias: Float[Array, "heads time source"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "time width"]:
        """Mixes for each position of `x` the positions of `source`.

        Args:
            x: what asks, [time, width].
            source: what is read, [source, width].
            bias: added to the scores, [heads, time, source].
            key: the key of the dropout; without one, nothing is dropped.
        """

        def by_head(linear, x):
            return jax.vmap(linear)(x).reshape(len(x), self.heads, -1)

        scores = jnp.einsum("qhf,khf->hqk", by_head(self.query, x), by_head(self.key, source))
        weights = jax.nn.softmax(scores if bias is None else scores + bias)
        weights = self.dropout(weights, key=key, inference=key is None)
        mixed = jnp.einsum("hqk,khf->qhf", weights, by_head(self.value, source))
        return jax.vmap(self.out)(mixed.reshape(len(x), -1))


class MLP(eqx.Module):
    """Two linear layers with a ReLU between them."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(config.width, config.mlp, use_bias=False, key=up_key)
        self.down = eqx.nn.Linear(config.mlp, config.width, use_bias=False, key=down_key)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self, x: Float[Array, "time width"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "time width"]:
        """Transforms the features of each position. No key: no dropout."""
        inner = jax.nn.relu(jax.vmap(self.up)(x))
        return jax.vmap(self.down)(self.dropout(inner, key=key, inference=key is None))


class Block(eqx.Module):
    """One layer: attention, in a decoder attention to the encoder's output too, and an MLP.

    Each part normalises, transforms, drops out and adds.
    """

    attention: Attention
    cross: Attention | None
    mlp: MLP
    norms: tuple[eqx.nn.RMSNorm, ...]
    dropout: eqx.nn.Dropout

    def __init__(self, config: Config, *, decodes: bool, key: Key[Array, ""]):
        attention_key, cross_key, mlp_key = jax.random.split(key, 3)
        self.attention = Attention(config, key=attention_key)
        self.cross = Attention(config, key=cross_key) if decodes else None
        self.mlp = MLP(config, key=mlp_key)
        self.norms = tuple(make_norm(config) for _ in range(3 if decodes else 2))
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self,
        x: Float[Array, "time width"],
        bias: Float[Array, "heads time time"],
        encoded: Float[Array, "source width"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "time width"]:
        """Applies the layer; keeps shape and dtype.

        Args:
            x: the features of each position, [time, width].
            bias: of the positions on each other, [heads, time, time].
            encoded: what the encoder gave, [source, width]; for a decoder's layer.
            key: the key of the dropout; without one, nothing is dropped.
        """
        keys = iter(split_or_none(key, 6))

        def added(x, part, norm):
            changed = part(jax.vmap(norm)(x), key=next(keys))
            return x + self.dropout(changed, key=next(keys), inference=key is None)

        first, *between, last = self.norms
        x = added(x, lambda h, key: self.attention(h, h, bias, key=key), first)
        if (cross := self.cross) is not None:
            assert encoded is not None, "a decoder's layer reads what the encoder gave"
            x = added(x, lambda h, key: cross(h, encoded, key=key), *between)
        return added(x, self.mlp, last)


class RelativeBias(eqx.Module):
    """A learned bias for each head and bucket of distances."""

    weight: Float[Array, "buckets heads"]
    distance: int = eqx.field(static=True)
    causal: bool = eqx.field(static=True)

    def __init__(self, config: Config, *, causal: bool, key: Key[Array, ""]):
        shape = (config.buckets, config.heads)
        self.weight = config.width**-0.5 * jax.random.normal(key, shape)
        self.distance = config.distance
        self.causal = causal

    def __call__(self, time: int) -> Float[Array, "heads time time"]:
        """The bias of a sequence of `time` positions; minus infinity ahead where it is causal."""
        positions = jnp.arange(time)
        ahead = positions[None, :] - positions[:, None]
        found = bucket(ahead, len(self.weight), self.distance, causal=self.causal)
        bias = jnp.moveaxis(self.weight[found], -1, 0)
        return jnp.where(ahead > 0, -jnp.inf, bias) if self.causal else bias


def bucket(
    ahead: Int[Array, "..."], buckets: int, distance: int, *, causal: bool
) -> Int[Array, "..."]:
    """The bucket of a relative position: one each for the near ones, then logarithmic.

    Raffel et al., section 2.1; the formula is that of `_relative_position_bucket` in Mesh
    TensorFlow (mesh_tensorflow/transformer/transformer_layers.py).

    Args:
        ahead: how far the position read is ahead of the one that reads it.
        buckets: how many there are; unless causal, half of them are for positions ahead.
        distance: from here on all is in the last bucket.
        causal: whether only positions that are not ahead are read.

    Example:
        >>> import jax.numpy as jnp
        >>> bucket(jnp.array([0, -1, -15, -16, -127, -5000]), 32, 128, causal=True).tolist()
        [0, 1, 15, 16, 31, 31]
    """
    if causal:
        start, far = 0, jnp.maximum(-ahead, 0)
    else:
        buckets //= 2
        start, far = jnp.where(ahead > 0, buckets, 0), jnp.abs(ahead)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(far, 1) / exact) / math.log(distance / exact)
    coarse = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    return start + jnp.where(far < exact, far, jnp.minimum(coarse, buckets - 1))


def make_norm(config: Config) -> eqx.nn.RMSNorm:
    """The norm of all layers: it only rescales."""
    return eqx.nn.RMSNorm(config.width, eps=1e-6, use_bias=False)


class T5(eqx.Module):
    """An encoder and a decoder over tokens.

    `model.encoder` and `model.decoder` are tuples of blocks. Linear layers begin as Equinox draws
    them, but for the queries, which are smaller.
    """

    embed: eqx.nn.Embedding
    encoder_bias: RelativeBias
    encoder: tuple[Block, ...]
    encoder_norm: eqx.nn.RMSNorm
    decoder_bias: RelativeBias
    decoder: tuple[Block, ...]
    decoder_norm: eqx.nn.RMSNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        """Draws the parameters, in float32.

        Args:
            config: the sizes, e.g. `CONFIGS["t5_small"]`.
            key: the random key.
        """
        embed_key, first_key, second_key, *keys = jax.random.split(key, 3 + 2 * config.layers)
        shape = (config.vocabulary, config.width)
        self.embed = eqx.nn.Embedding(weight=jax.random.normal(embed_key, shape))
        self.encoder_bias = RelativeBias(config, causal=False, key=first_key)
        self.encoder = tuple(Block(config, decodes=False, key=k) for k in keys[: config.layers])
        self.encoder_norm = make_norm(config)
        self.decoder_bias = RelativeBias(config, causal=True, key=second_key)
        self.decoder = tuple(Block(config, decodes=True, key=k) for k in keys[config.layers :])
        self.decoder_norm = make_norm(config)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self,
        source: Int[Array, " source"],
        target: Int[Array, " time"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "time vocabulary"]:
        """Predicts each token of the target from the source and the tokens before it.

        Args:
            source: the tokens that are read, [source].
            target: the tokens that are predicted, [time].
            key: the key of this pair's dropout; without one, nothing is dropped.

        Returns:
            logits, [time, vocabulary], in the dtype of the parameters.
        """
        encoder_key, decoder_key = split_or_none(key, 2)
        encoded = self.encode(source, key=encoder_key)
        before = jnp.concatenate([jnp.full_like(target, START, shape=1), target[:-1]])
        decoded = self.decode(before, encoded, key=decoder_key)
        # The embedding is not as small as an output matrix.
        return decoded * self.embed.weight.shape[1] ** -0.5 @ self.embed.weight.T

    def encode(
        self, tokens: Int[Array, " source"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "source width"]:
        """What the decoder reads: tokens [source] to features [source, width]."""
        first_key, last_key, *keys = split_or_none(key, 2 + len(self.encoder))
        bias = self.encoder_bias(len(tokens))
        hidden = self._drop(jax.vmap(self.embed)(tokens), first_key)
        for block, block_key in zip(self.encoder, keys, strict=True):
            hidden = block(hidden, bias, key=block_key)
        return self._drop(jax.vmap(self.encoder_norm)(hidden), last_key)

    def decode(
        self,
        tokens: Int[Array, " time"],
        encoded: Float[Array, "source width"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "time width"]:
        """What predicts the next token: tokens [time] to features [time, width]."""
        first_key, last_key, *keys = split_or_none(key, 2 + len(self.decoder))
        bias = self.decoder_bias(len(tokens))
        hidden = self._drop(jax.vmap(self.embed)(tokens), first_key)
        for block, block_key in zip(self.decoder, keys, strict=True):
            hidden = block(hidden, bias, encoded, key=block_key)
        return self._drop(jax.vmap(self.decoder_norm)(hidden), last_key)

    def _drop(self, x: Float[Array, "..."], key: Key[Array, ""] | None) -> Float[Array, "..."]:
        return self.dropout(x, key=key, inference=key is None)


def loss_fn(
    model: T5,
    sources: Int[Array, "batch source"],
    targets: Int[Array, "batch time"],
    keys: Key[Array, " batch"] | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy of the targets' tokens.

    Args:
        model: the model.
        sources: a batch of sequences to read, [batch, source].
        targets: the sequences to give for them, [batch, time].
        keys: a dropout key for each pair, [batch]; without them, nothing is dropped.

    Returns:
        the loss in nats a token, a float32 scalar.
    """
    logits = jax.vmap(lambda source, target, key: model(source, target, key=key))(
        sources, targets, keys
    )
    return cross_entropy(logits, targets)
