"""A placed function inside a transformation is the plain one, and says so where it then runs."""

import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from tests.helpers import mesh_of


def loss(w, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w[0]))
    return jnp.mean((h @ w[1]) ** 2)


W, X = [jnp.eye(4), jnp.eye(4)], jnp.ones((8, 4))


def placed(mesh=None):
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 4)
    return jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh or mesh_of(2))


RUN = {
    "jit": lambda step: jax.jit(step)(W, X),
    "filter_jit": lambda step: eqx.filter_jit(step)(W, X),
    "grad": lambda step: jax.grad(lambda w: step(w, X)[0])(W),
    "vmap": lambda step: jax.vmap(step, (None, 0))(W, X[None]),
    "scan": lambda step: jax.lax.scan(lambda w, x: (step(w, x)[1], None), W, X[None]),
    "jit in jit": lambda step: jax.jit(lambda w, x: jax.jit(step)(w, x))(W, X),
}

LOOKED_AT = {
    "make_jaxpr": lambda step: jax.make_jaxpr(step)(W, X),
    "eval_shape": lambda step: jax.eval_shape(step, W, X),
    "filter_eval_shape": lambda step: eqx.filter_eval_shape(step, W, X),
    "lower": lambda step: jax.jit(step).lower(W, X),
    "grad in make_jaxpr": lambda step: jax.make_jaxpr(jax.grad(lambda w: step(w, X)[0]))(W),
    "place": lambda step: jaxpp.place(lambda w, x: step(w, x), step.mesh)(W, X),
    "a call": lambda step: step(W, X),
    "certify": lambda step: jaxpp.certify(step, W, X),
}


@pytest.mark.parametrize("name", RUN)
@pytest.mark.cases(len(RUN))
def test_a_pipeline_is_not_lost_in_silence(name):
    step = placed()
    with pytest.warns(UserWarning, match="runs without its ranks") as found:
        RUN[name](step)
    (warning,) = found
    assert re.search(r"Let place be outermost: step = jaxpp\.place\(", str(warning.message))
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RUN[name](step)  # once is enough
        step(W, X)


@pytest.mark.parametrize("name", LOOKED_AT)
@pytest.mark.cases(len(LOOKED_AT))
def test_one_that_is_only_looked_at_or_runs_on_its_ranks_gives_no_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LOOKED_AT[name](placed())


def test_one_whose_ranks_share_a_device_or_without_jit_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RUN["jit"](placed(jaxpp.MpmdMesh((2,), devices=[jax.devices()[0]] * 2)))
        with jax.disable_jit():
            placed()(W, X)
