"""A loop that takes layers of a stack by their number is cut as a scan over the stack."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.runtime import StackedArray
from tests.transforms import two_layers

LAYERS, WIDTH = 6, 4
PARAMS = {
    "layers": {
        "w": jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
        "b": jax.random.normal(jax.random.key(1), (LAYERS, WIDTH)),
    },
    "head": jnp.ones(WIDTH),
}
X = jax.random.normal(jax.random.key(2), (8, WIDTH))


def layer(h, p):
    return h + jnp.tanh(h @ p["w"] + p["b"])


def take(w, i):
    return jax.tree.map(lambda a: a[i], w["layers"])


def loss(w, h):
    return jnp.mean((h @ w["head"] - 1) ** 2)


def numbers_as_xs(w, x):
    return jax.lax.scan(lambda h, i: (layer(h, take(w, i)), None), x, jnp.arange(LAYERS))[0]


def reverse(w, x):
    step = lambda h, i: (layer(h, take(w, i)), None)  # noqa: E731
    return jax.lax.scan(step, x, jnp.arange(LAYERS), reverse=True)[0]


def fori(w, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, h: layer(h, take(w, i)), x)


def last_first(w, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, h: layer(h, take(w, LAYERS - 1 - i)), x)


def number_is_read(w, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, h: layer(h * (1 + 0.1 * i), take(w, i)), x)


def halves(w, x):
    half = lambda low, high, x: jax.lax.fori_loop(  # noqa: E731
        low, high, lambda i, h: layer(h, take(w, i)), x
    )
    return half(3, LAYERS, half(0, 3, x))


def inside_jit(w, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, h: jax.jit(lambda i: layer(h, take(w, i)))(i), x)


def with_results(w, x):
    def step(carry, _):
        i, h = carry
        h = layer(h, take(w, i))
        return (i + 1, h), jnp.sum(h)

    (n, h), sums = jax.lax.scan(step, (0, x), None, length=LAYERS)
    return h * jnp.mean(sums) / n


def partly_as_xs(w, x):
    def step(h, own):
        return layer(h, {"w": own[0], "b": w["layers"]["b"][own[1]]}), None

    return jax.lax.scan(step, x, (w["layers"]["w"], jnp.arange(LAYERS)))[0]


WALKS = [
    numbers_as_xs, reverse, fori, last_first, number_is_read, halves, inside_jit, with_results,
    partly_as_xs,
]  # fmt: skip


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.__name__)
def test_a_walk_by_number_is_cut_between_layers(walk):
    def fun(w, x):
        return loss(w, walk(w, x))

    with pytest.warns(UserWarning, match=r"test_walked.py:\d+ takes the layers of a stack by"):
        staged = jaxpp.split_stages(fun, 2)(PARAMS, X)
    np.testing.assert_array_equal(staged, fun(PARAMS, X))
    staged = jaxpp.split_stages(fun, 2)
    for own in (lambda f: f, jax.grad):
        got, want = jax.jit(own(staged))(PARAMS, X), jax.jit(own(fun))(PARAMS, X)
        chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)
    placed = two_layers.place(two_layers.scheduled(staged))
    _, grads = placed(PARAMS, X)
    assert all(isinstance(g, StackedArray) for g in jax.tree.leaves(grads["layers"]))
    assert {k for p in placed.programs for s in p.sends for k in s.message.kinds} == {"edge"}
    _, want = two_layers.accumulated(fun)(PARAMS, X)
    chex.assert_trees_all_close(jax.device_get(grads), want, rtol=1e-5, atol=1e-6)
    jaxpp.certify(placed, PARAMS, X)


def permuted(w, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, h: layer(h, take(w, (5 * i) % LAYERS)), x)


def as_while(w, x):
    def step(carry):
        return carry[0] + 1, layer(carry[1], take(w, carry[0]))

    return jax.lax.while_loop(lambda c: c[0] < LAYERS, step, (0, x))[1]


@pytest.mark.parametrize("walk", [permuted, as_while])
def test_a_walk_that_is_not_cut_is_told_the_way_out(walk):
    with pytest.warns(UserWarning, match=r"by a lax.scan over the layers, with their stack as xs"):
        jaxpp.split_stages(lambda w, x: loss(w, walk(w, x)), 2)(PARAMS, X)


def test_parameters_in_the_second_argument_are_told_the_way_out():
    def fun(x, w):
        return loss(w, jax.lax.scan(lambda h, p: (layer(h, p), None), x, w["layers"])[0])

    with pytest.warns(UserWarning, match="make them the first argument"):
        jaxpp.split_stages(fun, 2)(X, PARAMS)


def test_a_path_into_a_dictionary_is_told_the_way_out():
    with pytest.raises(ValueError, match=r"jaxpp.pipeline_enter_stage, or give num_stages"):
        jaxpp.split_stages(lambda w, x: loss(w, fori(w, x)), at=["blocks.2"])(PARAMS, X)
