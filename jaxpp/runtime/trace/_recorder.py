"""Clocks the runs and the messages of a process, without stopping it."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxpp._program import Message, Run
from jaxpp.runtime.arrays import is_ready
from jaxpp.runtime.executor import Chunk, Worker
from jaxpp.runtime.trace import _plan

#: One clock for all processes of a host, in nanoseconds.
clock = time.monotonic_ns


@dataclasses.dataclass(frozen=True, slots=True)
class RunRecord:
    """A run of a call: its position in its rank's program, its times of dispatch and end.

    Times are nanoseconds of the clock of the process.
    """

    call: int
    step: int
    rank: int
    position: int
    dispatched: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class MessageRecord:
    """A message at one of its ends: the start and the end of the sending, or of the receiving."""

    call: int
    tag: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """All records of a process; `errors` tell why some of its runs are not known."""

    runs: tuple[RunRecord, ...]
    sent: tuple[MessageRecord, ...]
    received: tuple[MessageRecord, ...]
    errors: tuple[str, ...] = ()


class Recorder:
    """Records the runs of a process's executors, and the messages of its transport.

    Execution stays asynchronous: a thread for each device waits for the results of its runs, one
    after the other, and notes the time.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[Worker, dict[int, _plan.Watch]]] = {}
        self._watchers: dict[Any, _Watcher] = {}
        self._sent: list[MessageRecord] = []
        self._received: list[MessageRecord] = []

    def execute(
        self, worker: Worker, chunk: Chunk, call: int, step: int, device: Any = None
    ) -> None:
        """Lets an executor run some instructions in order, and clocks them.

        Args:
            worker: the worker of a rank.
            chunk: the instructions.
            call: the number of the call.
            step: the number of the step that is called.
            device: that of the rank, where the process has several.
        """
        watches, rank = self._watches(worker), worker.program.rank
        watcher = self._watcher(device)
        slots = worker.slots
        for instruction in chunk:
            dispatched = clock()
            worker.execute((instruction,))
            if isinstance(instruction, Run):
                watch = watches[id(instruction)]
                if watch.slot is not None:
                    array = slots[watch.slot]
                    make = partial(RunRecord, call, step, rank, watch.position, dispatched)
                    if watcher.idle and is_ready(array):  # computed before the call returned
                        watcher.ends.append((make, clock()))
                    else:
                        watcher.put(make, [array if watch.mark is None else watch.mark(array)])

    def sent(self, call: int, message: Message, start: int, end: int) -> None:
        """Notes that a message was sent from `start` to `end`, in nanoseconds of `clock`."""
        self._sent.append(MessageRecord(call, message.tag, start, end))

    def received(self, call: int, message: Message, start: int, end: int) -> None:
        """Notes that a message came in from `start` to `end`, in nanoseconds of `clock`."""
        self._received.append(MessageRecord(call, message.tag, start, end))

    def copied(self, call: int, message: Message, arrays: list[Any], start: int, link: Any) -> None:
        """Notes a message between devices of this process while its copies are made.

        Args:
            call: the number of the call.
            message: the message.
            arrays: what it carries, on the device it goes to.
            start: when the copies were asked for.
            link: the devices it goes between; the copies of a link are made in order.
        """
        self._watcher(link).put(partial(MessageRecord, call, message.tag, start), arrays)

    def settle(self, timeout: float = 60.0) -> None:
        """Waits until all recorded runs and copies have ended, for `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        for watcher in self._watchers.values():
            watcher.settle(max(0.0, deadline - time.monotonic()))

    def stop(self, timeout: float = 60.0) -> Records:
        """Ends the threads, and returns all records."""
        self.settle(timeout)
        records, errors = [], []
        for watcher in self._watchers.values():
            watcher.close()
            records += [make(end) for make, end in tuple(watcher.ends)]
            errors += watcher.errors
        runs = tuple(record for record in records if isinstance(record, RunRecord))
        copies = [record for record in records if isinstance(record, MessageRecord)]
        sent, received = tuple(self._sent), tuple(self._received)
        return Records(runs, (*sent, *copies), (*received, *copies), tuple(errors))

    def prepare(self, worker: Worker) -> None:
        """Plans the waits for an executor's program before it is clocked."""
        self._watches(worker)

    def _watches(self, worker: Worker) -> dict[int, _plan.Watch]:
        known = self._plans.get(id(worker))
        if known is None:
            # Kept with the executor, or another one might get its id.
            known = self._plans[id(worker)] = worker, _plan.plan(worker)
        return known[1]

    def _watcher(self, key: Any) -> "_Watcher":
        watcher = self._watchers.get(key)
        if watcher is None:
            watcher = self._watchers[key] = _Watcher()
        return watcher


#: Makes a record from the time of its end.
_Make = Callable[[int], RunRecord | MessageRecord]


class _Watcher:
    """A thread that waits for arrays, one after the other, and notes the time of each."""

    def __init__(self) -> None:
        self.ends: list[tuple[_Make, int]] = []
        self.errors: list[str] = []
        #: The numbers of records that have been put, and that are done.
        self._waiting = self._waited = 0
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="jaxpp trace", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Tells whether the thread waits for nothing."""
        return self._waiting == self._waited

    def put(self, make: "_Make", arrays: list[Any]) -> None:
        """Lets the thread wait for arrays, after those that it waits for already.

        `make` makes the record from the time when the arrays are there.
        """
        self._waiting += 1
        self._queue.put((make, arrays))

    def settle(self, timeout: float) -> None:
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
                self.ends.append((make, clock()))
            array = arrays = None
            self._waited += 1
