"""The starts of the synthesizer: the catalogue's tables, and the rules of list scheduling."""

import dataclasses
import functools
import math
import random
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._catalogue import CATALOGUE
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, chain
from jaxpp.schedules.simulator import OrderProblem, Rule


def catalogue_tables(
    placement: tuple[tuple[int, ...], ...],
    num_microbatches: int,
    stage_inputs: tuple[tuple[int, ...], ...] | None,
) -> Iterator[tuple[str, Table]]:
    """Returns the catalogue's tables with this placement and this graph of stages, by name.

    Where there are several directions, as many microbatches take each of them.
    A schedule's knobs that are integers or booleans are varied one at a time, from the defaults and
    from those variants that have this placement.
    """
    num_ranks, num_stages = max(map(max, placement)) + 1, len(placement[0])
    values = (*range(5), num_ranks // 2, num_ranks, 2 * num_ranks)

    def table(schedule: Schedule) -> Table | None:
        try:
            if schedule.num_ranks(num_stages) != num_ranks:
                return None
            if schedule.placement(num_ranks) != placement:
                return None
            if as_graph(schedule.stage_inputs(num_ranks)) != stage_inputs:
                return None
            made = schedule.table(num_stages, num_microbatches)
        except ValueError:
            return None
        return made if len({*map(made.direction_of.count, made.direction_of)}) == 1 else None

    for name, make in CATALOGUE.items():
        known = dict.fromkeys(_variants(make, {}, values))
        first = next(iter(known), None)
        found = {schedule: made for schedule in known if (made := table(schedule)) is not None}
        for schedule in list(found):
            for other in _variants(make, _knobs(schedule), values):
                if other not in found and (made := table(other)) is not None:
                    found[other] = made
        seen = set()
        for schedule, made in found.items():
            if not made.forward_only and made not in seen:
                seen.add(made)
                yield name if schedule == first else repr(schedule), made


def as_graph(stage_inputs: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    """Makes the stage graph from the inputs of stages; None where it is a chain."""
    if stage_inputs is None:
        return None
    given = tuple(tuple(own) for own in stage_inputs)
    return None if given == chain(len(given)) else given


def _knobs(schedule: Schedule) -> dict[str, object]:
    return {f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule) if f.init}


def _variants(
    make: Callable[..., Schedule], knobs: dict[str, object], values: Sequence[int]
) -> Iterator[Schedule]:
    """Returns the schedule with these knobs, and each with one more knob set or changed."""
    options: list[dict[str, object]] = [knobs]
    made = make.func if isinstance(make, functools.partial) else make
    if isinstance(made, type):
        types = typing.get_type_hints(made)
        for field in dataclasses.fields(made):
            allowed = (types[field.name], *typing.get_args(types[field.name]))
            if field.init and bool in allowed:
                options += [knobs | {field.name: value} for value in (False, True)]
            elif field.init and int in allowed:
                options += [knobs | {field.name: value} for value in values]
    for option in options:
        try:
            yield make(**option)
        except ValueError:
            continue


def one_at_a_time(problem: OrderProblem) -> list[list[int]]:
    """Returns orders that end each microbatch before the next one: no others hold less."""
    m, sequence = problem.num_microbatches, []
    # Weight gradients first, as they free the most; then backwards, which need all forwards.
    left = sorted(range(len(problem.ops)), key=lambda op: (-"FBIW".index(problem.ops[op][0]), op))
    while left:
        op = next(op for op in left if not any(need in left for need, _ in problem.inputs[op]))
        left.remove(op)
        sequence.append(op)
    return [
        [op * m + i for i in range(m) for op in sequence if problem.op_rank[op] == rank]
        for rank in range(problem.num_ranks)
    ]


class Rules:
    """The rules of list scheduling for a problem: a grid of rules, and neighbours of a rule.

    The plans are: input gradients first, weight gradients last, as all zero-bubble schedules have
    them (Qi et al., arXiv 2401.10241, section 3.1); the same with weight gradients first, or
    forwards first, which suits a tight memory; and by the earliest start, or the latest end, of
    one microbatch alone, in a period of the busiest rank. A rank may wait for the idle time that a
    target leaves it, as in that paper's heuristic, where a gap is filled unless the rank has fewer
    bubbles than another one.
    """

    def __init__(self, problem: OrderProblem, bound: float):
        """Makes the rules for a problem and its lower bound."""
        m = problem.num_microbatches
        self.problem, self.bound = problem, bound
        self.time = [sum(problem.time[op * m : op * m + m]) / m for op in range(len(problem.ops))]
        self.work = [m * sum(self.time[op] for op in own) for own in problem.rank_ops]
        self.period = max(self.work) / m
        self.head, self.tail = _alone(problem, self.time)
        self.begin = [
            min(self.head[op] for op in own) if problem.objective == "wall" else 0.0
            for own in problem.rank_ops
        ]
        self.longest = max(self.time)
        self.trip = max(h + t for h, t in zip(self.head, self.time, strict=True)) + self.longest
        self.plans = self._plans()
        self.windows = self._windows()

    def _plans(self) -> list[list[float]]:
        far = 10 * self.trip + self.problem.num_microbatches * self.period * 4
        kinds = [kind for kind, _ in self.problem.ops]

        def shifted(times: Sequence[float], **by: float) -> list[float]:
            return [t + far * by.get(kind, 0) for t, kind in zip(times, kinds, strict=True)]

        late = [far if k is Kind.W else -t for t, k in zip(self.tail, kinds, strict=True)]
        return [
            shifted(self.head, I=-1, B=-1, W=1),
            shifted(self.head, I=-1, B=-1, W=-2),
            shifted(self.head, F=-1, W=1),
            shifted(self.head, W=1),
            late,
            list(self.head),
            shifted(self.head, I=-1, B=-1, W=-1),
        ]

    def _windows(self) -> list[list[float]]:
        """Returns choices of `in_flight`: no limit, or forwards for the trip there and back."""
        at = {key: op for op, key in enumerate(self.problem.ops)}
        half = Kind.I if self.problem.splits else Kind.B
        stages = [s for kind, s in self.problem.ops if kind is Kind.F]
        trip = [self.head[at[half, s]] - self.head[at[Kind.F, s]] for s in stages]
        windows: list[list[float]] = [[]]
        for extra in (1, 2, 3, 5):
            windows.append([math.ceil(trip[s] / self.period - 1e-9) + extra for s in stages])
        return windows

    def rule(self, plan: int, window: int, slack: float, patience: float) -> Rule:
        """Makes a rule of the grid; `slack` is that of the target, in times of the longest task."""
        target = self.bound + slack * self.longest
        idle = [target - b - w for b, w in zip(self.begin, self.work, strict=True)]
        periods = [self.period] * len(self.time)
        return Rule(self.plans[plan], periods, self.windows[window], idle, patience)

    def grid(self) -> list[Rule]:
        """Returns the grid of rules, the most promising first."""
        slacks = (0.0, 0.08, 0.17, 0.25, 0.33, 0.42, 0.5, 0.75, 1.0, 2.0)
        ample = [self.rule(0, 0, slack, math.inf) for slack in slacks]
        tight = [
            self.rule(plan, window, slack, 1.0)
            for slack in (4.0, 0.0)
            for window in range(1, len(self.windows))
            for plan in (3, 4, 0)
        ]
        ample += self._eager()
        return ample + tight + [self.rule(plan, 0, 4.0, 1.0) for plan in range(1, len(self.plans))]

    def _eager(self) -> list[Rule]:
        """Returns rules by which no rank ever waits: backwards first, weight gradients last.

        Between tasks of a kind, that of the older microbatch comes first, or that of the later
        stage.
        """
        m, kinds = self.problem.num_microbatches, [kind for kind, _ in self.problem.ops]
        rules = []
        for period, sign in ((2 * self.trip, 1), (0.0, -1)):
            far = 4 * (m + 1) * self.trip
            at = {Kind.F: 0.0, Kind.I: -far, Kind.B: -far, Kind.W: far}
            offsets = [
                at[kind] + (sign if kind is Kind.F else 1) * h
                for h, kind in zip(self.head, kinds, strict=True)
            ]
            rules.append(Rule(offsets, [period] * len(offsets), patience=1.0))
        return rules

    def replanned(self, found: Any) -> Rule:
        """Makes a rule whose plan repeats the middle of what was found, as a building block."""
        m, starts, ops = self.problem.num_microbatches, found.times.starts, range(len(self.time))
        period = max((starts[op * m + m - 1] - starts[op * m]) / max(m - 1, 1) for op in ops)
        offsets = [starts[op * m + m // 2] - m // 2 * period for op in ops]
        target = max(found.times.ends[order[-1]] for order in found.orders)
        idle = [target - b - w for b, w in zip(self.begin, self.work, strict=True)]
        return Rule(offsets, [period] * len(offsets), (), idle, 1.0)

    def near(self, rule: Rule, choose: random.Random) -> Rule:
        """Makes a rule from another one, with some of its numbers changed at random."""
        scale = self.longest * choose.choice((0.1, 0.3, 1.0))
        offsets, window, idle = list(rule.offsets), list(rule.in_flight), list(rule.idle)
        patience, period = rule.patience, rule.periods[0]
        match choose.randrange(5):
            case 0:
                idle = [i + choose.gauss(0, scale) for i in idle]
            case 1:
                shift = choose.gauss(0, scale)
                idle = [i + shift for i in idle]
            case 2:
                offsets = [o + choose.gauss(0, scale) for o in offsets]
            case 3:
                window = window or list(choose.choice(self.windows[1:]))
                for _ in range(choose.randrange(1, 4)):
                    at = choose.randrange(len(window))
                    window[at] = max(1, window[at] + choose.choice((-1, 1)))
            case _:
                patience = choose.choice((0.5, 1.0, 2.0, math.inf))
                period *= choose.choice((0.98, 1.0, 1.02))
        return Rule(offsets, [period] * len(offsets), window, idle, patience)


def _alone(problem: OrderProblem, time: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns for each op the earliest start and the time to the end, for one microbatch alone."""
    head, tail = [0.0] * len(time), [0.0] * len(time)
    for op in problem.sorted_ops:
        for reader, delays in problem.outputs[op]:
            head[reader] = max(head[reader], head[op] + time[op] + delays[0])
    for op in reversed(problem.sorted_ops):
        for reader, delays in problem.outputs[op]:
            tail[op] = max(tail[op], tail[reader] + time[reader] + delays[0])
    return head, [t + own for t, own in zip(tail, time, strict=True)]
