"""Products are counted once for the same operands, through checkpoints, calls and loops."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpp import jaxprs

LAYERS, EXAMPLES, WIDTH = 5, 16, 8
W, X = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((EXAMPLES, WIDTH))
PRODUCT = 2 * EXAMPLES * WIDTH * WIDTH
ROWS = jnp.array([3, 3, 3, 3, 4])


def products(fun, *args):
    """The products of a function, of examples times weights."""
    jaxpr, counter = jax.make_jaxpr(fun)(*args), jaxprs.Products()
    counter.run(jaxpr, [counter.number(n) for n in range(len(jaxpr.jaxpr.invars))])
    return counter.flops / PRODUCT


def layers(w, x):
    for own in w:
        x = jnp.tanh(x @ own)
    return x


def scanned(w, x, wrap=lambda f: f):
    return jax.lax.scan(wrap(lambda x, w: (jnp.tanh(x @ w), None)), x, w)[0]


def scanned_twice(w, x, wrap=lambda f: f):
    """Scans over pairs of layers, and in each over its layers."""

    def pair(x, w):
        return scanned(w, x, wrap), None

    return jax.lax.scan(wrap(pair), x, w[:4].reshape(2, 2, WIDTH, WIDTH))[0]


def branches(w, x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w[0]), lambda x: layers(w[:2], x), x)


def ragged(w, x):
    return jax.lax.ragged_dot(jnp.tanh(jax.lax.ragged_dot(x, w, ROWS)), w, ROWS)


def sharded(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=specs[1])(w, x)


#: A function, and how many products the gradient of its weights has: in the forward, for each of
#: the weights, and for all examples but those of the first product.
CASES = [
    (layers, 14),
    (jax.jit(layers), 14),
    (scanned, 15),  # a loop computes the gradient of the examples, too
    (lambda w, x: scanned(w, x, jax.checkpoint), 15),
    (lambda w, x: scanned_twice(w, x, jax.checkpoint), 12),
    (branches, 5),
    (ragged, 5),
    (sharded, 14),
]
IDS = "calls jit scan body scans cond ragged shard_map".split()


@pytest.mark.parametrize(("fun", "count"), CASES, ids=IDS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_what_a_checkpoint_computes_again_counts_once(fun, count, wrap):
    assert products(jax.grad(lambda w, x: jnp.sum(wrap(fun)(w, x) ** 2)), W, X) == count


def test_dropout_is_recomputed_with_the_same_mask():
    def loss(w, x, key):
        h = jnp.tanh(x @ w[0]) * jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.sum((h @ w[1]) ** 2)

    for wrapped in (loss, jax.checkpoint(loss)):
        assert products(jax.grad(wrapped), W, X, jax.random.key(0)) == 5


def test_other_operands_are_other_products():
    assert products(lambda w, x: (x @ w[0]) + (x @ w[0]), W, X) == 1
    assert products(lambda w, x: (x @ w[0]) + (x @ w[1]), W, X) == 2
    assert products(lambda w, x: (x @ w[0]) + ((x + 1) @ w[0]), W, X) == 2
    assert products(lambda w, x: (x @ w[0]) + ((x + 2) @ w[0]) + ((x + 1) @ w[0]), W, X) == 3
    assert products(lambda w, x: scanned(w, x) + scanned(w[::-1], x), W, X) == 2 * LAYERS
    assert products(lambda w, x: scanned(w, x) + scanned(w, x + 1), W, X) == 2 * LAYERS
    assert products(lambda w, x: scanned(w, x) + scanned(w, x), W, X) == LAYERS


def test_a_while_loop_counts_its_body_once():
    def loop(w, x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w[0]), (0, x))[1]

    assert products(loop, W, X) == 1
    assert products(lambda w, x: jax.lax.fori_loop(0, 3, lambda _, x: x @ w[0], x), W, X) == 3
