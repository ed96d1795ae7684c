"""Dynamic loss scaling: against the loss scale of `jmp`, and around optimizers."""

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp import precision


@pytest.mark.more
@pytest.mark.parametrize("chance", [0.1, 0.9])
def test_the_scale_goes_as_that_of_jmp_does(chance):
    jmp = pytest.importorskip("jmp")
    optimizer: Any = precision.dynamic_loss_scale(optax.sgd(1.0), 2.0**124, period=3, factor=4)
    state = optimizer.init(jnp.ones(2))
    scale = jmp.DynamicLossScale(jnp.float32(2.0**124), period=3, factor=4)
    scales = []
    for finite in np.random.default_rng(0).random(120) < chance:
        _, state = optimizer.update(jnp.array([1.0, 1.0 if finite else jnp.nan]), state)
        scale = scale.adjust(jnp.array(finite))
        assert bool(state.finite) == finite
        assert (state.scale, state.steps) == (scale.loss_scale, scale.counter)
        scales.append(float(state.scale))
    limit = 1.0 if chance < 0.5 else 2.0**126  # a further factor would not be finite
    assert scales.count(limit) > 1


def test_updates_are_those_of_the_unscaled_gradients_and_zero_where_they_are_not_finite():
    inner = optax.adamw(0.1)
    optimizer: Any = precision.dynamic_loss_scale(inner, 4.0)
    params = {"w": jnp.arange(3.0), "frozen": None}
    gradients = {"w": jnp.array([1.0, -2.0, 3.0]), "frozen": None}
    want, wanted = inner.update(gradients, inner.init(params), params)
    scaled = {"w": (4 * gradients["w"]).astype(jnp.float16), "frozen": None}
    got, state = optimizer.update(scaled, optimizer.init(params), params)
    chex.assert_trees_all_equal((got, state.inner), (want, wanted), strict=True)
    bad = {"w": jnp.array([1.0, jnp.inf, 3.0]), "frozen": None}
    zero, skipped = optimizer.update(bad, state, params)
    chex.assert_trees_all_equal(skipped.inner, state.inner, strict=True)
    chex.assert_trees_all_equal(zero, {"w": jnp.zeros(3), "frozen": None}, strict=True)


def test_small_gradients_are_unscaled_in_float32():
    optimizer: Any = precision.dynamic_loss_scale(optax.sgd(1.0), 2.0**15)
    update, _ = optimizer.update(jnp.ones((), jnp.float16), optimizer.init(jnp.zeros(())))
    assert update.dtype == jnp.float32 and float(update) == -(2.0**-15)
