"""The model of a training: a byte-level GPT, or a language model of the zoo."""

import dataclasses
from typing import Any

import equinox as eqx
from jaxtyping import Array, DTypeLike, Float, Int, Key

from experiments.models import gpt, gpt2, llama, mixtral


@dataclasses.dataclass(frozen=True)
class ByteGPT:
    """The sizes of a `gpt.GPT`; its context is the sequence length."""

    layers: int = 8
    width: int = 64
    heads: int = 4
    dropout: float = 0.0
    tied: bool = False


Sizes = ByteGPT | gpt2.Config | llama.Config | mixtral.Config

CONFIGS: dict[str, Sizes] = {
    "gpt": ByteGPT(),
    # Small enough for a CPU, with each part of the architecture.
    "gpt2": gpt2.Config(layers=8, width=64, heads=4),
    "llama2": llama.Config(
        layers=1, width=1024, heads=8, kv_heads=8, head_width=128, mlp_width=11008
    ),
    "mistral": llama.Config(
        layers=1, width=2048, heads=1, kv_heads=1, head_width=8, mlp_width=896, window=4096
    ),
    "mixtral": mixtral.Config(
        layers=2, width=1024, heads=2, kv_heads=2, head_width=16, mlp_width=896, rope_theta=1e6
    ),
    **gpt2.CONFIGS,
    **llama.CONFIGS,
    **mixtral.CONFIGS,
}

#: The fields of these configurations that a training may replace.
FIELDS = (
    "layers", "width", "heads", "kv_heads", "head_width", "mlp_width", "window", "experts",
    "experts_per_token", "vocabulary", "dropout", "tied",
)  # fmt: skip


def make(sizes: Sizes, sequence_length: int, dtype: DTypeLike, key: Key[Array, ""]) -> Any:
    """Draws the parameters of a model."""
    if isinstance(sizes, ByteGPT):
        return gpt.GPT(**dataclasses.asdict(sizes), context=sequence_length, dtype=dtype, key=key)
    if isinstance(sizes, gpt2.Config):
        return gpt2.GPT2(sizes, dtype=dtype, key=key)
    if isinstance(sizes, mixtral.Config):
        return mixtral.Mixtral(sizes, dtype=dtype, key=key)
    return llama.Llama(sizes, dtype=dtype, key=key)


def loss_fn(
    model: Any, tokens: Int[Array, "batch time_plus_1"], keys: Key[Array, " batch"] | None = None
) -> Float[Array, ""]:
    """The model's own loss; the keys of the sequences' dropout are for those that have it."""
    if isinstance(model, gpt.GPT):
        return gpt.loss_fn(model, tokens, keys)
    if isinstance(model, gpt2.GPT2):
        return gpt2.loss_fn(model, tokens, keys)
    if isinstance(model, mixtral.Mixtral):
        return mixtral.loss_fn(model, tokens)
    return llama.loss_fn(model, tokens)


def logits_of_bytes(model: eqx.Module, tokens: Int[Array, " time"]) -> Float[Array, "time bytes"]:
    """What the model predicts after each position, of the tokens that are bytes."""
    assert callable(model)
    out = model(tokens)
    logits = out[0] if isinstance(out, tuple) else out  # a Mixtral also gives its balance losses
    return logits[:, : gpt.NUM_BYTES]
