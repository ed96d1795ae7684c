"""A balanced cut does not fall between what reads a state and what makes its next value."""

import warnings

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
CASES = {
    "haiku": lambda: (quantised, *QUANTISED.init(jax.random.key(2), X)),
    "at-once": lambda: (lambda w, s, x: normalised(w, s, x, 2, late=False), WS, STATE),
    "late": lambda: (lambda w, s, x: normalised(w, s, x, 2, late=True), WS, STATE),
    "first-layer": lambda: (lambda w, s, x: normalised(w, s, x, 0, late=True), WS, STATE),
}


def microbatched(fun):
    return jaxpp.microbatch(
        jax.value_and_grad(fun, has_aux=True),
        4,
        in_axes=(None, "carry", 0),
        reduce=(("mean", "carry"), "mean"),
    )


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_state_can_be_carried_from_one_microbatch_to_the_next(case, num_stages):
    fun, weights, state = CASES[case]()
    split = jaxpp.wrap_forward(jaxpp.split_stages(fun, num_stages))
    scheduled = jaxpp.schedule(microbatched(split), OneFOneB())
    got = jax.jit(scheduled)(weights, state, X)
    want = jax.jit(microbatched(fun))(weights, state, X)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_layers_around_a_state_are_shared_out_evenly(num_stages, primitives_of):
    fun, weights, state = CASES["late"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = primitives_of(jaxpp.split_stages(fun, num_stages), weights, state, X)
    assert [n.count("dot_general") for n in names] == [6 // num_stages] * num_stages


def spanning(ws, state, x):
    """The first layer reads what the last one leaves."""
    x = x + state["left"]
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2), {"left": x[0]}


def test_a_state_that_leaves_no_place_to_cut_is_not_minded(stages_of):
    assert stages_of(jaxpp.split_stages(spanning, 10), WS, {"left": X[0]}, X).num_stages == 10


def test_a_state_that_spans_most_of_the_work_is_named_in_a_warning(primitives_of):
    def fun(ws, state, x):
        return spanning(ws[1:], state, jnp.tanh(x @ ws[0]))

    message = r"read at \S*test_states.py:\d+, .* made at \S*py:\d+: both stay .* at= .* 0.16, 0.8"
    with pytest.warns(UserWarning, match=message):
        names = primitives_of(jaxpp.split_stages(fun, 2), WS, {"left": X[0]}, X)
    assert [n.count("dot_general") for n in names] == [1, 5]


def test_a_result_that_is_no_more_than_an_array_is_no_state(primitives_of):
    def fun(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2), x

    names = primitives_of(jaxpp.split_stages(fun, 2), WS, X)
    assert [n.count("dot_general") for n in names] == [3, 3]


def test_of_two_states_that_are_alike_each_has_its_own_next_value(primitives_of):
    """The last layer's is the first result: neither spans the layers between the two."""

    def fun(ws, first, last, x):
        for i, w in enumerate(ws):
            if i in (0, 5):
                state = first if i == 0 else last
                x = x - state["mean"]
                new = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}
                first, last = (new, last) if i == 0 else (first, new)
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2), (last, first)

    state = {"mean": jnp.zeros(8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = primitives_of(jaxpp.split_stages(fun, 3), WS, state, state, X)
    assert [n.count("dot_general") for n in names] == [2, 2, 2]


def counted(ws, state, x):
    """Each layer reads the count and raises it, as the dropouts of NNX do."""
    count = state["count"]
    for w in ws:
        x = jnp.tanh(x @ w) * jax.random.bernoulli(jax.random.key(count), 0.9, x.shape)
        count = count + 1
    return jnp.mean(x**2), {"count": count}


def of_a_dictionary(ws, x):
    def loss(ws, x):
        for w in [*ws["down"], *ws["up"]]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return jax.grad(loss)(ws, x)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (counted, (WS, {"count": jnp.zeros((), jnp.uint32)}, X)),
        (of_a_dictionary, ({"down": WS[:3], "up": WS[3:]}, X)),
    ],
    ids=["count", "gradient"],
)
def test_what_is_no_such_state_keeps_nothing_together(fun, args, primitives_of):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A gradient multiplies by each parameter twice.
        warnings.filterwarnings("ignore", "split_stages: stages .* multiply by the same parameters")
        names = primitives_of(jaxpp.split_stages(fun, 2), *args)
    products = [n.count("dot_general") for n in names]
    assert min(products) >= sum(products) // 2 - 1
