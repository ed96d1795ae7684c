"""A worker fails: all ranks end with one error, nothing hangs, and a restarted mesh goes on.

Runs with random faults are in `test_random_faults.py`.
"""

import ctypes
import gc
import os
import re
import signal
import socket
import threading
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.core.generated.common_pb2")

import jaxpp  # noqa: E402
from benchmarks import faults  # noqa: E402
from benchmarks.faults import Fault, TaskError  # noqa: E402
from jaxpp.runtime import RankError  # noqa: E402
from jaxpp.runtime.site._failure import Death, Failure  # noqa: E402
from jaxpp.runtime.site._process import Process  # noqa: E402
from jaxpp.runtime.transport import NotComputed  # noqa: E402
from tests.helpers import wait_until  # noqa: E402
from tests.runtime.local.test_mesh import batch, step_of  # noqa: E402
from tests.runtime.remote.failures.failing import Unmade, arm, begin, fail, is_gone, pid_of, pids  # noqa: E402

# ---- one worker -----------------------------------------------------------------------------


def large_arrays(process):
    gc.collect()  # a thread may have let go of the error of a step, and its arrays, after the reset
    return [x.shape for x in jax.live_arrays() if x.size > 1]


def test_a_restart_frees_the_arrays_of_workers_that_stay(mesh, step, tmp_path):
    before = pids(mesh)
    kept = step(*begin(), batch())
    arm(mesh, tmp_path, "raise", rank=1, call=1)
    fail(step)
    mesh.restart()
    assert pids(mesh) == before and kept
    # A thread that has just met the error of the step may hold its arrays for a moment more.
    assert wait_until(lambda: mesh.apply(large_arrays, {0: (), 1: ()}) == {0: [], 1: []}, 3)


def test_a_killed_worker_ends_the_step_on_all_ranks(mesh, step, tmp_path):
    before = pids(mesh)
    kept, last = jax.device_get(step(*begin(), batch())[3]), step(*begin(), batch())[3]
    donated = step(*begin(), batch())
    arm(mesh, tmp_path, "kill", rank=1, call=0)
    began = time.monotonic()
    step(*donated[:3], batch(1))
    with pytest.raises(RankError) as caught:
        jax.device_get(step(*begin(), batch()))
    assert time.monotonic() - began < faults.LIMIT
    error = caught.value
    assert error.rank == 1 and error.host.startswith(socket.gethostname())
    assert f"rank 1 (process {before[1]} on {error.host}) has failed" in str(error)
    assert "its process has died" in error.reason
    mesh.restart()
    after = pids(mesh)
    assert after[0] == before[0] and after[1] != before[1]
    with pytest.raises(ValueError, match="was lost when the mesh was restarted; load the last"):
        float(last)
    with pytest.raises(ValueError, match=r"donated as args\[0\]\[0\] to call \d+"):
        step(*donated[:3], batch())
    np.testing.assert_array_equal(kept, jax.device_get(step(*begin(), batch())[3]))


def test_a_stopped_worker_is_found_by_its_silence(mesh, step, tmp_path):
    before = pids(mesh)
    note = arm(mesh, tmp_path, "stop", rank=0)
    error = fail(step)
    raised = time.monotonic()
    faults.check_error(Fault("stop", 0, 1, 0.5), error, "")
    assert raised - faults.read_note(note)["time"] < faults.LIMIT
    assert wait_until(lambda: is_gone(before[0]), 3)


def test_an_exception_in_a_task_names_stage_and_line_and_is_the_cause(mesh, step, tmp_path):
    before = pids(mesh)
    note = arm(mesh, tmp_path, "raise", rank=1, position=0.3)
    error = fail(step)
    faults.check_error(Fault("raise", 1, 1, 0.3), error, faults.read_note(note)["task"])
    assert isinstance(error.__cause__, TaskError)
    assert "faults.py" in "".join(error.__cause__.__notes__)  # where it was raised
    assert "stage 1" in str(error) and "test_mesh.py:" in str(error) and "of call" in str(error)
    mesh.restart()
    assert pids(mesh) == before  # nobody has to be replaced


