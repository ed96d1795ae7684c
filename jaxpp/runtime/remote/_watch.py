"""The watch over the workers of a mesh: if one fails, all end at once, and with one error."""

import concurrent.futures
import contextlib
import functools
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxpp.runtime.remote._failure import Death, Failed, Failure, RankError, judge
from jaxpp.runtime.remote._process import Process
from jaxpp.runtime.remote.cluster import ANSWER_TIMEOUT

#: Seconds between two heartbeats.
BEAT = 0.5
#: Seconds between two looks of a thread that waits for a worker; a Ctrl-C may come in between.
POLL = 0.05
#: The most lines of a dead worker's output that its error has.
LINES = 8


class Watch:
    """Watches the workers of a mesh until one fails; then ends the work of all.

    A call of `Process.live` on each worker ends with the worker's failure, or by Ray with its
    death. A worker whose process has been stopped does neither, and is found by its heartbeats: one
    that is silent for `timeout` seconds is looked at on its host, and killed if it is stopped. One
    that runs is left in peace, however slow, since C code may hold Python's lock.

    Args:
        members: the workers.
        timeout: the seconds.
        describe: gives the stage and source line of a task, from its call's number and its label.
    """

    def __init__(self, members: Sequence[Any], timeout: float, describe: Callable[[int, str], str]):
        self.error: RankError | None = None
        self._members, self._timeout, self._describe = list(members), timeout, describe
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        #: What has been heard, in its order. Only the thread of the watch changes it.
        self._reports: dict[int, Failure | Death] = {}
        self._first = 0.0
        #: For each worker the heartbeat that it has to answer, and how long it has been silent.
        self._asked: dict[int, Any] = {}
        self._silent = dict.fromkeys(range(len(members)), 0.0)
        self._beaten = time.monotonic()
        self._fails = self._settled = self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxpp-watch", daemon=True)

    def start(self) -> None:
        """Starts to watch."""
        for member in self._members:
            living = member.call(Process.live).future()
            living.add_done_callback(functools.partial(self._ended, member.worker))
        self._thread.start()

    # ---- for the rest of the driver -------------------------------------------------------------

    def check(self) -> None:
        """Raises the error of the workers, if one has failed."""
        if not ray.is_initialized():
            gone = ray.exceptions.RaySystemError("the Ray session has been shut down")
            self.report(0, Death.of(gone))
        if self._fails or self._closed:
            self.end()

    def end(self) -> NoReturn:
        """Raises the error of the workers, once it is known; one of them has failed."""
        # A Ctrl-C in `Event.wait` could leave a lock locked.
        while not (self._settled or self._closed):
            time.sleep(POLL)
        if self.error is not None:
            raise self.error.with_traceback(None)  # the traceback would grow with every raise
        raise RuntimeError(
            "The mesh has been shut down or restarted meanwhile, or could not be restarted; call "
            "mesh.restart() and load the last checkpoint to go on."
        )

    def report(self, worker: int, what: Failure | Death) -> None:
        """Notes that a worker has failed."""
        self._fails = True
        self._events.put((worker, what))

    def close(self) -> None:
        """Ends the watch; threads that wait for a worker get an error."""
        self._closed = True
        self._events.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_TIMEOUT)

    def _ended(self, worker: int, living: Any) -> None:
        """Takes the end of a worker's `live`, on a thread of Ray's."""
        if living.cancelled():  # as the session ends
            return
        error = living.exception()
        if isinstance(error, concurrent.futures.CancelledError):
            return
        own = getattr(error, "cause", None)
        self.report(worker, own.failure if isinstance(own, Failed) else Death.of(error))

    # ---- its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                if (event := self._events.get(timeout=BEAT)) is not None:
                    self._take(*event)
            if ray.is_initialized() and time.monotonic() - self._beaten >= BEAT:
                self._beat()
            if self._reports and self._is_settled():
                self._settle()
                return

    def _take(self, worker: int, what: Failure | Death) -> None:
        """Notes what is heard of a worker; after the first, aborts all others."""
        member = self._members[worker]
        if isinstance(what, Death) and not what.output:
            what = Death.of(what.cause, self._output(member)) if what.cause else what
        first = not self._reports
        self._reports.setdefault(worker, what)
        if first:
            self._first = time.monotonic()
            self._fails = True
            for other in self._members if ray.is_initialized() else ():
                if other is not member:
                    other.call(Process.abort, f"{member} has failed")

    def _beat(self) -> None:
        """Asks all workers for signs of life, and looks at those that are silent."""
        # If this process was stopped itself, that was no silence of the workers.
        before, self._beaten = self._beaten, time.monotonic()
        passed = min(self._beaten - before, 2 * BEAT)
        for member in self._members:
            worker = member.worker
            if worker in self._reports:
                continue
            if worker in self._asked and not self._asked[worker].done():
                self._silent[worker] += passed
                if self._silent[worker] >= self._timeout:
                    self._look_at(member)
            else:
                self._silent[worker] = 0.0
                self._asked[worker] = member.call(Process.pulse).future()

    def _look_at(self, member: Any) -> None:
        """Takes for dead a silent worker that has been stopped, or whose host is silent, too."""
        silence = f"no sign of life for {self._silent[member.worker]:.1f} s"
        self._silent[member.worker] = 0.0
        try:
            if _on_node(member.hello.node, end_stopped, member.hello.pid):
                self._take(member.worker, Death(f"{silence}, and its process is stopped"))
        except ray.exceptions.RayError:
            self._take(member.worker, Death(f"{silence}, and its host does not answer"))

    def _output(self, member: Any) -> str:
        """Returns the last lines of a dead worker's output; none where its host is not there."""
        if member.hello is None or not ray.is_initialized():
            return ""
        with contextlib.suppress(ray.exceptions.RayError):
            return _on_node(member.hello.node, last_lines, member.hello.output)
        return ""

    def _is_settled(self) -> bool:
        """Tells whether all workers have ended the step, or have had their time to do so."""
        if len(self._reports) == len(self._members) or not ray.is_initialized():
            return True
        return time.monotonic() - self._first > self._timeout + 2 * BEAT

    def _settle(self) -> None:
        """Makes the error of all workers."""
        for worker, what in self._reports.items():
            self._members[worker].dead |= isinstance(what, Death)
        try:
            self.error = judge(self._members, self._reports, self._describe)
        except Exception as error:  # `end` waits for an error
            reason = f"{type(error).__name__}: {error}"
            self.error = self._members[0].error(f"A rank has failed: {reason}.", reason)
        self._settled = True


# ---- on a worker's host -------------------------------------------------------------------------


def _on_node(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on a node of Ray.

    Raises:
        RayError: the node does not answer.
    """
    if node == ray.get_runtime_context().get_node_id():
        return function(*args)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(function)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return ray.get(task.options(**options).remote(*args), timeout=ANSWER_TIMEOUT)


def end_stopped(pid: int) -> bool:
    """Kills a process of this host if it has been stopped; tells whether it was."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        state = stat.read_text().rpartition(")")[2].strip()[:1] if stat.exists() else ""
    else:
        told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
        state = told.stdout.strip()[:1]
    stopped = state in ("T", "t")  # by a signal, or by a debugger
    if stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # Ray would ask it to end itself
    return stopped


def last_lines(path: str) -> str:
    """Reads the last lines of a worker's output: what Python says of a crash, if it does."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(errors="replace")
        _, crash, told = text.rpartition("Fatal Python error: ")
        lines = [n for n in f"{crash}{told}".splitlines() if n and not n.startswith(":")]
        return "\n".join(lines[:LINES] if crash else lines[-LINES:])
    return ""
