"""Runs the programs of all ranks on terms, instruction by instruction, as their devices would.

It refutes what no run may do: to wait for each other, to send twice or what nobody reads, to read
what was freed or given away, to take memory that is still needed, to run on another type.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxpp._program import (
    Argument,
    Bundle,
    Computation,
    Free,
    Message,
    Program,
    Receive,
    Run,
    Send,
    Wait,
)
from jaxpp.certification._evaluate import Evaluator
from jaxpp.certification._refuted import Refuted
from jaxpp.certification._table import Term, shown, type_of


class _Buffer(NamedTuple):
    """The memory of a value on a rank: an argument's, a constant's, or that of number `number`."""

    kind: str
    number: int


@dataclasses.dataclass
class _Slot:
    """The content of a slot, with its type; `lost` says why there is none."""

    term: Term | None = None
    aval: Any = None
    buffer: _Buffer | None = None
    lost: str = "nothing has been put there"


class _RankSlots:
    """A rank: its program, the next instruction, and its slots."""

    def __init__(self, program: Program):
        self.program, self.number, self.at = program, program.rank, 0
        self.slots = [_Slot() for _ in range(program.num_slots)]
        #: The memory that computations have taken, and by whom; and that of values being sent.
        self.taken: dict[_Buffer, str] = {}
        self.sent: set[_Buffer] = set()
        self.last = ""

    @property
    def is_done(self) -> bool:
        return self.at == len(self.program.instructions)

    def refute(self, why: str) -> Refuted:
        return Refuted(f"rank {self.number}: {why}", rank=self.number, task=self.last)

    def read(self, slot: int, aval: Any, who: str) -> Term:
        """The term in a slot that is read as a value of a type."""
        own = self.slots[slot]
        if own.term is None or own.buffer is None:
            raise self.refute(f"{who} reads slot {slot}, but {own.lost}")
        if own.buffer in self.taken:
            raise self.refute(
                f"{who} reads slot {slot}, whose memory {self.taken[own.buffer]} has taken"
            )
        wanted, given = type_of(aval), type_of(own.aval)
        if given[:3] != wanted[:3] or given[:2] != (own.term.shape, own.term.dtype):
            raise self.refute(f"{who} reads slot {slot}, {shown(given)}, as {shown(wanted)}")
        return own.term


class SymbolicRanks:
    """All ranks of a bundle; `arguments` gives the term of a flat argument."""

    def __init__(self, evaluator: Evaluator, bundle: Bundle, arguments: Callable[[Argument], Term]):
        self.evaluator, self.bundle = evaluator, bundle
        self.tasks = self.messages = 0
        self._buffers = 0
        self._sent: dict[int, tuple[Message, list[Term]]] = {}
        self._received: set[int] = set()
        self._rank_of_ordered: int | None = None
        self.ranks = [_RankSlots(program) for program in bundle.programs]
        for rank in self.ranks:
            for n, s in rank.program.inputs:
                record = bundle.arguments[n]
                own = _Slot(arguments(record), record.aval, _Buffer("argument", n))
                rank.slots[s] = own
            for s, value in rank.program.constants:
                term = evaluator.terms.constant(value)
                rank.slots[s] = _Slot(term, jax.typeof(value), _Buffer("constant", s))

    def run(self) -> dict[int, dict[int, tuple[Term, Any]]]:
        """Runs all programs to their end; gives for each result its term and type on each rank.

        Raises:
            Refuted: no run of these programs gives the results.
        """
        while not all(rank.is_done for rank in self.ranks):
            if not any([self._advance(rank) for rank in self.ranks]):
                waiting = [
                    f"rank {r.number} waits for {_named(own.message)} of rank {own.message.source}"
                    for r in self.ranks
                    if not r.is_done and isinstance(own := r.program.instructions[r.at], Receive)
                ]
                raise Refuted("the ranks wait for each other: " + "; ".join(waiting))
        for tag, (message, _) in self._sent.items():
            if tag not in self._received:
                raise Refuted(
                    f"rank {message.target} never receives {_named(message)}, which rank "
                    f"{message.source} sends",
                    rank=message.target,
                )
        found = collections.defaultdict[int, dict[int, tuple[Term, Any]]](dict)
        for rank in self.ranks:
            buffers: dict[_Buffer | None, int] = {}
            for n, s in rank.program.outputs:
                aval = rank.slots[s].aval
                found[n][rank.number] = rank.read(s, aval, f"result {n}"), aval
                other = buffers.setdefault(rank.slots[s].buffer, n)
                if other != n:
                    raise rank.refute(f"results {other} and {n} have one memory")
                if (whose := self._owner(rank.slots[s].buffer)) is not None:
                    raise rank.refute(f"result {n} has the memory of {whose}")
        return found

    def _advance(self, rank: _RankSlots) -> bool:
        """Runs a rank until it waits for a message; says whether it ran anything."""
        start, instructions = rank.at, rank.program.instructions
        while rank.at < len(instructions):
            instruction = instructions[rank.at]
            if isinstance(instruction, Receive) and instruction.message.tag not in self._sent:
                break
            match instruction:
                case Run():
                    self._run(rank, instruction)
                case Send():
                    self._send(rank, instruction)
                case Receive():
                    self._receive(rank, instruction)
                case Free(slots):
                    for s in slots:
                        rank.slots[s] = _Slot(lost=f"it was freed after {rank.last or 'nothing'}")
                case Wait():
                    pass
            rank.at += 1
        return rank.at > start

    def _put(
        self, rank: _RankSlots, slots: Sequence[int], terms: Sequence[Term], avals: Sequence[Any]
    ) -> None:
        for s, term, aval in zip(slots, terms, avals, strict=True):
            self._buffers += 1
            rank.slots[s] = _Slot(term, aval, _Buffer("value", self._buffers))

    def _run(self, rank: _RankSlots, run: Run) -> None:
        self.tasks += 1
        rank.last = run.label
        terms, computation = self.evaluator.terms, self.bundle.computations[run.computation]
        inside = computation.jaxpr.jaxpr
        for slots, variables, what in (
            (run.inputs, inside.invars, "inputs"),
            (run.outputs, inside.outvars, "outputs"),
        ):
            if len(slots) != len(variables):
                raise rank.refute(
                    f"{run.label} has {len(slots)} {what} for a computation of {len(variables)}"
                )
        own = zip(run.inputs, inside.invars, strict=True)
        given = [rank.read(s, v.aval, run.label) for s, v in own]
        terms.where = f"{run.label} on rank {rank.number}"
        self.evaluator.microbatch = run.task.microbatch if run.task else None
        before = len(self.evaluator.effects)
        made = self.evaluator.run(computation.jaxpr, given)
        if any(is_ordered for _, is_ordered in self.evaluator.effects[before:]):
            if self._rank_of_ordered not in (None, rank.number):
                raise rank.refute(
                    f"{run.label} has an ordered effect, and rank {self._rank_of_ordered} has one"
                )
            self._rank_of_ordered = rank.number
        self._take(rank, run, computation)
        self._put(rank, run.outputs, made, [v.aval for v in inside.outvars])

    def _owner(self, own: _Buffer | None) -> str | None:
        """Names what keeps its memory whatever the programs do; None if they may take it."""
        if own is not None and own.kind == "constant":
            return "a constant"
        if own is not None and own.kind == "argument":
            record = self.bundle.arguments[own.number]
            return None if record.donated else f"args{record.name}, which is not donated"
        return None

    def _take(self, rank: _RankSlots, run: Run, computation: Computation) -> None:
        """Gives the memory of donated inputs away."""
        buffers = [rank.slots[s].buffer for s in run.inputs]
        times = collections.Counter(buffers)
        for i in computation.donated:
            own, slot = buffers[i], run.inputs[i]
            if own is None:
                continue
            problem = self._owner(own)
            if problem is None and times[own] > 1:
                problem = f"slot {slot}, which it reads twice"
            if problem is None and own in rank.sent:
                problem = f"slot {slot}, which is sent"
            if problem is not None:
                raise rank.refute(f"{run.label} takes the memory of {problem}")
            rank.taken[own] = run.label

    def _send(self, rank: _RankSlots, send: Send) -> None:
        self.messages += 1
        message = send.message
        who = f"the send of {_named(message)} to rank {message.target}"
        if message.tag in self._sent:
            raise rank.refute(f"{who} repeats the tag {message.tag} of another message")
        if message.source != rank.number:
            raise rank.refute(f"{who} says that it is from rank {message.source}")
        own = zip(send.slots, message.avals, strict=True)
        values = [rank.read(s, aval, who) for s, aval in own]
        for s in send.slots:
            if (own := rank.slots[s].buffer) is not None:
                rank.sent.add(own)
        self._sent[message.tag] = message, values

    def _receive(self, rank: _RankSlots, receive: Receive) -> None:
        message, values = self._sent[receive.message.tag]
        if message != receive.message or message.target != rank.number:
            raise rank.refute(
                f"{_named(receive.message)} is received as another message than was sent"
            )
        if message.tag in self._received:
            raise rank.refute(f"{_named(message)} is received twice")
        self._received.add(message.tag)
        self._put(rank, receive.slots, values, message.avals)


def _named(message: Message) -> str:
    return f"message {message.tag} ({', '.join(message.names)})"
