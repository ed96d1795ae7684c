"""Saving and loading on worker processes: training goes on as if nothing had happened."""

import os
import signal
import time

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpp
from jaxpp.runtime.checkpoint import _shares, load_state, restore_args, save_args, save_state
from tests.runtime.local.test_mesh import batch, loss_fn, start, step_of


@pytest.fixture(scope="module")
def mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


def placed(mesh):
    return jaxpp.place(step_of(two_stages), mesh, donate_argnums=(0, 1))


def two_stages(params, x):
    return loss_fn([params[0] @ params[1], params[2]], x)


def train(step, state, numbers, manager=None):
    losses = []
    for number in numbers:
        *state, loss = step(*state, batch(number))
        losses.append(loss)
        if manager is not None:
            manager.save(number, args=save_args(state))
    return state, jax.device_get(losses)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_mesh_that_ends_or_restarts_waits_for_what_its_ranks_write(
    ray_session, tmp_path, restarts
):
    del ray_session
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        with jaxpp.RemoteMpmdMesh((2,)) as mesh:
            state, _ = train(placed(mesh), list(start()), range(2))
            expected = jax.device_get(state)
            mesh.apply(_write_slowly, {0: (), 1: ()})
            manager.save(7, args=save_args(state))
            if restarts:
                mesh.restart()
        manager.wait_until_finished()
        assert manager.latest_step() == 7
        restored = manager.restore(7, args=restore_args(expected))
    chex.assert_trees_all_equal(jax.device_get(restored), expected, strict=True)


def _write_slowly(process):
    del process
    write = _shares.write_shares

    def slowly(*args):
        time.sleep(2)
        write(*args)

    _shares.write_shares = slowly


def test_training_goes_on_from_a_checkpoint_on_any_mesh(mesh, tmp_path, read_plainly):
    here = placed(jaxpp.MpmdMesh((2,)))
    expected, losses = train(here, list(start()), range(5))
    middle, _ = train(here, list(start()), range(3))
    step = placed(mesh)
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        state, got = train(step, list(start()), range(5), manager)  # steps donate what is saved
        manager.wait_until_finished()
        assert got == losses
        assert list(manager.all_steps()) == [2, 3, 4]
        restored = manager.restore(2, args=restore_args(state))
    assert all(isinstance(x, jaxpp.RemoteArray) for x in jax.tree.leaves(restored))
    saved = tmp_path / "run" / "2" / "default"
    assert not list(saved.glob("*driver")), "the driver has written what the ranks hold"
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(middle), strict=True)
    plain = read_plainly(saved)
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(middle)):
        np.testing.assert_array_equal(plain[jax.tree_util.keystr(path)], leaf, strict=True)

    types = jax.eval_shape(lambda: list(start()))
    compiled = step.lower(*types, batch(0)).compile()
    placed_anew = load_state(saved, types, list(compiled.input_shardings[:3]))
    on_local_mesh = load_state(saved, middle)
    plain = load_state(saved, types)
    assert {d for x in jax.tree.leaves(plain) for d in x.devices()} == {jax.devices()[0]}
    for goes_on, run in (
        (restored, step), (placed_anew, step), (on_local_mesh, here), (plain, step),
    ):  # fmt: skip
        state, got = train(run, goes_on, range(3, 5))
        assert got == losses[3:]
        chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(expected), strict=True)


def break_writes(process, how):
    """Makes the next write of a rank go wrong."""
    write = _shares.write_shares

    def broken(directory, writer, shares):
        _shares.write_shares = write
        if how == "full disk":
            raise OSError(28, os.strerror(28), f"{directory}/{writer}")
        write(directory, writer, shares[: len(shares) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    _shares.write_shares = broken


def test_a_full_disk_of_a_rank_ends_the_save_and_nothing_else(mesh, tmp_path):
    step = placed(mesh)
    state, _ = train(step, list(start()), range(1))
    save_state(tmp_path / "a", state)
    mesh.apply(break_writes, {1: ("full disk",)})
    with pytest.raises(OSError, match="No space left on device.*rank1"):
        save_state(tmp_path / "a", state, overwrite=True)
    state, got = train(step, state, range(1, 2))
    _, losses = train(step, list(start()), range(2))
    assert got == losses[1:]
    load_state(tmp_path / "a", state)


@pytest.mark.parametrize("saving", ["save_state", "CheckpointManager"])
def test_a_worker_that_dies_in_a_save_costs_the_new_checkpoint_only(mesh, tmp_path, saving):
    step = placed(mesh)
    expected, losses = train(step, list(start()), range(4))
    expected = jax.device_get(expected)
    state, _ = train(step, list(start()), range(2))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=save_args(state))
        manager.wait_until_finished()
        mesh.apply(break_writes, {1: ("dies",)})
        began = time.monotonic()
        with pytest.raises(jaxpp.RankError, match="rank 1"):
            if saving == "save_state":
                save_state(tmp_path / "2", state)
            else:
                manager.save(2, args=save_args(state))
                manager.wait_until_finished()
        assert time.monotonic() - began < 5
        assert [p.name for p in tmp_path.iterdir()] == ["run"]
    mesh.restart()
    with pytest.raises(ValueError, match="lost"):
        save_state(tmp_path / "2", state)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() == 1
        restored = manager.restore(1, args=restore_args(state))
        state, got = train(step, restored, range(2, 4), manager)
    assert got == losses[2:]
    chex.assert_trees_all_equal(jax.device_get(state), expected, strict=True)
    like = jax.eval_shape(lambda: list(start()))
    chex.assert_trees_all_equal(load_state(tmp_path / "run" / "3" / "default", like), expected)


def fail():
    raise RuntimeError("as a callback may")


def failing(params, x):
    jax.debug.callback(fail)
    return two_stages(params, x)


def test_the_error_of_a_step_is_that_of_the_save(mesh, tmp_path):
    state = jaxpp.place(step_of(failing), mesh)(*start(), batch(0))
    with pytest.raises(Exception, match="as a callback may"):
        save_state(tmp_path / "a", state)
    assert not list(tmp_path.iterdir())
    mesh.restart()
