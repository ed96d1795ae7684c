"""Ranks that send from device to device, by JAX's transfers between processes."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp


def listen(process):
    """Notes from now on what JAX compiles in a worker."""
    process.compiled = []

    def note(event, duration_secs, **kwargs):
        if "backend_compile" in event:
            stack = traceback.extract_stack()
            own = [f"{f.filename}:{f.lineno}" for f in stack if "/jaxpp/" in f.filename]
            process.compiled.append(own[-1] if own else str(stack))

    jax.monitoring.register_event_duration_secs_listener(note)


def compiled(process):
    return process.compiled


def test_a_loaded_step_compiles_nothing_when_it_is_called(ray_session):
    """A rank that compiled would hold up its peers, whose transfers may hold up its device."""

    def passed_on(params, x):  # what is sent is donated, too
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params["tied"]))
        return jnp.mean((h @ params["tied"].T @ params["last"]) ** 2)

    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(passed_on)), 2)
    grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())

    def step(params, key, x):
        value, grads = grad(params, x + jax.random.normal(key, x.shape))
        return jax.tree.map(lambda p, g: p - g, params, grads), jax.random.split(key, 1)[0], value

    state = {name: jnp.eye(4) for name in ("tied", "last")}, jax.random.key(0)
    each = {rank: () for rank in range(2)}
    with jaxpp.RemoteMpmdMesh((2,), transport="device") as mesh:
        placed = jaxpp.place(step, mesh, donate_argnums=(0, 1))
        placed.lower(*state, jnp.ones((8, 4))).compile()
        mesh.apply(listen, each)
        for _ in range(3):
            *state, value = placed(*state, np.ones((8, 4), np.float32))
        float(value)
        assert mesh.apply(compiled, each) == {0: [], 1: []}
