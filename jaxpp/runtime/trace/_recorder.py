"""Records what a process dispatches and sends, without stopping it."""

import contextlib
import copy
import dataclasses
import pathlib
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax

from jaxpp._program import Message, Run, Send
from jaxpp.runtime.executor import Chunk, Dispatcher, Executor
from jaxpp.runtime.trace._profile import Module, Seen, match, module_of, read_profile
from jaxpp.runtime.trace._result import Where

#: The seconds to wait for what devices compute.
_TIMEOUT = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """All that a process has recorded; times are nanoseconds of its clock.

    `sent` and `received` have a start and an end for the call and the tag of a message, `calls` the
    step of each call, `errors` why some of the runs are not known.
    """

    runs: dict[Where, Seen] = dataclasses.field(default_factory=dict)
    sent: dict[tuple[int, int], tuple[int, int]] = dataclasses.field(default_factory=dict)
    received: dict[tuple[int, int], tuple[int, int]] = dataclasses.field(default_factory=dict)
    calls: dict[int, int] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)


class Recorder:
    """Records the runs of a process's executors, and the messages of its transport.

    JAX's profiler, which goes on meanwhile, has the times of the runs; each run, and each call, is
    an annotation there. Where the profile does not have a run's times, or with `waits`, a thread
    waits for the run's results. Execution stays asynchronous in any case.
    """

    def __init__(self, waits: bool = False) -> None:
        #: The time of the profile's last clock event.
        self.zero = 0
        self._waits = waits
        self._programs: dict[int, tuple[Executor, dict[int, tuple[int, Module | None]]]] = {}
        self._dispatches: dict[Module, dict[Where, int]] = defaultdict(dict)
        #: For each lane of a rank, and each way of a message, a thread that waits.
        self._threads: dict[Any, futures.Executor] = defaultdict(
            lambda: futures.ThreadPoolExecutor(1, "jaxpp trace")
        )
        self._clocked: list[futures.Future[None]] = []
        self._records = Records()

    def run(self, dispatcher: Dispatcher, call: int, step: int) -> None:
        """Lets a dispatcher run a call of a step, and records it; tools show it as a step."""
        for executor in dispatcher.executors.values():
            self._prepare(executor)
        with jax.profiler.StepTraceAnnotation("jaxpp step", step_num=call):
            dispatcher.run(lambda executor, chunk: self.execute(executor, chunk, call, step))

    def execute(self, executor: Executor, chunk: Chunk, call: int, step: int) -> None:
        """Lets an executor run some instructions of a call of a step, and records them."""
        known, rank = self._prepare(executor), executor.program.rank
        self._records.calls[call] = step
        for instruction in chunk:
            start = time.monotonic_ns()
            if not isinstance(instruction, Run):
                executor.execute((instruction,))
                if isinstance(instruction, Send):
                    self._copied(executor.transport, instruction.message, call, start)
                continue
            position, module = known[id(instruction)]
            where = call, rank, position
            if module is not None:  # noted before: the profile has a run that fails, too
                self._dispatches[module][where] = start
            with jax.profiler.TraceAnnotation(instruction.label, call=call, rank=rank):
                executor.execute((instruction,))
            if module is None:
                self._computed(executor, instruction, where, start)

    def sent(self, call: int, message: Message, start: int, end: int) -> None:
        """Notes that a message was sent from `start` to `end`, in nanoseconds."""
        self._records.sent[call, message.tag] = start, end

    def received(self, call: int, message: Message, start: int, end: int) -> None:
        """Notes that a message came in from `start` to `end`, in nanoseconds."""
        self._records.received[call, message.tag] = start, end

    def settle(self) -> None:
        """Waits until all recorded runs and copies have ended."""
        wait_for_runs()
        futures.wait(self._clocked, _TIMEOUT)

    def stop(self, profile: pathlib.Path | None = None) -> Records:
        """Returns all records; without the folder of a profile, runs that threads have clocked."""
        _, late = futures.wait(self._clocked, _TIMEOUT)
        for thread in self._threads.values():
            thread.shutdown(wait=False)
        noted = [getattr(self._records, field.name) for field in dataclasses.fields(Records)]
        records = Records(*map(copy.copy, noted))  # what is noted later is not in it
        if late:
            records.errors.append(f"a device has not ended its work in {_TIMEOUT:.0f} s")
        if profile is not None and self._dispatches:
            runs, errors = match(self._dispatches, read_profile(profile), self.zero)
            records.runs.update(runs)
            records.errors.extend(errors)
        return records

    def _prepare(self, executor: Executor) -> dict[int, tuple[int, Module | None]]:
        """Finds the position of each run of an executor, and its module, by the run's id."""
        if id(executor) not in self._programs:
            modules = [
                None if self._waits or executable is None else module_of(executable)
                for executable in executor.executables
            ]
            known = {
                id(instruction): (position, modules[instruction.computation])
                for position, instruction in enumerate(executor.program.instructions)
                if isinstance(instruction, Run)
            }
            # Kept with the executor, or another one might get its id.
            self._programs[id(executor)] = executor, known
        return self._programs[id(executor)][1]

    def _copied(self, transport: Any, message: Message, call: int, start: int) -> None:
        """Notes a message between devices of this process, whose copies were asked for at `start`.

        The copies between two homes are made in order.
        """

        def note(end: int) -> None:
            self.sent(call, message, start, end)
            self.received(call, message, start, end)

        if (copies := transport.copies_of(message)) is not None:
            order, arrays = copies
            self._wait(order, arrays, note)

    def _computed(self, executor: Executor, run: Run, where: Where, start: int) -> None:
        """Notes a run at the end of its smallest result."""
        results = [x for slot in run.outputs if (x := executor.slots[slot]).size]
        smallest = min(results, key=lambda x: x.size, default=None)
        if smallest is not None and run.lane != "copy":  # nothing takes the memory of a copy
            smallest = _mark(smallest)

        def note(end: int) -> None:
            self._records.runs[where] = start, None, end

        self._wait((executor.program.rank, run.lane), smallest, note)

    def _wait(self, order: Any, arrays: Any, note: Callable[[int], None]) -> None:
        """Lets a thread wait for arrays, and note their time; one thread waits for an `order`."""

        def wait() -> None:
            try:
                jax.block_until_ready(arrays)
            except Exception as error:  # the step's own error, which the caller of the step gets
                self._records.errors.append(str(error).partition("\n")[0])
            else:
                note(time.monotonic_ns())

        self._clocked.append(self._threads[order].submit(wait))


def wait_for_runs() -> None:
    """Waits until this process has computed all that it has dispatched.

    A device takes what a thread dispatches in order, so that the next computation is the last one.
    What other threads have dispatched has results that are alive, or nobody wants it.
    """
    for device in jax.local_devices():
        _mark(jax.device_put(0, device)).block_until_ready()
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # of a call that has failed, or deleted meanwhile
            array.block_until_ready()


@jax.jit
def _first(x: jax.Array) -> jax.Array:
    return x[(slice(0, 1),) * x.ndim]


def _mark(array: jax.Array) -> jax.Array:
    """Returns an element of an array, which is there as soon as the array is.

    The array itself may be donated to the next run, and then nobody can wait for it. The element is
    of the first device of this process that the array is on.
    """
    return _first(array.addressable_data(0))