def test_the_line_is_one_of_the_step_that_fails(mesh):
    """Other steps on the mesh have a task of the same name."""

    def negative(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        return jnp.mean(jnp.log(h @ w - 100.0))

    grad = jax.value_and_grad(jaxpp.wrap_forward(negative))
    grad = jaxpp.schedule(jaxpp.microbatch(grad, 2), jaxpp.schedules.OneFOneB())
    broken = jaxpp.place(grad, mesh)
    first = negative.__code__.co_firstlineno
    with jax.debug_nans(True), pytest.raises(RankError, match=r"\(stage 1, .*\.py:\d+\)") as caught:
        jax.device_get(broken(jnp.eye(4), jnp.ones((4, 4))))
    assert f"{__file__}:{first + 2}" in str(caught.value)
    found = f"invalid value (nan) encountered in log at {__file__}:{first + 2}"
    assert str(caught.value.__cause__) == found and isinstance(
        caught.value.__cause__, FloatingPointError
    )


@pytest.mark.parametrize(
    "fetch", [float, np.asarray, jax.device_get, jnp.asarray, jax.block_until_ready]
)
def test_an_error_surfaces_at_whatever_comes_next(mesh, step, tmp_path, fetch):
    """And from then on everywhere."""
    *state, loss = step(*begin(), batch())
    arm(mesh, tmp_path, "raise", rank=0, call=0)
    *state, loss = step(*state, batch())
    began = time.monotonic()
    with pytest.raises(RankError, match="this task does not work"):
        fetch(loss)
    assert time.monotonic() - began < 1
    for use in (
        lambda: step(*state, batch()),
        lambda: step(*begin(), batch()),
        lambda: fetch(state[0][0]),
        lambda: mesh.apply(pid_of, {0: ()}),
        lambda: jaxpp.place(step_of(), mesh).lower(*begin(), batch()).compile(),
    ):
        with pytest.raises(RankError, match="this task does not work"):
            use()


def test_who_waits_for_the_failed_rank_is_released_and_named(mesh, step, tmp_path):
    arm(mesh, tmp_path, "raise", rank=1, call=0, position=0.5)
    error = fail(step, calls=1)
    assert "Waiting for it: rank 0 in receive of" in str(error)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_that_die_idle_are_noticed_at_the_next_call(mesh, step, end):
    for pid in pids(mesh).values():
        os.kill(pid, end)
    began = time.monotonic()
    error = fail(step, calls=1)
    assert time.monotonic() - began < faults.LIMIT
    assert "its process has died" in error.reason


def test_a_worker_that_dies_while_nobody_calls_is_reported_at_once_later(mesh, step):
    *state, loss = step(*begin(), batch())
    float(loss)
    os.kill(pids(mesh)[1], signal.SIGKILL)
    time.sleep(2)
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1"):
        step(*state, batch())
    assert time.monotonic() - began < 0.2


def test_two_failures_at_once_are_one_error(mesh, step, tmp_path):
    for rank, kind in enumerate(("stop", "raise")):
        (tmp_path / kind).mkdir()
        arm(mesh, tmp_path / kind, kind, rank, call=0, position=0.0)
    began = time.monotonic()
    error = fail(step, calls=1)
    assert time.monotonic() - began < faults.LIMIT
    assert error.rank in (0, 1)


def hold_the_lock(process, seconds):
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_busy_worker_is_not_taken_for_dead(shared_mesh):
    """It may hold Python's lock for many times the timeout of a worker that has been stopped."""
    with jaxpp.RemoteMpmdMesh((1,), heartbeat_timeout=0.2) as mesh:
        before = pids(mesh)
        mesh.apply(hold_the_lock, {0: (5.0,)})
        assert pids(mesh) == before


def crash(process):
    signal.raise_signal(signal.SIGSEGV)


def test_the_signal_that_crashed_a_worker_is_named(mesh, step):
    told = r"rank 1 .*its process has died: Segmentation fault\.(?s:.*)output:\n(?s:.*)in crash"
    with pytest.raises(RankError, match=told):
        mesh.apply(crash, {1: ()})


def fail_to_load(number):
    raise KeyError("no such batch")


def test_an_error_of_the_function_that_feeds_a_step_says_so(mesh, step):
    fed = jaxpp.place(step_of(), mesh, feed={3: batch_or_error})
    state = fed(*begin(), 0)
    with pytest.raises(RankError, match="in the function that feeds the step of call") as caught:
        float(fed(*state[:3], 7)[3])
    assert isinstance(caught.value.__cause__, KeyError)


def batch_or_error(number):
    return fail_to_load(number) if number == 7 else batch(number)


class Unreadable:
    """Can be pickled, and not be read again."""

    def __reduce__(self):
        return int, ("no number",)


def give_unreadable(process):
    return Unreadable()


@pytest.mark.parametrize(("function", "args"), [(pid_of, (Unreadable(),)), (give_unreadable, ())])
def test_what_cannot_be_read_on_the_other_side_ends_nothing(shared_mesh, step, function, args):
    state = step(*begin(), batch())
    with pytest.raises(ValueError, match="no number"):
        shared_mesh.apply(function, {1: args})
    assert np.isfinite(float(state[3]))


# ---- memory ---------------------------------------------------------------------------------


def test_a_task_without_enough_memory_is_named(mesh):
    def loss(params, x):
        x = jnp.tanh(jaxpp.pipeline_enter_stage(jnp.tanh(x @ params[0])) @ params[1])
        huge = jnp.sort(jnp.broadcast_to(x.ravel(), (1 << 40, x.size)) + x[0, 0], axis=0)
        return jnp.mean(x) + jax.lax.stop_gradient(huge[0, 0])

    with pytest.raises(RankError) as caught:
        step = jaxpp.place(step_of(loss), mesh)
        float(step(*begin(), batch())[3])
    error = caught.value
    assert error.rank == 1
    if jax.__version_info__ >= (0, 12) and "its process has died" in error.reason:
        return  # this crashes the process at times, on a mesh of one, too
    # Computations are dispatched ahead: it shows where the result is first needed.
    assert re.search(r"\b[FB]1\.\d", error.task), error.task
    assert isinstance(error.__cause__, jax.errors.JaxRuntimeError)
    assert "memory" in error.reason.lower()


@pytest.mark.parametrize("sent", [True, False])
def test_an_error_that_is_met_in_a_fetch_is_of_the_task_that_a_sender_names(sent):
    transport, process = unittest.mock.Mock(), Process((1,))
    transport.homes = {1: jax.devices()[0]}
    process.have(transport, id)
    process.ranks[1].arrays[7] = Unmade()
    named = NotComputed("B1.0")
    named.__cause__ = Unmade.error
    later = threading.Timer(0.1, transport.on_failure, [named])
    if sent:
        later.start()
    assert process.fetch(1, (7,)) is None
    failure = process.failure
    assert isinstance(failure, Failure)
    assert (failure.rank, failure.task) == (1, "B1.0" if sent else "")
    assert "out of memory" in failure.exception
    assert process.wait(1, (7,)) is None and process.failure is failure


def of_actor(message):
    context = ray.core.generated.common_pb2.ActorDiedErrorContext(
        error_message=message, actor_id=bytes(16), class_name="Actor"
    )
    return ray.exceptions.ActorDiedError(context)


DIED = "The actor is dead because its worker process has died. Worker exit type: "


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ray.exceptions.OutOfMemoryError("Task was killed"), "its host ran out of memory"),
        (
            of_actor(f"{DIED}NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the "
            "node running low on memory. Memory on the node was 1 GB."),
            "its host ran out of memory",
        ),
        (
            of_actor(f"{DIED}SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
            "connection error code 2. End of file. Some common causes include: (1) the process was "
            "killed by the OOM killer."),
            "its process has died (Ray: SYSTEM_ERROR, Worker unexpectedly exits with a connection "
            "error code 2)",
        ),
        (of_actor("It was lost."), "its process has died"),
        (ray.exceptions.RaySystemError("the Ray session has been shut down"), "session"),
    ],
)  # fmt: skip
def test_what_ray_says_of_a_dead_worker(error, words):
    assert words in Death.of(error).reason
