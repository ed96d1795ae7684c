"""A `cond` around the loops runs the branch that the plain step runs, on each rank its part."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from tests.transforms import two_layers
from tests.transforms.place.test_effects import Recorder
from tests.transforms.two_layers import WEIGHTS, X


def descend(weights, grads):
    return [w - g for w, g in zip(weights, grads, strict=True)]


def forever(x):
    """Never ends; where it runs, so does the test until it is stopped."""
    return jax.lax.while_loop(lambda c: c == c, lambda c: 0.5 * c + 1.0, x)


def norm(grads):
    return jnp.sqrt(sum(jnp.sum(g**2) for g in grads))


def make_step(update, grad_fn):
    def step(weights, x, n):
        value, grads = grad_fn(weights, x)
        return value, update(weights, grads, n)

    return step


def assert_agree(update, *numbers, rtol=1e-4):
    placed = two_layers.place(make_step(update, two_layers.scheduled()))
    plain = jax.jit(make_step(update, two_layers.accumulated()))
    for n in numbers:
        got, want = (run(WEIGHTS, X, jnp.asarray(n)) for run in (placed, plain))
        chex.assert_trees_all_close(got, want, rtol=rtol, atol=1e-5)
    return placed


# ---- a branch that is not taken is not run ------------------------------------------------------


def each_alone(w, g):
    """A loop that never ends for each parameter, on its own rank."""
    return [a + forever(b[0, 0]) for a, b in zip(w, g, strict=True)]


def all_together(w, g):
    """One loop over what all ranks have together."""
    return [a + forever(norm(g)) for a in w]


@pytest.mark.parametrize("endless", [each_alone, all_together])
def test_a_branch_that_never_ends_may_stand_where_it_is_not_taken(endless):
    assert_agree(lambda w, g, n: jax.lax.cond(n > 10, endless, descend, w, g), 3)


def test_a_branch_inside_a_branch_that_is_not_taken():
    def inner(w, g):
        size = norm(g)
        return jax.lax.cond(
            size > 1e6, all_together, lambda w, g: descend(w, [size * b for b in g]), w, g
        )

    assert_agree(lambda w, g, n: jax.lax.cond(n > 10, inner, descend, w, g), 3, 30)


@pytest.mark.more
def test_an_endless_branch_over_stacked_layers():
    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0] ** 2)

    weights = jax.random.normal(jax.random.key(7), (4, 4, 4))
    grad_fn = two_layers.scheduled(jaxpp.split_stages(loss, 2))

    def step(grad_fn, w, x, n):
        value, g = grad_fn(w, x)

        def endless():
            return w + jax.vmap(lambda a: forever(a[0, 0]))(g)[:, None, None]

        return value, jax.lax.cond(n > 10, endless, lambda: w - g)

    placed = two_layers.place(lambda *args: step(grad_fn, *args))
    got = jax.device_get(placed(weights, X, jnp.asarray(3)))
    want = jax.jit(lambda *args: step(two_layers.accumulated(loss), *args))(
        weights, X, jnp.asarray(3)
    )
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


# ---- a branch that is taken ---------------------------------------------------------------------


def clipped(w, g):
    """Needs the norm over both ranks."""
    return descend(w, [b / jnp.maximum(norm(g), 0.1) for b in g])


def crossed(w, g):
    """Gives each rank a matrix of the other's."""
    return [w[0] - w[1].T * jnp.sum(g[0]), w[1] - (g[1] + w[0].T)]


def iterated(w, g):
    size = jax.lax.while_loop(lambda c: c < 1000, lambda c: 2 * c + 1, norm(g))
    return descend(w, [size * b for b in g])


@pytest.mark.parametrize("branch", [clipped, crossed, iterated])
def test_either_branch_is_that_of_the_plain_step(branch):
    assert_agree(lambda w, g, n: jax.lax.cond(n > 10, branch, descend, w, g), 3, 30)


def test_a_switch_of_three_branches():
    branches = [lambda w, g: list(w), descend, clipped]
    assert_agree(lambda w, g, n: jax.lax.switch(n, branches, w, g), -1, 0, 1, 2, 5)


def test_a_predicate_that_is_known():
    assert_agree(lambda w, g, n: jax.lax.cond(True, descend, each_alone, w, g), 3)


def test_a_predicate_of_what_both_ranks_have():
    assert_agree(lambda w, g, n: jax.lax.cond(norm(g) > n, clipped, descend, w, g), 0.0, 1e6)


def test_effects_in_branches_happen_where_they_are_taken():
    def make(recorder):
        def noisy(w, g):
            recorder.report("both", *g)
            return clipped(w, g)

        def quiet(w, g):
            recorder.report("last", g[1])
            return descend(w, g)

        return lambda w, g, n: jax.lax.cond(n > 10, noisy, quiet, w, g)

    recorder = Recorder()
    placed = two_layers.place(make_step(make(recorder), two_layers.scheduled()))
    plain = jax.jit(make_step(make(recorder), two_layers.accumulated()))
    for n, tag in ((3, "last"), (30, "both")):
        got, want = (recorder.of(run, WEIGHTS, X, jnp.asarray(n)) for run in (placed, plain))
        assert [t for t, *_ in got] == [t for t, *_ in want] == [tag]
        np.testing.assert_allclose(got[0][1:], want[0][1:], rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, np.nan])
def test_apply_if_finite_keeps_what_the_plain_step_keeps(scale):
    optimizer = optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)), 3
    )

    def make(grad_fn):
        def step(w, state, x):
            value, grads = grad_fn(w, x)
            updates, state = optimizer.update(grads, state, w)
            return optax.apply_updates(w, updates), state, value

        return step

    placed, plain = (
        two_layers.place(make(two_layers.scheduled())),
        jax.jit(make(two_layers.accumulated())),
    )
    args = WEIGHTS, optimizer.init(WEIGHTS), X * scale
    chex.assert_trees_all_close(placed(*args), plain(*args), rtol=1e-4, atol=1e-5)
