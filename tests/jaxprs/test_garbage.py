"""The garbage collector rests while a step is lowered or certified, and is then as before."""

import gc

import jax
import jax.numpy as jnp
import pytest

import jaxpp


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_and_is_then_as_before(enabled):
    seen = []

    def step(x, wrong):
        seen.append(gc.isenabled())
        if wrong:
            raise KeyError
        return jnp.sin(x)

    placed = jaxpp.place(step, jaxpp.MpmdMesh((1,)), static_argnums=1)
    (gc.enable if enabled else gc.disable)()
    try:
        placed.lower(jnp.ones(2), False).certify()
        with pytest.raises(KeyError):
            placed.lower(jnp.ones(2), True)
        jax.jit(placed, static_argnums=1)(jnp.ones(2), False)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen == [False, False, False, enabled]
