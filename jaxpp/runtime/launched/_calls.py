"""The calls of a launched process: of its own site, in lanes, and to meetings of all processes."""

import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxpp.runtime.site import LANES, POLL, Failed, Process, Watch


class Lanes:
    """Runs methods of a site, each in its lane. The threads do not keep the process from ending."""

    def __init__(self, process: Process):
        self._process, self._turn = process, 0
        self._queues = {name: queue.SimpleQueue() for name in LANES}
        self._lock = threading.Lock()
        for name, number in LANES.items():
            for _ in range(number):
                run = functools.partial(self._run, self._queues[name])
                threading.Thread(target=run, name=f"jaxpp-{name}", daemon=True).start()

    def call(self, method: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
        """Starts a method; returns its result to come."""
        name: str = getattr(method, "lane", "control")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if name == "steps":
                args, self._turn = (self._turn, *args), self._turn + 1
            self._queues[name].put((future, method, args))
        return future

    def _run(self, waiting: "queue.SimpleQueue[Any]") -> None:
        while True:
            future, method, args = waiting.get()
            try:
                future.set_result(method(self._process, *args))
            except BaseException as error:  # noqa: B036  who waits has to know of every exception
                future.set_exception(error)
            del future, method, args  # they would hold arrays while the thread waits


class Call:
    """A call of this process, or of all, that is under way.

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
