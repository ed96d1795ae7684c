"""The bytes that a device of each rank holds in a step: what, from when, and until when.

What the ranks compute is known from XLA's analysis, and what they hold from their programs.
"""

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpp import _compat
from jaxpp._program import Bundle, Free, Program, Receive, Role, Run, Send
from jaxpp._specs import Spec
from jaxpp.runtime.executor._compile import Copier
from jaxpp.runtime.executor._executor import interleave


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The figures that XLA gives of a compiled computation on a device; 0 where it does not tell.

    `temporary_bytes` are what it needs while it runs, beside its arguments and results;
    `accessed_bytes` what it reads and writes.
    """

    temporary_bytes: int
    flops: float
    accessed_bytes: float


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A rank of a step: its devices, as JAX writes them, the axes inside it, XLA's analyses.

    These are by the number of the computation. Of `run_ahead` messages, those received last, it
    holds the first array.
    """

    devices: tuple[str, ...]
    axes: Mapping[str, int]
    analyses: Mapping[int, Analysis]
    run_ahead: int = 0

    @classmethod
    def of(
        cls,
        devices: Sequence[Any],
        axes: Mapping[str, int],
        executables: Sequence[Any],
        run_ahead: int = 0,
    ) -> "Inspected":
        """Inspects a rank; where it does not run a computation, its executable is None."""
        analyses = {n: _analyse(own) for n, own in enumerate(executables) if own is not None}
        return cls(tuple(map(str, devices)), axes, analyses, run_ahead)


def _analyse(executable: Any) -> Analysis:
    if isinstance(executable, Copier):
        return Analysis(0, 0.0, 0.0)
    memory, costs = executable.memory_analysis(), executable.cost_analysis() or {}
    if isinstance(costs, list):  # a dictionary for each program of an executable
        costs = costs[0] if costs else {}
    return Analysis(
        0 if memory is None else int(memory.temp_size_in_bytes),
        max(0.0, float(costs.get("flops", 0.0))),
        max(0.0, float(costs.get("bytes accessed", 0.0))),
    )


#: The kind of bytes that are in the memory of the host, and of no device. The other kinds are those
#: of arguments by their role, "accumulators", "activations", "messages" and "temporary"; what a `G`
#: or an `H` gathers are "parameters", and what an `S` reduces "accumulators".
HOST = "host"
_OF_ROLE = {
    Role.PARAMETER: "parameters",
    Role.OPTIMIZER: "optimizer",
    Role.BATCH: "batch",
    Role.OTHER: "other",
}

#: Gives when a rank runs something, from the rank, the run, and the earliest time at which it can.
When = Callable[[int, Run, float], tuple[float, float]]
#: The number of a computation, and the position of one of its results.
_Output = tuple[int, int] | None


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """Bytes that a device of a rank holds from `start` until `end`; `output` computes them."""

    rank: int
    kind: str
    nbytes: int
    start: float
    end: float = math.inf
    output: _Output = None


def held_bytes(bundle: Bundle, ranks: Sequence[Inspected], when: When | None = None) -> list[Held]:
    """Finds all that the ranks hold in a step.

    Arguments are there from the start to the end, unless a computation takes their memory. A
    message is on its target from the end of the task that makes it. A computation's results are
    there from its start: an executable takes all of its memory when it starts. `when` says when
    each rank runs what; by default one after the other, each for one unit.
    """
    ledgers = [_Ledger(bundle, *own) for own in zip(bundle.programs, ranks, strict=True)]
    sent: dict[int, float] = {}
    numbers = itertools.count()
    for rank, chunk in interleave(bundle.programs):
        ledger = ledgers[rank]
        for instruction in chunk:
            match instruction:
                case Run():
                    if when is None:
                        start = float(next(numbers))
                        ledger.run(instruction, start, start + 1)
                    else:
                        ledger.run(instruction, *when(rank, instruction, ledger.clock))
                case Send(message=message):
                    sent[message.tag] = ledger.clock
                case Receive(message=message):
                    ledger.receive(instruction, sent[message.tag])
                case Free(slots):
                    ledger.free(slots)
    end = max(ledger.clock for ledger in ledgers)
    return [held for ledger in ledgers for held in ledger.close(end)]


def over_time(held: Iterable[Held]) -> Iterator[tuple[float, Counter[str]]]:
    """Returns the bytes of each kind, at each time at which they change, in order.

    What is dropped at a time makes room for what comes at that time.
    """
    changes: list[tuple[float, int, str]] = []
    for h in held:
        if h.start < h.end:
            changes += (h.start, h.nbytes, h.kind), (h.end, -h.nbytes, h.kind)
    now: Counter[str] = Counter()
    for time, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        for _, nbytes, kind in group:
            now[kind] += nbytes
        yield time, Counter(now)


