"""The five transforms keep the types of the functions that they take."""

import inspect
import typing

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.transforms.place import Placed


def loss_fn(weight: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((jaxpp.pipeline_enter_stage(jnp.tanh(x @ weight)) @ weight) ** 2)


def train_step(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    grad_fn = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss_fn)), 2)
    grad = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())(weight, x)
    return weight - grad, jnp.sum(grad)


def test_a_transformed_function_has_the_types_of_the_function():
    """Types are what pyright checks; it runs on the tests, too."""
    staged = typing.assert_type(jaxpp.split_stages(loss_fn)(jnp.eye(2), jnp.eye(2)), jax.Array)
    wrapped = typing.assert_type(jaxpp.wrap_forward(loss_fn)(jnp.eye(2), jnp.eye(2)), jax.Array)
    looped = typing.assert_type(jaxpp.microbatch(loss_fn, 2)(jnp.eye(2), jnp.eye(2)), jax.Array)
    assert staged.shape == wrapped.shape == looped.shape == ()
    step = jaxpp.place(train_step, jaxpp.MpmdMesh((2,)))
    weight, _ = typing.assert_type(step(jnp.eye(2), jnp.eye(2)), tuple[jax.Array, jax.Array])
    fed: Placed[..., tuple[jax.Array, jax.Array]] = jaxpp.place(train_step, feed={1: jnp.eye})
    assert jnp.array_equal(weight, fed(jnp.eye(2), 2)[0])


@pytest.mark.parametrize(
    "name", ["split_stages", "wrap_forward", "microbatch", "schedule", "place"]
)
def test_no_argument_of_a_transform_is_of_any_type(name):
    annotations = inspect.get_annotations(getattr(jaxpp, name))
    assert set(annotations) == {"return", *inspect.signature(getattr(jaxpp, name)).parameters}
    assert typing.Any not in annotations.values()
