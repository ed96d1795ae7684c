"""Clocks the runs and the messages of a process, without stopping it."""

import dataclasses
import functools
import math
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp._program import Free, Message, Receive, Run
from jaxpp.runtime.arrays import is_ready
from jaxpp.runtime.executor import Chunk, Executor

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


@dataclasses.dataclass(frozen=True, slots=True)
class Watch:
    """The end of a run: the moment when the array in `slot`, or `mark` of that array, is there."""

    position: int
    slot: int | None
    mark: Callable[[Any], Any] | None


#: Makes a record from the time of its end.
_Make = Callable[[int], RunRecord | MessageRecord]


class Recorder:
    """Records the runs of a process's executors, and the messages of its transport.

    Each run is an annotation of JAX's profile, too, where the profiler records.

    Execution stays asynchronous: a thread for each lane of a device waits for the results of its
    runs, one after the other, and notes the time.
    """

    def __init__(self) -> None:
        self._plans: dict[int, tuple[Executor, dict[int, Watch]]] = {}
        self._watchers: dict[Any, _Watcher] = {}
        self._sent: list[MessageRecord] = []
        self._received: list[MessageRecord] = []

    def execute(
        self, executor: Executor, chunk: Chunk, call: int, step: int, device: Any = None
    ) -> None:
        """Lets an executor run some instructions in order, and clocks them.

        `call` and `step` are the numbers of the call and of the step that is called; `device` is
        that of the rank, where the process has several.
        """
        watches, rank = self.prepare(executor), executor.program.rank
        for instruction in chunk:
            if not isinstance(instruction, Run):
                executor.execute((instruction,))
                continue
            dispatched = clock()
            with jax.profiler.TraceAnnotation(instruction.label, call=call, rank=rank):
                executor.execute((instruction,))
            watch = watches[id(instruction)]
            if watch.slot is None:
                continue
            watcher = self._watcher((device, instruction.lane))
            array = executor.slots[watch.slot]
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
        """Notes a message between devices of this process, whose copies were asked for at `start`.

        `arrays` are what it carries, on the device it goes to. `link` has the devices it goes
        between; the copies of a link are made in order.
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

    def prepare(self, executor: Executor) -> dict[int, Watch]:
        """Plans the waits for the runs of an executor's program, by their ids, if it is new."""
        if id(executor) not in self._plans:
            # Kept with the executor, or another one might get its id.
            self._plans[id(executor)] = executor, plan(executor)
        return self._plans[id(executor)][1]

    def _watcher(self, key: Any) -> "_Watcher":
        if key not in self._watchers:
            self._watchers[key] = _Watcher()
        return self._watchers[key]


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

    def put(self, make: _Make, arrays: list[Any]) -> None:
        """Lets the thread wait for arrays, after those that it waits for already."""
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


# ---- the array to wait for in order to know when a run has ended --------------------------------


def plan(executor: Executor) -> dict[int, Watch]:
    """Finds for each run of an executor's program, by the run's id, the array to wait for.

    The array is the smallest result that is not donated later. A wait for a donated array would
    raise an error, for its memory belongs to another array as soon as that one is dispatched. Where
    every result is donated, as the accumulators of a backward without an input gradient are, the
    array is one element of the smallest result, made by a computation of its own right after the
    run. A wait for the run itself before the next dispatch would let the device wait, too.
    """
    donated = _donated_results(executor)
    watches = {}
    for position, run in enumerate(executor.program.instructions):
        if not isinstance(run, Run):
            continue
        made = jax.tree_util.tree_leaves(executor.executables[run.computation].out_info)
        types = dict(zip(run.outputs, made, strict=True))
        kept = [slot for slot in types if (position, slot) not in donated]
        slot = min(kept or types, key=lambda slot: _size(types[slot]), default=None)
        mark = None if slot is None or kept else _mark(types[slot])
        watches[id(run)] = Watch(position, slot, mark)
    return watches


def _donated_results(executor: Executor) -> set[tuple[int, int]]:
    """Finds the runs' results that are donated later: their positions and slots.

    A result of the step counts as donated: the next call may donate it, or the user may delete it.
    """
    donated: set[tuple[int, int]] = set()
    made: dict[int, int] = {}
    for position, instruction in enumerate(executor.program.instructions):
        match instruction:
            case Run(number, inputs, outputs):
                infos = executor.executables[number].args_info
                infos = jax.tree_util.tree_leaves(infos, is_leaf=lambda x: hasattr(x, "donated"))
                taken = [slot for slot, info in zip(inputs, infos, strict=True) if info.donated]
                donated.update((made[slot], slot) for slot in taken if slot in made)
                made.update(dict.fromkeys(outputs, position))
            case Receive(slots) | Free(slots):
                for slot in slots:
                    made.pop(slot, None)
    returned = {slot for _, slot in executor.program.outputs}
    return donated | {(made[slot], slot) for slot in returned if slot in made}


def _size(type_: Any) -> float:
    return math.prod(type_.shape) or math.inf  # nobody can wait for an array without elements


@functools.cache
def _compiled_mark(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[Any], Any]:
    def mark(x):
        return lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), (1,))

    if isinstance(sharding, NamedSharding):
        mark = jax.shard_map(
            mark,
            mesh=sharding.mesh,
            in_specs=sharding.spec,
            out_specs=PartitionSpec(sharding.mesh.axis_names),
            check_vma=False,
        )
    return jax.jit(mark).lower(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)).compile()


def _mark(type_: Any) -> Callable[[Any], Any] | None:
    """Makes a function that gives an element of an array on each device; None if there is none."""
    if 0 in type_.shape:
        return None
    sharding, (device, *others) = type_.sharding, type_.sharding.device_set
    if not others:
        sharding = SingleDeviceSharding(device)
    return _compiled_mark(type_.shape, type_.dtype, sharding)
