"""What the examples of other libraries share: a reference on one device, and a main program."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags

import jaxpp
from jaxpp.schedules import Schedule, by_name


@dataclasses.dataclass(frozen=True)
class Example:
    """A training run in some library, of a model with a layer for each stage.

    `make_train_step(schedule, num_stages, num_microbatches)` gives `step(state, batch)`, whose
    results are the next state and the loss: as a pipeline, or without a schedule on one device.
    """

    make_state: Callable[[int], Any]  # of the number of stages
    make_train_step: Callable[[Schedule | None, int, int], Callable]
    draw_batch: Callable[[int, int], Any]  # of a step's number and the number of microbatches


def in_a_loop(loss_fn: Callable, num_microbatches: int) -> Callable:
    """Gradients of `loss_fn(params, batch)`, accumulated as one does without this library."""
    grad_fn = in_a_loop_with_state(
        lambda params, state, batch: (loss_fn(params, batch), state), num_microbatches
    )

    def accumulated(params, batch):
        (loss, _), grads = grad_fn(params, (), batch)
        return loss, grads

    return accumulated


def in_a_loop_with_state(loss_fn: Callable, num_microbatches: int) -> Callable:
    """The same of `loss_fn(params, state, batch)`, which gives the loss and the next state."""
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    def accumulated(params, state, batch):
        slices = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)

        def body(state, microbatch):
            (loss, state), grads = grad_fn(params, state, microbatch)
            return state, (loss, grads)

        state, results = jax.lax.scan(body, state, slices)
        loss, grads = jax.tree.map(lambda x: x.mean(axis=0), results)
        return (loss, state), grads

    return accumulated


def run(example: Example) -> None:
    """Runs an example as a script: trains it as a pipeline and on one device, and prints both."""
    schedule_name = flags.DEFINE_string("schedule", "1f1b", "For jaxpp.schedules.by_name.")
    ranks = flags.DEFINE_integer("ranks", 2, "Pipeline ranks, a CPU device each.")
    microbatches = flags.DEFINE_integer("microbatches", 4, "Microbatches.")
    steps = flags.DEFINE_integer("steps", 10, "Training steps.")

    def main(_):
        jax.config.update("jax_num_cpu_devices", ranks.value)
        schedule = by_name(schedule_name.value)
        num_stages = ranks.value * schedule.stages_per_rank
        sizes = num_stages, microbatches.value
        step = jaxpp.place(
            example.make_train_step(schedule, *sizes), jaxpp.MpmdMesh((ranks.value,))
        )
        plain_step = jax.jit(example.make_train_step(None, *sizes))
        state = plain_state = example.make_state(num_stages)
        for number in range(steps.value):
            batch = example.draw_batch(number, microbatches.value)
            state, loss = step(state, batch)
            plain_state, plain_loss = plain_step(plain_state, batch)
            print(f"step {number}: loss {loss:.6f}, on one device {plain_loss:.6f}")

    app.run(main)
