"""Failures and interrupts while a mesh compiles, waits, fetches or is restarted."""

import gc
import os
import signal
import sys
import threading
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.core.generated.common_pb2")

import jaxpp  # noqa: E402
from benchmarks.faults import TaskError  # noqa: E402
from jaxpp.runtime import RankError  # noqa: E402
from jaxpp.runtime.checkpoint import _shares  # noqa: E402
from jaxpp.runtime.site._array import Handles, RemoteArray  # noqa: E402
from jaxpp.runtime.site._process import Process  # noqa: E402
from tests.helpers import assert_same, wait_until  # noqa: E402
from tests.runtime.local.test_mesh import batch, step_of  # noqa: E402
from tests.runtime.remote.failures.failing import (  # noqa: E402
    Unmade,
    arm,
    begin,
    command,
    fail,
    is_gone,
    pid_of,
    pids,
)

# ---- other times ----------------------------------------------------------------------------


def break_loading(rank, how):
    def load(*_):
        del rank.load
        if how == "raise":
            raise TaskError("cannot be compiled")
        os._exit(1)

    rank.load = load


def test_an_error_while_a_step_is_compiled_ends_nothing(mesh, step, expected):
    mesh.apply(break_loading, {1: ("raise",)})
    with pytest.raises(TaskError, match="cannot be compiled") as caught:
        jaxpp.place(step_of(), mesh)(*begin(), batch())
    assert "rank 1" in "".join(caught.value.__notes__)
    found = jax.device_get(step(*begin(), batch()))
    assert_same(found, expected)


def test_a_worker_that_dies_while_a_step_is_compiled(mesh):
    mesh.apply(break_loading, {1: ("exit",)})
    with pytest.raises(RankError, match="rank 1") as caught:
        jaxpp.place(step_of(), mesh)(*begin(), batch())
    assert "has died" in str(caught.value)


def test_a_worker_that_cannot_start_leaves_nothing(shared_mesh):
    children = {c.pid for c in psutil.Process().children(recursive=True)}
    with pytest.raises((RuntimeError, ValueError), match="nonsense"):
        jaxpp.RemoteMpmdMesh((2,), environment={"JAX_PLATFORMS": "nonsense"})

    def left():
        own = [c for c in psutil.Process().children(recursive=True) if c.pid not in children]
        return [c for c in own if "jaxpp_rank" in command(c)]

    assert wait_until(lambda: not left(), 5), left()


def test_a_mesh_is_shut_down_with_steps_under_way(shared_mesh):
    mesh = jaxpp.RemoteMpmdMesh((2,))
    step = jaxpp.place(step_of(), mesh)
    state = step(*begin(), batch())
    own = pids(mesh)
    mesh.apply_everywhere(time_passes, {0: (30,)})
    for n in range(3):
        state = step(*state[:3], batch(n))
    began = time.monotonic()
    mesh.shutdown()
    assert time.monotonic() - began < 5
    assert wait_until(lambda: all(map(is_gone, own.values())), 5)
    with pytest.raises(ValueError, match="was shut down; fetch what you keep"):
        float(state[3])


def time_passes(process, seconds):
    time.sleep(seconds)


def test_who_waits_for_room_is_told_of_a_failure_while_a_rank_is_busy(mesh, step):
    state, own = step(*begin(), batch()), pids(mesh)
    mesh.apply_everywhere(time_passes, {0: (8,)})
    threading.Timer(0.5, os.kill, [own[1], signal.SIGKILL]).start()
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1"):
        for n in range(20):
            state = step(*state[:3], batch(n))
    assert time.monotonic() - began < 6


def test_a_mesh_is_restarted_with_steps_under_way(mesh, step):
    before = pids(mesh)
    state = step(*begin(), batch())
    for n in range(3):
        state = step(*state[:3], batch(n))
    mesh.restart()
    assert pids(mesh) == before
    with pytest.raises(ValueError, match="was lost"):
        float(state[3])


def test_who_waits_while_the_mesh_is_restarted_is_told(mesh, step):
    mesh.apply_everywhere(time_passes, {0: (2,)})
    loss = step(*begin(), batch())[3]
    errors = []

    def wait():
        try:
            float(loss)
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    mesh.restart()
    waiting.join(timeout=5)
    assert not waiting.is_alive()
    assert "restart" in str(errors[0])


class Batches:
    """An iterator of batches, which loads some of them slowly."""

    def __init__(self):
        self.given = 0

    def __call__(self, seconds):
        time.sleep(seconds)
        self.given += 1
        return batch(self.given)


def test_batches_that_were_to_be_loaded_before_a_restart_are_not_loaded_after_it(mesh, step):
    fed, state = jaxpp.place(step_of(), mesh, feed={3: Batches()}), begin()
    for _ in range(4):
        state = fed(*state[:3], 0.5)
    mesh.restart()
    found, again = jax.device_get((fed(*begin(), 0.0), step(*begin(), batch(1))))
    assert_same(found, again)


