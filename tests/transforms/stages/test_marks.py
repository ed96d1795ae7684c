"""The two primitives that mark a program: identities under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import jaxprs
from jaxpp.transforms.stages import _marks
from tests.helpers import assert_close

X = jax.random.normal(jax.random.key(0), (3, 4))


def entered(x):
    return jnp.tanh(jaxpp.pipeline_enter_stage(jnp.sin(x)))


def edged(x):
    return jnp.tanh(_marks.edge(jnp.sin(x)))


def plain(x):
    return jnp.tanh(jnp.sin(x))


def summed(fun):
    return lambda x: fun(x).sum()


@pytest.mark.parametrize("fun", [entered, edged])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        jax.vmap,
        lambda f: jax.vmap(f, in_axes=1, out_axes=1),
        lambda f: jax.grad(summed(f)),
        lambda f: jax.grad(summed(jax.grad(summed(f)))),
        lambda f: jax.vmap(jax.grad(summed(f))),
        lambda f: jax.jacfwd(f),
        lambda f: jax.jacrev(f),
        lambda f: lambda x: jax.jvp(f, (x,), (2 * x,)),
        lambda f: lambda x: jax.linearize(f, x)[1](2 * x),
        lambda f: lambda x: jax.lax.map(f, x),
    ],
    ids=[
        "eager", "jit", "checkpoint", "vmap", "vmap-axis-1", "grad", "grad-grad", "vmap-grad",
        "jacfwd", "jacrev", "jvp", "linearize", "map",
    ],
)  # fmt: skip
def test_marks_are_identities(fun, transform):
    got, want = jax.jit(transform(fun))(X), jax.jit(transform(plain))(X)
    assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "value",
    [np.arange(3), jnp.array(True), jax.random.key(0), jnp.zeros((0, 2)), jnp.bfloat16(3)],
    ids=["int", "bool", "key", "empty", "bfloat16"],
)
def test_marks_take_every_dtype(value):
    got = jax.jit(jaxpp.pipeline_enter_stage)(value)
    assert got.dtype == jnp.asarray(value).dtype and got.shape == value.shape


@pytest.mark.parametrize("stage_id", [-1, True])
def test_a_stage_number_is_counted_from_zero(stage_id):
    with pytest.raises(ValueError, match="stage_id is a number from 0"):
        jaxpp.pipeline_enter_stage(X, stage_id=stage_id)


def test_a_mark_carries_its_name_and_number():
    jaxpr = jax.make_jaxpr(lambda x: jaxpp.pipeline_enter_stage(x, "mine", 2))(X)
    (eqn,) = [e for e in jaxpr.eqns if _marks.is_enter(e)]
    assert (eqn.params["name"], eqn.params["stage"]) == ("mine", 2)


def test_a_mark_on_nothing_is_nothing():
    assert jaxpp.pipeline_enter_stage({"a": None, "b": "text"}) == {"a": None, "b": "text"}


def test_calls_know_their_stage_and_direction():
    def fun(x):
        (y,) = _marks.call_stage(lambda x: [jnp.tanh(x)], 1, 3, [x])
        return y.sum()

    eqns = jax.make_jaxpr(jax.grad(fun))(X).eqns
    calls = [e for e in eqns if _marks.is_stage_call(e)]
    assert [_marks.stage_of_call(e) for e in calls] == [(1, 3), (1, 3)]
    assert [_marks.is_backward_call(e) for e in calls] == [False, True]
    others = [e for e in eqns if not _marks.is_stage_call(e)]
    assert others and all(_marks.stage_of_call(e) is None for e in others)


def test_a_transposed_call_inside_a_checkpoint_is_known():
    def fun(x):
        (y,) = _marks.call_stage(jax.checkpoint(lambda x: [jnp.tanh(x)], policy=None), 0, 1, [x])
        return y.sum()

    calls = [e for e in jax.make_jaxpr(jax.grad(fun))(X).eqns if _marks.is_stage_call(e)]
    assert [_marks.is_backward_call(e) for e in calls] == [False, True]


def test_users_functions_of_similar_names_are_not_stage_calls():
    def pipeline_stage_0(x):
        return x + 1

    jaxpr = jax.make_jaxpr(jax.jit(pipeline_stage_0))(X)
    assert not any(jaxprs.contains(e, _marks.is_stage_call) for e in jaxpr.eqns)


def test_a_constant_may_go_through_a_mark():
    def loss(w, x):
        h, scale = jaxpp.pipeline_enter_stage((jnp.tanh(x @ w), jnp.asarray(3.0)))
        return jnp.mean((h @ w) ** 2 * scale)

    w, x = jax.random.normal(jax.random.key(0), (4, 4)), jnp.arange(12.0).reshape(3, 4)
    got = jax.jit(jax.grad(jaxpp.wrap_forward(loss)))(w, x)
    np.testing.assert_allclose(got, jax.jit(jax.grad(loss))(w, x), rtol=1e-5)