class _Ledger:
    """All that one rank holds, and which of it is in a slot."""

    def __init__(self, bundle: Bundle, program: Program, rank: Inspected):
        self.clock = 0.0  # of the rank: when its last run ended
        self._sizes, self._analyses, self._run_ahead = rank.axes, rank.analyses, rank.run_ahead
        self._computations, self._rank = bundle.computations, program.rank
        self._held: list[Held] = []
        self._in_slot: dict[int, Held] = {}
        self._accumulators: set[_Output] = set()
        self._recent: deque[Held] = deque()  # the first array of each message received last
        self._late: list[Held] = []  # messages that are dropped before the next run
        self._copied: dict[int, float] = {}  # for each slot, when the last copy of it has ended
        for n, slot in program.inputs:
            own = bundle.arguments[n]
            self._in_slot[slot] = self._take(_OF_ROLE[own.role], own.aval, own.spec, -math.inf)
        for slot, value in program.constants:
            self._in_slot[slot] = self._hold("other", array_bytes(value, (), rank.axes), -math.inf)
        becomes = {slot: bundle.results[n].becomes for n, slot in program.outputs}
        self._results = {
            slot: _OF_ROLE[bundle.arguments[n].role] for slot, n in becomes.items() if n is not None
        }
        runs = (i for i in program.instructions if isinstance(i, Run))
        #: The run that writes each slot last: if the slot has a result, it makes the result.
        self._last = {slot: run for run in runs for slot in run.outputs}

    def _take(self, kind: str, aval: Any, spec: Spec, start: float, output: _Output = None) -> Held:
        """Takes an array; one in the memory of the host is of that kind, whatever it is for."""
        kind = HOST if _compat.memory_kind(aval) else kind
        return self._hold(kind, array_bytes(aval, spec, self._sizes), start, output)

    def _hold(self, kind: str, nbytes: int, start: float, output: _Output = None) -> Held:
        self._held.append(Held(self._rank, kind, nbytes, start, output=output))
        return self._held[-1]

    def run(self, run: Run, start: float, end: float) -> None:
        """Takes and drops what a run takes and drops."""
        number, task = run.computation, run.task
        for held in self._late:
            held.end = start
        self._late.clear()
        computation = self._computations[number]
        for i in computation.donated:
            if held := self._in_slot.pop(run.inputs[i], None):
                held.end = start
                if task and held.kind in ("activations", "other"):  # no argument of the step
                    held.kind = "accumulators"
                    self._accumulators.add(held.output)
        specs = computation.out_specs or ((),) * len(run.outputs)
        for o, (slot, spec) in enumerate(zip(run.outputs, specs, strict=True)):
            kind = "activations" if task else "other"
            if task and task.kind.of_stage:
                kind = "accumulators" if task.kind.takes else "parameters"
            if self._last[slot] is run:
                kind = self._results.get(slot, kind)
            aval = computation.jaxpr.out_avals[o]
            self._in_slot[slot] = self._take(kind, aval, spec, start, (number, o))
        if nbytes := self._analyses[number].temporary_bytes:
            self._hold("temporary", nbytes, start).end = end
        if run.lane == "copy":  # the rank goes on beside it
            self._copied |= dict.fromkeys(run.inputs, end)
        else:
            self.clock = end

    def receive(self, receive: Receive, sent: float) -> None:
        """Takes a message from another rank, which has been here since `sent`."""
        slots, message = receive.slots, receive.message
        self.clock = max(self.clock, sent)
        for slot, aval, spec in zip(
            slots, message.avals, message.specs or ((),) * len(slots), strict=True
        ):
            self._take("messages", aval, spec, sent).end = self.clock
            self._in_slot[slot] = self._take("activations", aval, spec, self.clock)
        self._recent.append(self._in_slot[slots[0]])
        if len(self._recent) > self._run_ahead:
            oldest = self._recent.popleft()
            self._late += [oldest] if oldest.kind == "messages" else []

    def free(self, slots: Sequence[int]) -> None:
        """Drops slots, but what was there before the step: its caller, or the mesh, holds that."""
        for slot in slots:
            copied, held = self._copied.pop(slot, self.clock), self._in_slot.pop(slot, None)
            if held is None or held.start == -math.inf:
                continue
            held.end = max(self.clock, copied)
            if held in self._recent and held.kind != HOST:
                late = self._hold("messages", held.nbytes, held.end)
                self._recent[self._recent.index(held)] = late

    def close(self, end: float) -> list[Held]:
        """Drops what is left; returns all that there was."""
        for held in self._held:
            held.end = end if held.end == math.inf else held.end
            if held.kind == "activations" and held.output in self._accumulators:
                held.kind = "accumulators"
        return self._held


def array_bytes(aval: Any, spec: Spec, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of an array on one device."""
    parts = math.prod(sizes[axis] for entry in spec for axis in entry)
    return aval.size * getattr(aval.dtype, "itemsize", 4) // parts


def format_bytes(nbytes: float) -> str:
    """Writes bytes in the largest unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
