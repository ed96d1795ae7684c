"""The GPT on causal slices of its sequences, one after the other, for pipelines within a sequence.

A slice attends to the keys and values of the slices before it, so that a pipeline can start on the
first slice's next layers while the second slice goes through the first ones (Sun et al., "Seq1F1B",
arXiv 2406.03488, section 3.2). The model and its loss are those of `gpt`; only the order of the
work is another.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import jaxpp
from experiments.models import gpt, language

Past = tuple[Float[Array, "past heads features"], Float[Array, "past heads features"]]


def loss_fn(
    model: gpt.GPT, tokens: Int[Array, "batch time_plus_1"], *, slices: int, groups: int
) -> Float[Array, ""]:
    """Mean cross-entropy of the next byte, as `gpt.loss_fn` without dropout.

    Slice j of layer group r is pipeline stage `j * groups + r`.

    Args:
        model: the model; its blocks are cut into groups as equal as can be.
        tokens: a batch of sequences, [batch, time + 1].
        slices: the number of slices of a sequence; it divides `time`.
        groups: the number of groups of blocks.

    Returns:
        the loss in nats a byte, a float32 scalar.

    Raises:
        ValueError: when `slices` does not divide `time`, or there are more groups than blocks.
    """
    time, num_blocks = tokens.shape[1] - 1, len(model.blocks)
    if time % slices:
        raise ValueError(
            f"sequences of {time} bytes do not divide into {slices} slices; use a sequence length "
            f"of {time - time % slices or slices}, or another number of slices."
        )
    if groups > num_blocks:
        raise ValueError(f"{num_blocks} blocks do not make {groups} groups; use fewer ranks.")
    length = time // slices
    bounds = [round(group * num_blocks / groups) for group in range(groups + 1)]
    past: list[Past | None] = [None] * num_blocks
    losses = []
    for j in range(slices):
        start = j * length
        hidden = tokens[:, start : start + length]
        for group, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
            hidden = jaxpp.pipeline_enter_stage(hidden, stage_id=j * groups + group)
            if group == 0:
                position = model.position[start : start + length]
                hidden = jax.vmap(jax.vmap(model.embed))(hidden) + position
            for n in range(first, last):
                hidden, past[n] = jax.vmap(block_slice, in_axes=(None, 0, 0))(
                    model.blocks[n], hidden, past[n]
                )
        targets = tokens[:, start + 1 : start + length + 1]
        losses.append(language.cross_entropy(jax.vmap(model.predict)(hidden), targets))
    return sum(losses, jnp.zeros(())) / slices


def block_slice(
    block: gpt.Block, x: Float[Array, "time width"], past: Past | None
) -> tuple[Float[Array, "time width"], Past]:
    """One layer on one slice, without dropout: what follows, and the keys and values so far."""
    mixed, past = attend(block.attention, jax.vmap(block.attention_norm)(x), past)
    x = x + mixed
    return x + jax.vmap(block.mlp)(jax.vmap(block.mlp_norm)(x)), past


def attend(
    attention: gpt.Attention, x: Float[Array, "time width"], past: Past | None
) -> tuple[Float[Array, "time width"], Past]:
    """Mixes each position of a slice with those before it, in the slices before it too."""
    time, width = x.shape
    heads = attention.heads
    qkv = jax.vmap(attention.qkv)(x).reshape(time, 3, heads, width // heads)
    keys, values = qkv[:, 1], qkv[:, 2]
    if past is not None:
        keys, values = jnp.concatenate([past[0], keys]), jnp.concatenate([past[1], values])
    before = keys.shape[0] - time
    seen = jnp.arange(keys.shape[0]) <= before + jnp.arange(time)[:, None]
    mixed = jax.nn.dot_product_attention(qkv[:, 0], keys, values, mask=seen[None])
    return jax.vmap(attention.out)(mixed.reshape(time, width)), (keys, values)
