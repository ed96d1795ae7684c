"""A model that a loss calls twice: both calls read the same parameters, and add to one gradient."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from tests.helpers import assert_same, mesh_of

nnx = pytest.importorskip("flax.nnx")

MICROBATCHES = 2
XS = jax.random.normal(jax.random.key(0), (3, 8, 4))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


GRAPH, STATE = nnx.split(Net(nnx.Rngs(0)))
MLP = eqx.nn.MLP(4, 4, 4, 3, key=jax.random.key(1))

MODELS = {
    "equinox": (MLP, lambda model: jax.vmap(model)),
    "nnx": (STATE, lambda state: nnx.merge(GRAPH, state)),
}


def on_two_inputs(net, x):
    """Siamese: the calls do not depend on each other."""
    return jnp.mean((net(x) - net(2.0 * x)) ** 2)


def on_its_own_output(net, x):
    return jnp.mean((net(net(x)) - x) ** 2)


def with_a_frozen_one(net, x):
    """The gradient of one of the calls is stopped."""
    return jnp.mean((net(x) - jax.lax.stop_gradient(net(2.0 * x))) ** 2)


def train(model, grad_fn, place):
    arrays, rest = eqx.partition(model, eqx.is_array)
    arrays = jax.tree.map(jnp.copy, arrays)  # the step consumes them

    def step(arrays, x):
        value, grads = grad_fn(eqx.combine(arrays, rest), x)
        grads = eqx.filter(grads, eqx.is_array)
        return jax.tree.map(lambda w, g: w - 0.1 * g, arrays, grads), value

    step, values = place(step), []
    for x in XS:
        arrays, value = step(arrays, x)
        values.append(value)
    return jax.tree.leaves(jax.device_get((arrays, values)))


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("library", MODELS)
@pytest.mark.parametrize("loss", [on_two_inputs, on_its_own_output, with_a_frozen_one])
def test_a_model_that_is_called_twice_is_exact(loss, library, num_stages):
    model, call = MODELS[library]

    def loss_fn(model, x):
        return loss(call(model), x)

    staged = jaxpp.wrap_forward(jaxpp.split_stages(loss_fn, num_stages))
    grad_fn = jaxpp.microbatch(eqx.filter_value_and_grad(staged), MICROBATCHES)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())
    apart, together = (
        train(model, grad_fn, lambda step, m=m: jaxpp.place(step, m, donate_argnums=0))
        for m in (mesh_of(num_stages), mesh_of(num_stages, shared=True))
    )
    assert_same(apart, together)
    chex.assert_trees_all_close(
        apart, train(model, eqx.filter_value_and_grad(loss_fn), jax.jit), rtol=1e-5, atol=1e-6
    )
