"""Text that a language model writes, and the flags that say how much and how bold."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Array, Key, UInt8

from experiments import training_model

_SAMPLE_BYTES = flags.DEFINE_integer("sample_bytes", 256, "Bytes of text generated at the end.", 0)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.8, "Of the generated text; 1 is the model's own."
)


def number_of_bytes() -> int:
    return _SAMPLE_BYTES.value


@eqx.filter_jit
def generate(
    model: eqx.Module,
    prompt: UInt8[Array, " prompt"],
    length: int,
    context: int,
    temperature: float,
    key: Key[Array, ""],
) -> UInt8[Array, " prompt_plus_length"]:
    """Continues `prompt` by `length` bytes drawn from the model, in one compiled loop.

    Each byte is predicted from the `context` bytes before it. What lies after them in the buffer
    does not matter: the model is causal.
    """
    total = prompt.size + length
    text = jnp.zeros(max(total, context), jnp.uint8).at[: prompt.size].set(prompt)

    def append(end, text):
        start = jnp.maximum(end - context, 0)
        window = jax.lax.dynamic_slice_in_dim(text, start, context)
        logits = training_model.logits_of_bytes(model, window)[end - 1 - start]
        drawn = jax.random.categorical(jax.random.fold_in(key, end), logits / temperature)
        return text.at[end].set(drawn.astype(jnp.uint8))

    return jax.lax.fori_loop(prompt.size, total, append, text)[:total]


def sample(model: eqx.Module, key: Key[Array, ""]) -> str:
    """A text of the length that `--sample_bytes` asks for."""
    prompt = jnp.asarray(np.frombuffer(b"def ", np.uint8))
    context = training_model.sequence_length()
    text = generate(model, prompt, _SAMPLE_BYTES.value, context, _TEMPERATURE.value, key)
    return bytes(np.asarray(text)).decode("utf-8", errors="replace")
