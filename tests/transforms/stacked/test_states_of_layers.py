"""States of stacked layers, such as statistics and scales, stay with the layers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.runtime import StackedArray
from tests.helpers import mesh_of

LAYERS, WIDTH, MICROBATCHES = 4, 8, 4
PARAMS = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
STATE = {"mean": jnp.zeros((LAYERS, WIDTH)), "count": jnp.zeros(LAYERS, jnp.int32)}
X = jax.random.normal(jax.random.key(1), (8, WIDTH))


def layer(h, own):
    w, state = own
    h = jnp.tanh(h @ w)
    mean = 0.9 * state["mean"] + 0.1 * jax.lax.stop_gradient(h.mean(0))
    return h - state["mean"], {"mean": mean, "count": state["count"] + 1}


def scanned(w, state, x, **how):
    h, state = jax.lax.scan(layer, x, (w, state), **how)
    return jnp.mean((h - 1) ** 2), state


def reverse(w, state, x):
    return scanned(w, state, x, reverse=True)


def averaged(w, state, x):
    value, new = scanned(w, state, x)
    return value, {**new, "mean": 0.5 * state["mean"] + 0.5 * new["mean"]}


def checkpointed(w, state, x):
    h, state = jax.lax.scan(jax.checkpoint(layer), x, (w, state))
    return jnp.mean((h - 1) ** 2), state


def accumulated(loss, **where):
    """The mean gradient over microbatches, whose states follow each other."""
    staged = jaxpp.split_stages(loss, **where) if where else loss
    grad = jax.value_and_grad(jaxpp.wrap_forward(staged), has_aux=True)
    axes, reduce = (None, "carry", 0), (("mean", "carry"), "mean")
    return jaxpp.microbatch(grad, MICROBATCHES, in_axes=axes, reduce=reduce)


def step_of(grad):
    def step(w, state, x):
        (value, state), grads = grad(w, state, x)
        return w - 0.1 * grads, state, value

    return step


S = jaxpp.schedules


@pytest.mark.parametrize(
    ("loss", "stages", "schedule"),
    [
        (scanned, 2, S.OneFOneB()),
        (scanned, 2, S.ZeroBubbleH1()),
        (scanned, 4, S.Interleaved1F1B()),
        (reverse, 2, S.OneFOneB()),
        (averaged, 2, S.OneFOneB()),
        (checkpointed, 2, S.Recompute(S.OneFOneB())),
    ],
    ids=lambda own: getattr(own, "__name__", type(own).__name__),
)
def test_states_stay_with_their_layers(loss, stages, schedule):
    step = step_of(jaxpp.schedule(accumulated(loss, num_stages=stages), schedule))
    placed, shared = (jaxpp.place(step, mesh_of(2, shared=own)) for own in (False, True))
    plain = jax.jit(step_of(accumulated(loss)))
    got = same = want = (PARAMS, STATE)
    for _ in range(2):
        *got, _ = placed(*got, X)
        *same, _ = shared(*same, X)
        *want, _ = plain(*want, X)
    assert all(isinstance(x, StackedArray) for x in jax.tree.leaves(got))
    assert {k for p in placed.programs for s in p.sends for k in s.message.kinds} == {"edge"}
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, tree) for tree in (got, same)))
    chex.assert_trees_all_close(jax.tree.map(np.asarray, got), want, rtol=1e-5, atol=1e-6)
    jaxpp.certify(placed, PARAMS, STATE, X)


def test_caches_that_no_microbatch_hands_on_stay_with_their_layers():
    """As in a step of decoding: each microbatch reads what is there before the step."""

    def decode(w, cache, x):
        def layer(h, own):
            w, cache = own
            cache = jnp.concatenate([cache[1:], h.mean(0)[None]])
            return jnp.tanh(h @ w + cache.mean(0)), cache

        return jax.lax.scan(layer, x, (w, cache))

    def forward(staged, num):
        axes, reduce = (None, None, 0), ("concat", "last")
        return jaxpp.microbatch(jaxpp.wrap_forward(staged), num, in_axes=axes, reduce=reduce)

    cache = jax.random.normal(jax.random.key(3), (LAYERS, 3, WIDTH))
    loop = jaxpp.schedule(forward(jaxpp.split_stages(decode, 2), 2), S.ForwardOnly())
    placed = jaxpp.place(loop, mesh_of(2))
    got, want = placed(PARAMS, cache, X), jax.jit(forward(decode, 2))(PARAMS, cache, X)
    assert isinstance(got[1], StackedArray) and got[1].bounds == (0, 2, 4)
    chex.assert_trees_all_close(jax.tree.map(np.asarray, got), want, rtol=1e-6)
    jaxpp.testing.assert_no_transfers_of(placed, (PARAMS, cache))
    jaxpp.certify(placed, PARAMS, cache, X)
