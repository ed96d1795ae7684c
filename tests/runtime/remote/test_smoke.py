"""A training on worker processes, on one mesh: the part of these tests that each run has."""

import os
import signal

import chex
import jax
import pytest

import jaxpp
from tests.runtime.local.test_mesh import batch, init_params, start, step_of


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


def place(mesh):
    """A step whose ranks load the batches by their numbers, and whose state is donated."""
    return jaxpp.place(step_of(), mesh, donate_argnums=(0, 1), feed={3: batch})


def begin():
    return list(start(init_params(2)))


def train(step, state, numbers):
    losses = []
    for number in numbers:
        *state, loss = step(*state, number)
        losses.append(loss)
    return state, jax.device_get(losses)


@pytest.fixture(scope="module")
def expected():
    """The state and the losses of four steps on the mesh of this process."""
    here = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    state, losses = train(place(here), begin(), range(4))
    return jax.device_get(state), losses


def pid_of(process):
    return os.getpid()


def test_steps_are_bitwise_those_of_the_local_mesh(mesh, expected):
    state, losses = train(place(mesh), begin(), range(4))
    assert losses == expected[1]
    assert all(isinstance(x, jaxpp.RemoteArray) for x in jax.tree.leaves(state))
    chex.assert_trees_all_equal(jax.device_get(state), expected[0], strict=True)


@pytest.mark.more
def test_a_killed_worker_is_an_error_and_a_checkpoint_goes_on(mesh, expected, tmp_path):
    step = place(mesh)
    state, losses = train(step, begin(), range(2))
    jaxpp.save_state(tmp_path / "2", state)
    os.kill(mesh.apply(pid_of, {1: ()})[1], signal.SIGKILL)
    with pytest.raises(jaxpp.RankError, match="rank 1"):
        train(step, state, range(2, 4))
    mesh.restart()
    state, more = train(step, jaxpp.load_state(tmp_path / "2", begin()), range(2, 4))
    assert losses + more == expected[1]
    chex.assert_trees_all_equal(jax.device_get(state), expected[0], strict=True)


def test_an_array_that_a_step_has_consumed_says_so(mesh):
    step, state = place(mesh), begin()
    first, *rest = step(*state, 0)[:3]
    step(first, *rest, 1)
    with pytest.raises(ValueError, match="donated"):
        jax.device_get(first)
