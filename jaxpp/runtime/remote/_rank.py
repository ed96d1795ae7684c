"""A rank in its worker process: its arrays, its steps and its connections."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpp._program import Instruction, Program, Receive, Run, Send
from jaxpp.runtime.arrays import Home, from_host, own_share, spans, to_host
from jaxpp.runtime.executor import Executor, find_invalid
from jaxpp.runtime.remote._call import Call, Given, Held, Input, Loaded, Moved, Part, Source
from jaxpp.runtime.remote._failure import Failure, Lost
from jaxpp.runtime.remote._feed import Loader
from jaxpp.runtime.remote._pickled import Pickled, load_serialized, serialize
from jaxpp.runtime.remote._programs import Compiling, Loading
from jaxpp.runtime.transport import NotComputed, PeerLost, lost_in_collective

#: Called with a rank, its error, and the task whose error it is where the rank is at another.
Fail = Callable[["Rank", BaseException, str | None], Failure]


class RankArrays(dict[int, Any]):
    """The arrays of a rank by number; who waits for one is woken when it comes.

    Args:
        changed: what they wait at.
    """

    def __init__(self, changed: threading.Condition):
        super().__init__()
        self._changed = changed

    def update(self, arrays: Any) -> None:  # pyright: ignore
        """Adds arrays, all at once."""
        with self._changed:
            super().update(arrays)
            self._changed.notify_all()


@dataclasses.dataclass(frozen=True, slots=True)
class _Executable:
    """A compiled computation, and what it was compiled from."""

    call: Callable[..., Any]
    pickled: Pickled


class Rank:
    """A rank of a worker process. Functions that `mesh.apply` runs get it as their first argument.

    Where a rank has several processes, each has a `Rank`, and all run the same program.

    Args:
        rank: its number.
        process: the number of this process among those of the rank.
        home: where its arrays are.
        transport: its way to other ranks.
        changed: notified when arrays come or the process fails.
        fail: called when the rank fails.
        get: gives the value of a reference into Ray's store.
    """

    def __init__(
        self,
        rank: int,
        process: int,
        home: Home,
        transport: Any,
        changed: threading.Condition,
        fail: Fail,
        get: Callable[[Any], Any],
    ):
        self.rank, self.process, self.home, self.transport = rank, process, home, transport
        transport.on_failure = self._transport_failed
        #: Records the times of tasks, where it is not None: see `trace.Recorder`.
        self.recorder: Any = None
        self.arrays = RankArrays(changed)
        self.loader = Loader(get)
        #: Why the process does no more work; None while it is well.
        self.failure: Failure | None = None
        self._changed, self._fail, self._get = changed, fail, get
        self._executables: dict[int, _Executable] = {}
        #: For each step its executor, and for each input of the program what makes it.
        self._steps: dict[int, tuple[Executor, tuple[Input, ...]]] = {}
        self._resets = 0
        self._call = -1
        self._executor: Executor | None = None
        #: Tells whether the step waits for a batch that this rank loads itself.
        self._feeding = False

    # ---- steps ----------------------------------------------------------------------------------

    def compile(self, compiling: Compiling) -> dict[int, bytes]:
        """Compiles computations; returns those that others want, where the backend can share."""
        found = {}
        for number, reference in compiling.pickled.items():
            if number not in self._executables:
                own: Pickled = self._get(reference)
                self._executables[number] = _Executable(own.compile(self.home), own)
            if number in compiling.shared:
                payload = serialize(self._executables[number].call)
                found |= {} if payload is None else {number: payload}
        return found

    def load(self, loading: Loading) -> None:
        """Registers a step."""
        lacks = {n: r for n, r in loading.pickled.items() if n not in self._executables}
        compiled: dict[int, bytes] = {}
        for reference in loading.compiled if lacks else ():
            compiled |= self._get(reference)
        for number, reference in lacks.items():
            own = self._get(reference)
            call = number in compiled and load_serialized(compiled[number], self.home)
            self._executables[number] = _Executable(call or own.compile(self.home), own)
        known = [n if n is None else self._executables[n] for n in loading.computations]
        executables = [own and own.call for own in known]
        donated = {n: own.pickled.donated for n, own in enumerate(known) if own is not None}

        def find(computation: int, args: Sequence[Any]) -> str | None:
            own = known[computation]
            assert own is not None
            return find_invalid(own.pickled.computation(), self.home, args)

        program = loading.program
        executor = Executor(program, executables, self.transport, find)
        for slot, array_type, value in loading.constants:
            executor.slots[slot] = from_host(value.copy(), array_type, self.home)
        messages = (i.message for i in program.instructions if isinstance(i, Send | Receive))
        self.transport.expect(messages, loading.step, sent_before_donated(program, donated))
        made = tuple(Input(type_, self.home, spec) for type_, spec in loading.inputs)
        self._steps[loading.step] = executor, made

    def executables(self, step: int) -> Sequence[Any]:
        """Returns the executables of a step's computations; None for one that is not run here."""
        return self._steps[step][0].executables

    def unload(self, step: int, computations: Sequence[int]) -> None:
        """Forgets a step, and computations that no other step has."""
        self._steps.pop(step, None)
        for number in computations:
            self._executables.pop(number, None)
        self.transport.forget(step)

    def run(self, call: Call, part: Part) -> None:
        """Dispatches this rank's part of a step; an error fails the process."""
        executor, makes = self._steps[call.step]
        program = executor.program
        executor.at, self._feeding = None, False
        self._call, self._executor = call.number, executor
        try:
            self.transport.begin(call.number, call.step)
            self._feed(part, executor, makes)
            with contextlib.ExitStack() as settings:
                for name in call.checks:
                    settings.enter_context(getattr(jax, name)(True))
                if self.recorder is None:
                    executor.execute(program.instructions)
                else:
                    self.recorder.execute(executor, program.instructions, call.number, call.step)
            results = {call.results + n: executor.slots[slot] for n, slot in program.outputs}
            for _, slot in program.outputs:
                executor.slots[slot] = None
            executor.at = None
        except BaseException as error:  # noqa: B036  the driver has to know of every exception
            self.fail(error)
        else:
            self.arrays.update(results)

    def _feed(self, part: Part, executor: Executor, makes: Sequence[Input]) -> None:
        """Puts the inputs of a step into their slots."""
        for move in part.sends:
            self.transport.send([self.arrays[move.array]], move.message)
        slots = [slot for _, slot in executor.program.inputs]
        for slot, make, source in zip(slots, makes, part.inputs, strict=True):
            executor.slots[slot] = self._input(source, make)
        # An array that the transport has yet to send must not be donated.
        self.transport.settle([executor.slots[slot] for slot in slots])
        self.drop(part.dropped)
        self.loader.drop({s.batch for s in part.inputs if isinstance(s, Loaded)})

    def _input(self, source: Source, make: Input) -> Any:
        match source:
            case Held(array):
                return make.resplit(self.arrays[array])
            case Given(data):
                return make(data)
            case Moved(message):
                return self.transport.receive(message)[0]
            case Loaded(batch, leaf):
                self._feeding = True
                found = self.loader.take(batch, leaf, make.array_type, self.home, make.spec)
                self._feeding = False
                return found

    # ---- arrays ---------------------------------------------------------------------------------

    def wait_for(self, numbers: Sequence[int]) -> list[jax.Array]:
        """Waits until the calls that make some arrays have been dispatched; returns the arrays.

        Raises:
            Lost: the process has failed, or has been reset, before they were made.
        """
        resets = self._resets

        def known() -> bool:
            over = self.failure is not None or self._resets != resets
            return over or all(n in self.arrays for n in numbers)

        with self._changed:
            self._changed.wait_for(known)
            if any(n not in self.arrays for n in numbers):
                raise Lost("The step that was to make it has failed.")
            return [self.arrays[n] for n in numbers]

    def fetch(self, numbers: Sequence[int]) -> list[Any]:
        """Waits until arrays have been computed; returns their bytes.

        Where the rank has several processes, these are the process's shares.
        """
        to_bytes = own_share if spans(self.home) else to_host
        return list(map(to_bytes, jax.block_until_ready(self.wait_for(numbers))))

    def drop(self, numbers: Sequence[int]) -> None:
        """Forgets arrays."""
        for number in numbers:
            self.arrays.pop(number, None)

    # ---- its end --------------------------------------------------------------------------------

    def fail(self, error: BaseException, task: str | None = None) -> Failure:
        """Fails the process; its first error counts, and is returned.

        Args:
            error: what went wrong.
            task: whose error it is, where that is another than what the rank is at.
        """
        return self._fail(self, error, task)

    def describe(self, error: BaseException, task: str | None) -> Failure:
        """Describes an error of this rank."""
        at, source = self._doing() if task is None else (task, None)
        failure = Failure.of(error, self.rank, self._call, at, source)
        if spans(self.home) and lost_in_collective(error):
            failure = dataclasses.replace(failure, is_echo=True)
        return failure

    def end(self, failure: Failure, error: BaseException) -> None:
        """Wakes all threads that wait here."""
        with self._changed:
            self.failure = failure
            self._changed.notify_all()
        self.transport.abort(error)
        self.loader.stop(Lost("The rank has ended the step."))

    def reset(self, epoch: int) -> None:
        """Drops the arrays of the rank, which must be idle, and makes it fit for work again."""
        with self._changed:
            self.arrays.clear()
            self.failure = None
            self._call, self._executor = -1, None
            self._resets += 1
            self._changed.notify_all()
        for executor, _ in self._steps.values():
            kept = {slot for slot, _ in executor.program.constants}
            executor.slots[:] = [x if i in kept else None for i, x in enumerate(executor.slots)]
        self.loader.reset()
        self.recorder = self.transport.recorder = None
        self.transport.reset(epoch)

    def _transport_failed(self, error: BaseException) -> None:
        # The loss of a rank is an error only for threads that wait for it. All other errors come
        # from a thread of the transport: an array that was to be sent could not be computed.
        if isinstance(error, NotComputed):
            self.fail(error.__cause__ or error, error.task)
        elif not isinstance(error, PeerLost) and self.failure is None:
            self.fail(error)

    def _doing(self) -> tuple[str, int | None]:
        """Describes the current instruction, and gives the rank that it sends to or waits for."""
        if self._feeding:
            return "the function that feeds the step", None
        return _described(self._executor.at if self._executor else None)


def _described(instruction: Instruction | None) -> tuple[str, int | None]:
    """Describes an instruction in words; also gives the rank that it sends to or waits for."""
    match instruction:
        case Run(label=label):
            return label, None
        case Send(message=message):
            return f"send of {message.names[0]} to rank {message.target}", message.target
        case Receive(message=message):
            return f"receive of {message.names[0]} from rank {message.source}", message.source
    return "", None


def sent_before_donated(program: Program, donated: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Finds the messages whose arrays are donated to a later computation of the program.

    Args:
        program: the program.
        donated: by computation, the positions of the arguments whose memory it takes.
    """
    found: set[int] = set()
    sent: dict[int, set[int]] = collections.defaultdict(set)
    for instruction in program.instructions:
        match instruction:
            case Send(slots, message):
                for slot in slots:
                    sent[slot].add(message.tag)
            case Run(computation, inputs, outputs, _):
                for position in donated[computation]:
                    found |= sent[inputs[position]]
                for slot in outputs:
                    sent.pop(slot, None)
            case Receive(slots, _):
                for slot in slots:
                    sent.pop(slot, None)
    return frozenset(found)
