"""The executor: runs one rank's program, instruction by instruction; and the order of all ranks."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from jaxpp import _compat
from jaxpp._program import Free, Instruction, Message, Program, Receive, Run, Send, Wait

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
        donated: by computation, the positions of the arguments whose memory it takes.
        find_invalid: says more of an invalid value that a computation, by its number, has given for
            some arguments, or gives None; see `find_invalid`.
    """

    def __init__(
        self,
        program: Program,
        executables: Sequence[Any],
        transport: Any,
        constants: Iterable[tuple[int, Any]] = (),
        donated: Mapping[int, Sequence[int]] = MappingProxyType({}),
        find_invalid: Callable[[int, Sequence[Any]], str | None] = lambda number, args: None,
    ):
        self.program, self.executables, self.transport = program, executables, transport
        self.slots: list[Any] = [None] * program.num_slots
        for slot, value in constants:
            self.slots[slot] = value
        self.donated, self._find_invalid = donated, find_invalid
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
        if not isinstance(public, FloatingPointError):
            return public
        found = self._find_invalid(run.computation, [self.slots[i] for i in run.inputs])
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


# ---- transfers for which all processes keep one order --------------------------------------------


def transfers_of(programs: Sequence[Program], process_of: Mapping[int, int]) -> tuple[Message, ...]:
    """Returns the messages between processes, in the order of their sends in that of all ranks."""
    return tuple(
        i.message
        for _, chunk in interleave(programs)
        for i in chunk
        if isinstance(i, Send) and _is_between(i.message, process_of)
    )


def check_transfers(
    transfers: Sequence[Message], programs: Sequence[Program], process_of: Mapping[int, int]
) -> None:
    """Proves that processes which issue transfers in one order do not wait for each other.

    A process issues a transfer where it sends the message or receives it, and before that all
    transfers that are earlier in the order. It can do so where it makes its sends in that order,
    and each after all that it has received by then. So each transfer needs only earlier ones, and
    the earliest that is not done can always go on.

    Raises:
        ValueError: the order does not have each message between processes once, or a process would
            wait for what it sends later itself.
    """
    places = {message.tag: place for place, message in enumerate(transfers)}
    issued: Counter[int] = Counter()  # by each process
    sent: set[int] = set()
    for rank, i in ((rank, i) for rank, chunk in interleave(programs) for i in chunk):
        if not isinstance(i, Send | Receive) or not _is_between(i.message, process_of):
            continue
        process, message = process_of[rank], i.message
        if (place := places.get(message.tag)) is None:
            raise ValueError(f"The order of transfers lacks {_named(message)}.")
        if isinstance(i, Send):
            sent.add(message.tag)
            if place < issued[process]:
                raise ValueError(
                    f"The order of transfers has {_named(message)} before "
                    f"{_named(transfers[issued[process] - 1])}, which process {process} issues "
                    f"before it sends the former; it would wait for itself, or another for it."
                )
        issued[process] = max(issued[process], place + 1)
    if len(transfers) != len(sent) or sent != places.keys():
        raise ValueError(
            f"The order of transfers has {len(transfers)} messages, and the ranks send {len(sent)} "
            f"to other processes."
        )


def _is_between(message: Message, process_of: Mapping[int, int]) -> bool:
    return process_of[message.source] != process_of[message.target]


def _named(message: Message) -> str:
    return f"{message.names[0]} from rank {message.source} to rank {message.target}"
