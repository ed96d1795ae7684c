"""A training that is planned: its sizes, its plan, and its step, for this process or a worker."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, Float, Int, UInt8

import jaxpp
from experiments.models.language import cross_entropy
from experiments.models.mixed import Model
from experiments.training import data
from jaxpp.schedules import Schedule

RANKS = 2
LEARNING_RATE = 1e-3

#: For each model the kinds of its layers.
KINDS = {"vocabulary": (0,) * 4, "mixed": (16, 0, 2, 8)}


@dataclasses.dataclass(frozen=True)
class Run:
    """The sizes of a training, which worker processes are told."""

    model: str
    width: int
    vocabulary: int
    batch_size: int
    length: int
    microbatches: int

    def start(self) -> tuple[Model, optax.OptState]:
        """The state that a training begins with."""
        vocabulary = self.vocabulary if self.model == "vocabulary" else 256
        model = Model(KINDS[self.model], self.width, vocabulary, jax.random.key(0))
        return model, optimizer().init(eqx.filter(model, eqx.is_array))

    def batch(self, step: int) -> Int[np.ndarray, "batch time_plus_1"]:
        """The batch of a step: sequences of bytes of Python's library, and the byte after each."""
        return data.batch(
            text(), batch_size=self.batch_size, sequence_length=self.length, seed=0, step=step
        )


@functools.cache
def text() -> UInt8[np.ndarray, " bytes"]:
    """Python's own library."""
    return data.load().train


@functools.cache
def optimizer() -> optax.GradientTransformation:
    """The update rule."""
    return optax.adamw(LEARNING_RATE)


def loss_fn(model: Model, tokens: Int[Array, "batch time"]) -> Float[Array, ""]:
    """The mean cross-entropy of each next token."""
    return cross_entropy(jax.vmap(model)(tokens[:, :-1]), tokens[:, 1:])


def planned(process: Any, run: Run, **options: Any) -> jaxpp.Plan:
    """The plan, made on a worker's device; `options` are those of `jaxpp.plan`."""
    model, _ = run.start()
    return jaxpp.plan(
        loss_fn, model, run.batch(0), ranks=RANKS, microbatches=run.microbatches,
        device=process.home, repeats=5, **options,
    )  # fmt: skip


def make_step(run: Run, cuts: Any, order: Schedule, mesh: Any) -> Any:
    """The train step with the cuts and the schedule of a plan."""
    return step_from(run, jaxpp.split_stages(loss_fn, at=cuts), order, mesh)


def step_from(run: Run, split: Any, order: Schedule, mesh: Any) -> Any:
    """The train step of a loss function that is cut into stages."""
    staged = jaxpp.wrap_forward(split)
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), run.microbatches)
    grad_fn = jaxpp.schedule(grad_fn, order)

    def train_step(model, opt_state, tokens):
        loss, grads = grad_fn(model, tokens)
        updates, opt_state = optimizer().update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return jaxpp.place(train_step, mesh, donate_argnums=(0, 1))


def step_of(run: Run, plan: jaxpp.Plan, mesh: Any) -> Any:
    """The step of a plan."""
    return make_step(run, plan.cuts, plan.order, mesh)
