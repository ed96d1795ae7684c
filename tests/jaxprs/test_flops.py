"""The cost model against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp import jaxprs

X, W = jnp.ones((4, 8)), jnp.ones((8, 16))
IMAGE, KERNEL = jnp.ones((2, 3, 10, 10)), jnp.ones((5, 3, 3, 3))


def total(fun, *args):
    return sum(jaxprs.flops(eqn) for eqn in jax.make_jaxpr(fun)(*args).eqns)


@pytest.mark.parametrize(
    ("fun", "args", "flops"),
    [
        (lambda x, w: x @ w, (X, W), 2 * 4 * 8 * 16),
        (jnp.matmul, (jnp.ones((3, 4, 8)), jnp.ones((3, 8, 2))), 384),
        (lambda x: jnp.tanh(x), (X,), 32),
        (lambda x: x.sum(), (X,), 32),
        (lambda x: x.max(1), (X,), 32),
        (lambda x: x.reshape(8, 4).T, (X,), 0),
        (lambda x: jax.jit(jnp.tanh)(x), (X,), 32),
        (lambda x: jax.checkpoint(jnp.tanh)(x), (X,), 32),
        (lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, 5)[0], (X,), 5 * 32),
        (lambda x: jax.lax.cond(True, lambda x: jnp.tanh(jnp.tanh(x)), jnp.tanh, x), (X,), 64),
        (lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), (IMAGE, KERNEL), 2 * 2 * 5 * 100 * 27),
        (
            lambda x, k: jax.lax.conv_general_dilated(
                x, k, (1, 1), "SAME", feature_group_count=3
            ),
            (IMAGE, jnp.ones((6, 1, 3, 3))),
            2 * 2 * 6 * 100 * 9,
        ),
    ],
    ids=[
        "matmul", "batched", "elementwise", "sum", "max", "layout", "jit", "checkpoint", "scan",
        "cond", "conv", "grouped-conv",
    ],
)  # fmt: skip
def test_flops_are_those_counted_by_hand(fun, args, flops):
    assert total(fun, *args) == flops


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (np.zeros((3, 4), np.float32), 48),
        (np.zeros((3, 4), np.int8), 12),
        (jnp.zeros((), jnp.bfloat16), 2),
        (np.zeros(5, bool), 5),
        (jax.random.key(0), 8),
        (jax.random.split(jax.random.key(0, impl="rbg"), 3), 48),
    ],
    ids=["float32", "int8", "bfloat16", "bool", "key", "keys"],
)
def test_bytes_are_those_of_the_array(value, nbytes):
    jaxpr = jax.make_jaxpr(lambda x: x)(value)
    assert jaxprs.nbytes(jaxpr.jaxpr.invars[0]) == nbytes


def test_balance_is_resolved():
    def mine(eqn):
        return 1.0

    assert jaxprs.cost_function("flops") is jaxprs.flops
    assert jaxprs.cost_function(mine) is mine
    with pytest.raises(
        ValueError, match="balance is 'flops', 'layers' or a function of an equation, got 3"
    ):
        jaxprs.cost_function(3)  # pyright: ignore[reportArgumentType]
