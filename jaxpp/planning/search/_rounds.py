"""The search: rounds of simulated annealing over cut, placement and order, one after the other.

The rounds, their lengths and their random choices do not depend on the budget. A larger budget goes
on where a smaller one ended, so it never ends with a worse plan. Sums are those of `math.fsum`, as
Python 3.12 adds numbers by another rule than those before it.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxpp.planning.search._judge import EAGER, RULES, judge, table_of
from jaxpp.planning.search._moves import move, start
from jaxpp.planning.search._setting import Choice, Setting
from jaxpp.schedules import Table, Task, simulate, synthesize

#: The tries of the first rounds; all later ones have as many as the last of these.
LENGTHS = (50, 250, 500, 1000, 3000)
#: By which part of its value a choice may be worse than the one before, at first.
HEAT = 0.02
#: The same in a round that goes on from the best of earlier rounds.
REHEAT = 0.01
#: How much the mean time before ranks begin counts beside the time of all; it guides the search.
GUIDE = 0.5
#: How often a try may be refused before it is judged, in the mean.
REFUSED = 20
#: A round's best that is slower than this, over the best of all, is not finished.
WORTHWHILE = 1.01
#: The evaluations of `synthesize` that finish a round's best.
EVALUATIONS = 400


@dataclasses.dataclass(frozen=True)
class Found:
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
) -> Found | None:
    """Searches for the fastest choice; gives None where none fits.

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
    best: Found | None = None
    # For each way, its best choices of earlier rounds.
    known: dict[tuple[int, bool], list[tuple[float, Choice]]] = {way: [] for way in ways}
    tried = number = 0
    while ways and tried < tries and time.monotonic() < deadline:
        way, turn = ways[number % len(ways)], number // len(ways)
        length = LENGTHS[min(turn, len(LENGTHS) - 1)]
        choose = random.Random(seed * 1_000_003 + number)
        earlier = known[way]
        again = turn % 3 == 2 and bool(earlier)
        if again:
            begin = earlier[choose.randrange(min(3, len(earlier)))][1]
        else:
            begin = start(setting, way[0], turn - turn // 3, way[1])
        heat = REHEAT if again else HEAT
        # Where memory is limited, every other turn frees it early.
        rule = EAGER * (turn // 2 % 2) if setting.memory_limit < math.inf else 0
        value, choice, judged = _anneal(
            setting, begin, rule, length, min(length, tries - tried), heat, choose, deadline
        )
        tried += judged
        number += 1
        if value < math.inf:
            earlier.append((value, choice))
            earlier.sort(key=lambda own: own[0])
            least = math.inf if best is None else best.time
            if value < least:
                best = Found(value, choice, table_of(setting, choice, rule))
            if judged == length and value <= WORTHWHILE * least:
                best = min(_finished(setting, choice), best, key=_time)  # pyright: ignore
        report(tried, math.inf if best is None else best.time)
    return best


def _time(found: Found) -> float:
    return found.time


def _anneal(
    setting: Setting,
    choice: Choice,
    rule: int,
    length: int,
    budget: int,
    heat: float,
    choose: random.Random,
    deadline: float,
) -> tuple[float, Choice, int]:
    """Anneals from a choice: gives the best time, its choice, and the number of tries.

    A round that its budget cuts short has done what the whole round would have done by then.
    """
    time_of = judge(setting, choice, rule=rule)
    value = time_of + GUIDE * _quick(setting, choice)[1]
    best, best_choice = time_of, choice
    refused = 0
    for n in range(budget):
        if n % 32 == 0 and time.monotonic() > deadline:
            return best, best_choice, n
        allowed = value * (1 + heat * (1 - n / length) * choose.random())
        while refused < REFUSED * length:
            refused += 1
            other = move(setting, choice, choose)
            if other is None:
                continue
            least, guide = _quick(setting, other)
            if least + GUIDE * guide <= allowed:
                break
        else:
            return best, best_choice, length if budget == length else budget
        time_of = judge(setting, other, allowed - GUIDE * guide, rule)
        if time_of + GUIDE * guide <= allowed:
            choice, value = other, time_of + GUIDE * guide
            if time_of < best:
                best, best_choice = time_of, choice
    return best, best_choice, budget


def _quick(setting: Setting, choice: Choice) -> tuple[float, float]:
    """Finds a time that no order beats, of the slowest rank, and the mean time before ranks begin.

    A rank begins after the forwards before its first stage, and then has all its work to do.
    """
    ranks, parts = setting.ranks, setting.sums[choice.halves]
    forward, first, rest = parts
    heads, work = [math.inf] * ranks, [0.0] * ranks
    cuts = choice.cuts
    for stages in choice.placement:
        for stage, rank in enumerate(stages):
            a, b = cuts[stage], cuts[stage + 1]
            if forward[a] < heads[rank]:
                heads[rank] = forward[a]
            work[rank] += forward[b] - forward[a] + first[b] - first[a] + rest[b] - rest[a]
    pairs = setting.microbatches // len(choice.placement)
    fastest = max(setting.speed)
    ends = (
        head / fastest + pairs * own / speed
        for head, own, speed in zip(heads, work, setting.speed, strict=True)
    )
    return max(ends), math.fsum(heads) / ranks / fastest


def _finished(setting: Setting, choice: Choice) -> Found:
    """Orders the tasks of a choice as well as it can: by all rules, and by `synthesize`."""
    tables = [table_of(setting, choice, rule) for rule in RULES if
              judge(setting, choice, rule=rule) < math.inf]  # fmt: skip
    tables += _synthesized(setting, choice)
    return min((timed(setting, choice, table) for table in tables), key=_time)


def _synthesized(setting: Setting, choice: Choice) -> list[Table]:
    placement, speed = choice.placement, setting.speed

    def on_its_rank(values: Sequence[float]) -> Callable[[Task], float]:
        def cost(task: Task) -> float:
            own = placement[task.microbatch % len(placement)]
            return values[task.stage] / speed[own[task.stage]]

        return cost

    costs: Any = setting.costs(choice)
    costs = dataclasses.replace(
        costs,
        forward=on_its_rank(costs.forward),
        input_grad=on_its_rank(costs.input_grad),
        weight_grad=on_its_rank(costs.weight_grad),
    )
    limits = [setting.memory_limit - own for own in setting.resident(choice)]
    try:
        found = synthesize(
            costs, placement, setting.microbatches, memory=setting.memory(choice),
            memory_limit=limits, split_backward=choice.halves, evaluations=EVALUATIONS,
        )  # fmt: skip
    except ValueError:  # not even one microbatch fits
        return []
    return [found.table]


def timed(setting: Setting, choice: Choice, table: Table) -> Found:
    """Simulates a table of a choice."""
    timeline = simulate(table, setting.costs(choice), machine=setting.machine(choice))
    return Found(timeline.makespan, choice, table)
