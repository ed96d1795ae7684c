"""Trains a small model on four pipeline ranks: in one process, on Ray workers, or launched.

`python train.py local`, `python train.py ray`, or, started by torchrun, mpirun or srun,
`train.py launched`: only the mesh's line differs, and the losses are the same to the bit.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp

RANKS, STEPS = 4, 20


def loss_fn(params, x):
    for number, (w, b) in enumerate(params):
        x = x if number == 0 else jaxpp.pipeline_enter_stage(x)
        x = jnp.tanh(x @ w + b)
    return jnp.mean(jnp.square(x - 0.5))


def init_params(key):
    keys = jax.random.split(key, RANKS)
    return [(jax.random.normal(k, (64, 64)) / 8, jnp.zeros(64)) for k in keys]


def load_batch(number):
    """Runs in the process of each rank that reads the batch, while the step before runs."""
    return np.random.default_rng(number).normal(size=(32, 64)).astype(np.float32)


def make_mesh(kind):
    if kind == "launched":
        return jaxpp.LaunchedMpmdMesh((RANKS,))
    if kind == "ray":
        return jaxpp.RemoteMpmdMesh((RANKS,))
    return jaxpp.MpmdMesh((RANKS,), devices=jax.devices()[:1] * RANKS)


def main(kind="local", folder=None):
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), 8)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def train_step(params, batch):
        loss, grads = grad_fn(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    with make_mesh(kind) as mesh:
        step = jaxpp.place(train_step, mesh, donate_argnums=0, feed={1: load_batch})
        first = 0
        params = step.initialize(init_params, jax.random.key(0), rest=(0,))
        saved = sorted(pathlib.Path(folder).glob("step-*")) if folder else []
        if saved:  # a job that is started again goes on where its checkpoint is
            params, first = jaxpp.load_state(saved[-1], params), int(saved[-1].name[-4:])
        for number in range(first, STEPS):
            params, loss = step(params, number)
            if (number + 1) % 10 == 0:
                loss = float(loss)  # all processes fetch; one prints
                if getattr(mesh, "process", 0) == 0:
                    print(f"step {number + 1}: loss {loss!r}", flush=True)
                if folder:
                    jaxpp.save_state(f"{folder}/step-{number + 1:04}", params)


if __name__ == "__main__":
    main(*sys.argv[1:])
