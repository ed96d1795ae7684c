"""A training loop on a remote mesh, and faults in its workers: random ones, or those of a test.

`run_with_fault` trains for a few steps with a checkpoint now and then, while a fault befalls a
worker; checks the error; restarts the mesh, loads the last checkpoint and goes on to the end; and
compares all of it, bitwise, with an uninterrupted run on one process.
"""

import contextlib
import dataclasses
import errno
import faulthandler
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxpp
from jaxpp._program import Run
from jaxpp.runtime import RankError
from jaxpp.runtime.checkpoint import Checkpointer, _store
from jaxpp.runtime.transport import _epoch
from tests.runtime.local.test_mesh import batch, start, step_of

#: Steps of a run, and after how many there is a checkpoint.
STEPS, EVERY = 6, 2
#: Seconds from a fault to its error.
LIMIT = 5.0
KINDS = ("kill", "stop", "raise", "exit", "disk")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What befalls a worker.

    Args:
        kind: `"kill"` and `"stop"` send SIGKILL and SIGSTOP to the worker, `"raise"` lets a task
            raise, `"exit"` ends the process when half of a message has been written, `"disk"` lets
            the writing of a checkpoint fail half-way for want of space.
        rank: the worker's.
        call: in which call of the step, or with `"disk"` in which checkpoint, counted from 0.
        position: where in the call: the part of the rank's instructions, or messages, before it.
        delay: seconds after that, on another thread, while the worker goes on.
    """

    kind: str
    rank: int
    call: int
    position: float
    delay: float = 0.0

    @staticmethod
    def random(seed: int, ranks: int) -> "Fault":
        """A fault; all kinds come in turn."""
        chance = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        calls = STEPS // EVERY if kind == "disk" else STEPS
        late = kind in ("kill", "stop") and chance.random() < 0.5
        return Fault(
            kind,
            chance.randrange(ranks),
            chance.randrange(calls),
            chance.random(),
            chance.random() * 0.05 if late else 0.0,
        )


class TaskError(Exception):
    """What a task raises."""


# ---- in the worker ------------------------------------------------------------------------------


def arm(process: Any, fault: Fault, note: str) -> None:
    """Prepares a fault; when it happens, its time and the task are written to the file `note`."""
    {
        "kill": _arm_signal,
        "stop": _arm_signal,
        "raise": _arm_exception,
        "exit": _arm_exit,
        "disk": _arm_disk,
    }[fault.kind](process, fault, note)


def _write_note(note: str, task: str = "") -> None:
    with open(note + ".part", "w") as file:
        json.dump({"time": time.monotonic(), "task": task}, file)
    os.rename(note + ".part", note)


def _at_instruction(process: Any, fault: Fault, act: Any, among: Any = object) -> None:
    """Calls `act(worker, instruction)` before an instruction of the call that is to fail."""
    worker = _worker(process)
    execute, calls = worker.execute, iter(range(STEPS + 1))

    def watched(instructions):
        if next(calls) != fault.call:
            return execute(instructions)
        places = [n for n, i in enumerate(instructions) if isinstance(i, among)]
        place = places[int(fault.position * len(places))]
        del worker.execute
        execute(instructions[:place])
        worker.at = instructions[place]
        act(worker, instructions[place])
        execute(instructions[place:])

    worker.execute = watched


def _worker(process: Any) -> Any:
    """What runs the step, the last one that has been loaded."""
    return list(process._steps.values())[-1].worker


def _arm_signal(process: Any, fault: Fault, note: str) -> None:
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault.kind]

    def strike(task=""):
        time.sleep(fault.delay)
        _write_note(note, task)
        os.kill(os.getpid(), number)
        time.sleep(60)  # a stop reaches another thread first, and this one would go on

    def act(worker, instruction):
        if fault.delay:
            threading.Thread(target=strike, daemon=True).start()
        else:
            strike(instruction.label if isinstance(instruction, Run) else "")

    _at_instruction(process, fault, act)


def _arm_exception(process: Any, fault: Fault, note: str) -> None:
    def act(worker, instruction):
        number = instruction.computation
        executable = worker.executables[number]

        def fail(*_):
            worker.executables[number] = executable
            _write_note(note, instruction.label)
            raise TaskError("this task does not work")

        worker.executables[number] = fail

    _at_instruction(process, fault, act, among=Run)


def _arm_exit(process: Any, fault: Fault, note: str) -> None:
    count = len(_worker(process).program.sends)
    before = iter(range(fault.call * count + int(fault.position * count), -1, -1))

    def send(connection, header, arrays):
        if next(before, -1) == 0:
            data = b"".join([header.pack(), *(array.tobytes() for array in arrays)])
            connection.sendall(data[: len(data) // 2])
            _write_note(note)
            os._exit(1)
        send_frame(connection, header, arrays)

    send_frame = _epoch.send_frame
    _epoch.send_frame = send


def _arm_disk(process: Any, fault: Fault, note: str) -> None:
    del process
    before = iter(range(fault.call, -1, -1))

    def write(directory, pieces):
        if next(before) > 0:
            return write_pieces(directory, pieces)
        _store.write = write_pieces
        write_pieces(directory, dict(list(pieces.items())[: len(pieces) // 2]))
        _write_note(note)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))

    write_pieces = _store.write
    _store.write = write


# ---- in the driver ------------------------------------------------------------------------------


def read_note(note: Path) -> dict[str, Any]:
    """When a fault happened, in seconds of the monotonic clock, and in which task, if in one."""
    return json.loads(note.read_text())


@dataclasses.dataclass
class Bench:
    """A mesh with a placed step, and what an uninterrupted run of it gives.

    `losses` and `state` are those of an uninterrupted run; `like` and `shardings` are what a
    checkpoint is restored with.
    """

    mesh: Any
    step: Any
    losses: list[np.ndarray]
    state: list[np.ndarray]
    like: Any
    shardings: Any

    @staticmethod
    def on(mesh: Any) -> "Bench":
        """Places the step on a mesh and compiles it."""
        ranks = mesh.num_ranks
        devices = [jax.devices()[n % jax.device_count()] for n in range(ranks)]
        local = jaxpp.place(step_of(), jaxpp.MpmdMesh((ranks,), ("mpmd",), devices=devices))
        state, losses = start(), []
        for n in range(STEPS):
            *state, loss = local(*state, batch(n))
            losses.append(np.asarray(loss))
        step = jaxpp.place(step_of(), mesh, donate_argnums=(0, 1))
        shardings = step.lower(*start(), batch(0)).compile().input_shardings
        jax.device_get(step(*start(), batch(0)))  # what a call compiles is its own
        like = jax.eval_shape(lambda: start())
        final = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        return Bench(mesh, step, losses, final, list(like), list(shardings[:3]))

    def train_once(self) -> None:
        """Brings the step to workers that do not have it."""
        jax.device_get(self.step(*start(), batch(0)))

    def train(self, state: Any, first: int, checkpointer: Checkpointer, chance: Any) -> None:
        """Trains from a step on to the end, and compares with the uninterrupted run."""
        losses = {}
        for n in range(first, STEPS):
            *state, losses[n] = self.step(*state, batch(n))
            if chance.random() < 0.5:  # else several steps are under way
                float(losses[n])
            if (n + 1) % EVERY == 0:
                checkpointer.save(n + 1, state)
        checkpointer.wait()
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
    bench.mesh.apply(arm, {fault.rank: (fault, str(note))})
    error, raised = _train_until_error(bench, note, directory, chance)
    happened = read_note(note)
    detection = raised - happened["time"]
    check_error(fault, error, happened["task"])
    assert detection < LIMIT, f"{fault}: the error came after {detection:.1f} s"
    restarting = time.monotonic()
    if fault.kind != "disk":  # which leaves the workers as they are
        bench.mesh.restart()
    restarted = time.monotonic() - restarting
    with Checkpointer(directory / "checkpoints", keep=None) as checkpointer:
        last = checkpointer.latest()
        # A worker goes on until the fault befalls it: where that takes a while, to the end.
        ends_there = fault.kind != "disk" and not fault.delay
        last_call = fault.call if ends_there else STEPS - 1
        assert last in (None, *range(EVERY, last_call + 2, EVERY))
        state = start() if last is None else checkpointer.restore(bench.like, last, bench.shardings)
        bench.train(state, last or 0, checkpointer, chance)
    if last == STEPS:  # nothing was left to do, so that new workers do not have the step yet
        bench.train_once()
    return Outcome(fault, detection, restarted, time.monotonic() - began, str(error))


def _train_until_error(
    bench: Bench, note: Path, directory: Path, chance: random.Random
) -> tuple[BaseException, float]:
    try:
        with Checkpointer(directory / "checkpoints", keep=None) as checkpointer:
            bench.train(start(), 0, checkpointer, chance)
            # All there is to fetch was there before: the next call or fetch has to notice.
            while not note.exists():
                time.sleep(0.01)
            jax.device_get(bench.step(*start(), batch(0)))
    except (RankError, OSError) as error:
        return error, time.monotonic()
    raise AssertionError("The fault was not noticed.")


def check_error(fault: Fault, error: BaseException, task: str) -> None:
    """Checks that an error says which rank has failed, where, at what, and why."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    host = socket.gethostname()
    assert f"rank {fault.rank}" in text and host in text, text
    if fault.kind == "disk":
        assert isinstance(error, OSError) and error.errno == errno.ENOSPC, text
        assert "checkpoints" in text, text
        return
    assert isinstance(error, RankError), text
    assert error.rank == fault.rank and error.host.startswith(host), text
    if task:
        assert error.task == task and task in text, text
    match fault.kind:
        case "raise":
            assert isinstance(error.__cause__, TaskError), text
            assert "this task does not work" in text
            if task[1:].partition(".")[0].isdigit():  # not the update of the parameters
                assert f"stage {task[1]}" in text and "test_mesh.py:" in text, text
        case "stop":
            assert "stopped" in error.reason and "no sign of life" in error.reason, text
        case "kill" | "exit":
            assert "its process has died" in error.reason, text


@contextlib.contextmanager
def deadline(seconds: float):
    """Fails what takes longer, instead of waiting for ever; what cannot be interrupted is ended."""

    def late(*_):
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError(f"it hangs: not done after {seconds} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 20, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
