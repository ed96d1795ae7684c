"""Attention over a sequence that the devices of a rank share, in a pipeline of transformer layers.

    python -m examples.ring_attention
    python -m examples.ring_attention --seq=4 --sequence_length=2048

Ring attention (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", arXiv
2310.01889, section 3): each device has a block of the sequence, and the blocks of keys and values
travel around the ring of devices, while each device adds what it sees to a softmax that is kept
normalised as it grows (Milakov, Gimelshein, arXiv 1805.02867, algorithm 3). The rest of the layer
is computed position by position, and needs no line of its own: `in_specs` splits the sequences.

The script compares loss and gradients with plain attention on one device, and what the ranks keep
between their tasks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

import jaxpp
from experiments.models import language, llama

_PP = flags.DEFINE_integer("pp", 2, "Ranks of the pipeline.", lower_bound=1)
_SEQ = flags.DEFINE_integer("seq", 4, "Devices of a rank, which share a sequence.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 4, "Transformer layers.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 32, "Features of each position.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads of a layer.", lower_bound=1)
_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 256, "Tokens.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Sequences in a step.", lower_bound=1)
_MICROBATCHES = flags.DEFINE_integer("microbatches", 4, "Slices of the batch.", lower_bound=1)

#: Of loss and gradients, relative to the largest entry of an array.
TOLERANCE = 1e-5
VOCABULARY = 64
#: How arrays [batch, time, ...] are split.
SPLIT = PartitionSpec(None, "seq")

Heads = Float[Array, "batch time heads features"]
Rows = Float[Array, "batch heads time"]
Scores = Float[Array, "batch heads time keys"]
AttentionFn = Callable[[Heads, Heads, Heads], Heads]


def plain_attention(queries: Heads, keys: Heads, values: Heads) -> Heads:
    """Causal attention of whole sequences."""
    scores = _scores(queries, keys, 0, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)


def _scores(queries: Heads, keys: Heads, query_block: Any, key_block: Any) -> Scores:
    """The scores of a block of queries and one of keys; -inf for a key after the query."""
    time, _, features = queries.shape[1:]
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(features)
    place = jnp.arange(time)
    visible = (query_block * time + place)[:, None] >= key_block * time + place
    return jnp.where(visible, scores, -jnp.inf)


# ---- around the ring -----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def ring_attention(queries: Heads, keys: Heads, values: Heads, axis: str = "seq") -> Heads:
    """Causal attention of sequences whose blocks the devices of an axis have.

    To be called with whole arrays under a mesh with such an axis, inside or outside of a stage.

    Args:
        queries: [batch, time, heads, features]; `time` a multiple of the axis' size.
        keys: the same.
        values: the same.
        axis: the name of the axis.

    Returns:
        the mean of the values by the softmax of `queries @ keys / sqrt(features)`, of the same
        shape and dtype. No device holds more than two blocks of keys and values, and of the scores
        those of one block with another.
    """
    return _ring_forward(queries, keys, values, axis)[0]


def _ring_forward(queries, keys, values, axis):
    """The result, and what the backward pass needs, all of it in blocks."""
    split = PartitionSpec(None, axis)
    run = jax.shard_map(
        functools.partial(_forward_blocks, axis=axis),
        in_specs=(split, split, split),
        out_specs=(split, PartitionSpec(None, None, axis)),
    )
    out, log_sums = run(queries, keys, values)
    return out, (queries, keys, values, out, log_sums)


def _ring_backward(axis, kept, cotangent):
    split = PartitionSpec(None, axis)
    run = jax.shard_map(
        functools.partial(_backward_blocks, axis=axis),
        in_specs=(split, split, split, split, PartitionSpec(None, None, axis), split),
        out_specs=(split, split, split),
    )
    queries, keys, values, out, log_sums = kept
    return run(queries, keys, values, out, log_sums, cotangent)


ring_attention.defvjp(_ring_forward, _ring_backward)


def _forward_blocks(queries, keys, values, *, axis: str) -> tuple[Heads, Rows]:
    """One device's block of the result, and the logarithms of its softmax's denominators."""
    size, own = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    scores = _scores(queries, keys, own, own)  # each query sees itself: the maximum is finite
    maximum = scores.max(axis=-1)
    weights = jnp.exp(scores - maximum[..., None])
    start = jnp.einsum("bhqk,bkhd->bqhd", weights, values), weights.sum(axis=-1), maximum

    def visit(carry, hop):
        blocks, (out, total, maximum) = carry
        blocks = _passed_on(blocks, axis)
        keys, values = blocks
        scores = _scores(queries, keys, own, (own - hop) % size)
        highest = jnp.maximum(maximum, scores.max(axis=-1))
        weights, decay = jnp.exp(scores - highest[..., None]), jnp.exp(maximum - highest)
        out = out * _by_position(decay) + jnp.einsum("bhqk,bkhd->bqhd", weights, values)
        return (blocks, (out, total * decay + weights.sum(axis=-1), highest)), None

    hops = jnp.arange(1, size)
    (_, (out, total, maximum)), _ = jax.lax.scan(visit, ((keys, values), start), hops)
    return out / _by_position(total), maximum + jnp.log(total)


def _backward_blocks(queries, keys, values, out, log_sums, cotangent, *, axis: str):
    """One device's blocks of the gradients; those of keys and values travel along with them.

    Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
    """
    size, own = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    scale = 1 / math.sqrt(queries.shape[-1])
    offset = jnp.einsum("bqhd,bqhd->bhq", out, cotangent)

    def gradients(keys, values, key_block):
        weights = jnp.exp(_scores(queries, keys, own, key_block) - log_sums[..., None])
        of_weights = jnp.einsum("bqhd,bkhd->bhqk", cotangent, values)
        of_scores = weights * (of_weights - offset[..., None]) * scale
        return (
            jnp.einsum("bhqk,bkhd->bqhd", of_scores, keys),
            jnp.einsum("bhqk,bqhd->bkhd", of_scores, queries),
            jnp.einsum("bhqk,bqhd->bkhd", weights, cotangent),
        )

    def visit(carry, hop):
        of_queries, blocks = carry
        keys, values, of_keys, of_values = _passed_on(blocks, axis)
        added = gradients(keys, values, (own - hop) % size)
        blocks = keys, values, of_keys + added[1], of_values + added[2]
        return (of_queries + added[0], blocks), None

    of_queries, of_keys, of_values = gradients(keys, values, own)
    start = of_queries, (keys, values, of_keys, of_values)
    (of_queries, blocks), _ = jax.lax.scan(visit, start, jnp.arange(1, size))
    _, _, of_keys, of_values = _passed_on(blocks, axis)  # home again
    return of_queries, of_keys, of_values


def _passed_on(blocks: Any, axis: str) -> Any:
    """The blocks of the device before this one in the ring."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(blocks, axis, [(i, (i + 1) % size) for i in range(size)])


