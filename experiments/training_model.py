"""The model of a training and its flags: a byte-level GPT, or a language model of the zoo."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from absl import app, flags
from jaxtyping import Array, Float, Int, Key

from experiments.models import gpt, gpt2, llama, mixtral


@dataclasses.dataclass(frozen=True)
class ByteGPT:
    """The sizes of a `gpt.GPT`; its context is the sequence length."""

    layers: int = 8
    width: int = 64
    heads: int = 4
    dropout: float = 0.0
    tied: bool = False


Config = ByteGPT | gpt2.Config | llama.Config | mixtral.Config

CONFIGS: dict[str, Config] = {
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

_MODEL = flags.DEFINE_enum(
    "model",
    "gpt",
    list(CONFIGS),
    "The model: a byte-level GPT, a small one of the zoo, or the sizes that were published.",
)
_SEQUENCE_LENGTH = flags.DEFINE_integer("sequence_length", 64, "In bytes.", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of the parameters.")
#: Flags that replace a field of the model's configuration; by default it stays as it is.
_FIELDS = [
    flags.DEFINE_integer("layers", None, "Transformer blocks; 8 in gpt.", lower_bound=1),
    flags.DEFINE_integer("width", None, "Features of each position; 64 in gpt.", lower_bound=1),
    flags.DEFINE_integer("heads", None, "Attention heads of a block; 4 in gpt.", lower_bound=1),
    flags.DEFINE_integer("kv_heads", None, "Key and value heads of each block.", lower_bound=1),
    flags.DEFINE_integer("head_width", None, "Features of an attention head.", lower_bound=2),
    flags.DEFINE_integer("mlp_width", None, "Features in a feed-forward layer.", lower_bound=1),
    flags.DEFINE_integer("window", None, "Positions that a position attends to.", lower_bound=1),
    flags.DEFINE_integer("experts", None, "Feed-forward layers of a block.", lower_bound=1),
    flags.DEFINE_integer("experts_per_token", None, "How many transform a token.", lower_bound=1),
    flags.DEFINE_integer(
        "vocabulary", None, "Different tokens; of these the data has bytes.", lower_bound=256
    ),
    flags.DEFINE_float("dropout", None, "Probability of dropping a feature.", 0.0, 1.0),
    flags.DEFINE_bool("tied", None, "Whether the output layer is the embedding's matrix."),
]


def config() -> Config:
    """The configuration that `--model` names, with the fields that other flags replace."""
    chosen = CONFIGS[_MODEL.value]
    given = {flag.name: flag.value for flag in _FIELDS if flag.value is not None}
    known = {field.name for field in dataclasses.fields(chosen)}
    for name in given:
        if name not in known:
            taken = ", ".join(f"--{flag.name}" for flag in _FIELDS if flag.name in known)
            raise app.UsageError(f"--{name} is not for --model={_MODEL.value}, which has {taken}.")
    try:
        return dataclasses.replace(chosen, **given)
    except ValueError as error:
        raise app.UsageError(f"--model={_MODEL.value}: {error}") from error


def check() -> None:
    """Says what is wrong with the flags before anything is compiled."""
    context = getattr(config(), "context", None)
    if context is not None and sequence_length() > context:
        raise app.UsageError(
            f"--model={_MODEL.value} has positions for {context} tokens, got "
            f"--sequence_length={sequence_length()}."
        )


def has_dropout() -> bool:
    return bool(getattr(config(), "dropout", 0.0))


def can_be_sliced() -> bool:
    """Whether the model runs on causal slices of a sequence, one after the other."""
    return isinstance(config(), ByteGPT)


def sequence_length() -> int:
    return _SEQUENCE_LENGTH.value


def dtype() -> str:
    return _DTYPE.value


def make(key: Key[Array, ""]) -> Any:
    """Draws the parameters of the model."""
    sizes, dtype = config(), jnp.dtype(_DTYPE.value)
    if isinstance(sizes, ByteGPT):
        return gpt.GPT(**dataclasses.asdict(sizes), context=sequence_length(), dtype=dtype, key=key)
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
