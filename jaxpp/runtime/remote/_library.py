"""The program cache: the steps and computations of a mesh, and which workers have them."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpp import _compat, _jaxprs
from jaxpp._program import Bundle, Program, Run
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayType, to_host
from jaxpp.runtime.executor import current_settings, key_of
from jaxpp.runtime.remote.calls import Pickled


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step: its programs, the computations that each of them runs, its arguments.

    A rank knows a computation by its number among those of the mesh; None stands for one that the
    rank does not run. `lines` has by the label of a run its stage, and the user's line that it
    begins with.
    """

    programs: tuple[Program, ...]
    computations: tuple[tuple[int | None, ...], ...]
    inputs: tuple[tuple[ArrayType, Spec], ...]
    lines: Mapping[str, str]


#: The number of calls whose steps are remembered: of more than a worker may have under way.
REMEMBERED = 1000


@dataclasses.dataclass(frozen=True)
class Loading:
    """The arguments of `Process.compile` and `Process.load` that bring a step to a rank.

    Those of `load` end with the executables, from `Library.shared`, that the rank lacks and others
    compile.
    """

    rank: int
    compile: tuple[Any, ...]
    load: tuple[Any, ...]
    lacks: Collection[int]


class Library:
    """A program cache: all steps of a mesh, and their computations, each kept once.

    Args:
        kinds: for each rank something that is equal where ranks can share executables.
        has: gives the set of what a rank's workers have, which is changed here.
    """

    def __init__(self, kinds: Sequence[Any], has: Callable[[int], set[Any]]):
        self._kinds, self._has = kinds, has
        self._numbers = itertools.count()
        self._steps: dict[int, _Step] = {}
        self._pickled: dict[int, Pickled] = {}
        #: Whether a computation has had effects, such as a print.
        self.has_effects = False
        #: Computations by their keys, which name objects by their ids; so each is kept alive.
        self._known: dict[Any, tuple[int, Any]] = {}
        #: For each of the last calls the lines of its step.
        self._lines: dict[int, Mapping[str, str]] = {}
        self._removed: list[int] = []

    def add(self, bundle: Bundle) -> int:
        """Adds a step, and pickles its computations that no other has; returns its number."""
        computations = tuple(self._numbers_of(program, bundle) for program in bundle.programs)
        number = next(self._numbers)
        inputs = tuple((ArrayType.of(a.aval), a.spec) for a in bundle.arguments)
        self._steps[number] = _Step(bundle.programs, computations, inputs, _lines_of(bundle))
        return number

    def _numbers_of(self, program: Program, bundle: Bundle) -> tuple[int | None, ...]:
        """Finds the number of each computation that a rank runs; pickles those that no rank had."""
        settings = current_settings(), bundle.inside
        numbers: list[int | None] = [None] * len(bundle.computations)
        for n in {i.computation for i in program.instructions if isinstance(i, Run)}:
            computation = bundle.computations[n]
            key = key_of(computation, settings)
            if key not in self._known:
                self._known[key] = number, _ = next(self._numbers), computation
                self._pickled[number] = Pickled.of(computation)
                self.has_effects |= bool(computation.jaxpr.effects)
            numbers[n] = self._known[key][0]
        return tuple(numbers)

    def missing(self, step: int) -> list["Loading"]:
        """Makes the loadings for the ranks that do not have a step."""
        found = self._steps[step]
        lacking = [p for p in found.programs if ("step", step) not in self._has(p.rank)]
        wanted = {p.rank: self._lacks(found, p) for p in lacking}
        compiles: dict[int, list[int]] = {rank: [] for rank in wanted}
        shared = set()
        for number in dict.fromkeys(n for own in wanted.values() for n in own):
            alike: dict[Any, list[int]] = defaultdict(list)  # that can share executables
            for rank, own in wanted.items():
                if number in own:
                    alike[self._kinds[rank]].append(rank)
            for ranks in alike.values():
                compiles[min(ranks, key=lambda r: self._weight(compiles[r]))].append(number)
                shared |= {number} if len(ranks) > 1 else set()
        return [
            self._loading(step, program, compiles[program.rank], wanted[program.rank], shared)
            for program in lacking
        ]

    def shared(
        self, loading: "Loading", others: Mapping[int, "Loading"], compiled: Mapping[int, Any]
    ) -> dict[int, bytes]:
        """Finds the executables for a rank's loading that others, by worker, have compiled."""
        kind = self._kinds[loading.rank]
        own = [found for w, found in compiled.items() if self._kinds[others[w].rank] == kind]
        return {n: found[n] for found in own for n in loading.lacks if n in found}

    def _weight(self, computations: Iterable[int]) -> int:
        """Estimates how long computations take to compile, by their bytes."""
        return sum(len(self._pickled[n].payload) for n in computations)

    def _lacks(self, step: _Step, program: Program) -> list[int]:
        """Finds the computations that a rank runs in a step and does not have, largest first."""
        numbers = {n for n in step.computations[program.rank] if n is not None}
        lacks = [n for n in numbers if ("computation", n) not in self._has(program.rank)]
        return sorted(lacks, key=lambda n: (-self._weight([n]), n))

    def _loading(
        self, number: int, program: Program, compiles: list[int], lacks: list[int], shared: set[int]
    ) -> "Loading":
        step = self._steps[number]
        numbers = step.computations[program.rank]
        constants = [(s, ArrayType.of(x), to_host(x)) for s, x in program.constants]
        slots = tuple((slot, None) for slot, _ in program.constants)
        bare = dataclasses.replace(program, constants=slots)
        inputs = [step.inputs[n] for n, _ in program.inputs]
        others = {n: self._pickled[n] for n in lacks if n not in compiles}
        return Loading(
            program.rank,
            ({n: self._pickled[n] for n in compiles}, shared),
            (number, bare, inputs, numbers, others, constants),
            others,
        )

    def installed(self, step: int) -> None:
        """Notes that all ranks have a step."""
        found = self._steps[step]
        for program in found.programs:
            own = found.computations[program.rank]
            numbers = (("computation", n) for n in own if n is not None)
            self._has(program.rank).update([("step", step), *numbers])

    def remove(self, step: int) -> None:
        """Notes that a step is not called any more; `removals` tells the ranks."""
        self._removed.append(step)

    def removals(self) -> list[tuple[int, int, set[int]]]:
        """Returns, once only, ranks, a step that each may forget, and computations of no other."""
        found = []
        while self._removed:
            number = self._removed.pop()
            step = self._steps.pop(number)
            used = {n for other in self._steps.values() for own in other.computations for n in own}
            unused = {n for own in step.computations for n in own} - used - {None}
            for program in step.programs:
                own = unused.intersection(step.computations[program.rank])
                gone = [("step", number), *(("computation", n) for n in own)]
                self._has(program.rank).difference_update(gone)
                found.append((program.rank, number, own))
            self._known = {k: v for k, v in self._known.items() if v[0] not in unused}
            self._pickled = {n: e for n, e in self._pickled.items() if n not in unused}
        return found

    # ---- names in the user's words --------------------------------------------------------------

    def called(self, call: int, step: int) -> None:
        """Notes the step of a call, which may be removed before the call ends."""
        self._lines[call] = self._steps[step].lines
        self._lines.pop(call - REMEMBERED, None)

    def describe(self, call: int, label: str) -> str:
        """Finds the stage of a task, and the user's line that the task begins with, in brackets."""
        known = self._lines.get(call, {}).get(label, "")
        return f" ({known})" if known else ""


def _lines_of(bundle: Bundle) -> dict[str, str]:
    """Finds the stage of each task of a step, by label, and the user's line that it begins with."""
    found: dict[str, str] = {}
    line_of: dict[int, str] = {}
    for program in bundle.programs:
        for run in program.instructions:
            if isinstance(run, Run) and run.label not in found:
                if run.computation not in line_of:
                    lines = _source_lines(bundle.computations[run.computation].jaxpr)
                    line_of[run.computation] = next(lines, "")
                stage = f"stage {run.task.stage}" if run.task else ""
                found[run.label] = ", ".join(filter(None, (stage, line_of[run.computation])))
    return found


def _source_lines(jaxpr: Any) -> Iterator[str]:
    """Yields the user's lines of a jaxpr's equations; where one has none, those inside it."""
    for eqn in jaxpr.eqns:
        if line := _compat.source_line(eqn):
            yield line
        else:
            for inner in _jaxprs.sub_jaxprs(eqn):
                yield from _source_lines(inner)
