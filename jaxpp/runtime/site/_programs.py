"""The program library: the steps and computations of a mesh, and how they come to the sites."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxpp import _compat, jaxprs
from jaxpp._program import Bundle, Message, Program, Run
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayType, to_host
from jaxpp.runtime.executor import current_settings, key_of, turns_of
from jaxpp.runtime.site._carried import carry


@dataclasses.dataclass(frozen=True)
class Loading:
    """All that brings a step to a rank.

    Args:
        step: its number.
        program: what the rank runs, without the values of constants.
        inputs: for each of the program's inputs its type, and how it is split.
        computations: for each computation of the step the number by which the mesh knows it; None
            for one that this rank does not run.
        references: by those numbers, to the computations, each a carried `WithSettings`.
        constants: slots, types and bytes of the program's constants.
        turns: the ranks in the order in which pieces of their programs are dispatched.
        lines: for the label of each run its stage, and the user's line that it begins with.
        transfers: the messages for which all processes keep one order, in that order.
    """

    step: int
    program: Program
    inputs: tuple[tuple[ArrayType, Spec], ...]
    computations: tuple[int | None, ...]
    references: Mapping[int, Any]
    constants: tuple[tuple[int, ArrayType, Any], ...]
    turns: tuple[int, ...]
    lines: Mapping[str, str]
    transfers: tuple[Message, ...] = ()

    @property
    def numbers(self) -> set[int]:
        """The numbers of the computations that the rank runs."""
        return {n for n in self.computations if n is not None}


class Library:
    """The program library: all steps of a mesh, and their computations, each kept once.

    For `put` and `pack` see `Group`.
    """

    def __init__(self, put: Callable[[Any], Any], pack: Callable[[Any], Any]):
        self._put, self._pack = put, pack
        self._numbers = itertools.count()
        #: Of each step its loading for each rank, without references.
        self._steps: dict[int, tuple[Loading, ...]] = {}
        self._carried: dict[int, Any] = {}
        #: True if a computation has had effects, such as a print.
        self.has_effects = False
        #: Computations by their keys, which name objects by their ids; so each is kept alive.
        self._known: dict[Any, tuple[int, Any]] = {}
        self._removed: list[int] = []

    def add(self, bundle: Bundle, transfers: tuple[Message, ...] = ()) -> int:
        """Adds a step, and carries its computations that no other has; returns its number."""
        turns = tuple(turns_of(bundle.programs))
        computations = [self._numbers_of(program, bundle) for program in bundle.programs]
        step = next(self._numbers)
        inputs = [(ArrayType.of(a.aval), a.spec) for a in bundle.arguments]
        self._steps[step] = tuple(
            Loading(
                step,
                dataclasses.replace(own, constants=tuple((s, None) for s, _ in own.constants)),
                tuple(inputs[n] for n, _ in own.inputs),
                numbers,
                {},
                tuple((s, ArrayType.of(x), to_host(x)) for s, x in own.constants),
                turns,
                _lines_of(own, bundle),
                transfers,
            )
            for own, numbers in zip(bundle.programs, computations, strict=True)
        )
        return step

    def _numbers_of(self, program: Program, bundle: Bundle) -> tuple[int | None, ...]:
        """Finds the number of each computation that a rank runs; carries those that no rank had."""
        settings = current_settings(), bundle.inside
        numbers: list[int | None] = [None] * len(bundle.computations)
        for n in {i.computation for i in program.instructions if isinstance(i, Run)}:
            computation = bundle.computations[n]
            key = key_of(computation, settings)
            if key not in self._known:
                self._known[key] = number, _ = next(self._numbers), computation
                self._carried[number] = carry(computation, self._pack)
                self.has_effects |= bool(computation.jaxpr.effects)
            numbers[n] = self._known[key][0]
        return tuple(numbers)

    # ---- to the workers -------------------------------------------------------------------------

    def loading(self, step: int, rank: int) -> Loading:
        """Returns the loading of a step for a rank."""
        found = self._steps[step][rank]
        references = {n: self._put(self._carried[n]) for n in found.numbers}
        return dataclasses.replace(found, references=references)

    def remove(self, step: int) -> None:
        """Notes that a step is not called any more; `removals` tells the ranks."""
        self._removed.append(step)

    def removals(self) -> dict[int, set[int]]:
        """Returns, once only, steps to forget, each with the computations that no other has."""
        gone = {}
        while self._removed:
            number = self._removed.pop()
            loadings = self._steps.pop(number)
            used = {n for other in self._steps.values() for own in other for n in own.numbers}
            gone[number] = unused = {n for own in loadings for n in own.numbers} - used
            self._known = {k: v for k, v in self._known.items() if v[0] not in unused}
            for n in unused:
                del self._carried[n]
        return gone


def _lines_of(program: Program, bundle: Bundle) -> dict[str, str]:
    """Finds the stage of each task of a rank, by label, and the user's line that it begins with."""
    found: dict[str, str] = {}
    line_of: dict[int, str] = {}
    for run in program.instructions:
        if isinstance(run, Run) and run.label not in found:
            if run.computation not in line_of:
                lines = _source_lines(bundle.computations[run.computation].jaxpr)
                line_of[run.computation] = next(lines, "")
            stages = " and ".join(dict.fromkeys(str(task.stage) for task in run.tasks))
            stage = f"stage {stages}" if stages else ""
            found[run.label] = ", ".join(filter(None, (stage, line_of[run.computation])))
    return found


def _source_lines(jaxpr: Any) -> Iterator[str]:
    """Yields the user's lines of a jaxpr's equations; where one has none, those inside it."""
    for eqn in jaxpr.eqns:
        if line := _compat.source_line(eqn):
            yield line
        else:
            for inner in jaxprs.sub_jaxprs(eqn):
                yield from _source_lines(inner)
