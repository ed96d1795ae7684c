"""Saving and loading on worker processes: training goes on as if nothing had happened."""

import os
import signal
import time

import chex
import jax
import pytest

import jaxpp
from jaxpp.runtime.checkpoint import Checkpointer, _store, load_state, save_state
from tests.runtime.local.test_mesh import batch, loss_fn, start, step_of


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


def placed(mesh):
    return jaxpp.place(step_of(two_stages), mesh, donate_argnums=(0, 1))


def two_stages(params, x):
    return loss_fn([params[0] @ params[1], params[2]], x)


def train(step, state, numbers, checkpointer=None):
    losses = []
    for number in numbers:
        *state, loss = step(*state, batch(number))
        losses.append(loss)
        if checkpointer is not None:
            checkpointer.save(number, state)
    return state, jax.device_get(losses)


def test_training_goes_on_from_a_checkpoint_on_any_mesh(mesh, tmp_path):
    here = placed(jaxpp.MpmdMesh((2,)))
    expected, losses = train(here, list(start()), range(5))
    middle, _ = train(here, list(start()), range(3))
    step = placed(mesh)
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        state, got = train(step, list(start()), range(5), checkpointer)
        checkpointer.wait()
        assert got == losses
        assert checkpointer.steps() == [2, 3, 4]
        restored = checkpointer.restore(state, step=2)
    assert all(isinstance(x, jaxpp.RemoteArray) for x in jax.tree.leaves(restored))
    for path in tmp_path.iterdir():
        assert not list(path.rglob("driver")), "the driver has written what the ranks hold"
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(middle), strict=True)

    types = jax.eval_shape(lambda: list(start()))
    compiled = step.lower(*types, batch(0)).compile()
    placed_anew = load_state(tmp_path / "2", types, list(compiled.input_shardings[:3]))
    on_local_mesh = load_state(tmp_path / "2", middle)
    plain = load_state(tmp_path / "2", types)
    assert {d for x in jax.tree.leaves(plain) for d in x.devices()} == {jax.devices()[0]}
    for goes_on, run in (
        (restored, step), (placed_anew, step), (on_local_mesh, here), (plain, step),
    ):  # fmt: skip
        state, got = train(run, goes_on, range(3, 5))
        assert got == losses[3:]
        chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(expected), strict=True)


def break_writes(process, how):
    """Makes the next write of a rank go wrong."""
    write = _store.write

    def broken(directory, pieces):
        _store.write = write
        if how == "full disk":
            raise OSError(28, os.strerror(28), str(directory))
        os.kill(os.getpid(), signal.SIGKILL)

    _store.write = broken


def test_a_full_disk_of_a_rank_ends_the_save_and_nothing_else(mesh, tmp_path):
    step = placed(mesh)
    state, _ = train(step, list(start()), range(1))
    save_state(tmp_path / "a", state)
    mesh.apply(break_writes, {1: ("full disk",)})
    with pytest.raises(OSError, match="No space left on device.*rank-1"):
        save_state(tmp_path / "a", state, overwrite=True)
    state, got = train(step, state, range(1, 2))
    _, losses = train(step, list(start()), range(2))
    assert got == losses[1:]
    load_state(tmp_path / "a", state)


@pytest.mark.parametrize("saving", ["save_state", "Checkpointer"])
def test_a_worker_that_dies_in_a_save_costs_the_new_checkpoint_only(mesh, tmp_path, saving):
    step = placed(mesh)
    expected, losses = train(step, list(start()), range(4))
    expected = jax.device_get(expected)
    state, _ = train(step, list(start()), range(2))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        mesh.apply(break_writes, {1: ("dies",)})
        began = time.monotonic()
        with pytest.raises(jaxpp.RankError, match="rank 1"):
            if saving == "save_state":
                save_state(tmp_path / "2", state)
            else:
                checkpointer.save(2, state)
                checkpointer.wait()
        assert time.monotonic() - began < 5
        assert [p.name for p in tmp_path.iterdir()] == ["1"]
        mesh.restart()
        with pytest.raises(ValueError, match="lost"):
            checkpointer.save(2, state)
        state, got = train(step, checkpointer.restore(state), range(2, 4), checkpointer)
    assert got == losses[2:]
    chex.assert_trees_all_equal(jax.device_get(state), expected, strict=True)
    chex.assert_trees_all_equal(
        load_state(tmp_path / "3", jax.eval_shape(lambda: list(start()))), expected
    )
