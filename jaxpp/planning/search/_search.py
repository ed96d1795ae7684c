"""The search: from a choice to a neighbour of it, and on; once, or in rounds of annealing.

The rounds, their lengths and their random choices do not depend on the budget. A larger budget goes
on where a smaller one ended, so it never ends with a worse plan. Sums are those of `math.fsum`, as
Python 3.12 adds numbers by another rule than those before it.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from jaxpp.planning.search._judge import EAGER, RULES, judge, table_of
from jaxpp.planning.search._moves import move, start
from jaxpp.planning.search._setting import Choice, Setting
from jaxpp.schedules import Synthesis, Table, Task, synthesize

#: The tries of the first rounds; all later ones have as many as the last of these.
LENGTHS = (50, 250, 1000, 4000, 8000)
#: By which part of its value a choice may be worse than the one before, at first.
HEAT = 0.02
#: The same in a round that goes on from the best of earlier rounds.
REHEAT = 0.015
#: The weight of the mean time before ranks begin beside the time of all; it guides the search.
GUIDE = 0.5
#: A neighbour may be refused so often before one is judged, in the mean.
REFUSED = 20
#: A round's best that is slower than this, over the best of all, is not finished.
WORTHWHILE = 1.01
#: The evaluations of `synthesize` that finish a round's best.
EVALUATIONS = 400

_Choice = TypeVar("_Choice")


def search(
    choice: _Choice,
    value: Callable[[_Choice, Any], Any],
    neighbours: Callable[[_Choice, Any], Iterable[_Choice]],
    tries: int,
    allow: Callable[[int, Any], Any] | None = None,
) -> tuple[Any, _Choice, int]:
    """Goes from a choice to a neighbour, again and again, until it may go to none.

    Args:
        choice: where to begin.
        value: the value of a choice, less is better; it may be infinite above a value.
        neighbours: gives the neighbours of a choice that may have at most a value.
        tries: how many neighbours to judge, at most.
        allow: from the number of tries, and the value of the present choice, the greatest value of
            the next one. By default it has to be better.

    Returns:
        The best value, its choice, and the number of tries.
    """
    now = value(choice, math.inf)
    best, found, tried = now, choice, 0
    while tried < tries:
        allowed, before, moved = allow(tried, now) if allow else now, tried, False
        for other in neighbours(choice, allowed):
            tried += 1
            worth = value(other, allowed)
            if moved := worth < now or (allow is not None and worth <= allowed):
                choice, now = other, worth
                if now < best:
                    best, found = now, choice
            if moved or allow or tried >= tries:
                break
        if not moved and (allow is None or tried == before):
            break
    return best, found, tried


@dataclasses.dataclass(frozen=True)
class TimedChoice:
    """A choice, the order of its tasks as a table, and its time."""

    time: float
    choice: Choice
    table: Table


def find(
    setting: Setting,
    directions: Sequence[int] = (1, 2),
    *,
    tries: int,
    seed: int = 0,
    deadline: float = math.inf,
    report: Callable[[int, float], None] = lambda tried, best: None,
) -> TimedChoice | None:
    """Searches for the fastest choice in rounds; gives None where none fits.

    Args:
        setting: the layers and the machine.
        directions: the numbers of directions to try.
        tries: how many choices to judge.
        seed: of all random choices.
        deadline: a time of `time.monotonic` at which to stop.
        report: is told the number of tries and the best time, after each round.
    """
    allowed = [d for d in directions if setting.microbatches % d == 0 and d <= setting.ranks]
    ways = [(d, halves) for halves in setting.layers.forms for d in allowed]
    best: TimedChoice | None = None
    # For each way, its best choices of earlier rounds, with the rules that judged them.
    known: dict[tuple[int, bool], list[tuple[float, Choice, int]]] = {way: [] for way in ways}
    tried = number = 0
    while ways and tried < tries and time.monotonic() < deadline:
        way, turn = ways[number % len(ways)], number // len(ways)
        length, heat = LENGTHS[min(turn, len(LENGTHS) - 1)], HEAT
        choose = random.Random(seed * 1_000_003 + number)
        earlier = known[way]
        # The first two rounds, and then every other one, begin anew.
        if turn > 1 and turn % 2 == 0 and earlier:
            _, begin, rule = earlier[choose.randrange(min(3, len(earlier)))]
            heat = REHEAT
        else:
            begin = start(setting, way[0], (turn + 1) // 2, way[1])
            rule = turn % EAGER
            # Where memory is limited, every other such round frees it early.
            rule += EAGER * (turn // 2 % 2) if setting.memory_limit < math.inf else 0
        anneal = _Round(setting, rule, length, heat, choose, deadline)
        value, choice, judged = anneal.run(begin, min(length, tries - tried))
        tried += judged
        number += 1
        if value < math.inf:
            earlier.append((value, choice, rule))
            earlier.sort(key=lambda own: own[0])
            least = math.inf if best is None else best.time
            if value < least:
                best = TimedChoice(value, choice, table_of(setting, choice, rule))
            if judged == length and value <= WORTHWHILE * least:
                best = min(_finished(setting, choice), best, key=attrgetter("time"))
        report(tried, math.inf if best is None else best.time)
    return best


@dataclasses.dataclass
class _Round:
    """A round of annealing.

    One that its budget cuts short has done what the whole one would have done by then.
    """

    setting: Setting
    rule: int
    length: int
    heat: float
    choose: random.Random
    deadline: float

    def run(self, choice: Choice, budget: int) -> tuple[float, Choice, int]:
        """Returns the best time, its choice, and the number of tries."""
        self.best, self.found, self.refused = math.inf, choice, 0
        *_, tried = search(choice, self._value, self._neighbours, budget, self._allow)
        # A round that finds no more neighbours counts as whole.
        over = tried < budget == self.length and time.monotonic() < self.deadline
        return self.best, self.found, self.length if over else tried

    def _value(self, choice: Choice, most: float) -> float:
        guide = GUIDE * _quick(self.setting, choice)[1]
        found = judge(self.setting, choice, most - guide, self.rule)
        if found < self.best:
            self.best, self.found = found, choice
        return found + guide

    def _allow(self, tried: int, now: float) -> float:
        return now * (1 + self.heat * (1 - tried / self.length) * self.choose.random())

    def _neighbours(self, choice: Choice, allowed: float) -> Iterator[Choice]:
        """Makes a random neighbour whose own bound is not above what is allowed."""
        while self.refused < REFUSED * self.length and time.monotonic() < self.deadline:
            self.refused += 1
            other = move(self.setting, choice, self.choose)
            if other is not None:
                least, guide = _quick(self.setting, other)
                if least + GUIDE * guide <= allowed:
                    yield other
                    return


def _quick(setting: Setting, choice: Choice) -> tuple[float, float]:
    """Finds a time that no order beats, of the slowest rank, and the mean time before ranks begin.

    A rank begins after the forwards before its first stage, if these are a chain, and then has all
    its work to do.
    """
    ranks, sums, cuts = setting.ranks, setting.sums, choice.cuts
    forward, work = setting.before, sums["halves" if choice.halves else "whole"]
    heads, left = [math.inf] * ranks, [0.0] * ranks
    for stages in choice.placement:
        for stage, rank in enumerate(stages):
            a, b = cuts[stage], cuts[stage + 1]
            if forward[a] < heads[rank]:
                heads[rank] = forward[a]
            left[rank] += work[b] - work[a]
    pairs = setting.microbatches // len(choice.placement)
    fastest = max(setting.speeds)
    ends = (
        head / fastest + pairs * own / speed
        for head, own, speed in zip(heads, left, setting.speeds, strict=True)
    )
    return max(ends), math.fsum(heads) / ranks / fastest


def _finished(setting: Setting, choice: Choice) -> TimedChoice:
    """Orders the tasks of a choice as well as it can: by all rules, and by `synthesize`."""
    found = [
        timed(setting, choice, table_of(setting, choice, rule))
        for rule in RULES
        if judge(setting, choice, rule=rule) < math.inf
    ]
    if ordered := synthesized(setting, choice, evaluations=EVALUATIONS):
        choice = dataclasses.replace(choice, **vars(ordered.windows))
        found.append(timed(setting, choice, ordered.table))
    return min(found, key=attrgetter("time"))


def synthesized(
    setting: Setting, choice: Choice, whole: bool = False, **options: Any
) -> Synthesis | None:
    """Orders the tasks of a choice by `synthesize`; None where not even one microbatch fits.

    Args:
        setting: the layers and the machine.
        choice: the cut and the placement.
        whole: whether backwards may be whole, too, where the choice has halves.
        **options: as for `synthesize`, which chooses the windows: those of the choice do not count.
    """
    split, reduced = setting.zero == 3, setting.zero > 0
    choice = dataclasses.replace(choice, held=0 if split else None, reduces=reduced)
    placement, speeds = choice.placement, setting.speeds

    def on_its_rank(values: Sequence[float]) -> Callable[[Task], float]:
        def cost(task: Task) -> float:
            own = placement[task.microbatch % len(placement)]
            return values[task.stage] / speeds[own[task.stage]]

        return cost

    forward, first, rest = map(on_its_rank, setting.times(choice))
    of_whole = on_its_rank(setting.times(dataclasses.replace(choice, halves=False))[1])
    costs = dataclasses.replace(
        setting.costs(choice), forward=forward, input_grad=first, weight_grad=rest,
        backward=of_whole if whole and setting.layers.backward else None,
    )  # fmt: skip
    limits = [setting.memory_limit - own for own in setting.resident(choice)]
    try:
        return synthesize(
            costs, placement, setting.microbatches, memory=setting.memory(choice),
            memory_limit=limits, split_backward=choice.halves,
            stage_inputs=setting.graph(choice), gather=split, reduce=reduced, **options,
        )  # fmt: skip
    except ValueError:  # not even one microbatch fits
        return None


def timed(setting: Setting, choice: Choice, table: Table) -> TimedChoice:
    """Simulates a table of a choice."""
    return TimedChoice(setting.time_of(setting.timeline(table, choice), choice), choice, table)
