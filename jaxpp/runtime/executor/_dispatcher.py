"""`Dispatcher`: runs what the ranks of one process have of a step, all on the caller's thread."""

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence

from jaxpp._program import Instruction, Message, Program, Receive, Run, Send
from jaxpp.runtime.executor._executor import Chunk, Executor, chunks, interleave


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


def turns_of(programs: Sequence[Program]) -> list[int]:
    """Returns the ranks in the order of `interleave`."""
    return [rank for rank, _ in interleave(programs)]


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