def _by_position(rows: Rows) -> Float[Array, "batch time heads 1"]:
    return jnp.swapaxes(rows, 1, 2)[..., None]


# ---- a transformer -------------------------------------------------------------------------------


class Layer(eqx.Module):
    """Attention and a feed-forward layer over sequences [batch, time, width]."""

    attention_norm: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp_norm: eqx.nn.RMSNorm
    mlp: llama.SwiGLU
    heads: int = eqx.field(static=True)

    def __init__(self, config: llama.Config, *, key: Key[Array, ""]):
        qkv_key, out_key, mlp_key = jax.random.split(key, 3)
        self.attention_norm = llama.rms_norm(config)
        self.qkv = llama.linear(config.width, 3 * config.width, key=qkv_key)
        self.out = llama.linear(config.width, config.width, key=out_key)
        self.mlp_norm = llama.rms_norm(config)
        self.mlp = llama.SwiGLU(config, key=mlp_key)
        self.heads = config.heads

    def __call__(
        self, x: Float[Array, "batch time width"], attention: AttentionFn
    ) -> Float[Array, "batch time width"]:
        """Applies the layer; keeps shape and dtype."""
        qkv = at_each_position(self.qkv)(at_each_position(self.attention_norm)(x))
        queries, keys, values = (
            h.reshape(*h.shape[:2], self.heads, -1) for h in jnp.split(qkv, 3, axis=-1)
        )
        mixed = attention(queries, keys, values).reshape(x.shape)
        x = x + at_each_position(self.out)(mixed)
        return x + at_each_position(self.mlp)(at_each_position(self.mlp_norm)(x))


def at_each_position(function: Callable[..., Array]) -> Callable[..., Array]:
    return jax.vmap(jax.vmap(function))


