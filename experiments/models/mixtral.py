"""Mixtral: a Mistral whose feed-forward layers are mixtures of experts.

Jiang et al., "Mixtral of Experts", arXiv 2401.04088, section 2. Each layer has a loss that keeps
the load of its experts balanced (Fedus et al., "Switch Transformers", arXiv 2101.03961, section
2.2), so that layers of different pipeline stages add to the loss.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from experiments.models import language, llama


@dataclasses.dataclass(frozen=True)
class Config(llama.Config):
    """The sizes of a Mixtral: those of a Mistral, and of its mixtures.

    Args:
        experts: number of feed-forward layers of each block.
        experts_per_token: how many of them transform a token.
        balance: the share of the balance loss in the loss.
    """

    experts: int = 8
    experts_per_token: int = 2
    balance: float = 0.02

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token must be from 1 to the {self.experts} experts, got "
                f"{self.experts_per_token}; use more experts, or fewer for each token."
            )


#: Table 1 of arXiv 2401.04088; the rest is from the `config.json` of mistralai/Mixtral-8x7B-v0.1.
CONFIGS = {
    "mixtral_8x7b": Config(
        32, 4096, heads=32, kv_heads=8, head_width=128, mlp_width=14336, rope_theta=1e6
    ),
}


class MixtureOfExperts(eqx.Module):
    """Feed-forward layers of which each token chooses some.

    All experts transform all tokens, and what a token has not chosen counts nothing: simple and
    exact, at the arithmetic of `experts` instead of `experts_per_token`.
    """

    router: eqx.nn.Linear
    experts: llama.SwiGLU  # stacked: its arrays have a leading axis of experts
    per_token: int = eqx.field(static=True)

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.float32, key: Key[Array, ""]):
        router_key, experts_key = jax.random.split(key)
        self.router = llama.linear(config.width, config.experts, dtype=dtype, key=router_key)
        self.experts = eqx.filter_vmap(lambda key: llama.SwiGLU(config, dtype=dtype, key=key))(
            jax.random.split(experts_key, config.experts)
        )
        self.per_token = config.experts_per_token

    def __call__(
        self, x: Float[Array, "time width"]
    ) -> tuple[Float[Array, "time width"], Float[Array, ""]]:
        """The mixture of each position's experts, in shape and dtype of `x`, and the balance loss.

        The weights of a token's experts are the softmax of their logits alone (arXiv 2401.04088,
        section 2.1).
        """
        logits = jax.vmap(self.router)(x).astype(jnp.float32)
        best, chosen = jax.lax.top_k(logits, self.per_token)
        choices = jax.nn.one_hot(chosen, logits.shape[-1])
        weights = jnp.einsum("tk,tke->te", jax.nn.softmax(best), choices).astype(x.dtype)
        transformed = eqx.filter_vmap(lambda expert: jax.vmap(expert)(x))(self.experts)
        mixed = jnp.einsum("te,etw->tw", weights, transformed)
        return mixed, balance_loss(logits, choices)


def balance_loss(
    logits: Float[Array, "time experts"], choices: Float[Array, "time choice experts"]
) -> Float[Array, ""]:
    """How unevenly the tokens of one sequence load the experts.

    `experts * sum(f * P)`, f the share of tokens that chose an expert and P the mean probability
    that the router gives it (Switch Transformers, equations 4 to 6, for several choices of a
    token). It is `choices` of a token where the load is even. A sequence is looked at by itself,
    as in DeepSeek-V3 (arXiv 2412.19437, equation 17), so that the loss of a batch is the mean over
    its sequences, in however many microbatches they come.
    """
    share = choices.sum(axis=1).mean(axis=0)
    probability = jax.nn.softmax(logits).mean(axis=0)
    return logits.shape[-1] * jnp.sum(share * probability)


class Block(eqx.Module):
    """One transformer layer: each half normalises, transforms and adds."""

    attention_norm: eqx.nn.RMSNorm
    attention: llama.Attention
    mixture_norm: eqx.nn.RMSNorm
    mixture: MixtureOfExperts

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.float32, key: Key[Array, ""]):
        attention_key, mixture_key = jax.random.split(key)
        self.attention_norm = llama.rms_norm(config, dtype=dtype)
        self.attention = llama.Attention(config, dtype=dtype, key=attention_key)
        self.mixture_norm = llama.rms_norm(config, dtype=dtype)
        self.mixture = MixtureOfExperts(config, dtype=dtype, key=mixture_key)

    def __call__(
        self, x: Float[Array, "time width"]
    ) -> tuple[Float[Array, "time width"], Float[Array, ""]]:
        """Applies the layer to one sequence; keeps shape and dtype. Also gives its balance loss."""
        x = x + self.attention(jax.vmap(self.attention_norm)(x))
        mixed, balance = self.mixture(jax.vmap(self.mixture_norm)(x))
        return x + mixed, balance


class Mixtral(eqx.Module):
    """The language model.

    Example:
        >>> import equinox as eqx, jax
        >>> model = eqx.filter_eval_shape(Mixtral, CONFIGS["mixtral_8x7b"], key=jax.random.key(0))
        >>> sum(x.size for x in jax.tree.leaves(model) if hasattr(x, "size"))
        46702792704
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
            config.vocabulary, config.width, llama.INITIAL_DEVIATION, dtype=dtype, key=embed_key
        )
        self.blocks = language.make_blocks(
            lambda key: Block(config, dtype=dtype, key=key),
            config.layers,
            stacked=stacked,
            key=blocks_key,
        )
        self.norm = llama.rms_norm(config, dtype=dtype)
        self.head = llama.linear(config.width, config.vocabulary, dtype=dtype, key=head_key)
        self.config = config
        self.remat = remat

    def __call__(
        self, tokens: Int[Array, " time"]
    ) -> tuple[Float[Array, "time vocabulary"], Float[Array, " layers"]]:
        """Predicts the token after each position.

        Args:
            tokens: one sequence, [time], any integer type, of any length.

        Returns:
            logits, [time, vocabulary], in the dtype of the parameters, and the balance loss of
            each layer, [layers], float32.
        """
        hidden, balance = language.run_blocks(
            lambda block, hidden, _: block(hidden),
            jax.vmap(self.embed)(tokens),
            self.blocks,
            remat=self.remat,
        )
        return jax.vmap(self.head)(jax.vmap(self.norm)(hidden)), balance


def loss_fn(model: Mixtral, tokens: Int[Array, "batch time_plus_1"]) -> Float[Array, ""]:
    """Mean cross-entropy of the next token, and the balance losses of all layers.

    Args:
        model: the model.
        tokens: a batch of sequences, [batch, time + 1]; each position predicts the one after it.

    Returns:
        the loss in nats a token, with `config.balance` times the sum of the layers' balance
        losses added to it, a float32 scalar.
    """
    logits, balance = jax.vmap(model)(tokens[:, :-1])
    balance = balance.sum(axis=1).mean()
    return language.cross_entropy(logits, tokens[:, 1:]) + model.config.balance * balance
