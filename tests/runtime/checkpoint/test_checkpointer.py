"""Checkpoints of a loop: in the background, the last ones kept, errors told."""

import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.runtime.checkpoint import Checkpointer, _directory, _store, load_state, save_state


def names(path):
    return sorted(p.name for p in path.iterdir())


@pytest.fixture
def held_up(monkeypatch):
    """Holds up every write until the event is set."""
    event, write = threading.Event(), _store.write

    def waiting_write(*args):
        assert event.wait(20)
        write(*args)

    monkeypatch.setattr(_store, "write", waiting_write)
    yield event
    event.set()


def test_saving_does_not_wait_for_the_disk_and_arrays_may_be_donated(tmp_path, held_up):
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.arange(1000.0)
    host = np.arange(3.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": x, "host": host})
        assert checkpointer.latest() is None
        y = increment(x)
        assert x.is_deleted()
        host += 1
        assert y[3] == 4
        held_up.set()
        checkpointer.wait()
        assert checkpointer.latest() == 1
        loaded = checkpointer.restore({"x": y, "host": host})
    assert (loaded["x"] == jnp.arange(1000.0)).all()
    assert (loaded["host"] == np.arange(3.0)).all()


def test_a_save_waits_for_the_one_before(tmp_path, held_up):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, np.arange(3))
    threading.Timer(0.1, held_up.set).start()
    checkpointer.save(2, np.arange(3))
    assert checkpointer.steps()[0] == 1
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


def test_the_last_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (2, 9, 10, 11):
            checkpointer.save(step, step)
    assert names(tmp_path) == ["10", "11"]
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(3, 3)  # of a run that began anew: what it has written stays
    assert names(tmp_path) == ["11", "3"]
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        for step in range(5):
            checkpointer.save(step, step)
        assert checkpointer.restore(0) == 11
        assert checkpointer.restore(0, step=2) == 2
    assert len(names(tmp_path)) == 6


def test_what_is_no_checkpoint_of_ours_stays(tmp_path):
    for name in ("notes", "007", "-1", "1.5"):
        (tmp_path / name).mkdir()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in range(3):
            checkpointer.save(step, step)
    assert names(tmp_path) == ["-1", "007", "1.5", "2", "notes"]


def test_one_that_is_read_stays(tmp_path):
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, 1)
        checkpointer.wait()
        with _directory.reading(tmp_path / "1"):
            checkpointer.save(2, 2)
            checkpointer.wait()
            assert names(tmp_path) == ["1", "2"]
        checkpointer.save(3, 3)
    assert names(tmp_path) == ["3"]


def test_a_step_is_saved_again_over_the_old_one(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, 1)
        checkpointer.save(1, 2)
        assert checkpointer.restore(0) == 2
    assert len(names(tmp_path / "1")) == 2


def test_what_is_left_of_a_save_that_died_is_no_checkpoint_and_goes(tmp_path):
    save_state(tmp_path / "5", 5)
    save_state(tmp_path / "6", 6)
    (tmp_path / "6" / "manifest.json").unlink()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() == 5
        assert checkpointer.restore(0) == 5
        with pytest.raises(ValueError, match="half-written"):
            checkpointer.restore(0, step=6)
        checkpointer.save(7, 7)
    assert names(tmp_path) == ["5", "7"]


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    def failing_write(directory, pieces):
        raise OSError(28, "No space left on device", str(directory))

    calls = [
        lambda c: c.save(2, np.arange(3)), lambda c: c.wait(), lambda c: c.restore(np.arange(3)),
        lambda c: c.close(),
    ]  # fmt: skip
    save_state(tmp_path / "0", np.arange(3))
    for call in calls:
        checkpointer = Checkpointer(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(_store, "write", failing_write)
            checkpointer.save(1, np.arange(4))
            with pytest.raises(OSError, match="No space left"):
                call(checkpointer)
        assert names(tmp_path) == ["0"]
        assert checkpointer.latest() == 0  # told once
        checkpointer.close()

    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(_store, "write", failing_write)
        checkpointer.save(1, np.arange(4))
        checkpointer._pool.submit(lambda: None).result()
        with pytest.raises(OSError, match="No space left"):
            checkpointer.latest()
    checkpointer.close()


def test_the_error_of_the_block_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(_store, "write", lambda *_: 1 / 0)
    with pytest.raises(KeyError) as caught, Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, np.arange(3))
        raise KeyError("mine")
    assert "ZeroDivisionError" in caught.value.__notes__[0]


def test_leaving_the_block_waits_for_the_write(tmp_path, held_up):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, np.arange(3))
        threading.Timer(0.1, held_up.set).start()
    assert (load_state(tmp_path / "1", np.arange(3)) == np.arange(3)).all()


def test_wrong_use_is_named(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)
    checkpointer = Checkpointer(tmp_path / "new" / "folder")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpointer.restore(0)
    with pytest.raises(FileNotFoundError, match="12"):
        checkpointer.restore(0, step=12)
    with pytest.raises(ValueError, match="-1"):
        checkpointer.save(-1, 0)
    checkpointer.close()
    with pytest.raises(RuntimeError, match="closed"):
        checkpointer.save(1, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Checkpointer(tmp_path / "file" / "a")
    shutil.rmtree(tmp_path / "new")


@pytest.mark.gpu
def test_arrays_on_a_gpu_come_back(tmp_path):
    gpu = next(d for d in jax.devices() if d.platform == "gpu")
    increment = jax.jit(lambda x: jax.tree.map(lambda x: x + x.dtype.type(1), x), donate_argnums=0)
    state = {
        "x": jax.device_put(jnp.arange(10**6, dtype="float32"), gpu),
        "y": jax.device_put(jnp.arange(9, dtype="bfloat16"), gpu),
    }
    want = jax.tree.map(np.array, state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        state = increment(state)
        loaded = checkpointer.restore(state)
    for name, x in loaded.items():
        assert x.devices() == {gpu}
        assert np.asarray(x).tobytes() == want[name].tobytes()
