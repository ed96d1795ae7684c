"""Two computations are one only if JAX itself could not tell them apart."""

import chex
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

import jaxpp
from jaxpp import jaxprs
from tests.models import with_backward, with_tangent
from tests.transforms import two_layers
from tests.transforms.two_layers import WEIGHTS, X


@pytest.mark.parametrize("make", [with_backward, with_tangent])
def test_functions_with_other_derivative_rules_are_not_one(make):
    """Both are read by no microbatch alone, and are computed before the loop."""
    one, hundred = make(1.0), make(100.0)

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(x @ one(w))
        return jnp.sum(h @ hundred(w))

    loop = jaxpp.microbatch(jaxpp.wrap_forward(loss), 2)
    forward = jaxpp.schedule(loop, jaxpp.schedules.ForwardOnly())
    w = jax.random.normal(jax.random.key(3), (4, 4))
    want = jax.grad(lambda w, x: (loss(w, x[:4]) + loss(w, x[4:])) / 2)(w, X)
    chex.assert_trees_all_close(jax.grad(forward)(w, X), want, rtol=1e-5)


@pytest.mark.more
def test_a_step_under_another_implementation_of_random_bits_is_another():
    """One function in two loops of a step, each under its own."""

    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
        noise = jax.random.normal(jax.random.key(0), (3, 5)).sum()
        return jnp.mean((h @ w[1]) ** 2) + noise

    def make(grad_fn):
        def step(w, x):
            values = []
            for partitionable in (True, False):
                with jax.threefry_partitionable(partitionable):
                    values.append(grad_fn(loss)(w, x)[0])
            return values

        return step

    got = two_layers.place(make(two_layers.scheduled))(WEIGHTS, X)
    want = jax.jit(make(two_layers.accumulated))(WEIGHTS, X)
    assert abs(float(want[0]) - float(want[1])) > 0.1
    chex.assert_trees_all_close(got, want, rtol=1e-5)


def scaling_primitive(factor=None, name="scaling"):
    """A primitive of a user's: `x` times a factor, its own or that of its parameter `name`."""
    primitive = jex.Primitive(name)

    def scale(x, *, name):
        return x * (factor if factor is not None else len(name))

    primitive.def_impl(scale)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    mlir.register_lowering(primitive, mlir.lower_fun(scale, multiple_results=False))
    return primitive


def test_a_parameter_called_name_is_a_parameter():
    primitive = scaling_primitive()

    def step(grad_fn, name):
        def run(w, x):
            value, grads = grad_fn(w, x)
            return primitive.bind(value, name=name), [primitive.bind(g, name=name) for g in grads]

        return run

    for name in ("a", "abcde"):
        got = two_layers.place(step(two_layers.scheduled(), name))(WEIGHTS, X)
        want = jax.jit(step(two_layers.accumulated(), name))(WEIGHTS, X)
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


def test_a_primitive_that_is_defined_again_is_another():
    """As in a notebook whose cell is run twice."""
    for factor in (2.0, 7.0):
        primitive = scaling_primitive(factor)

        def step(grad_fn, primitive=primitive):
            def run(w, x):
                value, grads = grad_fn(w, x)
                return primitive.bind(value, name="x"), grads

            return run

        got = two_layers.place(step(two_layers.scheduled()))(WEIGHTS, X)
        want = jax.jit(step(two_layers.accumulated()))(WEIGHTS, X)
        chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


# ---- the key ------------------------------------------------------------------------------------


def key(fun, *args, **options):
    return jaxprs.structure(jaxprs.trace(fun, args).jaxpr, **options)


def test_weak_types_count():
    strong, weak = jnp.float32(2.0), 2.0
    assert key(lambda x: x * 2, strong) != key(lambda x: x * 2, jnp.asarray(weak))


def test_derivative_rules_count_only_where_they_can_be_used():
    one, other = with_backward(1.0), with_backward(2.0)
    assert key(one, X) == key(other, X)
    assert key(one, X, differentiable=True) != key(other, X, differentiable=True)


def test_the_configuration_of_an_equation_counts():
    def bits():
        return jax.random.bits(jax.random.key(0), (3,))

    def under(partitionable):
        with jax.threefry_partitionable(partitionable):
            return key(bits)

    assert under(True) == under(True) != under(False)


@pytest.mark.more
def test_the_name_of_a_jitted_function_does_not_count():
    def one(x):
        return jnp.sin(x)

    def other(x):
        return jnp.sin(x)

    assert key(jax.jit(one), X) == key(jax.jit(other), X)
    assert key(lambda x: np.float32(1) * x, X) != key(lambda x: np.float32(2) * x, X)
