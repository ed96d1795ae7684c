"""The empty pipeline on a launched mesh: a process, which runs blocks of steps when it is told.

`remote_step.py` starts it, as it does `torch_pipeline.py`, and takes turns with both: for each line
of standard input, the number of steps, process 0 prints a line with their seconds; first the loss.
All processes get the same lines.
"""

import argparse
import dataclasses
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import jaxpp
from benchmarks.empty_pipeline import LEARNING_RATE, EmptyPipeline
from benchmarks.equal_blocks import Loop, elapsed

WARM_UP_STEPS = 20


def empty_loop(pipeline: EmptyPipeline, mesh: Any) -> Loop:
    """The training loop of an empty pipeline."""

    def loss_fn(weights, batch):
        x, y = batch
        for stage, w in enumerate(weights):
            if stage:
                x = jaxpp.pipeline_enter_stage(x)
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn))
    grad_fn = jaxpp.microbatch(jax.value_and_grad(staged), pipeline.microbatches)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.by_name(pipeline.schedule))

    def train_step(weights, batch):
        loss, grads = grad_fn(weights, batch)
        return [w - LEARNING_RATE * g for w, g in zip(weights, grads, strict=True)], loss

    step = jaxpp.place(train_step, mesh, donate_argnums=0)
    weights = [jnp.asarray(w) for w in pipeline.weights()]
    return Loop(step, (weights,), pipeline.batch())


def run_block(loop: Loop, steps: int) -> float:
    """Trains for some steps; gives the seconds until all processes know the last loss."""
    start = time.perf_counter()
    for _ in range(steps - 1):
        loop()
    float(loop()[1])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(EmptyPipeline):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    pipeline = EmptyPipeline(**vars(parser.parse_args()))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    with jaxpp.LaunchedMpmdMesh((pipeline.ranks,), ("mpmd",)) as mesh:
        loop = empty_loop(pipeline, mesh)

        def tell(value: float) -> None:
            if mesh.process == 0:
                print(value, flush=True)

        tell(float(loop()[1]))
        elapsed(loop, WARM_UP_STEPS)
        for line in sys.stdin:
            tell(run_block(loop, int(line)))


if __name__ == "__main__":
    main()
