"""What runs in a worker's process: one rank's arrays, its steps and its connections.

Knows nothing of Ray: the actor is a thin shell around it.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpp._program import Message, Program, Receive, Run, Send
from jaxpp.runtime._array_types import ArrayType, from_host, to_host
from jaxpp.runtime._remote import _export
from jaxpp.runtime._remote._failure import Failure, Lost
from jaxpp.runtime._transport._errors import Aborted, PeerLost
from jaxpp.runtime._worker import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """An argument that a rank reads and another one holds; it is sent before the step."""

    array: int
    message: Message


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a step, as a rank gets it.

    Args:
        number: counts the calls of all steps of the mesh.
        step: the step's number.
        arrays: for each input of the program the id of an array of the rank; `VALUE` for one that
            comes with the call, `MOVED` for one that comes from another rank.
        types: of the arrays that come with the call.
        results: the id of the step's first result; those of the others follow.
        dropped: ids of arrays that this call consumes, or that nobody wants any more.
        moves: what is sent and received before the step, in one order for all ranks.
    """

    number: int
    step: int
    arrays: tuple[int, ...]
    types: tuple[ArrayType, ...]
    results: int
    dropped: tuple[int, ...]
    moves: tuple[Move, ...] = ()


VALUE, MOVED = -1, -2