def assert_held_up_no_longer(mesh, end, words):
    """Ends what a thread waits for, in a call that waits for room: it has an error soon."""
    fed, errors = jaxpp.place(step_of(), mesh, feed={3: Batches()}), []
    fed(*begin(), 0.0)

    def call():
        with pytest.raises(RuntimeError, match=words) as caught:
            for _ in range(8):
                fed(*begin(), 60.0)
        errors.append(caught.value)

    calling = threading.Thread(target=call)
    calling.start()
    time.sleep(1)
    began = time.monotonic()
    end()
    calling.join(5)
    assert errors and time.monotonic() - began < 40


def test_a_thread_that_waits_for_room_holds_up_no_restart(mesh, step):
    assert_held_up_no_longer(mesh, mesh.restart, "restarted meanwhile")


def test_a_thread_that_waits_for_room_holds_up_no_shutdown():
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        assert_held_up_no_longer(mesh, mesh.shutdown, "shut down")


def write_late(process, *seconds):
    """Lets this process write its next shares of checkpoints only so many seconds later, each."""
    write, delays = _shares.write_shares, list(seconds)

    def late(*args):
        time.sleep(delays.pop(0) if delays else 0)
        write(*args)

    _shares.write_shares = late


def test_no_write_goes_on_behind_a_restart(mesh, step, tmp_path):
    """Else it would write into the next checkpoint of the same step, or fail it."""
    before, directory = pids(mesh), tmp_path / "checkpoints"
    *first, _ = step(*begin(), batch(1))
    *second, _ = step(*begin(), batch(2))
    expected = jax.device_get(second)
    mesh.apply(write_late, {0: (2,), 1: (0, 3)})  # the first of rank 0 amid the second
    with pytest.raises(RankError), ocp.CheckpointManager(directory) as manager:
        manager.save(7, args=jaxpp.save_args(first))
        arm(mesh, tmp_path, "raise", rank=1)
        fail(step)
    mesh.restart()
    assert pids(mesh) == before
    *second, _ = step(*begin(), batch(2))
    with ocp.CheckpointManager(directory) as manager:
        manager.save(7, args=jaxpp.save_args(second))
        manager.wait_until_finished()
        found = manager.restore(7, args=jaxpp.restore_args(second))
    assert_same(jax.device_get(found), expected)


def test_a_restart_beside_a_stopped_worker_keeps_the_others(mesh, step):
    before = pids(mesh)
    os.kill(before[0], signal.SIGSTOP)
    mesh.restart()
    after = pids(mesh)
    assert after[1] == before[1] and after[0] != before[0]


def test_an_error_of_what_was_wanted_before_a_restart_ends_nothing_after_it():
    class Late(Unmade):
        def block_until_ready(self):
            process.abort("The mesh is restarted.")
            process.have(transport, id)
            raise self.error

    transport, process = unittest.mock.Mock(), Process((1,))
    transport.homes = {1: jax.devices()[0]}
    process.have(transport, id)
    process.ranks[1].arrays[7] = Late()
    assert process.fetch(1, (7,)) is None
    assert process.failure is None


def test_a_restart_between_the_parts_of_a_fetch_is_told():
    group, restarts = unittest.mock.Mock(stopped=False), []
    handles = Handles(unittest.mock.Mock(num_ranks=2, processes_per_rank=1), group)
    aval = jax.typeof(jnp.float32(0))
    arrays = [RemoteArray(handles, handles.new_ids(1), aval, (rank,)) for rank in range(2)]

    def ask(rank, numbers, split):
        if rank == 1:  # the first rank has been asked
            restarts.append(threading.Thread(target=handles.restart))
            restarts[0].start()
            restarts[0].join(0.5)
        call = unittest.mock.Mock()
        call.value.side_effect = RuntimeError("restarted meanwhile")
        return [(call, rank)]

    group.fetch = ask
    for array in arrays:
        array.want()
    with pytest.raises(RuntimeError, match="restarted meanwhile"):
        np.asarray(arrays[0])
    restarts[0].join()
    with pytest.raises(ValueError, match="lost when the mesh was restarted"):
        np.asarray(arrays[1])


def leave_later(process, seconds):
    time.sleep(seconds)
    sys.exit(3)


def test_functions_from_before_a_restart_end_nothing_after_it(mesh, step, expected):
    told = [mesh.apply_everywhere(leave_later, {0: (2.0,)}, ordered=False) for _ in range(4)]
    time.sleep(0.3)
    mesh.restart()
    time.sleep(2.5)
    assert_same(jax.device_get(step(*begin(), batch())), expected)
    with pytest.raises(RuntimeError, match="restarted meanwhile"):
        told[0]()


class InterruptAt:
    """Interrupts the block, as Ctrl-C does, at the n-th place where Python would see the signal.

    That is where a function begins, and where a C function has returned.
    """

    def __init__(self, n):
        self.left = n

    def __enter__(self):
        sys.setprofile(self.see)

    def see(self, frame, event, _):
        files = ("jaxpp/runtime/remote/", "jaxpp/runtime/site/", "threading.py", "contextlib.py")
        if event in ("call", "c_return") and any(f in frame.f_code.co_filename for f in files):
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    def __exit__(self, *_):
        sys.setprofile(None)


