"""BERT in plain Equinox: masked language modelling with a tied decoder.

Post-norm blocks, learned positions and segments (Devlin et al., "BERT: Pre-training of Deep
Bidirectional Transformers for Language Understanding", arXiv 1810.04805, section 3). Only the
masked language model is here, not the prediction of the next sentence.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from experiments.models.language import cross_entropy, split_or_none

#: The token that stands for a masked one, in the vocabulary of the uncased models.
MASK = 103


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a BERT; `mlp` is the width inside a block's feed-forward half."""

    layers: int
    width: int
    heads: int
    mlp: int
    vocabulary: int = 30522
    context: int = 512
    segments: int = 2
    dropout: float = 0.1


#: Devlin et al., section 3, "Model Architecture"; the vocabulary is of the published checkpoints
#: (github.com/google-research/bert).
CONFIGS = {
    "bert_base_uncased": Config(layers=12, width=768, heads=12, mlp=3072),
    "bert_large_uncased": Config(layers=24, width=1024, heads=16, mlp=4096),
}


class Block(eqx.Module):
    """One transformer layer: each half transforms, drops out, adds and then normalises."""

    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    mlp_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        attention_key, up_key, down_key = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            config.heads,
            config.width,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            dropout_p=config.dropout,
            key=attention_key,
        )
        self.attention_norm = eqx.nn.LayerNorm(config.width, eps=1e-12)
        self.up = eqx.nn.Linear(config.width, config.mlp, key=up_key)
        self.down = eqx.nn.Linear(config.mlp, config.width, key=down_key)
        self.mlp_norm = eqx.nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = eqx.nn.Dropout(config.dropout)

    def __call__(
        self,
        x: Float[Array, "time width"],
        is_token: Bool[Array, " time"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "time width"]:
        """Applies the layer to one sequence; keeps shape and dtype. No key: no dropout."""
        weights_key, attention_key, mlp_key = split_or_none(key, 3)
        mask = None if is_token is None else jnp.broadcast_to(is_token, (len(x), len(x)))
        mixed = self.attention(x, x, x, mask, key=weights_key, inference=key is None)
        mixed = self.dropout(mixed, key=attention_key, inference=key is None)
        x = jax.vmap(self.attention_norm)(x + mixed)
        inner = jax.nn.gelu(jax.vmap(self.up)(x), approximate=False)
        transformed = self.dropout(jax.vmap(self.down)(inner), key=mlp_key, inference=key is None)
        return jax.vmap(self.mlp_norm)(x + transformed)


class BERT(eqx.Module):
    """A bidirectional encoder with the head that predicts masked tokens.

    The head's last matrix is that of the token embedding. Linear layers begin as Equinox draws
    them, embeddings as in the paper's code.
    """

    embed: eqx.nn.Embedding
    position: Float[Array, "context width"]
    segment: Float[Array, "segments width"]
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    blocks: tuple[Block, ...]
    head: eqx.nn.Linear
    head_norm: eqx.nn.LayerNorm
    head_bias: Float[Array, " vocabulary"]

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        """Draws the parameters, in float32.

        Args:
            config: the sizes, e.g. `CONFIGS["bert_base_uncased"]`.
            key: the random key.
        """
        embed_key, position_key, segment_key, head_key, *block_keys = jax.random.split(
            key, 4 + config.layers
        )
        shape = (config.vocabulary, config.width)
        self.embed = eqx.nn.Embedding(weight=0.02 * jax.random.normal(embed_key, shape))
        shape = (config.context, config.width)
        self.position = 0.02 * jax.random.normal(position_key, shape)
        shape = (config.segments, config.width)
        self.segment = 0.02 * jax.random.normal(segment_key, shape)
        self.norm = eqx.nn.LayerNorm(config.width, eps=1e-12)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.blocks = tuple(Block(config, key=k) for k in block_keys)
        self.head = eqx.nn.Linear(config.width, config.width, key=head_key)
        self.head_norm = eqx.nn.LayerNorm(config.width, eps=1e-12)
        self.head_bias = jnp.zeros(config.vocabulary)

    def __call__(
        self,
        tokens: Int[Array, " time"],
        positions: Int[Array, " predictions"],
        segments: Int[Array, " time"] | None = None,
        is_token: Bool[Array, " time"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "predictions vocabulary"]:
        """Predicts the tokens of one sequence at some positions.

        Args:
            tokens: the sequence, masked, [time]; at most `context` long.
            positions: the positions to predict, [predictions].
            segments: the segment of each token, [time]; without them, all are of segment 0.
            is_token: False where the sequence is padded, [time]; without it, nowhere.
            key: the key of this sequence's dropout; without one, nothing is dropped.

        Returns:
            logits, [predictions, vocabulary], in the dtype of the parameters.
        """
        embed_key, *block_keys = split_or_none(key, 1 + len(self.blocks))
        segments = jnp.zeros_like(tokens) if segments is None else segments
        hidden = (
            jax.vmap(self.embed)(tokens) + self.position[: len(tokens)] + self.segment[segments]
        )
        hidden = self.dropout(jax.vmap(self.norm)(hidden), key=embed_key, inference=key is None)
        for block, block_key in zip(self.blocks, block_keys, strict=True):
            hidden = block(hidden, is_token, key=block_key)
        hidden = jax.nn.gelu(jax.vmap(self.head)(hidden[positions]), approximate=False)
        return jax.vmap(self.head_norm)(hidden) @ self.embed.weight.T + self.head_bias


def mask_tokens(
    tokens: Int[Array, " time"], *, predictions: int, vocabulary: int, key: Key[Array, ""]
) -> tuple[Int[Array, " time"], Int[Array, " predictions"]]:
    """Hides some tokens of a sequence: 80% become `MASK`, 10% a random token, 10% stay.

    Devlin et al., section 3.1, "Task #1", where `predictions` is 15% of the sequence.

    Args:
        tokens: one sequence, [time].
        predictions: how many positions to choose.
        vocabulary: the number of tokens.
        key: the random key.

    Returns:
        the tokens that the model sees, [time], and the positions that it predicts, [predictions].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> tokens = jnp.full(8, 5)
        >>> seen, positions = mask_tokens(
        ...     tokens, predictions=2, vocabulary=200, key=jax.random.key(0))
        >>> int((seen != tokens).sum()) <= len(set(positions.tolist())) == 2
        True
    """
    place_key, fate_key, token_key = jax.random.split(key, 3)
    positions = jax.random.choice(place_key, len(tokens), (predictions,), replace=False)
    fate = jax.random.uniform(fate_key, (predictions,))
    other = jax.random.randint(token_key, (predictions,), 0, vocabulary, tokens.dtype)
    seen = jnp.where(fate < 0.8, MASK, jnp.where(fate < 0.9, other, tokens[positions]))
    return tokens.at[positions].set(seen.astype(tokens.dtype)), positions


def loss_fn(
    model: BERT,
    tokens: Int[Array, "batch time"],
    positions: Int[Array, "batch predictions"],
    targets: Int[Array, "batch predictions"],
    is_token: Bool[Array, "batch time"] | None = None,
    keys: Key[Array, " batch"] | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy of the masked tokens.

    Args:
        model: the model.
        tokens: a batch of sequences, masked, [batch, time].
        positions: which to predict, [batch, predictions]; as many in each sequence.
        targets: the tokens that stood there, [batch, predictions].
        is_token: False where a sequence is padded, [batch, time]; without it, nowhere.
        keys: a dropout key for each sequence, [batch]; without them, nothing is dropped.

    Returns:
        the loss in nats a token, a float32 scalar.
    """

    def predict(tokens, positions, is_token, key):
        return model(tokens, positions, is_token=is_token, key=key)

    logits = jax.vmap(predict)(tokens, positions, is_token, keys)
    return cross_entropy(logits, targets)
