"""Clocks arrays: a thread waits for them, one after the other, and notes when each is there."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxpp.runtime.trace._records import MessageRecord, RunRecord, clock

#: Makes a record from the time of its end.
Make = Callable[[int], RunRecord | MessageRecord]


class Watcher:
    """A thread that waits for arrays, one after the other, and notes the time of each."""

    def __init__(self) -> None:
        self.records: list[RunRecord | MessageRecord] = []
        self.errors: list[str] = []
        self._queue: queue.SimpleQueue[tuple[Make, list[Any]] | threading.Event | None]
        self._queue = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="jaxpp trace", daemon=True).start()

    def put(self, make: Make, arrays: list[Any]) -> None:
        """Lets the thread wait for arrays, after those that it waits for already."""
        self._queue.put((make, arrays))

    def settle(self, timeout: float = 60.0) -> None:
        """Waits until all records so far are done, for `timeout` seconds at most."""
        reached = threading.Event()
        self._queue.put(reached)
        if not reached.wait(timeout):
            self.errors.append(f"a device has not ended its work in {timeout:.0f} s")

    def close(self) -> None:
        """Ends the thread once it has nothing to wait for."""
        self._queue.put(None)

    def _watch(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            make, arrays = item
            del item  # it would keep the arrays alive
            try:
                for array in arrays:
                    array.block_until_ready()
            except Exception as error:  # the step's own error, which the caller of the step gets
                self.errors.append(str(error).partition("\n")[0])
            else:
                self.records.append(make(clock()))
            array = arrays = None


@jax.jit
def _first(x: jax.Array) -> jax.Array:
    return x[(slice(0, 1),) * x.ndim]


def mark(array: jax.Array) -> jax.Array:
    """Returns an element of an array, which is there as soon as the array is.

    The array itself may be donated to the next run, and then nobody can wait for it. The element is
    of the first device of this process that the array is on.
    """
    return _first(array.addressable_data(0))
