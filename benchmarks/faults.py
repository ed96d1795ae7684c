"""A training loop on a remote mesh, and a fault that befalls it: a random one, or that of a test.

`run_with_fault` trains for a few steps with a checkpoint now and then, while a fault befalls a
worker or the driver; checks the error; restarts the mesh, loads the last checkpoint and goes on to
the end; and compares all of it, bitwise, with an uninterrupted run on one process.

`random_faults.py` makes many such runs. What reaches inside the executor is under "in the worker".
"""

import contextlib
import dataclasses
import errno
import faulthandler
import functools
import itertools
import json
import os
import random
import re
import signal
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jaxpp
from jaxpp._program import Run, Send
from jaxpp.runtime import RankError
from jaxpp.runtime.checkpoint import _shares
from jaxpp.runtime.executor import Executor

#: Steps of a run, and after how many there is a checkpoint.
STEPS, EVERY = 6, 2
#: Seconds from a fault to its error.
LIMIT = 5.0
#: The kinds of faults, as `Fault` describes them.
KINDS = (
    "kill", "stop", "memory", "raise", "exit", "link", "disk", "interrupt", "feed",
)  # fmt: skip
#: The kinds that leave all workers as they are, and need no restart.
MILD = ("disk",)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What befalls a run.

    Args:
        kind: `"kill"` and `"stop"` send SIGKILL and SIGSTOP to a worker; `"raise"` lets a task
            raise; `"memory"` lets a task ask JAX for an array of 128 TiB, which is more than there
            is; `"exit"` ends a worker when half of a message has been written; `"link"` cuts a
            worker's connections to another rank; `"disk"` lets the writing of a checkpoint fail
            half-way for want of space; `"interrupt"` is a Ctrl-C in the driver; `"feed"` lets the
            function that loads a batch raise.
        rank: the worker's, where it is one.
        call: in which call of the step, or with `"disk"` in which checkpoint, counted from 0.
        position: where in the call: the part of the rank's instructions, or messages, before it;
            with `"interrupt"` the part of the whole run.
        delay: seconds after that, on another thread, while the worker goes on.
        peer: the rank at the other end of what is cut; -1 where nothing is.
    """

    kind: str
    rank: int
    call: int
    position: float
    delay: float = 0.0
    peer: int = -1

    @staticmethod
    def random(seed: int, ranks: int) -> "Fault":
        """A fault; all kinds come in turn."""
        chance = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        calls = STEPS // EVERY if kind == "disk" else STEPS
        late = kind in ("kill", "stop") and chance.random() < 0.5
        rank = 0 if kind == "feed" else chance.randrange(ranks)  # the first stage reads the batch
        neighbours = [r for r in (rank - 1, rank + 1) if 0 <= r < ranks]
        return Fault(
            kind,
            rank,
            chance.randrange(calls),
            chance.random(),
            chance.random() * 0.05 if late else 0.0,
            chance.choice(neighbours) if kind == "link" else -1,
        )


class TaskError(Exception):
    """What a task or a feed raises."""


# ---- the training -------------------------------------------------------------------------------

#: The messages between stages are large (64 KiB), so that a transport reads them by themselves.
WIDTH, BATCH, MICROBATCHES = 8, 4096, 2


def loss_fn(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for i, w in enumerate(params):
        x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
    return jnp.mean((x - 0.5) ** 2)


def train_step(params, momentum, rate, x):
    """A train step; the last stage's loss decides the rate, which every stage reads."""
    loop = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss_fn)), MICROBATCHES)
    value, grads = jaxpp.schedule(loop, jaxpp.schedules.OneFOneB())(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    params = jax.tree.map(lambda p, m: p - rate * m, params, momentum)
    return params, momentum, jnp.where(value > 0.1, 0.9 * rate, rate), value


def start(ranks: int) -> tuple[Any, Any, Any]:
    """The state to start from: parameters with a matrix for each rank, momentum, and rate."""
    keys = jax.random.split(jax.random.key(0), ranks)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]
    return params, [jnp.zeros_like(p) for p in params], jnp.float32(0.1)


def batch(number: int) -> jax.Array:
    return jax.random.normal(jax.random.key(100 + number), (BATCH, WIDTH))


# ---- in the worker ------------------------------------------------------------------------------

#: What undoes the faults that have been prepared in this process.
_undo: list[Callable[[], None]] = []


