"""A worker process of a rank: its arrays, its steps and its connections.

This file knows nothing of Ray: the actor is a thin shell around `Process`.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jaxpp import _compat
from jaxpp._program import Program, Receive, Run, Send
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayType, Home, from_host, own_share, spans, to_host
from jaxpp.runtime.executor import Executor, find_invalid
from jaxpp.runtime.remote.calls import (
    FED,
    MOVED,
    VALUE,
    Call,
    Failure,
    Input,
    Loader,
    Lost,
    Pickled,
    load_serialized,
    serialize,
)
from jaxpp.runtime.remote.worker._black_box import BlackBox, NotingExecutor, doing
from jaxpp.runtime.transport import (
    Aborted,
    NotComputed,
    PeerLost,
    leave_processes,
    lost_in_collective,
)

#: Seconds that an error of no known task waits for the same error with its task.
GRACE = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class _Executable:
    """A compiled computation, and what it was compiled from."""

    call: Callable[..., Any]
    pickled: Pickled


class Process:
    """A worker process: its arrays by id, its steps by number, its transport.

    Where a rank has several processes, each has a `Process`, and all run the same program.

    The driver calls `run`, `compile`, `load`, `unload`, `drop`, and `apply` where it is ordered, on
    one thread, in one order. All other methods may be called at any time, on any thread.
    """

    def __init__(
        self,
        rank: int,
        home: Home,
        transport: Any,
        box: BlackBox | None = None,
        number_in_rank: int = 0,
    ):
        self.rank = rank
        self.number_in_rank = number_in_rank
        self.home = home
        self.transport = transport
        transport.on_failure = self._transport_failed
        self.recorder: Any = None
        self.loader = Loader()
        self.arrays: dict[int, jax.Array] = {}
        self.lock = threading.Condition()
        self.failure: Failure | None = None
        self._box = box
        self._executables: dict[int, _Executable] = {}
        #: For each step its executor, and for each input of the program the function that makes the
        #: input from bytes that come with a call.
        self._steps: dict[int, tuple[Executor, tuple[Input, ...]]] = {}
        self._epoch = 0
        self._call = -1
        self._executor: Executor | None = None
        #: Tells whether the step waits for a batch that this rank loads itself.
        self._feeding = False

    # ---- steps ----------------------------------------------------------------------------------

    def compile(self, pickled: Mapping[int, Pickled], shared: Collection[int]) -> dict[int, bytes]:
        """Compiles computations, and keeps them by number.

        Args:
            pickled: the computations.
            shared: those of them that others want, too.

        Returns:
            The shared ones, for `load` of others, where the backend can share them.
        """
        found = {}
        for number, own in pickled.items():
            call = own.compile(self.home)
            self._executables[number] = _Executable(call, own)
            if number in shared and (payload := serialize(call)) is not None:
                found[number] = payload
        return found

    def load(
        self,
        step: int,
        program: Program,
        inputs: Sequence[tuple[ArrayType, Spec]],
        computations: Sequence[int | None],
        pickled: Mapping[int, Pickled],
        constants: Sequence[tuple[int, ArrayType, Any]],
        payloads: Mapping[int, bytes],
    ) -> None:
        """Registers a step.

        Args:
            step: its number.
            program: what this rank runs, without the values of constants.
            inputs: for each of the program's inputs its type, and how it is split.
            computations: for each computation of the program the number by which the mesh knows
                it; None for one that this rank does not run.
            pickled: the computations that others compile for this process, by those numbers.
            constants: slots, types and bytes of the program's constants.
            payloads: those of them that others could share, as `compile` gave them.
        """
        for number, own in pickled.items():
            call = number in payloads and load_serialized(payloads[number], self.home)
            self._executables[number] = _Executable(call or own.compile(self.home), own)
        known = [n if n is None else self._executables[n] for n in computations]
        executables = [own and own.call for own in known]
        donated = {n: own.pickled.donated for n, own in enumerate(known) if own is not None}

        def find(computation: int, args: Sequence[Any]) -> str | None:
            own = known[computation]
            assert own is not None
            return find_invalid(own.pickled.computation(), self.home, args)

        arguments = program, executables, self.transport, find
        executor = NotingExecutor(self._box, *arguments) if self._box else Executor(*arguments)
        for slot, array_type, value in constants:
            executor.slots[slot] = from_host(value.copy(), array_type, self.home)
        moved = (i.message for i in program.instructions if isinstance(i, Send | Receive))
        self.transport.expect(moved, step, sent_before_donated(program, donated))
        made = tuple(Input(type_, self.home, spec) for type_, spec in inputs)
        self._steps[step] = executor, made

    def executables(self, step: int) -> Sequence[Any]:
        """Returns the executables of a step's computations; None for one that is not run here."""
        return self._steps[step][0].executables

    def unload(self, step: int, computations: Collection[int]) -> None:
        """Forgets a step, and computations that no other step has."""
        self._steps.pop(step, None)
        for number in computations:
            self._executables.pop(number, None)
        self.transport.forget(step)

    def run(self, *fields: Any) -> Failure | None:
        """Dispatches a step; returns the failure if there is one.

        Args:
            *fields: those of a `Call`.
        """
        call = Call(*fields)
        executor, makes = self._steps[call.step]
        program = executor.program
        executor.at, self._feeding = None, False
        self._call, self._executor = call.number, executor
        if self._box:
            self._box.begin(call.number)
        try:
            self.transport.begin(call.number, call.step)
            self._feed(call, executor, makes)
            with contextlib.ExitStack() as settings:
                for name in call.checks:
                    settings.enter_context(getattr(jax, name)(True))
                if self.recorder is None:
                    executor.execute(program.instructions)
                else:
                    settings.enter_context(self.recorder.calling(call.number))
                    self.recorder.execute(executor, program.instructions, call.number, call.step)
            results = {call.results + n: executor.slots[slot] for n, slot in program.outputs}
            for _, slot in program.outputs:
                executor.slots[slot] = None
            executor.at = None
        except BaseException as error:  # noqa: B036  the driver has to know of every exception
            return self.fail(error)
        with self.lock:
            self.arrays.update(results)
            self.lock.notify_all()
        return None

    def _feed(self, call: Call, executor: Executor, makes: Sequence[Input]) -> None:
        inputs, moved = executor.program.inputs, []
        for move in call.moves:
            if move.message.source == self.rank:
                self.transport.send([self.arrays[move.array]], move.message)
            elif move.message.target == self.rank:
                moved.append(move.message)
        arrivals = (self.transport.receive(message)[0] for message in moved)
        fed, batches = iter(call.values), iter(call.fed)
        for (_, slot), make, number in zip(inputs, makes, call.arrays, strict=True):
            if number == VALUE:
                executor.slots[slot] = make(next(fed))
            elif number == MOVED:
                executor.slots[slot] = next(arrivals)
            elif number == FED:
                kind = make.array_type, self.home, make.spec
                self._feeding = True
                executor.slots[slot] = self.loader.take(*next(batches), *kind)
                self._feeding = False
            else:
                executor.slots[slot] = make.resplit(self.arrays[number])
        # An array that the transport has yet to send must not be donated.
        self.transport.settle([executor.slots[slot] for _, slot in inputs])
        for number in call.dropped:
            self.arrays.pop(number, None)
        self.loader.drop(number for number, _ in call.fed)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function on this process: `function(process, *args)`."""
        try:
            return function(self, *args)
        except (Lost, KeyboardInterrupt, SystemExit) as error:  # the last two would end the driver
            return self.failure or Failure.of(error, self.rank, -1, "")

    # ---- arrays ---------------------------------------------------------------------------------

    def wait_for(self, numbers: Sequence[int]) -> list[jax.Array]:
        """Waits until the calls that make some arrays have been dispatched; returns the arrays.

        Raises:
            Lost: the process has failed, or has been reset, before they were made.
        """
        with self.lock:
            epoch = self._epoch
            self.lock.wait_for(
                lambda: (
                    self.failure is not None
                    or self._epoch != epoch
                    or all(n in self.arrays for n in numbers)
                )
            )
            if any(n not in self.arrays for n in numbers):
                raise Lost("The step that was to make it has failed.")
            return [self.arrays[n] for n in numbers]

    def settle(self) -> Failure | None:
        """Waits until the callbacks of all calls have been made."""
        return self._noting(jax.effects_barrier)

    def fetch(self, numbers: Sequence[int], bring: bool = True) -> list[Any] | Failure:
        """Waits until arrays have been computed.

        Returns:
            Their bytes, or its shares where the rank has several processes; nothing if it is not to
            `bring` them.
        """
        to_bytes = own_share if spans(self.home) else to_host

        def computed() -> list[Any]:
            arrays = jax.block_until_ready(self.wait_for(numbers))
            return list(map(to_bytes, arrays)) if bring else []

        return self._noting(computed)

    def _noting(self, wait: Callable[[], Any]) -> Any:
        """Waits for what earlier tasks make; returns the failure if there is one."""
        try:
            return wait()
        except Lost as error:
            return self.failure or Failure.of(error, self.rank, -1, "")
        except Exception as error:
            # The rank meets the same error where it dispatches or sends, and knows the task there.
            with self.lock:
                self.lock.wait_for(lambda: self.failure is not None, GRACE)
            return self.fail(error)

    def drop(self, numbers: Sequence[int]) -> None:
        """Forgets arrays."""
        for number in numbers:
            self.arrays.pop(number, None)

    # ---- life and death -------------------------------------------------------------------------

    def pulse(self) -> tuple[int, str] | Failure:
        """Answers a heartbeat: with the last call and its instruction, or with the failure."""
        return self.failure or (self._call, self._doing()[0])

    def fail(self, error: BaseException, task: str | None = None) -> Failure:
        """Notes an error, and wakes all threads that wait here; the first error counts.

        Args:
            error: what went wrong.
            task: whose error it is, where that is another than what the process is at.
        """
        with self.lock:
            if self.failure is None:
                at, source = self._doing() if task is None else (task, None)
                self.failure = Failure.of(error, self.rank, self._call, at, source)
                if spans(self.home) and lost_in_collective(error):
                    self.failure = dataclasses.replace(self.failure, follows=True)
            self.lock.notify_all()
        self.transport.abort(error)
        self.loader.stop(Aborted("Another rank has failed."))
        return self.failure

    def abort(self, reason: str) -> Failure:
        """Ends all work here, because another rank has failed; returns this process's failure."""
        return self.fail(Aborted(reason))

    def reset(self, epoch: int) -> None:
        """Drops the arrays of the process, which must be idle, and makes it fit for work again."""
        with self.lock:
            self.arrays.clear()
            self.failure = None
            self._call, self._executor, self._epoch = -1, None, epoch
            self.lock.notify_all()
        for executor, _ in self._steps.values():
            kept = {slot for slot, _ in executor.program.constants}
            executor.slots[:] = [x if i in kept else None for i, x in enumerate(executor.slots)]
        self.loader.reset()
        self.recorder = self.transport.recorder = None
        _compat.forget_effects()
        self.transport.reset(epoch)

    def close(self) -> None:
        """Ends all threads, and closes all connections."""
        self.transport.close()
        if spans(self.home):
            leave_processes()

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
        return doing(self._executor.at if self._executor else None)


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
