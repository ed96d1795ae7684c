"""The calls of a launched process: of its own site, in lanes, and to meetings of all processes."""

import atexit
import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxpp.runtime.site import LANES, POLL, Failed, Process, Watch

#: Seconds that calls have to end after the mesh has.
CLOSING = 5.0
#: Set once a mesh of this process has failed, until the next one begins.
FAILED = threading.Event()
#: The threads of lanes that are in a call.
_IN_CALLS: set[int] = set()


@atexit.register  # with the import of jaxpp: what the script registers later is called before
def _leave() -> None:
    """Ends a process that has failed with an exit code that is not 0, and in time.

    Where no exception has ended the script, it has caught what was raised, or another thread has
    raised it. Where a thread is in XLA, or XLA in a callback, it may take longer than all others,
    and Python aborts where it comes back in the end.
    """
    if not FAILED.is_set():
        return
    known = {thread.ident for thread in threading.enumerate()}
    stuck = _IN_CALLS or not known.issuperset(sys._current_frames())
    if stuck or getattr(sys, "last_type", None) is None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # it may be closed
                stream.flush()
        os._exit(1)


class Lanes:
    """Runs methods of a site, each in its lane. The threads do not keep the process from ending."""

    def __init__(self, process: Process):
        self._process, self._turn = process, 0
        self._queues = {name: queue.SimpleQueue() for name in LANES}
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=self._run, args=(self._queues[name],), name=f"jaxpp-{name}", daemon=True
            )
            for name, number in LANES.items()
            for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def call(self, method: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
        """Starts a method; returns its result to come."""
        name: str = getattr(method, "lane", "control")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if name == "steps":
                args, self._turn = (self._turn, *args), self._turn + 1
            self._queues[name].put((future, method, args))
        return future

    def close(self) -> None:
        """Ends the threads, after the calls that have been started, as far as there is time."""
        for name, number in LANES.items():
            for _ in range(number):
                self._queues[name].put(None)
        end = time.monotonic() + CLOSING
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, waiting: "queue.SimpleQueue[Any]") -> None:
        while (call := waiting.get()) is not None:
            future, method, args = call
            _IN_CALLS.add(threading.get_ident())
            try:
                future.set_result(method(self._process, *args))
            except BaseException as error:  # noqa: B036  who waits has to know of every exception
                future.set_exception(error)
            _IN_CALLS.discard(threading.get_ident())
            del call, future, method, args  # they would hold arrays while the thread waits


class Outcome:
    """The outcome of a call of this process, or of all, that may be under way.

    Args:
        watch: the watch over the processes.
        future: what it will give: by process where all meet, else of this one alone.
        workers: the processes that it is of.
        local: where all meet, the part of this process.
    """

    def __init__(self, watch: Watch, future: Any, workers: set[int], local: Any = None):
        self._watch, self._future, self._workers = watch, future, workers
        self._local = future if len(workers) == 1 and local is None else local

    def wait(self, timeout: float = POLL) -> bool:
        """Waits until this process's part has ended; tells whether it has."""
        return self._local is None or not concurrent.futures.wait([self._local], timeout).not_done

    def values(self) -> dict[int, Any]:
        """Waits; gives the results by process, or raises what one has raised."""
        if self._future is None:
            return {}
        while not concurrent.futures.wait([self._future], POLL).done:
            self._watch.check()
        found = self._future.exception() or self._future.result()
        if self._local is self._future:
            found = dict.fromkeys(self._workers, found)
        for own in found.values():
            if isinstance(own, Failed):
                if own.ends:
                    self._watch.end()
                raise own.failure.cause()
            if isinstance(own, BaseException):
                raise own
        return found

    def value(self, worker: int, place: int = 0) -> Any:
        """Waits for one result of a method that gives None where the process has failed."""
        value = self.values()[worker]
        if isinstance(value, list):
            value = value[place]
        if value is None:
            self._watch.end()
        return value