class Transformer(eqx.Module):
    """A language model with learned positions."""

    embed: Float[Array, "vocabulary width"]
    position: Float[Array, "time width"]
    layers: tuple[Layer, ...]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, config: llama.Config, *, time: int, key: Key[Array, ""]):
        embed_key, position_key, head_key, *keys = jax.random.split(key, 3 + config.layers)
        self.embed = jax.random.normal(embed_key, (config.vocabulary, config.width))
        self.position = jax.random.normal(position_key, (time, config.width))
        self.layers = tuple(Layer(config, key=k) for k in keys)
        self.norm = llama.rms_norm(config)
        self.head = llama.linear(config.width, config.vocabulary, key=head_key)


def loss_fn(
    model: Transformer,
    tokens: Int[Array, "batch time"],
    targets: Int[Array, "batch time"],
    *,
    attention: AttentionFn,
) -> Float[Array, ""]:
    """Mean cross-entropy of the targets, with as many stages as ranks."""
    x = model.embed[tokens] + model.position
    opening = {round(rank * len(model.layers) / _PP.value) for rank in range(1, _PP.value)}
    for number, layer in enumerate(model.layers):
        x = jaxpp.pipeline_enter_stage(x) if number in opening else x
        x = layer(x, attention)
    logits = at_each_position(model.head)(at_each_position(model.norm)(x))
    return language.cross_entropy(logits, targets)


# ---- the comparison ------------------------------------------------------------------------------


def accumulated(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Loss and gradients, over microbatches."""
    return jaxpp.microbatch(
        eqx.filter_value_and_grad(loss_fn), _MICROBATCHES.value, in_axes=(None, 0, 0)
    )


def placed(attention: AttentionFn, parts: int | None = None) -> Any:
    """Loss and gradients as a pipeline, whose ranks share each sequence between their devices."""
    staged = jaxpp.wrap_forward(functools.partial(loss_fn, attention=attention))
    grad_fn = jaxpp.schedule(accumulated(staged), jaxpp.schedules.OneFOneB())
    if parts is None:
        return jaxpp.place(grad_fn, jaxpp.MpmdMesh((_PP.value,)))
    mesh = jaxpp.MpmdMesh((_PP.value, parts), ("mpmd", "seq"))
    return jaxpp.place(grad_fn, mesh, in_specs=(None, SPLIT, SPLIT))


def make_devices() -> None:
    """CPU devices for the mesh, where there is no accelerator."""
    jax.config.update("jax_num_cpu_devices", _PP.value * _SEQ.value)


def make_arguments() -> tuple[Transformer, Int[np.ndarray, "..."], Int[np.ndarray, "..."]]:
    width, heads = _WIDTH.value, _HEADS.value
    config = llama.Config(
        _LAYERS.value, width, heads, heads, width // heads, 2 * width, vocabulary=VOCABULARY
    )
    model = Transformer(config, time=_SEQUENCE_LENGTH.value, key=jax.random.key(0))
    shape = _BATCH_SIZE.value, _SEQUENCE_LENGTH.value + 1
    text = np.random.default_rng(0).integers(VOCABULARY, size=shape, dtype=np.int32)
    return model, text[:, :-1], text[:, 1:]


def difference(got: Any, want: Any) -> float:
    """The largest of two pytrees, relative to the largest entry of its array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    arrays = [(np.asarray(x), np.asarray(y)) for x, y in pairs]
    return float(np.max([np.abs(x - y).max() / np.abs(y).max() for x, y in arrays]))


def main(_: list[str]) -> None:
    make_devices()
    arguments = make_arguments()
    alone = functools.partial(loss_fn, attention=plain_attention)
    expected = jax.jit(accumulated(alone))(*arguments)
    worst = []
    print(f"{'attention':>9}  {'mesh':>5}  {'activations of each device':>28}  difference")
    for name, attention, parts in [
        ("plain", plain_attention, None),
        ("ring", ring_attention, _SEQ.value),
    ]:
        step = placed(attention, parts)
        worst.append(difference(step(*arguments), expected))
        kept = ", ".join(f"{rank.activation_bytes:,}" for rank in step.describe().ranks)
        print(f"{name:>9}  {f'{_PP.value}x{parts or 1}':>5}  {kept:>22} bytes  {worst[-1]:.1e}")
    if not np.max(worst) <= TOLERANCE:  # written so that NaN fails
        raise SystemExit(f"Loss or gradients differ by more than {TOLERANCE:.0e}.")


if __name__ == "__main__":
    app.run(main)
