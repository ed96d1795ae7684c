"""Orbax's CheckpointManager: it saves beside the training, and keeps the last or the best."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxpp.runtime.checkpoint import _shares, load_state, restore_args, save_args


@pytest.fixture
def held_up(monkeypatch):
    """Holds up every write until the event is set."""
    event, write = threading.Event(), _shares.write_shares

    def waiting_write(*args):
        assert event.wait(20)
        write(*args)

    monkeypatch.setattr(_shares, "write_shares", waiting_write)
    yield event
    event.set()


def test_saving_does_not_wait_for_the_disk_and_arrays_may_be_donated(tmp_path, held_up):
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.arange(1000.0)
    host = np.arange(3.0)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=save_args({"x": x, "host": host}))
        assert not list(tmp_path.glob("1"))
        y = increment(x)
        assert x.is_deleted()
        host += 1
        assert y[3] == 4
        held_up.set()
        manager.wait_until_finished()
        loaded = manager.restore(1, args=restore_args({"x": y, "host": host}))
    assert (loaded["x"] == jnp.arange(1000.0)).all()
    assert (loaded["host"] == np.arange(3.0)).all()


@pytest.mark.parametrize("background", [True, False])
def test_the_last_or_the_best_are_kept_and_loaded(tmp_path, background):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, best_fn=lambda m: m["loss"], best_mode="min",
        enable_async_checkpointing=background,
    )  # fmt: skip
    losses = [3.0, 1.0, 2.0, 5.0]
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in enumerate(losses):
            state = {"x": jnp.full(3, loss), "step": step}
            manager.save(step, args=save_args(state), metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.best_step() == 1
        assert sorted(manager.all_steps())[:2] == [1, 2]
    with ocp.CheckpointManager(tmp_path, options=options) as manager:  # as after a restart
        loaded = manager.restore(1, args=restore_args(state))
    assert (loaded["x"] == 1.0).all() and loaded["step"] == 1
    assert load_state(tmp_path / "2" / "default", state)["step"] == 2


def test_items_of_several_kinds_are_saved_together(tmp_path):
    state = {"x": jnp.arange(3)}
    with ocp.CheckpointManager(tmp_path) as manager:
        both = ocp.args.Composite(state=save_args(state), data=ocp.args.JsonSave({"next": 5}))
        manager.save(1, args=both)
        manager.wait_until_finished()
        both = ocp.args.Composite(state=restore_args(state), data=ocp.args.JsonRestore())
        found = manager.restore(1, args=both)
    assert (found.state["x"] == state["x"]).all() and found.data == {"next": 5}


def test_plain_orbax_restores_what_a_manager_has_saved(tmp_path):
    state = {"x": jnp.arange(3.0), "n": 4}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=save_args(state))
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(1, args=ocp.args.PyTreeRestore())
    with ocp.CheckpointManager(tmp_path) as manager:
        like = {"x": jax.ShapeDtypeStruct((3,), "float32"), "n": 0}
        standard = manager.restore(1, args=ocp.args.StandardRestore(like))
    assert found["x"].tolist() == [0, 1, 2] and found["n"] == standard["n"] == 4
    assert (standard["x"] == state["x"]).all()


def test_an_error_in_the_background_is_raised_and_costs_the_new_one_only(tmp_path, monkeypatch):
    def failing_write(directory, *_):
        raise OSError(28, "No space left on device", directory)

    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=save_args({"x": np.arange(3)}))
        manager.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(_shares, "write_shares", failing_write)
            manager.save(1, args=save_args({"x": np.arange(4)}))
            with pytest.raises(OSError, match="No space left"):
                manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 0
        assert manager.restore(0, args=restore_args({"x": np.arange(3)}))["x"].tolist() == [0, 1, 2]


def test_wrong_use_is_named(tmp_path):
    save = {"x": jnp.ones(3)}
    with ocp.CheckpointManager(tmp_path) as manager:
        cast = save_args(save)
        cast.save_args = {"x": ocp.SaveArgs(dtype=jnp.dtype("bfloat16"))}
        manager.save(1, args=cast)
        with pytest.raises(ValueError, match="cast them before"):
            manager.wait_until_finished()
        with pytest.raises(FileNotFoundError):
            manager.restore(12, args=restore_args(save))


@pytest.mark.gpu
def test_arrays_on_a_gpu_come_back(tmp_path):
    gpu = next(d for d in jax.devices() if d.platform == "gpu")
    increment = jax.jit(lambda x: jax.tree.map(lambda x: x + x.dtype.type(1), x), donate_argnums=0)
    state = {
        "x": jax.device_put(jnp.arange(10**6, dtype="float32"), gpu),
        "y": jax.device_put(jnp.arange(9, dtype="bfloat16"), gpu),
    }
    want = jax.tree.map(np.array, state)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=save_args(state))
        state = increment(state)
        manager.wait_until_finished()
        loaded = manager.restore(1, args=restore_args(state))
    for name, x in loaded.items():
        assert x.devices() == {gpu}
        assert np.asarray(x).tobytes() == want[name].tobytes()
