"""Deferred initialisation on worker processes: each makes its own part, the driver nothing."""

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from tests.helpers import assert_same
from tests.runtime.local.test_mesh import WIDTH, batch, start, step_of, tied_loss

RANKS = 3


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((RANKS,), start_timeout=300) as mesh:
        yield mesh


def make_state(key):
    weights = [
        jax.random.normal(k, (WIDTH, WIDTH), jnp.bfloat16) * 0.3 / 7.0
        for k in jax.random.split(key, 2)
    ]
    return start([w.astype(jnp.float32) for w in weights])


def held(mesh):
    return mesh.apply(sizes_of_arrays, {rank: () for rank in range(RANKS)})


def sizes_of_arrays(process):
    return sorted(x.size for x in process.arrays.values())


def test_workers_make_their_parts(mesh):
    """The same values as in one process, on the ranks that read them, and nothing else there."""
    step = jaxpp.place(step_of(tied_loss), mesh, donate_argnums=(0, 1, 2))
    key = jax.random.key(11)
    state = step.initialize(make_state, key, rest=(batch(),))
    matrix = WIDTH * WIDTH
    # The first weight is tied: the first and the last rank have it and its momentum.
    assert held(mesh) == {0: [1, matrix, matrix], 1: [1, matrix, matrix], 2: [1, matrix, matrix]}
    params, momentum, rate = state
    assert [x.ranks for x in [*params, *momentum, rate]] == [(0, 2), (1,), (0, 2), (1,), (0, 1, 2)]
    want = make_state(key)
    assert_same(state, want)
    local = jaxpp.place(step_of(tied_loss), jaxpp.MpmdMesh((RANKS,)))
    assert_same(step(*state, batch()), local(*want, batch()))


def test_a_compiled_step_initializes_again(mesh):
    """After a restart, for instance."""
    step = jaxpp.place(step_of(tied_loss), mesh)
    compiled = step.lower(*jax.eval_shape(make_state, jax.random.key(0)), batch()).compile()
    for seed in range(2):
        state = compiled.initialize(make_state, jax.random.key(seed))
        want = make_state(jax.random.key(seed))
        assert_same(state, want)
