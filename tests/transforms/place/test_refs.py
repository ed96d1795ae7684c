"""A `jax.new_ref` that a function makes is written and read as in the plain function."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from tests.transforms import two_layers
from tests.transforms.two_layers import WEIGHTS, X


def within_a_stage(w, x):
    h = jnp.tanh(x @ w[0])
    ref = jax.new_ref(jnp.zeros_like(h))
    ref[...] = 2 * h
    ref[0] += 1.0
    h = jaxpp.pipeline_enter_stage(jax.freeze(ref))
    return jnp.mean((h @ w[1]) ** 2)


def across_stages(w, x):
    h = jnp.tanh(x @ w[0])
    ref = jax.new_ref(h)
    h = jaxpp.pipeline_enter_stage(h)
    out = h @ w[1] + ref[...][:, :4]
    ref[...] = 3 * h
    return jnp.mean(out**2) + jnp.sum(ref[...] ** 2)


def in_a_loop_of_a_stage(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
    ref = jax.new_ref(jnp.zeros((x.shape[0], 4)))

    def body(i, _):
        ref[...] += (h @ w[1]) * i

    jax.lax.fori_loop(0, 3, body, None)
    return jnp.mean(ref[...] ** 2)


def in_a_jitted_part(w, x):
    @jax.jit
    def layer(h, w):
        ref = jax.new_ref(h)
        ref[...] = jnp.tanh(ref[...])
        return ref[...] @ w

    h = jaxpp.pipeline_enter_stage(layer(x, w[0]))
    return jnp.mean(layer(h, w[1]) ** 2)


@pytest.mark.parametrize(
    "loss", [within_a_stage, across_stages, in_a_loop_of_a_stage, in_a_jitted_part]
)
def test_a_ref_of_the_loss(loss):
    got = two_layers.place(two_layers.scheduled(loss))(WEIGHTS, X)
    want = jax.jit(two_layers.accumulated(loss))(WEIGHTS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


def tenfold():
    """`2 * x`, with a backward that no derivative of it would give."""
    fun = jax.custom_vjp(lambda x: 2 * x)
    fun.defvjp(lambda x: (2 * x, None), lambda _, g: (10 * g,))
    return fun


def rule_beside(h):
    ref = jax.new_ref(h)
    ref[0] *= 0.5
    return tenfold()(ref[...])


def rule_around(h):
    def double(x):
        ref = jax.new_ref(x)
        ref[...] *= 2
        return ref[...]

    fun = jax.custom_vjp(double)
    fun.defvjp(lambda x: (double(x), None), lambda _, g: (10 * g,))
    return fun(h)


def rule_in_a_jit(h):
    return jax.jit(rule_beside)(h)


def rule_in_a_scan(h):
    return jax.lax.scan(lambda c, _: (jnp.sin(rule_beside(c)), None), h, None, 3)[0]


def rule_in_a_checkpoint(h):
    return jax.checkpoint(rule_beside)(h)


@pytest.mark.parametrize(
    "layer", [rule_beside, rule_around, rule_in_a_jit, rule_in_a_scan, rule_in_a_checkpoint]
)
def test_a_ref_leaves_derivative_rules_as_they_are(layer):
    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(layer(x @ w[0]))
        return jnp.mean((h @ w[1]) ** 2)

    got = two_layers.place(two_layers.scheduled(loss))(WEIGHTS, X)
    want = jax.jit(two_layers.accumulated(loss))(WEIGHTS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_rule_in_a_loop_that_writes_a_ref_from_outside_is_refused_with_its_line():
    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(x @ w[0])
        ref = jax.new_ref(h)

        def body(_, c):
            ref[...] += tenfold()(h)
            return c

        jax.lax.fori_loop(0, 3, body, 0)
        return jnp.mean((ref[...] @ w[1]) ** 2)

    with pytest.raises(ValueError, match=r"test_refs\.py:\d+ reads or writes a jax.new_ref"):
        two_layers.scheduled(loss)(WEIGHTS, X)


@pytest.mark.more
def test_a_ref_of_the_step():
    def make(grad_fn):
        def step(w, x):
            ref = jax.new_ref(jnp.zeros(()))
            count = jax.new_ref(jnp.zeros(3, jnp.int32))
            value, grads = grad_fn(w, x)
            ref[...] = value
            count[1] += 2
            return ref[...], jax.freeze(count), grads

        return step

    got = two_layers.place(make(two_layers.scheduled()))(WEIGHTS, X)
    want = jax.jit(make(two_layers.accumulated()))(WEIGHTS, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("given", ["closed over", "an argument"])
def test_a_ref_from_outside_of_the_step_is_refused_with_its_line(given):
    ref, grad_fn = jax.new_ref(jnp.zeros(())), two_layers.scheduled()

    def step(ref, w, x):
        value, grads = grad_fn(w, x)
        ref[...] += value
        return grads

    fun = functools.partial(step, ref) if given == "closed over" else step
    with pytest.raises(ValueError, match=r"test_refs\.py:\d+ a jax.new_ref made outside of it"):
        two_layers.place(fun)(*((ref,) * (fun is step)), WEIGHTS, X)
