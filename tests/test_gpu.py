"""The laws on a GPU, which the ranks share where there is only one."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp

pytestmark = pytest.mark.gpu


def _loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


@pytest.mark.parametrize("schedule", [jaxpp.schedules.OneFOneB(), jaxpp.schedules.ZeroBubbleH1()])
def test_step_on_gpu_equals_the_plain_step(schedule):
    model = eqx.nn.MLP(16, 16, 32, 3, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (24, 16))
    gpus = jax.devices("gpu")
    mesh = jaxpp.MpmdMesh((4,), ("mpmd",), devices=[gpus[r % len(gpus)] for r in range(4)])

    def step_of(grad_fn):
        def step(model, x):
            loss, grads = grad_fn(model, x)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

        return step

    staged = jaxpp.wrap_forward(jaxpp.split_stages(_loss, 4))
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), 4)
    placed = jaxpp.place(step_of(jaxpp.schedule(grad_fn, schedule)), mesh)
    plain = eqx.filter_jit(step_of(eqx.filter_value_and_grad(_loss)))
    for _ in range(3):
        got, expected = placed(model, x), plain(model, x)
        for a, b in zip(
            jax.tree.leaves(eqx.filter(got, eqx.is_array)),
            jax.tree.leaves(eqx.filter(expected, eqx.is_array)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        model = expected[0]
