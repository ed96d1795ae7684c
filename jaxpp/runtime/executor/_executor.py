"""`Executor`: runs one rank's program. `Dispatcher`: those of a process, in one order."""

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxpp import _compat
from jaxpp._program import (
    Computation,
    Free,
    Instruction,
    Message,
    Program,
    Receive,
    Run,
    Send,
    Wait,
)
from jaxpp.runtime.arrays import Home
from jaxpp.runtime.executor._operations import find_invalid

Chunk = tuple[Instruction, ...]


class Executor:
    """The executor of one rank: its slots, its executables, and the loop over its instructions.

    It is the same for every mesh; only the transport differs.

    Args:
        program: what the rank runs.
        executables: for each computation its executable; None where the rank does not run it.
        transport: its way to other ranks: `send(arrays, message)`, which does not wait, and
            `receive(message)`, which gives the arrays.
        constants: slots, and the arrays that are there before the step.
        computations: what the executables were compiled from, if that is known.
        home: where they run.
    """

    def __init__(
        self,
        program: Program,
        executables: Sequence[Any],
        transport: Any,
        constants: Iterable[tuple[int, Any]] = (),
        computations: Sequence[Computation | None] = (),
        home: Home | None = None,
    ):
        self.program, self.executables, self.transport = program, executables, transport
        self.slots: list[Any] = [None] * program.num_slots
        for slot, value in constants:
            self.slots[slot] = value
        self._computations, self._home = computations, home
        #: By computation, the positions of the arguments whose memory it takes.
        self.donated = {n: own.donated for n, own in enumerate(computations) if own is not None}
        #: The instruction that runs, or ran last.
        self.at: Instruction | None = None

    def execute(self, chunk: Chunk) -> None:
        """Runs some instructions in order; an error in a computation names its task and rank."""
        slots = self.slots
        for instruction in chunk:
            self.at = instruction
            if isinstance(instruction, Run):
                try:
                    outputs = self.executables[instruction.computation](
                        *[slots[i] for i in instruction.inputs]
                    )
                except Exception as error:
                    public = self._public(error, instruction)
                    public.add_note(f"in {instruction.label} on rank {self.program.rank}")
                    raise public from (error.__cause__ if public is error else None)
                for slot, value in zip(instruction.outputs, outputs):  # noqa: B905  hot loop
                    slots[slot] = value
            elif isinstance(instruction, Free):
                outputs = None
                for slot in instruction.slots:
                    slots[slot] = None
            elif isinstance(instruction, Send):
                self.transport.send([slots[i] for i in instruction.slots], instruction.message)
            elif isinstance(instruction, Wait):
                jax.block_until_ready([slots[i] for i in instruction.slots])
            else:
                arrays = self.transport.receive(instruction.message)
                for slot, value in zip(instruction.slots, arrays, strict=True):
                    slots[slot] = value

    def _public(self, error: Exception, run: Run) -> Exception:
        """Returns the error that JAX raises for that of an executable."""
        public = _compat.public_error(error)
        if not isinstance(public, FloatingPointError) or self._home is None:
            return public
        computation = self._computations[run.computation]
        assert computation is not None
        found = find_invalid(computation, self._home, [self.slots[i] for i in run.inputs])
        return FloatingPointError(found) if found else public


def chunks(program: Program) -> list[Chunk]:
    """Cuts a program into pieces: each receives and waits only at its start, and has one run.

    So no rank waits before the others have got what they run until then.
    """
    pieces: list[list[Instruction]] = [[]]
    for instruction in program.instructions:
        piece = pieces[-1]
        waits = isinstance(instruction, Receive | Wait)
        if (waits and any(not isinstance(i, Receive | Wait) for i in piece)) or (
            isinstance(instruction, Run) and any(isinstance(i, Run) for i in piece)
        ):
            pieces.append([])
        pieces[-1].append(instruction)
    return [tuple(piece) for piece in pieces if piece]