def arm(process: Any, fault: Fault, note: str, pids: Mapping[int, int] | None = None) -> None:
    """Prepares a fault in a worker, and undoes those that have been prepared before.

    When it happens, its time and the task are written to the file `note`. `pids` are the processes
    of all ranks, and that of the driver as rank -1.
    """
    del process
    while _undo:
        _undo[-1]()
    pids = dict(pids or {})
    match fault.kind:
        case "kill" | "stop":
            _send_signal(fault, note)
        case "raise" | "memory":
            _in_a_task(fault, note)
        case "exit":
            _in_a_message(fault, note, [pid for rank, pid in pids.items() if rank >= 0])
        case "link":
            _at_instruction(fault, lambda *_: cut(pids[fault.peer], note))
        case "disk":
            _in_a_checkpoint(fault, note)
        case "feed":
            _in_a_feed(fault, note)


def _patch(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Replaces an attribute; returns the function that puts it back."""
    before = getattr(owner, name)
    own = name in vars(owner)

    def undo() -> None:
        setattr(owner, name, before) if own else delattr(owner, name)
        _undo.remove(undo)

    setattr(owner, name, value)
    _undo.append(undo)
    return undo


def write_note(note: str, task: str = "") -> None:
    with open(note + ".part", "w") as file:
        json.dump({"time": time.monotonic(), "task": task}, file)
    os.rename(note + ".part", note)


def _at_instruction(fault: Fault, act: Callable[..., None], among: Any = object) -> None:
    """Calls `act` before an instruction of the call that is to fail; it may take both."""
    execute, calls = Executor.execute, itertools.count()

    def watched(executor: Any, instructions: Any) -> None:
        places = [n for n, i in enumerate(instructions) if isinstance(i, among)]
        if not places or next(calls) != fault.call:  # of several ranks each has some in turn
            return execute(executor, instructions)
        place = places[int(fault.position * len(places))]
        undo()
        execute(executor, instructions[:place])
        executor.at = instructions[place]
        act(executor, instructions[place])
        execute(executor, instructions[place:])

    undo = _patch(Executor, "execute", watched)


def _send_signal(fault: Fault, note: str) -> None:
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault.kind]

    def strike() -> None:
        time.sleep(fault.delay)
        write_note(note)  # a process that has died cannot tell its task
        os.kill(os.getpid(), number)
        time.sleep(60)  # a stop reaches another thread first, and this one would go on

    def act(*_: Any) -> None:
        if fault.delay:
            threading.Thread(target=strike, daemon=True).start()
        else:
            strike()

    _at_instruction(fault, act)


def _in_a_task(fault: Fault, note: str) -> None:
    def act(executor: Any, instruction: Any) -> None:
        number = instruction.computation
        executable = executor.executables[number]

        def fail(*_: Any) -> None:
            executor.executables[number] = executable
            write_note(note, instruction.label)
            if fault.kind == "memory":
                jnp.zeros((1 << 20, 1 << 25)).block_until_ready()
            raise TaskError("this task does not work")

        executor.executables[number] = fail

    _at_instruction(fault, act, among=Run)


def _in_a_message(fault: Fault, note: str, peers: Sequence[int]) -> None:
    def act(*_: Any) -> None:
        for name in ("sendall", "sendmsg"):
            _patch(socket.socket, name, functools.partialmethod(send, getattr(socket.socket, name)))

    def send(self: socket.socket, write: Any, data: Any, *args: Any) -> Any:
        if _peer_of(self) not in peers:
            return write(self, data, *args)
        data = data if isinstance(data, bytes) else b"".join(data)
        socket.socket.send(self, data[: len(data) // 2])
        write_note(note)
        os._exit(1)

    _at_instruction(fault, act, among=Send)


def _peer_of(connection: socket.socket) -> int:
    """The process at the other end of a connection within this host; 0 where there is none."""
    if connection.family != socket.AF_UNIX:
        return 0
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def cut(pid: int, note: str) -> None:
    """Cuts all connections of this process to another one of this host."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            if _peer_of(connection) == pid:
                found.append(connection)
            else:
                connection.close()
    write_note(note)
    for connection in found:
        with connection, contextlib.suppress(OSError):  # the other end may have gone
            connection.shutdown(socket.SHUT_RDWR)


def _in_a_checkpoint(fault: Fault, note: str) -> None:
    before = iter(range(fault.call, -1, -1))

    def write(directory: str, writer: str, shares: Sequence[Any]) -> None:
        if next(before) > 0:
            return write_shares(directory, writer, shares)
        undo()
        write_shares(directory, writer, shares[: len(shares) // 2])
        write_note(note)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)

    write_shares = _shares.write_shares
    undo = _patch(_shares, "write_shares", write)


def _in_a_feed(fault: Fault, note: str) -> None:
    def load(number: int) -> jax.Array:
        if number == fault.call:
            undo()
            write_note(note)
            raise TaskError("there is no such batch")
        return batch(number)

    undo = _patch(_loading, "load", load)


class _loading:  # noqa: N801  a name to replace
    load = staticmethod(batch)


def load_batch(number: int) -> jax.Array:
    """Loads the batch of a step that is fed, in the worker."""
    return _loading.load(number)


def pid_of(process: Any) -> int:
    """Gives the id of the worker's process; runs in it."""
    del process
    return os.getpid()


# ---- in the driver ------------------------------------------------------------------------------


def read_note(note: Path) -> dict[str, Any]:
    """When a fault happened, in seconds of the monotonic clock, and in which task, if in one."""
    return json.loads(note.read_text())


@dataclasses.dataclass
class Bench:
    """A mesh with a placed step, and what an uninterrupted run of it gives.

    `step` takes batches, and `fed` loads them in the workers. `losses` and `state` are those of an
    uninterrupted run, which takes `seconds`; `like` and `shardings` are what a checkpoint is
    restored with.
    """

    mesh: Any
    step: Any
    fed: Any
    losses: list[np.ndarray]
    state: list[np.ndarray]
    like: Any
    shardings: Any
    seconds: float = 0.0

    @staticmethod
    def on(mesh: Any) -> "Bench":
        """Places the step on a mesh and compiles it."""
        ranks = mesh.num_ranks
        devices = [jax.devices()[n % jax.device_count()] for n in range(ranks)]
        local = jaxpp.place(train_step, jaxpp.MpmdMesh((ranks,), ("mpmd",), devices=devices))
        params, momentum, rate = start(ranks)
        losses = []
        for n in range(STEPS):
            params, momentum, rate, loss = local(params, momentum, rate, batch(n))
            losses.append(np.asarray(loss))
        step = jaxpp.place(train_step, mesh, donate_argnums=(0, 1))
        fed = jaxpp.place(train_step, mesh, donate_argnums=(0, 1), feed={3: load_batch})
        shardings = step.lower(*start(ranks), batch(0)).compile().input_shardings
        like = jax.eval_shape(lambda: start(ranks))
        final = [np.asarray(leaf) for leaf in jax.tree.leaves((params, momentum, rate))]
        bench = Bench(mesh, step, fed, losses, final, list(like), list(shardings[:3]))
        bench.train_once()  # what a call compiles is its own
        with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
            began = time.monotonic()
            bench.train(bench.start(), 0, manager, random.Random(0), False)
            bench.seconds = time.monotonic() - began
        return bench

    def call(self, state: Sequence[Any], number: int, fed: bool) -> Any:
        """Calls one of the steps with its batch."""
        return self.fed(*state, number) if fed else self.step(*state, batch(number))

    def start(self) -> tuple[Any, Any, Any]:
        return start(self.mesh.num_ranks)

    def train_once(self) -> None:
        """Brings the steps to workers that do not have them."""
        for fed in (False, True):
            jax.device_get(self.call(self.start(), 0, fed))

    def train(
        self,
        state: Any,
        first: int,
        manager: ocp.CheckpointManager,
        chance: random.Random,
        fed: bool,
    ) -> None:
        """Trains from a step on to the end, and compares with the uninterrupted run."""
        losses = {}
        for n in range(first, STEPS):
            *state, losses[n] = self.call(state, n, fed)
            if chance.random() < 0.5:  # else several steps are under way
                float(losses[n])
            if chance.random() < 0.3:
                self.mesh.apply(pid_of, {chance.randrange(self.mesh.num_ranks): ()})
            if (n + 1) % EVERY == 0:
                manager.save(n + 1, args=jaxpp.save_args(state))
        manager.wait_until_finished()
        for n, loss in losses.items():
            np.testing.assert_array_equal(np.asarray(loss), self.losses[n], strict=True)
        for leaf, expected in zip(jax.tree.leaves(state), self.state, strict=True):
            np.testing.assert_array_equal(np.asarray(leaf), expected, strict=True)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run went, in seconds: from the fault to the error, the restart, all of it."""

    fault: Fault
    detection: float
    restart: float
    total: float
    message: str


def run_with_fault(bench: Bench, fault: Fault, directory: Path, seed: int = 0) -> Outcome:
    """Trains with a fault, checks the error, restarts, goes on, and compares all results."""
    began = time.monotonic()
    chance = random.Random(seed)
    note = directory / "note.json"
    fed = fault.kind == "feed"
    error, raised = _train_until_error(bench, fault, note, directory, chance)
    if not note.exists():  # the error is not of the fault
        raise error
    happened = read_note(note)
    detection = raised - happened["time"]
    check_error(fault, error, happened["task"])
    assert detection < LIMIT, f"{fault}: the error came after {detection:.1f} s"
    if fault.kind == "interrupt" and chance.random() < 0.5:
        _step_after_interrupt(bench)
    restarting = time.monotonic()
    if fault.kind not in MILD:
        bench.mesh.restart()
    restarted = time.monotonic() - restarting
    with ocp.CheckpointManager(directory / "checkpoints") as manager:
        last = manager.latest_step()
        # Where a fault does not end the worker, or comes later, calls may go on to the end.
        ends_there = fault.kind not in ("disk", "interrupt", "link") and not fault.delay
        last_call = fault.call if ends_there else STEPS - 1
        assert last in (None, *range(EVERY, last_call + 2, EVERY)), last
        state = bench.start()
        if last is not None:
            state = manager.restore(last, args=jaxpp.restore_args(bench.like, bench.shardings))
        bench.train(state, last or 0, manager, chance, fed)
    bench.train_once()  # new workers may not have the steps yet
    return Outcome(fault, detection, restarted, time.monotonic() - began, str(error))


def _train_until_error(
    bench: Bench, fault: Fault, note: Path, directory: Path, chance: random.Random
) -> tuple[BaseException, float]:
    interrupts = fault.kind == "interrupt"
    if not interrupts:
        pids = bench.mesh.apply(pid_of, {rank: () for rank in range(bench.mesh.num_ranks)})
        pids[-1] = os.getpid()
        bench.mesh.apply(arm, {fault.rank: (fault, str(note), pids)})
    try:
        with ocp.CheckpointManager(directory / "checkpoints") as manager:
            if interrupts:
                interrupt_later(fault.position * bench.seconds, note)
            bench.train(bench.start(), 0, manager, chance, fault.kind == "feed")
            # All there is to fetch was there before: the next call or fetch has to notice.
            while not note.exists():
                time.sleep(0.01)
            jax.device_get(bench.call(bench.start(), 0, False))
            for _ in range(3 * interrupts):  # Python ignores one that comes in a finalizer
                interrupt_later(0.0, note)
                time.sleep(0.5)
    except (RankError, OSError, KeyboardInterrupt) as error:
        return error, time.monotonic()
    raise AssertionError("The fault was not noticed.")


def _step_after_interrupt(bench: Bench) -> None:
    """Calls a step on a mesh that has not been restarted; it works, or the mesh says why not."""
    try:
        *_, loss = jax.device_get(bench.call(bench.start(), 0, False))
    except RankError as error:  # the interrupt came half-way in what a worker was told
        assert isinstance(error.__cause__, KeyboardInterrupt), repr(error)
    else:
        np.testing.assert_array_equal(loss, bench.losses[0], strict=True)


def interrupt_later(seconds: float, note: Path) -> None:
    """Sends a Ctrl-C to the main thread of this process after some time."""
    # A program that was started in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.main_thread().ident
    assert thread is not None

    def strike() -> None:
        time.sleep(seconds)
        write_note(str(note))
        signal.pthread_kill(thread, signal.SIGINT)

    threading.Thread(target=strike, daemon=True).start()


def check_error(fault: Fault, error: BaseException, task: str) -> None:
    """Checks that an error says which rank has failed, where, at what, and why."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    if fault.kind == "interrupt":
        assert isinstance(error, KeyboardInterrupt), repr(error)
        return
    host = socket.gethostname()
    assert f"rank {fault.rank}" in text and host in text, text
    if fault.kind == "disk":
        assert isinstance(error, OSError) and error.errno == errno.ENOSPC, text
        assert "checkpoints" in text, text
        return
    assert isinstance(error, RankError), text
    ranks = (fault.rank, fault.peer) if fault.kind == "link" else (fault.rank,)
    assert error.rank in ranks and error.host.startswith(host), text
    assert all(f"rank {rank}" in text for rank in ranks), text
    if task:
        assert error.task == task and task in text, text
    cause = f"{type(error.__cause__).__name__}: {error.__cause__}"
    match fault.kind:
        case "raise" | "memory":
            wanted = "TaskError: this task" if fault.kind == "raise" else "Out of memory"
            assert wanted in cause and cause.partition(": ")[2].splitlines()[0] in text, text
            if task[1:].partition(".")[0].isdigit():  # not the update of the parameters
                assert f"stage {task[1]}" in text and re.search(r"\.py:\d+", str(error)), text
        case "feed":
            assert "TaskError: there is no such batch" in cause and "no such batch" in text, text
        case "stop":
            assert "stopped" in error.reason and "no sign of life" in error.reason, text
        case "kill" | "exit":
            assert "its process has died" in error.reason, text
        case "link":
            assert "connection" in text, text


class Hang(AssertionError):
    """Something has taken too long."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Fails what takes longer, instead of waiting for ever; what cannot be interrupted is ended."""

    def late(*_: Any) -> None:
        faulthandler.dump_traceback(all_threads=True)
        raise Hang(f"it hangs: not done after {seconds} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 20, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
