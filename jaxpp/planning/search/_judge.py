"""The judge of a search: a list schedule, each rank at each moment the first task that may run."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from jaxpp.planning.search._setting import Choice, Setting
from jaxpp.schedules import Kind, Table
from jaxpp.schedules.simulator import Problem, Rule, list_schedule

#: The rules that decide between tasks that may run: see `_rule`. From `EAGER` on they are the same
#: again, with weight gradients before forwards.
RULES = range(8)
EAGER = 4


@functools.lru_cache(maxsize=512)
def _shape(
    stages: int, directions: int, microbatches: int, halves: bool
) -> tuple[Table, list[tuple[Kind, int]]]:
    """Returns what problems of a size have in common: a table without orders, and the ops."""
    count = stages * directions
    kinds = (Kind.I, Kind.W) if halves else (Kind.B,)
    ops = [(Kind.F, stage) for stage in range(count)]
    ops += [(kind, stage) for kind in kinds for stage in reversed(range(count))]
    turns = tuple(n % directions for n in range(microbatches))
    placement = ((0,) * stages,) * directions
    return Table((), stages, microbatches, placement, direction_of=turns), ops


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
    for kind, own in _shape(stages, directions, directions, halves)[1]:
        direction, stage = divmod(own, stages)
        if kind is Kind.F:
            first, (step, period) = 2, (stage * pairs, 1) if breadth else (-stage, 2 * stages)
        elif kind is Kind.W:
            first, (step, period) = (
                weight,
                (-stage * pairs, 1) if by_stage else (-stage, 2 * stages),
            )
        else:
            first, step, period = 0, stage, 2 * stages
        offsets.append((first * 8 * stages * (pairs + 1) + step) * directions + direction)
        periods.append(period * directions)
    return Rule(offsets, periods)


def problem_of(setting: Setting, choice: Choice) -> Problem:
    """Makes the tasks of a choice in numbers, as `make_problem` would from its costs."""
    directions, stages = len(choice.placement), choice.num_stages
    m, count = setting.microbatches // directions, stages * directions
    table, ops = _shape(stages, directions, setting.microbatches, choice.halves)
    parts = setting.times(choice)
    ranks = [rank for own in choice.placement for rank in own]
    speeds = [setting.speeds[rank] for rank in ranks]
    kept = setting.of_stages("activation_bytes", choice) * directions
    by_op = [own * directions for own in (parts if choice.halves else parts[:2])]
    op_rank, time = ranks[:], []
    for _ in by_op[1:]:
        op_rank += ranks[::-1]
    for n, own in enumerate(by_op):
        each = [t / s for t, s in zip(own, speeds, strict=True)]
        for t in reversed(each) if n else each:
            time += [t] * m
    delays = setting.delays(choice) if setting.latency or setting.layers.crossing else None
    outputs: list[list[tuple[int, Sequence[float]]]] = [[] for _ in ops]
    here, graph = (0.0,) * m, setting.graph(choice)
    unread = {*range(stages)} - {source for own in graph for source in own}
    for forward in range(count):
        back, stage = 2 * count - 1 - forward, forward % stages
        late = max([delays[source] for source in graph[stage]], default=0.0) if delays else 0.0
        for source in graph[stage]:
            before = forward - stage + source
            apart = delays and ranks[before] != ranks[forward]
            outputs[before].append((forward, (delays[source],) * m if apart and delays else here))
            outputs[back].append((2 * count - 1 - before, (late,) * m if apart else here))
        if stage in unread:
            outputs[forward].append((back, here))
        if choice.halves:
            outputs[back].append((back + count, here))
    change, limits = [0.0] * len(time), [math.inf] * setting.ranks
    if setting.memory_limit < math.inf:
        change = [own for own in kept for _ in range(m)] + [0.0] * (len(time) - 2 * count * m)
        change += [-own for own in reversed(kept) for _ in range(m)]
        limits = [setting.memory_limit * (1 + 1e-9) - own for own in setting.resident(choice)]
    return Problem(table, ops, op_rank, time, change, limits, outputs)


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
) -> tuple[float, Problem, list[list[int]]]:
    problem, m = problem_of(setting, choice), setting.microbatches // len(choice.placement)
    update = list(map(sum, zip(*setting.update(choice), strict=True)))
    room = [most * (1 + 1e-12) - own for own in update]
    for op, rank in enumerate(problem.op_rank):
        room[rank] -= m * problem.time[op * m]
    own = _rule(choice.num_stages, len(choice.placement), m, choice.halves, rule)
    found = list_schedule(problem, own, room) if min(room) >= 0 else None
    if found is None:
        return math.inf, problem, []
    orders, ends = found
    return max(map(sum, zip(ends, update, strict=True))), problem, orders
