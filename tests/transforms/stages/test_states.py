"""What reads a state and what makes its next value are in one stage, or the error says where."""

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp.schedules import OneFOneB

WS = list(jax.random.normal(jax.random.key(0), (6, 8, 8)) / 2)
X = jax.random.normal(jax.random.key(1), (8, 8))
STATE = {"mean": jnp.zeros(8), "count": jnp.zeros((), jnp.int32)}


def normalised(ws, state, x, layer, late):
    """A layer in the middle reads the mean; its next value is written there, or at the end."""
    kept = state["mean"]
    for i, w in enumerate(ws):
        x = jnp.tanh(x @ w)
        if i == layer:
            seen = x
            x = x - state["mean"]
            if not late:
                kept = 0.9 * kept + 0.1 * seen.mean(0)
    if late:
        kept = 0.9 * kept + 0.1 * seen.mean(0)
    return jnp.mean(x**2), {"mean": kept, "count": state["count"] + 1}


def quantised(params, state, x):
    return QUANTISED.apply(params, state, x)


def _quantised(x):
    x = jnp.tanh(hk.Linear(32)(x))
    x = jnp.tanh(hk.Linear(4)(x))
    found = hk.nets.VectorQuantizerEMA(4, 8, 0.25, 0.9)(x, is_training=True)
    x = jnp.tanh(hk.Linear(32)(found["quantize"]))
    return jnp.mean((hk.Linear(8)(x)) ** 2) + found["loss"]


QUANTISED = hk.without_apply_rng(hk.transform_with_state(_quantised))


def at_once(ws, state, x):
    return normalised(ws, state, x, 2, late=False)


def late(ws, state, x):
    return normalised(ws, state, x, 2, late=True)


def spanning(ws, state, x):
    """The first layer reads what the last one leaves."""
    x = x + state["left"]
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2), {"left": x[0]}


def microbatched(fun):
    return jaxpp.microbatch(
        jax.value_and_grad(fun, has_aux=True),
        4,
        in_axes=(None, "carry", 0),
        reduce=(("mean", "carry"), "mean"),
    )


def check(fun, weights, state, **cuts):
    split = jaxpp.wrap_forward(jaxpp.split_stages(fun, **cuts))
    scheduled = jaxpp.schedule(microbatched(split), OneFOneB())
    got = jax.jit(scheduled)(weights, state, X)
    want = jax.jit(microbatched(fun))(weights, state, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_state_can_be_carried_from_one_microbatch_to_the_next(num_stages):
    check(at_once, WS, STATE, num_stages=num_stages)


@pytest.mark.more
def test_a_state_of_a_library_is_carried_where_the_cuts_leave_it_whole():
    params, state = QUANTISED.init(jax.random.key(2), X)
    check(quantised, params, state, at=["linear_2"])


@pytest.mark.parametrize(
    ("fun", "num_stages", "readers"), [(late, 3, "F of stage 1"), (spanning, 2, "F of stage 0")]
)
def test_a_state_that_is_made_behind_the_stage_that_reads_it_is_named(fun, num_stages, readers):
    state = STATE if fun is late else {"left": X[0]}
    line = r"test_states.py:\d+"
    message = (
        rf"float32\[8\] that is carried .* read by {readers}.* at \S*{line}, but made by F of "
        rf"stage \d at \S*{line}; .* Make it where it is read, or cut elsewhere: split_stages\(at="
    )
    with pytest.raises(ValueError, match=message):
        check(fun, WS, state, num_stages=num_stages)
