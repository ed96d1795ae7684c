"""The judge of a search: a list schedule, each rank at each moment the first task that may run."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from jaxpp.planning.search._setting import Choice, Setting
from jaxpp.schedules import Kind, Table
from jaxpp.schedules.simulator import OrderProblem, Rule, list_schedule, shape_of

#: The rules that decide between tasks that may run: see `_rule`. From `EAGER` on they are the same
#: again, with weight gradients before forwards.
RULES = range(8)
EAGER = 4


@functools.lru_cache(maxsize=512)
def _rule(stages: int, directions: int, pairs: int, halves: bool, rule: int) -> Rule:
    """Returns a rule: backwards come first, then forwards, older microbatches before newer ones.

    A weight gradient fills the time in which nothing else can run; by some rules it comes before
    forwards, to free memory. Of weight gradients that of the older microbatch comes first, or by
    odd rules that of the later stage. Of forwards that of the older microbatch comes first, which
    is the one that is further on its way, or by every other two rules that of the earlier stage.
    """
    by_stage, breadth, weight = rule % 2, rule // 2 % 2, 1 if rule >= EAGER else 3
    offsets, periods = [], []
    for kind, own in shape_of(stages, directions, directions, None, halves)[1]:
        direction, stage = divmod(own, stages)
        if kind is Kind.F:
            first, (step, period) = 2, (stage * pairs, 1) if breadth else (-stage, 2 * stages)
        elif kind is Kind.W:
            first = weight
            step, period = (-stage * pairs, 1) if by_stage else (-stage, 2 * stages)
        else:
            first, step, period = 0, stage, 2 * stages
        offsets.append((first * 8 * stages * (pairs + 1) + step) * directions + direction)
        periods.append(period * directions)
    return Rule(offsets, periods)


def problem_of(setting: Setting, choice: Choice) -> OrderProblem:
    """Makes the tasks of a choice in numbers, as `synthesize` would from its costs."""
    directions, graph = len(choice.placement), setting.graph(choice)
    m, halves = setting.microbatches // directions, choice.halves
    sizes = choice.num_stages, directions, setting.microbatches
    table, ops, readers = shape_of(*sizes, graph if setting.layers.inputs else None, halves)
    ranks = [rank for own in choice.placement for rank in own]
    op_rank = ranks + (ranks[::-1] * 2 if halves else ranks[::-1])
    time, speeds = [], [setting.speeds[rank] for rank in ranks]
    for n, own in enumerate(setting.times(choice)[: 2 + halves]):
        each = [t / s for t, s in zip(own * directions, speeds, strict=True)]
        for t in reversed(each) if n else each:
            time += [t] * m
    here = (0.0,) * m
    sent: Sequence[float] = ()
    if setting.latency or setting.layers.crossing:
        delays = [*setting.delays(choice), 0.0]
        late = [max([0.0, *map(delays.__getitem__, own)]) for own in graph]
        sent = delays * directions + late[::-1] * directions
    outputs: list[list[tuple[int, Sequence[float]]]] = [
        [(reader, (sent[op],) * m if sent and op_rank[reader] != op_rank[op] else here)
         for reader in own]
        for op, own in enumerate(readers)
    ]  # fmt: skip
    change, limits = [0.0] * len(time), [math.inf] * setting.ranks
    if setting.memory_limit < math.inf:
        kept = [own for own in setting.of_stages("activation_bytes", choice) for _ in range(m)]
        kept *= directions
        change = kept + [0.0] * (len(time) - 2 * len(kept)) + [-own for own in reversed(kept)]
        limits = [setting.memory_limit * (1 + 1e-9) - own for own in setting.resident(choice)]
    return OrderProblem(table, ops, op_rank, time, change, limits, outputs)


def judge(setting: Setting, choice: Choice, most: float = math.inf, rule: int = 0) -> float:
    """Returns the time of a choice under the rule; infinite where it is more than `most`.

    Args:
        setting: the layers and the machine.
        choice: the cut and the placement.
        most: a time from which on the choice is of no interest.
        rule: one of `RULES`.
    """
    return _scheduled(setting, choice, most, rule)[0]


def table_of(setting: Setting, choice: Choice, rule: int) -> Table:
    """Returns the table that `judge` has timed: microbatch `i` takes direction `i % directions`."""
    _, problem, orders = _scheduled(setting, choice, math.inf, rule)
    return dataclasses.replace(
        problem.to_table(orders), placement=choice.placement, stage_inputs=setting.graph(choice)
    )


def _scheduled(
    setting: Setting, choice: Choice, most: float, rule: int
) -> tuple[float, OrderProblem, list[list[int]]]:
    problem, m = problem_of(setting, choice), setting.microbatches // len(choice.placement)
    update = list(map(sum, zip(*setting.update(choice), strict=True)))
    room = [most * (1 + 1e-12) - own for own in update]
    for op, rank in enumerate(problem.op_rank):
        room[rank] -= m * problem.time[op * m]
    own = _rule(choice.num_stages, len(choice.placement), m, choice.halves, rule)
    # A task that adds no bytes does not ask for room: what is there all the time is judged here.
    fits = min(*room, *problem.limits) >= 0
    found = list_schedule(problem, own, room) if fits else None
    if found is None:
        return math.inf, problem, []
    orders, ends = found
    return max(map(sum, zip(ends, update, strict=True))), problem, orders
