"""The assertions for users: what they accept, what they reject, and what they say then."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp import testing

PARAMS = {
    "first": jax.random.normal(jax.random.key(0), (4, 4)),
    "second": {
        "w": jax.random.normal(jax.random.key(1), (4, 4)),
        "b": jnp.zeros(4),
    },
}
X = jax.random.normal(jax.random.key(2), (6, 4))


def loss_fn(params, x):
    h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params["first"]))
    return jnp.mean((h @ params["second"]["w"] + params["second"]["b"]) ** 2)


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def plain_step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return descend(params, grads), loss


def place(extra=lambda params: params):
    grad_fn = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), 3)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def step(params, x):
        loss, grads = grad_fn(params, x)
        return extra(descend(params, grads)), loss

    return jaxpp.place(step, jaxpp.MpmdMesh((2,)), donate_argnums=0)


@pytest.fixture(scope="module")
def step():
    placed = place()
    placed(jax.tree.map(jnp.copy, PARAMS), X)
    return placed


# ---- assert_matches_single_device ---------------------------------------------------------------


def test_a_right_step_matches_the_plain_function(step):
    testing.assert_matches_single_device(step, plain_step, PARAMS, X)


def test_a_step_matches_another_placed_step_bitwise(step):
    testing.assert_matches_single_device(step, place(), PARAMS, X, bitwise=True)


def test_donation_consumes_none_of_the_callers_arguments(step):
    testing.assert_matches_single_device(step, plain_step, PARAMS, X)
    assert not any(x.is_deleted() for x in jax.tree.leaves((PARAMS, X)))


def test_a_difference_is_named_with_step_path_rank_and_size(step):
    def wrong(params, x):
        new, loss = plain_step(params, x)
        new["second"]["w"] = new["second"]["w"].at[1, 2].add(1.0)
        return new, loss

    message = (
        "step 0: result[0]['second']['w'] (rank 1 of stage 1) differs in 1 of 16 elements, "
        "most at [1, 2]"
    )
    with pytest.raises(AssertionError, match=re.escape(message)):
        testing.assert_matches_single_device(step, wrong, PARAMS, X)


def test_a_difference_in_a_later_step_is_found(step):
    calls = []

    def wrong(params, x):
        calls.append(x)
        new, loss = step(params, x)
        return new, loss + 1.0 if len(calls) == 3 else loss

    testing.assert_matches_single_device(wrong, plain_step, PARAMS, X, steps=2, num_state=1)
    calls.clear()
    with pytest.raises(AssertionError, match=r"step 2: result\[1\] "):
        testing.assert_matches_single_device(wrong, plain_step, PARAMS, X, steps=3, num_state=1)


def test_the_other_differences_are_counted(step):
    def wrong(params, x):
        new, loss = plain_step(params, x)
        return jax.tree.map(lambda p: p + 1.0, new), loss

    with pytest.raises(AssertionError, match="2 more results differ"):
        testing.assert_matches_single_device(step, wrong, PARAMS, X)


def identity(*args):
    return args


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (jnp.float32(1.0), jnp.nextafter(jnp.float32(1.0), 2.0)),
        (jnp.zeros(2), -jnp.zeros(2)),
        (jnp.arange(3, dtype=jnp.bfloat16), jnp.arange(3, dtype=jnp.bfloat16) * 1.01),
    ],
)
def test_bitwise_rejects_what_the_tolerance_takes(got, want):
    testing.assert_matches_single_device(lambda: got, lambda: want, rtol=0.05)
    with pytest.raises(AssertionError, match="every bit must be equal"):
        testing.assert_matches_single_device(lambda: got, lambda: want, bitwise=True)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (jnp.arange(3), jnp.arange(3).at[2].set(7)),
        (jnp.array([True, False]), jnp.array([True, True])),
        (jax.random.key(0), jax.random.key(1)),
        (jnp.float32(1.0), jnp.float32(1.1)),
        (jnp.array([1.0, jnp.nan]), jnp.array([1.0, 2.0])),
        (jnp.array([1.0, 2.0]), jnp.array([1.0, jnp.inf])),
        (jnp.float32(1.0), jnp.bfloat16(1.0)),
        (jnp.zeros(2), jnp.zeros((1, 2))),
        ((jnp.zeros(2), 1), (jnp.zeros(2), 2)),
        ((jnp.zeros(2),), [jnp.zeros(2)]),
    ],
)
@pytest.mark.parametrize("bitwise", [False, True])
def test_other_results_are_rejected(got, want, bitwise):
    testing.assert_matches_single_device(lambda: want, lambda: want, bitwise=bitwise)
    with pytest.raises(AssertionError, match="step 0: (the )?result"):
        testing.assert_matches_single_device(lambda: got, lambda: want, bitwise=bitwise)


def test_the_tolerance_is_a_share_of_the_largest_magnitude():
    want = np.array([100.0, 0.0], np.float32)
    testing.assert_matches_single_device(lambda: want + np.float32(9e-4), lambda: want)
    with pytest.raises(AssertionError, match="1.0e-03 is allowed"):
        testing.assert_matches_single_device(lambda: want + np.float32(2e-3), lambda: want)
    testing.assert_matches_single_device(lambda: want + np.float32(2e-3), lambda: want, atol=2e-3)


def seen_by(*args, steps=3, result=lambda *args: args[:1], **kwargs):
    """What a step is called with."""
    calls = []

    def step(*args):
        calls.append(jax.tree.map(np.asarray, args))
        return result(*args)

    testing.assert_matches_single_device(step, jax.jit(result), *args, steps=steps, **kwargs)
    return calls


def test_state_is_fed_back_and_data_differs_from_step_to_step():
    state = {"w": jnp.zeros(2)}
    calls = seen_by(state, X, result=lambda s, x: ({"w": s["w"] + 1.0}, x.sum()))
    assert [float(s["w"][0]) for s, _ in calls] == [0.0, 1.0, 2.0]
    np.testing.assert_array_equal(calls[0][1], X)
    for i, (_, x) in enumerate(calls):
        np.testing.assert_array_equal(x, np.roll(X, i, axis=1))


def test_a_key_is_folded_with_the_step():
    draws = []

    def step(key):
        draws.append(float(jax.random.normal(key)))
        return jnp.zeros(())

    testing.assert_matches_single_device(step, lambda key: jnp.zeros(()), jax.random.key(0))
    assert len(set(draws)) == 3


def test_data_is_made_by_the_callable():
    calls = seen_by(
        {"w": jnp.zeros(2)},
        result=lambda s, x, y: ({"w": s["w"] + x}, y),
        data=lambda i: (jnp.full(2, i, jnp.float32), jnp.int32(i)),
    )
    assert [(float(x[0]), int(y)) for _, x, y in calls] == [(0.0, 0), (1.0, 1), (2.0, 2)]


def test_without_state_all_arguments_are_data():
    calls = seen_by({"w": jnp.arange(3)}, result=lambda s: {"w": s["w"] * 2}, num_state=0)
    assert [s["w"].tolist() for (s,) in calls] == [[0, 1, 2], [2, 0, 1], [1, 2, 0]]


def test_an_argument_counted_as_state_must_be_replaced():
    with pytest.raises(ValueError, match="no part of the result is like argument 1"):
        testing.assert_matches_single_device(
            lambda s, x: s, lambda s, x: s, {"w": X}, X[0], num_state=2
        )


def test_a_state_of_nan_is_rejected():
    def step(s):
        return {"w": s["w"] * jnp.nan}

    with pytest.raises(AssertionError, match=r"replaces args\[0\]\['w'\] has a NaN"):
        testing.assert_matches_single_device(step, step, {"w": jnp.ones(2)})


def test_there_must_be_a_step():
    with pytest.raises(ValueError, match="at least 1"):
        testing.assert_matches_single_device(identity, identity, X, steps=0)


# ---- assert_no_transfers_of ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def moving_step():
    """A step in which the first stage's parameter goes to the second stage's rank."""

    def mix(params):
        return params | {
            "second": {**params["second"], "w": params["second"]["w"] @ params["first"]}
        }

    return place(mix).lower(PARAMS, X)


@pytest.mark.parametrize("argument", [0, "[0]", "args[0]", "[0]['second']", 1, PARAMS])
def test_a_step_that_moves_nothing_passes(step, argument):
    testing.assert_no_transfers_of(step, argument)


@pytest.mark.parametrize("argument", [0, PARAMS, PARAMS["second"]])
def test_a_step_that_moves_a_parameter_is_rejected(moving_step, argument):
    with pytest.raises(AssertionError, match=r"float32\[4,4\].* from rank \d to rank \d"):
        testing.assert_no_transfers_of(moving_step, argument)


def test_an_argument_that_moves_is_named():
    grad_fn = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss_fn)), 3)
    grad_fn = jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())

    def step(params, x):
        return grad_fn(params, x), params["first"] @ params["second"]["w"]

    lowered = jaxpp.place(step, jaxpp.MpmdMesh((2,))).lower(PARAMS, X)
    with pytest.raises(AssertionError, match=r"args\[0\]\['(first|second)'\].* is sent from rank"):
        testing.assert_no_transfers_of(lowered, 0)
    testing.assert_no_transfers_of(lowered, "[0]['second']['b']")


def test_what_replaces_an_argument_may_not_move_either():
    def mix(params):
        return params | {"first": params["first"] + jnp.tile(params["second"]["b"], 2)[:4]}

    lowered = place(mix).lower(PARAMS, X)
    assert testing.count_sends(lowered, "argument") == 0
    with pytest.raises(AssertionError, match=r"the type of args\[0\]\['second'\]\['b'\]"):
        testing.assert_no_transfers_of(lowered, "[0]['second']['b']")


@pytest.mark.parametrize("argument", [2, "[0]['third']", "[0]['fir", {"w": jnp.zeros(9)}, {}])
def test_an_unknown_argument_is_an_error(step, argument):
    with pytest.raises(ValueError, match="has no argument"):
        testing.assert_no_transfers_of(step, argument)


# ---- count_sends --------------------------------------------------------------------------------


def test_messages_are_counted_by_kind(step):
    assert testing.count_sends(step, "edge") == 2 * 3  # microbatches, there and back
    assert testing.count_sends(step) == 2 * 3
    assert testing.count_sends(step, "gradient") == 0


def test_a_message_of_two_kinds_counts_for_both(moving_step):
    counts = {kind: testing.count_sends(moving_step, kind) for kind in testing.KINDS}
    # Each rank sends its weight and its gradient; one of these leaves with the last edge.
    assert counts == {"edge": 6, "gradient": 2, "scalar": 0, "argument": 2, "gathered": 0}
    assert testing.count_sends(moving_step) == 9


def test_an_unknown_kind_is_an_error(step):
    with pytest.raises(ValueError, match="no kind 'weights'.*edge, gradient"):
        testing.count_sends(step, "weights")
