"""Records what a process dispatches and sends, without stopping it."""

import contextlib
import dataclasses
import pathlib
from functools import partial
from typing import Any

import jax

from jaxpp._program import Message, Run, Send
from jaxpp.runtime.executor import Chunk, Executor
from jaxpp.runtime.trace._profile import Module, match, module_of, read_profile
from jaxpp.runtime.trace._records import MessageRecord, Records, RunRecord, clock
from jaxpp.runtime.trace._watch import Watcher, mark


def wait_for_runs() -> None:
    """Waits until this process has computed all that it has dispatched.

    A device takes what a thread dispatches in order, so that the next computation is the last one.
    What other threads have dispatched has results that are alive, or nobody wants it.
    """
    for device in jax.local_devices():
        mark(jax.device_put(0, device)).block_until_ready()
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # of a call that has failed, or deleted meanwhile
            array.block_until_ready()


class Recorder:
    """Records the runs of a process's executors, and the messages of its transport.

    JAX's profiler, which goes on meanwhile, has the times of the runs; each run, and each call, is
    an annotation there. Where the profile does not have a run's times, a thread waits for the
    run's results. Execution stays asynchronous in any case.

    Args:
        waits: whether a thread clocks all runs, as if no profile had their times.
    """

    def __init__(self, waits: bool = False) -> None:
        #: The time of the profile's clock event.
        self.zero = clock()
        self._waits = waits
        self._programs: dict[int, tuple[Executor, dict[int, int], dict[int, Module | None]]] = {}
        self._dispatches: list[tuple[Module, RunRecord]] = []
        self._watchers: dict[Any, Watcher] = {}
        self._sent: list[MessageRecord] = []
        self._received: list[MessageRecord] = []

    def calling(self, call: int) -> Any:
        """Makes the context of a call's dispatch, which tools show as a step."""
        return jax.profiler.StepTraceAnnotation("jaxpp step", step_num=call)

    def execute(self, executor: Executor, chunk: Chunk, call: int, step: int) -> None:
        """Lets an executor run some instructions in order, and records them.

        `call` and `step` are the numbers of the call and of the step that is called.
        """
        positions, modules = self.prepare(executor)
        rank = executor.program.rank
        for instruction in chunk:
            start = clock()
            if not isinstance(instruction, Run):
                executor.execute((instruction,))
                if isinstance(instruction, Send):
                    self._copied(executor.transport, instruction.message, call, start)
                continue
            record = RunRecord(call, step, rank, positions[id(instruction)], start)
            module = modules[instruction.computation]
            if module is not None:  # noted before: the profile has a run that fails, too
                self._dispatches.append((module, record))
            with jax.profiler.TraceAnnotation(instruction.label, call=call, rank=rank):
                executor.execute((instruction,))
            if module is None:
                self._wait(executor, instruction, record)

    def sent(self, call: int, message: Message, start: int, end: int) -> None:
        """Notes that a message was sent from `start` to `end`, in nanoseconds of `clock`."""
        self._sent.append(MessageRecord(call, message.tag, start, end))

    def received(self, call: int, message: Message, start: int, end: int) -> None:
        """Notes that a message came in from `start` to `end`, in nanoseconds of `clock`."""
        self._received.append(MessageRecord(call, message.tag, start, end))

    def settle(self) -> None:
        """Waits until all recorded runs and copies have ended."""
        wait_for_runs()
        for watcher in self._watchers.values():
            watcher.settle()

    def stop(self, profile: pathlib.Path | None = None) -> Records:
        """Ends the threads, and returns all records; the times of runs are in a profile's folder.

        Without one only runs that threads have clocked are known.
        """
        runs, errors, copies = [], [], []
        if profile is not None and self._dispatches:
            runs, errors = match(self._dispatches, read_profile(profile), self.zero)
        for watcher in self._watchers.values():
            watcher.settle()
            watcher.close()
            runs += [r for r in watcher.records if isinstance(r, RunRecord)]
            copies += [r for r in watcher.records if isinstance(r, MessageRecord)]
            errors += watcher.errors
        sent, received = (*self._sent, *copies), (*self._received, *copies)
        return Records(tuple(runs), sent, received, tuple(errors))

    def prepare(self, executor: Executor) -> tuple[dict[int, int], dict[int, Module | None]]:
        """Finds the positions of an executor's runs, by their ids, and the modules they run."""
        if id(executor) not in self._programs:
            positions = {id(i): n for n, i in enumerate(executor.program.instructions)}
            modules = {
                number: None if self._waits else module_of(executable)
                for number, executable in enumerate(executor.executables)
                if executable is not None
            }
            # Kept with the executor, or another one might get its id.
            self._programs[id(executor)] = executor, positions, modules
        return self._programs[id(executor)][1:]

    def _copied(self, transport: Any, message: Message, call: int, start: int) -> None:
        """Notes a message between devices of this process, whose copies were asked for at `start`.

        The copies between two homes are made in order.
        """
        if copies := transport.copies_of(message):
            link, arrays = copies
            self._watcher(link).put(partial(MessageRecord, call, message.tag, start), arrays)

    def _wait(self, executor: Executor, run: Run, record: RunRecord) -> None:
        """Lets a thread wait for the smallest result of a run, or for an element of it."""
        results = [executor.slots[slot] for slot in run.outputs]
        array = min((x for x in results if x.size), key=lambda x: x.size, default=None)
        watcher = self._watcher((executor.program.rank, run.lane))

        def make(end: int) -> RunRecord:
            return dataclasses.replace(record, end=end)

        if array is None:
            watcher.put(make, [])
        else:  # nothing takes the memory of what is copied
            watcher.put(make, [array if run.lane == "copy" else mark(array)])

    def _watcher(self, key: Any) -> Watcher:
        if key not in self._watchers:
            self._watchers[key] = Watcher()
        return self._watchers[key]
