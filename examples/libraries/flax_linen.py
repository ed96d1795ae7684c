"""A BERT in Flax Linen, whose loop over the layers marks the stages as JaxPP's users write it.

Devlin et al., arXiv 1810.04805, section 3: a post-norm encoder trained to predict masked tokens.

    python -m examples.libraries.flax_linen --schedule=zb_h1
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxpp
from examples.libraries import training
from jaxpp.schedules import Schedule

MASK, IGNORED = 0, -1


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of the model; by default tiny ones."""

    vocabulary: int = 32
    length: int = 8
    width: int = 16
    heads: int = 2
    layers: int = 2
    dropout: float = 0.1


class Layer(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, hidden, train: bool):
        config = self.config
        attended = nn.MultiHeadDotProductAttention(config.heads)(hidden)
        attended = nn.Dropout(config.dropout)(attended, deterministic=not train)
        hidden = nn.LayerNorm()(hidden + attended)
        inner = nn.Dense(config.width)(nn.gelu(nn.Dense(4 * config.width)(hidden)))
        inner = nn.Dropout(config.dropout)(inner, deterministic=not train)
        return nn.LayerNorm()(hidden + inner)


class Bert(nn.Module):
    config: Config

    def setup(self):
        config = self.config
        self.tokens = nn.Embed(config.vocabulary, config.width)
        self.positions = nn.Embed(config.length, config.width)
        self.norm = nn.LayerNorm()
        self.layers = [Layer(config, name=f"layer_{i}") for i in range(config.layers)]

    def __call__(self, tokens, train: bool):
        hidden = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        hidden = self.norm(hidden)
        for i, layer in enumerate(self.layers):
            hidden = jaxpp.pipeline_enter_stage(hidden, f"stage_{i}", i)
            hidden = layer(hidden, train)
        return self.tokens.attend(hidden)  # the output matrix is the embedding


def make_train_step(schedule: Schedule | None, num_stages: int, num_microbatches: int):
    """The train step, as a pipeline or on one device; see `training.Example`."""
    model = Bert(Config(layers=num_stages))

    def loss_fn(params, batch):
        rngs = {"dropout": batch["key"][0]}  # one for all examples of a microbatch
        logits: Any = model.apply({"params": params}, batch["tokens"], train=True, rngs=rngs)
        labels = batch["labels"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return jnp.mean(jnp.where(labels == IGNORED, 0.0, losses))

    if schedule is None:
        grad_fn = training.in_a_loop(loss_fn, num_microbatches)
    else:
        grad_fn = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
        grad_fn = jaxpp.microbatch(grad_fn, num_microbatches, in_axes=(None, 0))
        grad_fn = jaxpp.schedule(grad_fn, schedule)

    def train_step(state: TrainState, batch):
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return train_step


def make_state(num_stages: int) -> TrainState:
    model = Bert(Config(layers=num_stages))
    tokens = jnp.zeros((1, model.config.length), jnp.int32)
    variables = jax.jit(functools.partial(model.init, train=False))(jax.random.key(0), tokens)
    # The large epsilon keeps the noise of gradients near zero from becoming a whole step.
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-2, eps=1e-3)
    )


def draw_batch(step: int, num_microbatches: int):
    """Counting sequences, a quarter of whose tokens are hidden; a key each."""
    config, random, examples = Config(), np.random.default_rng(step), 2 * num_microbatches
    starts = random.integers(config.vocabulary, size=(examples, 1))
    tokens = 1 + (starts + np.arange(config.length)) % (config.vocabulary - 1)
    hidden = random.random(tokens.shape) < 0.25
    return {
        "tokens": np.where(hidden, MASK, tokens).astype(np.int32),
        "labels": np.where(hidden, tokens, IGNORED).astype(np.int32),
        "key": jax.random.split(jax.random.key(step), examples),
    }


EXAMPLE = training.Example(make_state, make_train_step, draw_batch)

if __name__ == "__main__":
    training.run(EXAMPLE)
