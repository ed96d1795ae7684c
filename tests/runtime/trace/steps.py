"""Steps to trace, and meshes to run them on."""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp
from jaxpp.runtime.trace import Times
from tests.helpers import mesh_of

WIDTH, BATCH, MICROBATCHES = 8, 8, 4
#: What a sleeping stage takes at least, in seconds.
NAP = 0.02


def loss_fn(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
    return jnp.mean(x**2)


def sleepy_loss_fn(params, x):
    """The forward of the last stage sleeps, and needs no core to do so."""
    for i, w in enumerate(params):
        x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)

    def nap(x):
        time.sleep(NAP)
        return np.asarray(x)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    waited = jax.pure_callback(nap, shape, jax.lax.stop_gradient(x))
    return jnp.mean((x + 0 * waited) ** 2)


def step_of(mesh, schedule=None, loss=loss_fn):
    loop = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), MICROBATCHES)
    grad_fn = jaxpp.schedule(loop, schedule or jaxpp.schedules.OneFOneB())

    def step(params, x):
        value, grads = grad_fn(params, x)
        return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value

    return jaxpp.place(step, mesh, donate_argnums=0)


def params_of(stages):
    keys = jax.random.split(jax.random.key(0), stages)
    return [jax.random.normal(k, (WIDTH, WIDTH)) for k in keys]


def batch():
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def traced(folder, *, calls=3, stages=3, ranks=3, shared=False, times: Times = "profile", **how):
    """The trace of some calls, and the placed step."""
    mesh = mesh_of(ranks, shared)
    step = step_of(mesh, **how)
    params, _ = step(params_of(stages), batch())
    mesh.start_trace(folder, times=times)
    for _ in range(calls):
        params, _ = step(params, batch())
    return mesh.stop_trace(), step