def number_of_arrays(process):
    return len(process.arrays), len(process.loader._batches)


def arrays_left(mesh):
    gc.collect()
    return list(mesh.apply(number_of_arrays, {rank: () for rank in range(2)}).values())


#: Each of so many places is interrupted, of those after them each seventh.
DENSE = int(os.environ.get("JAXPP_INTERRUPTS", "40"))

ACTIONS = {
    "step": lambda mesh, step, fed, state: step(*state[:3], batch()),
    "feed": lambda mesh, step, fed, state: fed(*state[:3], 0),
    "fetch": lambda mesh, step, fed, state: jax.device_get(state),
    "apply": lambda mesh, step, fed, state: mesh.apply(pid_of, {0: (), 1: ()}),
    "wait": lambda mesh, step, fed, state: jax.block_until_ready(state),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_interrupt_at_any_place_leaves_a_mesh_that_works(
    mesh, step, expected, action, monkeypatch
):
    """Nothing hangs or leaks, and a step has happened on all ranks or on none."""
    # Python only reports what is raised as a generator is closed, and goes on. The hook of pytest
    # would keep the report with all that its frames refer to.
    monkeypatch.setattr(sys, "unraisablehook", lambda report: None)
    fed = jaxpp.place(step_of(), mesh, donate_argnums=(0, 1), feed={3: batch})
    jax.device_get(fed(*begin(), 0))
    before, interrupted, place = arrays_left(mesh), True, 0
    while interrupted:
        place += 1 if place < DENSE else 7
        state = step(*begin(), batch())
        try:
            with InterruptAt(place):
                ACTIONS[action](mesh, step, fed, state)
            interrupted = place < 20
        except KeyboardInterrupt:
            pass
        leaves = jax.tree.leaves(state[:2])
        gone = [leaf.is_deleted() for leaf in leaves]
        assert all(gone) or not any(gone), f"place {place}"
        found = step(*(begin() if all(gone) else state[:3]), batch())
        if all(gone):
            assert_same(jax.device_get(found), expected)
        del state, leaves, found
    assert place > 20
    assert wait_until(lambda: arrays_left(mesh) == before, 5), (arrays_left(mesh), before)


def test_an_interrupt_of_a_step_that_waits_for_room_leaves_nothing(mesh, step, expected):
    fed = jaxpp.place(step_of(), mesh, donate_argnums=(0, 1), feed={3: batch})
    state = fed(*begin(), 0)
    jax.device_get(state)
    before = arrays_left(mesh)
    waiting = mesh.apply_everywhere(time_passes, {0: (1.5,)})
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    calls = 0
    with pytest.raises(KeyboardInterrupt):
        while True:
            state = fed(*state[:3], calls)
            calls += 1
    assert 0 < calls < 10  # the next one waited
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    waiting()
    jax.device_get(fed(*state[:3], 0))
    found = jax.device_get(step(*begin(), batch()))
    assert_same(found, expected)
    state = fed(*begin(), 0)
    jax.device_get(state)
    assert wait_until(lambda: arrays_left(mesh) == before, 5), (arrays_left(mesh), before)


def hold_fetches(process, seconds):
    """Lets the worker look for arrays only some time after it was asked for them."""
    fetch = process.fetch

    def late(numbers):
        time.sleep(seconds)
        return fetch(numbers)

    process.fetch = late


def fetch_as_before(process):
    del process.fetch


@pytest.mark.parametrize("how", ["donated", "dropped"])
def test_an_array_lives_until_a_fetch_has_it(mesh, step, expected, how):
    """Also where nobody waits for the fetch any more, after a Ctrl-C."""
    for _ in range(5):  # as many as the threads of a worker, and one more
        state = step(*begin(), batch())
        mesh.apply(hold_fetches, {0: (0.3,), 1: (0.3,)})
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            jax.device_get(state)
        if how == "donated":
            state = step(*state[:3], batch())
        else:
            del state
            step(*begin(), batch())
        mesh.apply(fetch_as_before, {0: (), 1: ()})
    found = jax.device_get(step(*begin(), batch()))
    assert_same(found, expected)


def sleep_at_fetch(process, seconds):
    fetch = process.fetch

    def slow(numbers):
        process.fetch = fetch
        time.sleep(seconds)
        return fetch(numbers)

    process.fetch = slow


def test_a_slow_fetch_holds_up_no_step(mesh, step):
    *state, loss = step(*begin(), batch())
    float(loss)
    mesh.apply(sleep_at_fetch, {1: (3.0,)})
    fetched = threading.Thread(target=float, args=(loss,))
    fetched.start()
    time.sleep(0.2)
    began = time.monotonic()
    *state, loss = step(*state, batch(1))
    float(loss)
    assert fetched.is_alive() and time.monotonic() - began < 2
    fetched.join()
