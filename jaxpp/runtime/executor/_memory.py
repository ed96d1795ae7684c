"""The bytes that a device of each rank holds in a step: what, from when, and until when."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpp._program import Bundle, Free, Receive, Role, Run, Send
from jaxpp._specs import Spec, axis_sizes
from jaxpp.runtime.executor._executor import interleave
from jaxpp.schedules import Task

#: The kinds of bytes: arguments by their role, and what a step makes.
KINDS = ("parameters", "optimizer", "batch", "other", "accumulators", "activations", "messages",
         "temporary")  # fmt: skip
_OF_ROLE = {
    Role.PARAMETER: "parameters",
    Role.OPTIMIZER: "optimizer",
    Role.BATCH: "batch",
    Role.OTHER: "other",
}

#: Gives when a rank runs something, from the rank, the run, and the earliest time at which it can.
When = Callable[[int, Run, float], tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a device of a rank holds from `start` until `end`."""

    rank: int
    kind: str
    nbytes: int
    start: float
    end: float


#: The number of a computation, and the position of one of its results.
_Output = tuple[int, int] | None


@dataclasses.dataclass(slots=True)
class _Live:
    kind: str
    nbytes: int
    start: float
    output: _Output = None


def held_bytes(
    bundle: Bundle,
    when: When | None = None,
    temporaries: Sequence[Mapping[int, int]] | None = None,
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> list[Held]:
    """Finds all that the ranks hold in a step.

    Arguments are there from the start to the end, unless a computation takes their memory. A
    message is on its target from the end of the task that makes it. A computation's results are
    there from its start: an executable takes all of its memory when it starts.

    Args:
        bundle: the step.
        when: when each rank runs what; by default one after the other, each for one unit.
        temporaries: for each rank, and each computation that it runs, the bytes that the
            computation needs beside its arguments and results; by default none.
        sizes: for each rank the sizes of the axes inside it; by default those of the step.
    """
    sizes = sizes or [axis_sizes(bundle.inside)] * len(bundle.programs)
    ledgers = [
        _Ledger(bundle, program.rank, own, (temporaries or [{}] * len(sizes))[program.rank])
        for program, own in zip(bundle.programs, sizes, strict=True)
    ]
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
                case Receive(slots, message):
                    specs = message.specs or ((),) * len(slots)
                    for slot, aval, spec in zip(slots, message.avals, specs, strict=True):
                        nbytes = array_bytes(aval, spec, ledger.sizes)
                        ledger.receive(slot, nbytes, sent[message.tag])
                case Free(slots):
                    ledger.free(slots)
    end = max(ledger.clock for ledger in ledgers)
    return [held for ledger in ledgers for held in ledger.close(end)]


def over_time(held: Iterable[Held]) -> Iterator[tuple[float, Counter[str]]]:
    """Gives the bytes of each kind, at each time at which they change, in order.

    What is dropped at a time makes room for what comes at that time.
    """
    changes: list[tuple[float, int, Held]] = []
    for h in held:
        if h.start < h.end:
            changes += (h.start, 1, h), (h.end, 0, h)
    now: Counter[str] = Counter()
    for time, group in itertools.groupby(
        sorted(changes, key=lambda change: change[:2]), key=lambda change: change[0]
    ):
        for _, comes, h in group:
            now[h.kind] += h.nbytes if comes else -h.nbytes
        yield time, Counter(now)


class _Ledger:
    """The slots of one rank that hold something, and all that has been dropped."""

    def __init__(
        self, bundle: Bundle, rank: int, sizes: Mapping[str, int], temporaries: Mapping[int, int]
    ):
        program = bundle.programs[rank]
        self.clock = 0.0  # of the rank: when its last run ended
        self.sizes = sizes
        self._computations, self._temporaries, self._rank = bundle.computations, temporaries, rank
        self._live: dict[int, _Live] = {}
        self._dropped: list[tuple[_Live, float]] = []
        self._staying: list[_Live] = []
        self._accumulators: set[_Output] = set()
        for n, slot in program.inputs:
            own = bundle.arguments[n]
            nbytes = array_bytes(own.aval, own.spec, sizes)
            self._live[slot] = _Live(_OF_ROLE[own.role], nbytes, -math.inf)
        for slot, value in program.constants:
            self._live[slot] = _Live("other", array_bytes(value, (), sizes), -math.inf)
        # The caller holds the arguments, and the mesh its constants, whatever the program frees.
        self._kept = set(self._live)
        becomes = {slot: bundle.results[n].becomes for n, slot in program.outputs}
        self._results = {
            slot: _OF_ROLE[bundle.arguments[n].role] for slot, n in becomes.items() if n is not None
        }

    def run(self, run: Run, start: float, end: float) -> None:
        """Takes and drops what a run takes and drops."""
        number, task = run.computation, Task.from_text(run.label)
        computation = self._computations[number]
        for i in computation.donated:
            if run.inputs[i] in self._live:
                if task:
                    self._live[run.inputs[i]].kind = "accumulators"
                    self._accumulators.add(self._live[run.inputs[i]].output)
                self._drop(run.inputs[i], start)
        for o, slot in enumerate(run.outputs):
            aval, spec = computation.jaxpr.out_avals[o], spec_of(computation.out_specs, o)
            kind = "activations" if task else self._results.get(slot, "other")
            nbytes = array_bytes(aval, spec, self.sizes)
            self._live[slot] = _Live(kind, nbytes, start, (number, o))
        if nbytes := self._temporaries.get(number, 0):
            self._dropped.append((_Live("temporary", nbytes, start), end))
        self.clock = end

    def receive(self, slot: int, nbytes: int, sent: float) -> None:
        """Takes an array of a message from another rank, which has been here since `sent`."""
        self.clock = max(self.clock, sent)
        self._dropped.append((_Live("messages", nbytes, sent), self.clock))
        self._live[slot] = _Live("activations", nbytes, self.clock)

    def free(self, slots: Sequence[int]) -> None:
        """Drops slots; arguments and constants stay where they are."""
        for slot in slots:
            if slot in self._kept:
                self._kept.discard(slot)
                self._staying.append(self._live.pop(slot))
            elif slot in self._live:
                self._drop(slot, self.clock)

    def _drop(self, slot: int, end: float) -> None:
        self._kept.discard(slot)
        self._dropped.append((self._live.pop(slot), end))

    def close(self, end: float) -> Iterator[Held]:
        """Drops what is left; gives all that there was."""
        left = [*self._staying, *self._live.values()]
        for live, end in [*self._dropped, *((live, end) for live in left)]:
            last = live.kind == "activations" and live.output in self._accumulators
            kind = "accumulators" if last else live.kind
            yield Held(self._rank, kind, live.nbytes, live.start, end)


def array_bytes(aval: Any, spec: Spec, sizes: Mapping[str, int]) -> int:
    """Gives the bytes of an array on one device."""
    parts = math.prod(sizes[axis] for entry in spec for axis in entry)
    return aval.size * getattr(aval.dtype, "itemsize", 4) // parts


def spec_of(specs: Sequence[Spec], n: int) -> Spec:
    """Gives the spec of an input or output; computations without specs have none."""
    return specs[n] if specs else ()
