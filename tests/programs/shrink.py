"""Makes a program that fails smaller, as long as it fails in the same way."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tests.programs.operations import Operation
from tests.programs.program import SCHEDULES, Call, Program, Stage

#: What a program is without a feature: each is tried by itself.
PLAINER: dict[str, tuple[Any, ...]] = {
    "loops": (("inside",), ("eval",)),
    "calls": ((Call(),),),
    "effects": ((),),
    "optimizer": ("by hand",),
    "policy": (None,),
    "around": ("nothing",),
    "half_weights": (False,),
    "returned": ((),),
    "jitted": (False,),
    "penalty": (False,),
    "cuts": ("marks", "numbers"),
    "donated": (False,),
    "flat": (False,),
    "gradients": (True,),
    "shared": (True,),
    "params": ("dict",),
    "container": ("tuple",),
    "loss": ("squares",),
    "microbatches": (1, 2, 4),
    "schedule": ("OneFOneB", "GPipe", "ZeroBubbleH1"),
}


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 200) -> Program:
    """The smallest program found that still fails; each try runs one."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            if tries == 0:
                return program
            tries -= 1
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """All programs that are one step smaller, those that leave out most first."""
    replace = dataclasses.replace
    for ranks in range(2, program.ranks):
        yield from _with_ranks(program, ranks)
    if SCHEDULES[program.schedule][0] > 1:
        one_each = replace(program, schedule="OneFOneB")
        for ranks in (2, 3):
            yield from _with_ranks(one_each, ranks)
    for number, stage in enumerate(program.stages):
        if stage.lines:
            yield _with_lines(program, number, ())
    for name, values in PLAINER.items():
        old = getattr(program, name)
        for value in values:
            if old == value:
                break  # those after it are no plainer
            smaller = replace(program, **{name: value})
            if _is_valid(smaller):
                yield smaller
    for i in range(len(program.outputs)):
        outputs = program.outputs[:i] + program.outputs[i + 1 :]
        place = min(program.place_of_loss, len(outputs))
        yield replace(program, outputs=outputs, place_of_loss=place)
    for name in ("effects", "returned", "loops", "calls"):
        parts = getattr(program, name)
        if len(parts) > 1:
            for i in range(len(parts)):
                yield replace(program, **{name: parts[:i] + parts[i + 1 :]})
    for i, call in enumerate(program.calls):
        for plainer in (replace(call, context="none"), replace(call, examples=3)):
            if plainer != call:
                yield replace(program, calls=(*program.calls[:i], plainer, *program.calls[i + 1 :]))
    for number, stage in enumerate(program.stages):
        chain = (number - 1,) if number else ()
        if stage.reads != chain:
            yield _with_stage(program, number, Stage(chain, stage.lines))
        for lines in _fewer(stage.lines):
            yield _with_lines(program, number, lines)


def _fewer(lines: tuple[Operation, ...]) -> Iterator[tuple[Operation, ...]]:
    """The lines without one, with what is inside one in its place, or with one made smaller."""
    for i, op in enumerate(lines):
        before, after = lines[:i], lines[i + 1 :]
        yield (*before, *after)
        if op.inner:
            yield (*before, *op.inner, *after)
            for inner in _fewer(op.inner):
                yield (*before, dataclasses.replace(op, inner=inner), *after)


def _with_stage(program: Program, number: int, stage: Stage) -> Program:
    stages = (*program.stages[:number], stage, *program.stages[number + 1 :])
    return dataclasses.replace(program, stages=stages)


def _with_lines(program: Program, number: int, lines: tuple[Operation, ...]) -> Program:
    return _with_stage(program, number, Stage(program.stages[number].reads, lines))


def _with_ranks(program: Program, ranks: int) -> Iterator[Program]:
    """The program on fewer ranks; its first stages are left, or its last."""
    for last in (False, True):
        count = ranks * SCHEDULES[program.schedule][0]
        if count >= len(program.stages):
            return
        kept = program.stages[-count:] if last else program.stages[:count]
        first = len(program.stages) - count if last else 0
        stages = []
        for number, stage in enumerate(kept):
            reads = tuple(j - first for j in stage.reads if j >= first)
            stages.append(Stage(reads or ((number - 1,) if number else ()), stage.lines))
        smaller = dataclasses.replace(program, ranks=ranks, stages=tuple(stages))
        if _is_valid(smaller):
            yield smaller


def _is_valid(program: Program) -> bool:
    if program.num_stages != len(program.stages):
        return False
    if program.schedule.startswith("ForwardOnly") != (program.loops == ("eval",)):
        return False
    if not program.loops or not program.calls:
        return False
    try:
        SCHEDULES[program.schedule][1].table(program.num_stages, program.microbatches)
    except ValueError:
        return False
    return True
