"""Text that a language model writes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt8

from experiments.training import models
from experiments.training.config import Config


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
        logits = models.logits_of_bytes(model, window)[end - 1 - start]
        drawn = jax.random.categorical(jax.random.fold_in(key, end), logits / temperature)
        return text.at[end].set(drawn.astype(jnp.uint8))

    return jax.lax.fori_loop(prompt.size, total, append, text)[:total]


def sample(config: Config, model: eqx.Module, key: Key[Array, ""]) -> str:
    """A text of `config.sample_bytes` bytes."""
    prompt = jnp.asarray(np.frombuffer(b"def ", np.uint8))
    sizes = config.sample_bytes, config.sequence_length, config.temperature
    return bytes(np.asarray(generate(model, prompt, *sizes, key))).decode("utf-8", errors="replace")
