"""A worker fails: all ranks end with one error, nothing hangs, and a restarted mesh goes on.

Runs with random faults are in `test_random_faults.py`.
"""

import ctypes
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.core.generated.common_pb2")

import jaxpp  # noqa: E402
from benchmarks import faults  # noqa: E402
from benchmarks.faults import Fault, TaskError  # noqa: E402
from jaxpp.runtime import RankError  # noqa: E402
from jaxpp.runtime.site._array import Handles, RemoteArray  # noqa: E402
from jaxpp.runtime.site._failure import Death, Failure  # noqa: E402
from jaxpp.runtime.site._process import Process  # noqa: E402
from jaxpp.runtime.transport import NotComputed  # noqa: E402
from tests.helpers import assert_same, wait_until  # noqa: E402
from tests.runtime.local.test_mesh import batch, init_params, start, step_of  # noqa: E402


@pytest.fixture(autouse=True)
def no_hanging():
    with faults.deadline(120):
        yield


@pytest.fixture(scope="module")
def shared_mesh(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def step(shared_mesh):
    step = jaxpp.place(step_of(), shared_mesh, donate_argnums=(0, 1))
    jax.device_get(step(*begin(), batch()))
    return step


@pytest.fixture(scope="module")
def expected():
    """What the step gives on the mesh of one process."""
    mesh = jaxpp.MpmdMesh((2,), devices=jax.devices()[:1] * 2)
    return jax.device_get(jaxpp.place(step_of(), mesh)(*begin(), batch()))


@pytest.fixture
def mesh(shared_mesh, step, expected):
    """The mesh; afterwards it is restarted, and has to give what it gave before."""
    yield shared_mesh
    shared_mesh.restart()
    found = jax.device_get(step(*begin(), batch()))
    assert_same(found, expected)


def begin():
    return start(init_params(2))


def arm(mesh, tmp_path, kind, rank, call=1, position=0.5):
    note = tmp_path / "note.json"
    mesh.apply(faults.arm, {rank: (Fault(kind, rank, call, position), str(note))})
    return note


def fail(step, calls=3):
    """Calls the step until it fails."""
    with pytest.raises(RankError) as caught:
        state = begin()
        for n in range(calls):
            *state, loss = step(*state, batch(n))
        float(loss)
    return caught.value


def pid_of(process):
    return os.getpid()


def pids(mesh):
    return mesh.apply(pid_of, {rank: () for rank in range(mesh.num_ranks)})


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# ---- one worker -----------------------------------------------------------------------------


def large_arrays(process):
    return [x.shape for x in jax.live_arrays() if x.size > 1]


def test_a_restart_frees_the_arrays_of_workers_that_stay(mesh, step, tmp_path):
    before = pids(mesh)
    kept = step(*begin(), batch())
    arm(mesh, tmp_path, "raise", rank=1, call=1)
    fail(step)
    mesh.restart()
    assert pids(mesh) == before and kept
    assert mesh.apply(large_arrays, {0: (), 1: ()}) == {0: [], 1: []}


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


class Unmade:
    """An array whose computation has failed."""

    error = RuntimeError("out of memory")

    def block_until_ready(self):
        raise self.error


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


def test_a_thread_that_waits_for_room_holds_up_no_restart(mesh, step):
    fed, errors = jaxpp.place(step_of(), mesh, feed={3: Batches()}), []
    fed(*begin(), 0.0)

    def call():
        with pytest.raises(RuntimeError, match="restarted meanwhile") as caught:
            for _ in range(8):
                fed(*begin(), 60.0)
        errors.append(caught.value)

    calling = threading.Thread(target=call)
    calling.start()
    time.sleep(1)
    began = time.monotonic()
    mesh.restart()
    calling.join(5)
    assert errors and time.monotonic() - began < 40


def test_a_thread_that_waits_for_room_holds_up_no_shutdown():
    errors = []
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        fed = jaxpp.place(step_of(), mesh, feed={3: Batches()})
        fed(*begin(), 0.0)

        def call():
            with pytest.raises(RuntimeError, match="shut down") as caught:
                for _ in range(8):
                    fed(*begin(), 60.0)
            errors.append(caught.value)

        calling = threading.Thread(target=call)
        calling.start()
        time.sleep(1)
        began = time.monotonic()
        mesh.shutdown()
    calling.join(5)
    assert errors and time.monotonic() - began < 40


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


# ---- connections that are cut, or are no worker's -----------------------------------------------


def cut(process, rank):
    process.transport.peers[rank].reader.connection.shutdown(socket.SHUT_RDWR)


def test_a_cut_between_two_ranks_names_the_connection_and_replaces_nobody(mesh, step):
    before, state = pids(mesh), step(*begin(), batch())
    jax.block_until_ready(state)
    mesh.apply(cut, {0: (1,)})
    began = time.monotonic()
    error = fail(step)
    assert time.monotonic() - began < faults.LIMIT
    text = (
        r"The connection between rank \d \(.*\) and rank \d \(.*\) broke, but both processes live"
    )
    assert re.match(text, str(error)), error
    mesh.restart()
    assert pids(mesh) == before


def addresses(rank):
    return rank.transport.addresses


def test_nobody_connects_to_a_mesh_that_has_started(mesh, step, expected):
    found, before = mesh.apply(addresses, {0: (), 1: ()}), pids(mesh)
    for own in found.values():
        with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(ConnectionRefusedError):
            stranger.connect(own.unix)
    mesh.restart()
    assert_same(jax.device_get(step(*begin(), batch())), expected)
    assert pids(mesh) == before


def test_200_connections_of_strangers_hold_up_no_restart(mesh, step, expected):
    """While a worker lets the others in; half say nothing, half garbage."""
    before = pids(mesh)
    strangers: list[socket.socket] = []
    over = threading.Event()

    def come():
        while len(strangers) < 200 and not over.is_set():
            for name in re.findall(r"@(jaxpp-\w+)", open("/proc/net/unix").read()):
                connection = socket.socket(socket.AF_UNIX)
                try:
                    connection.connect(b"\0" + name.encode())
                    connection.sendall(b"" if len(strangers) % 2 else b"GET / HTTP/1.1")
                except OSError:  # the door is closed
                    connection.close()
                else:
                    strangers.append(connection)
            time.sleep(0.001)

    crowd = threading.Thread(target=come)
    crowd.start()
    try:
        began = time.monotonic()
        mesh.restart()
        got = jax.device_get(step(*begin(), batch()))
        assert time.monotonic() - began < 5
    finally:
        over.set()
        crowd.join()
        for connection in strangers:
            connection.close()
    assert pids(mesh) == before
    assert_same(got, expected)


def test_the_ports_that_other_hosts_reach_are_told(ray_session, caplog):
    host = ray.util.get_node_ip_address()
    for address in (None, host):
        caplog.clear()
        with jaxpp.RemoteMpmdMesh((1,), address=address):
            told = [r.getMessage() for r in caplog.records if r.name == "jaxpp"]
        found = [re.match(rf"Workers listen .* at {host} port \d+\. ", text) for text in told]
        assert all(found) and len(found) == (address is not None and host != "127.0.0.1")


# ---- what is left ---------------------------------------------------------------------------


def command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def counts(process=None):
    own = psutil.Process()
    return own.num_threads(), own.num_fds()


def test_restarts_leave_no_thread_and_no_file(mesh, step):
    def once():
        float(step(*begin(), batch())[3])
        mesh.restart()
        float(step(*begin(), batch())[3])
        gc.collect()

    def all_counts():
        workers = mesh.apply(counts, {rank: () for rank in range(2)})
        return [counts(), *workers.values()]

    for _ in range(3):
        once()
    before = all_counts()
    for _ in range(10):
        once()
    # Threads that have been told to end may need a moment.
    assert wait_until(
        lambda: all(
            n <= most + 1
            for now, then in zip(all_counts(), before, strict=True)
            for n, most in zip(now, then, strict=True)
        ),
        5,
    ), (before, all_counts())


DRIVER = """
import os, signal, sys, time
import jax, jaxpp, ray
from tests.runtime.local.test_mesh import batch, init_params, start, step_of
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with jaxpp.RemoteMpmdMesh((2,), heartbeat_timeout=1.0) as mesh:
        step = jaxpp.place(step_of(), mesh)
        state = step(*start(init_params(2)), batch())
        float(state[3])
        print("ready", flush=True)
        if sys.argv[1] == "pause":
            sys.stdin.readline()
            time.sleep(2)  # the monitor asks for signs of life
            print(float(step(*state[:3], batch())[3]), flush=True)
            sys.exit()
        if sys.argv[1] == "early":
            ray.shutdown()
            for use in (lambda: float(state[3]), lambda: step(*state[:3], batch())):
                try:
                    use()
                except RuntimeError as error:
                    print("Ray session" in str(error), flush=True)
            time.sleep(1)
            mesh.shutdown()
            print("started again" if ray.is_initialized() else "ended", flush=True)
            sys.exit()
        while True:
            state = step(*state[:3], batch())
            float(state[3])
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Drivers with a Ray session of their own, by how they end; they start next to each other."""
    script = tmp_path_factory.mktemp("drivers") / "driver.py"
    script.write_text(DRIVER)
    environment = os.environ | {
        "RAY_ADDRESS": "local",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    found = {
        how: subprocess.Popen(
            [sys.executable, str(script), how],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for how in ("SIGINT", "SIGKILL", "early", "pause")
    }
    yield found
    for process in found.values():
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_a_driver_that_is_ended_leaves_no_process(drivers, how):
    driver = drivers[how]
    assert driver.stdout.readline() == "ready\n"
    children = psutil.Process(driver.pid).children(recursive=True)
    commands = {c.pid: command(c) for c in children}
    assert sum("jaxpp_rank" in found for found in commands.values()) == 2
    time.sleep(0.2)
    if how == "SIGINT":
        os.killpg(driver.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        _, errors = driver.communicate(timeout=60)
        assert "KeyboardInterrupt" in errors
    else:
        driver.kill()
        driver.wait()
    # Ray's agents try for up to a minute to tell the session that has gone that it has.
    children = [c for c in children if how == "SIGINT" or "Agent" not in commands[c.pid]]
    _, alive = psutil.wait_procs(children, timeout=45)
    assert not alive


@pytest.mark.slow
def test_a_session_that_the_user_ends_is_not_started_again(drivers):
    output, errors = drivers["early"].communicate(timeout=100)
    assert output.split() == ["ready", "True", "True", "ended"], errors
    assert drivers["early"].returncode == 0


@pytest.mark.slow
def test_a_driver_that_was_stopped_goes_on(drivers):
    driver = drivers["pause"]
    assert driver.stdout.readline() == "ready\n"
    driver.send_signal(signal.SIGSTOP)
    time.sleep(8)  # times the timeout of a worker that has been stopped
    driver.send_signal(signal.SIGCONT)
    output, errors = driver.communicate("go on\n", timeout=60)
    assert np.isfinite(float(output)), errors