def interleave(programs: Sequence[Program]) -> list[tuple[int, Chunk]]:
    """Puts the pieces of all programs in one order, each receive after its send.

    Each rank has a clock, on which every run takes one unit. The piece that can start first is the
    next, so that each rank gets work early.

    Raises:
        RuntimeError: if the programs wait for each other.
    """
    waiting = [list(reversed(chunks(p))) for p in programs]
    clock = [0.0] * len(programs)
    sent: dict[int, float] = {}
    order: list[tuple[int, Chunk]] = []

    def ready_at(rank: int) -> float:
        tags = [i.message.tag for i in waiting[rank][-1] if isinstance(i, Receive)]
        return max([clock[rank], *(sent.get(tag, float("inf")) for tag in tags)])

    while any(waiting):
        rank = min((r for r, w in enumerate(waiting) if w), key=ready_at)
        start = ready_at(rank)
        if start == float("inf"):
            raise RuntimeError("The ranks' programs wait for each other.")
        chunk = waiting[rank].pop()
        clock[rank] = start + any(isinstance(i, Run) for i in chunk)
        sent.update((i.message.tag, clock[rank]) for i in chunk if isinstance(i, Send))
        order.append((rank, chunk))
    return order


def turns_of(programs: Sequence[Program]) -> list[int]:
    """Returns the ranks in the order of `interleave`."""
    return [rank for rank, _ in interleave(programs)]


class Dispatcher:
    """Dispatches a step on the ranks of one process, on one thread, in the order of all ranks.

    Two processes that each keep to one order of all ranks cannot wait for each other: the earliest
    piece that is not done waits only for earlier ones. One thread for all ranks is faster than one
    for each, which would take turns at Python's lock.

    The `turns` are those of all ranks, of other processes too: see `turns_of`.
    """

    def __init__(self, executors: Iterable[Executor], turns: Sequence[int]):
        #: The executor of each rank.
        self.executors = {own.program.rank: own for own in executors}
        pieces = {rank: chunks(own.program)[::-1] for rank, own in self.executors.items()}
        #: The pieces of these ranks' programs in the order of their dispatch.
        self.order = [(rank, pieces[rank].pop()) for rank in turns if rank in pieces]
        self._runs = [
            (self.executors[rank], tuple(itertools.chain(*(chunk for _, chunk in run))))
            for rank, run in itertools.groupby(self.order, lambda piece: piece[0])
        ]
        #: What these ranks send and receive; a transport may want to know that before a call.
        self.messages: list[Message] = [
            i.message for _, chunk in self.order for i in chunk if isinstance(i, Send | Receive)
        ]
        #: The tags of messages whose arrays a later computation may take the memory of.
        self.late = frozenset().union(*map(_sent_before_donated, self.executors.values()))
        self._running: Executor | None = None

    def run(self, execute: Callable[[Executor, Chunk], None] | None = None) -> None:
        """Dispatches the step, by `execute` if given; its inputs are in their slots.

        An error leaves `at` where it was raised.
        """
        for executor, chunk in self._runs:
            self._running = executor
            (execute or Executor.execute)(executor, chunk)
        self._running = None

    @property
    def at(self) -> tuple[int, Instruction] | None:
        """The rank and the instruction that is dispatched now, or was when `run` raised."""
        running = self._running
        if running is None or running.at is None:
            return None
        return running.program.rank, running.at


def _sent_before_donated(executor: Executor) -> frozenset[int]:
    """Finds the messages whose arrays are donated to a later computation of the program."""
    found: set[int] = set()
    sent: dict[int, set[int]] = collections.defaultdict(set)
    for instruction in executor.program.instructions:
        match instruction:
            case Send(slots, message):
                for slot in slots:
                    sent[slot].add(message.tag)
            case Run(computation, inputs, outputs, _):
                for position in executor.donated.get(computation, ()):
                    found |= sent[inputs[position]]
                for slot in outputs:
                    sent.pop(slot, None)
            case Receive(slots, _):
                for slot in slots:
                    sent.pop(slot, None)
    return frozenset(found)
