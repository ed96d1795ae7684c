"""The driver's part of debug callbacks: a thread that calls their functions."""

import collections
import threading
import time
from collections.abc import Callable, Sequence

from jaxpp.runtime.arrays import ArrayType, host_array
from jaxpp.runtime.remote.calls import Hoisted
from jaxpp.runtime.transport import Bytes

#: Seconds between two looks at whether the callbacks are made that somebody waits for.
POLL = 1e-3


class Callbacks:
    """Makes the debug callbacks of computations that have run on the ranks, in order by rank.

    A thread makes them, so that a callback may fetch arrays.

    Args:
        find: gives a computation without its callbacks by its number.
        processes: the number of workers that a rank has.
    """

    def __init__(self, find: Callable[[int], Hoisted], processes: int = 1):
        self._find, self._processes = find, processes
        self._waiting: collections.deque[tuple[Hoisted, int, Sequence[Bytes]]] = collections.deque()
        self._heard = self._made = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def heard(self, worker: int, computation: int, pieces: Sequence[Bytes]) -> None:
        """Takes the bytes of the values that a computation's callbacks have read on a worker."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append((self._find(computation), worker // self._processes, pieces))
            self._heard += 1
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="jaxpp-call", daemon=True)
                self._thread.start()

    def settle(self) -> None:
        """Waits until all callbacks are made that were heard of before.

        Raises:
            BaseException: what a callback has raised, once.
        """
        heard = self._heard
        if threading.current_thread() is not self._thread:
            while self._made < heard:  # a Ctrl-C in a wait for a condition could keep its lock
                time.sleep(POLL)
        self.check()

    def check(self) -> None:
        """Raises the first exception of a callback, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread, once all callbacks are made; raises the exception of one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.settle()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                hoisted, rank, pieces = self._waiting.popleft()
            types = map(ArrayType.of, hoisted.read)
            values = [host_array(piece, kind) for piece, kind in zip(pieces, types, strict=True)]
            try:
                hoisted.replay(values, f"rank {rank}: ")
            except BaseException as error:  # noqa: B036  whatever it is, the next ones are made
                error.add_note(f"in a debug callback of rank {rank}")
                self._error = self._error or error
            del hoisted, pieces, values  # they would be kept until the next ones come
            with self._changed:
                self._made += 1
                self._changed.notify_all()