class Process:
    """One rank: its arrays by id, its steps by number, its transport.

    `run` and what is given to `apply` in order run on one thread; all else may be called from any.
    """

    def __init__(self, rank: int, num_ranks: int, device: Any, transport: Any):
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self.transport = transport
        transport.on_failure = self._transport_failed
        self.recorder: Any = None
        self.arrays: dict[int, jax.Array] = {}
        self.lock = threading.Condition()
        self.failure: Failure | None = None
        self._executables: dict[int, Any] = {}
        self._steps: dict[int, tuple[Program, Worker]] = {}
        self._call = -1
        self._worker: Worker | None = None

    # ---- steps ----------------------------------------------------------------------------------

    def load(
        self,
        step: int,
        program: Program,
        computations: Sequence[int | None],
        exported: Mapping[int, _export.Exported],
        constants: Sequence[tuple[int, ArrayType, Any]],
    ) -> None:
        """Compiles and registers a step.

        Args:
            step: its number.
            program: what this rank runs, without the values of constants.
            computations: for each computation of the program the number by which the mesh knows
                it; None for one that this rank does not run.
            exported: the computations that this process does not have yet, by those numbers.
            constants: slots, types and bytes of the program's constants.
        """
        for number, computation in exported.items():
            self._executables[number] = _export.compile_exported(computation, self.device)
        executables = [None if n is None else self._executables[n] for n in computations]
        worker = Worker(program, executables, self.transport)
        for slot, array_type, value in constants:
            worker.slots[slot] = from_host(value.copy(), array_type, self.device)
        messages = [i.message for i in program.instructions if isinstance(i, Send | Receive)]
        self.transport.expect(messages, step)
        self._steps[step] = program, worker

    def unload(self, step: int) -> None:
        """Forgets a step."""
        self._steps.pop(step, None)
        self.transport.forget(step)

    def run(self, call: Call, *values: Any) -> Failure | None:
        """Dispatches a step; returns what went wrong.

        Args:
            call: which, and on what.
            *values: the bytes of the arrays that come with the call.
        """
        if self.failure is not None:
            return self.failure
        program, worker = self._steps[call.step]
        self._call, self._worker = call.number, worker
        try:
            self.transport.begin(call.number, call.step)
            if self.recorder is not None:
                self.recorder.begin(call.number)
            self._feed(call, program, worker, values)
            worker.execute(program.instructions)
            results = {call.results + n: worker.slots[slot] for n, slot in program.outputs}
            for _, slot in program.outputs:
                worker.slots[slot] = None
        except BaseException as error:  # noqa: B036  whatever it is, the driver has to know
            return self.fail(error)
        with self.lock:
            self.arrays.update(results)
            self.lock.notify_all()
        return None

    def _feed(self, call: Call, program: Program, worker: Worker, values: Sequence[Any]) -> None:
        moved = []
        for move in call.moves:
            if move.message.source == self.rank:
                self.transport.send([self.arrays[move.array]], move.message)
            else:
                moved.append(move.message)
        arrivals = (self.transport.receive(message)[0] for message in moved)
        # Copied, for what comes with a call is Ray's memory, and JAX does not copy it.
        fed = (
            from_host(value.copy(), type_, self.device)
            for value, type_ in zip(values, call.types, strict=True)
        )
        for (_, slot), number in zip(program.inputs, call.arrays, strict=True):
            if number == VALUE:
                worker.slots[slot] = next(fed)
            elif number == MOVED:
                worker.slots[slot] = next(arrivals)
            else:
                worker.slots[slot] = self.arrays[number]
        for number in call.dropped:
            self.arrays.pop(number, None)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function on this process: `function(process, *args)`."""
        return function(self, *args)

    # ---- arrays ---------------------------------------------------------------------------------

    def wait_for(self, numbers: Sequence[int]) -> list[jax.Array]:
        """The arrays with these ids, once the calls that make them have been dispatched.

        Raises:
            Lost: the process has failed, or has been reset, before they were made.
        """
        with self.lock:
            self.lock.wait_for(
                lambda: self.failure is not None or all(n in self.arrays for n in numbers)
            )
            if any(n not in self.arrays for n in numbers):
                raise Lost("The step that was to make it has failed.")
            return [self.arrays[n] for n in numbers]

    def fetch(self, numbers: Sequence[int]) -> list[Any] | Failure:
        """The bytes of arrays."""
        try:
            return [to_host(x) for x in jax.block_until_ready(self.wait_for(numbers))]
        except Lost:
            assert self.failure is not None
            return self.failure
        except Exception as error:
            return self.fail(error)

    def ready(self, numbers: Sequence[int]) -> Failure | None:
        """Waits until arrays have been computed."""
        try:
            jax.block_until_ready(self.wait_for(numbers))
        except Lost:
            return self.failure
        except Exception as error:
            return self.fail(error)
        return None

    def drop(self, numbers: Sequence[int]) -> None:
        """Forgets arrays."""
        for number in numbers:
            self.arrays.pop(number, None)

    # ---- life and death -------------------------------------------------------------------------

    def pulse(self) -> tuple[int, str] | Failure:
        """A sign of life: the call that runs, or ran last, and what it is at; or what is wrong."""
        return self.failure or (self._call, self._doing()[0])

    def fail(self, error: BaseException) -> Failure:
        """Notes an error, and wakes all who wait here; the first one counts."""
        with self.lock:
            if self.failure is None:
                task, source = self._doing()
                self.failure = Failure.of(error, self.rank, self._call, task, source)
            self.lock.notify_all()
        self.transport.abort(error)
        return self.failure

    def abort(self, reason: str) -> None:
        """Ends what runs here, because another rank has failed."""
        self.fail(Aborted(reason))

    def reset(self, epoch: int) -> None:
        """Makes a process that has failed fit for work, without its arrays."""
        with self.lock:
            self.arrays.clear()
            self.failure = None
            self._call, self._worker = -1, None
        for program, worker in self._steps.values():
            kept = {slot for slot, _ in program.constants}
            worker.slots[:] = [x if i in kept else None for i, x in enumerate(worker.slots)]
        self.transport.reset(epoch)

    def close(self) -> None:
        """Ends all threads, and closes all connections."""
        self.transport.close()

    def _transport_failed(self, error: BaseException) -> None:
        # The loss of a rank is for those who wait for it, if any do. All else happens on a thread
        # of the transport: what was to be sent could not be computed.
        if not isinstance(error, PeerLost) and self.failure is None:
            self.fail(error)

    def _doing(self) -> tuple[str, int | None]:
        """What the current instruction is, and whose message it waits for."""
        match self._worker.at if self._worker else None:
            case Run(label=label):
                return label, None
            case Send(message=message):
                return f"send of {message.names[0]} to rank {message.target}", message.target
            case Receive(message=message):
                return f"receive of {message.names[0]} from rank {message.source}", message.source
        return "", None
