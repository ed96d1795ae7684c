"""Tabu search: the best of some moves along the critical path, again and again, but not back.

Only a shorter critical path shortens a table. A path is shortened where it enters or leaves a rank:
a task moves out of the path's stretch on that rank, or further into it (the neighbourhoods of
Nowicki and Smutnicki, 1996, and Balas and Vazacopoulos, 1998, for job shops). Moves that break a
dependency within the rank, or its memory limit, are not tried. What each would lead to is told from
the times before and after its tasks, without a run of all of them (Taillard, 1994; Balas and
Vazacopoulos, 1998). The best one is made even where it is worse than nothing; tasks that it has
swapped then stay so for some steps (Nowicki and Smutnicki, 1996).
"""

import itertools
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxpp.schedules.simulator import OrderProblem, Times, evaluate

#: The distances from an end of a stretch of the tasks that move over it, and out of it.
_NEAR, _BEYOND = 4, 2
#: Of how many stretches the moves are compared in a step.
_STRETCHES = 8
#: For how many steps tasks that were swapped stay so.
_TENURE = (8, 14)


class _Move(NamedTuple):
    """A move: the value that it seems to lead to, a random number, and what changes where."""

    value: float
    chance: float
    rank: int
    first: int
    segment: list[int]
    swapped: list[tuple[int, int]]


def escape(
    problem: OrderProblem,
    orders: Sequence[Sequence[int]],
    steps: int,
    target: float,
    seed: int,
    deadline: float = math.inf,
) -> tuple[float, list[list[int]]]:
    """Improves orders by so many steps of tabu search; returns the best value, and its orders."""
    choose = random.Random(seed)
    now = [list(order) for order in orders]
    times = evaluate(problem, now)
    assert times is not None, "the orders deadlock"
    best, best_orders = times.value, list(now)
    until: dict[tuple[int, int], int] = {}
    for step in range(steps):
        if best <= target or (step % 32 == 0 and time.monotonic() > deadline):
            break
        moves = []
        for move in _moves(problem, now, times, choose):
            tabu = any(until.get(pair, -1) > step for pair in move.swapped)
            moves.append((tabu and move.value >= best, move))
        for _, move in sorted(moves):
            old = now[move.rank]
            end = move.first + len(move.segment)
            now[move.rank] = [*old[: move.first], *move.segment, *old[end:]]
            after = evaluate(problem, now)
            if after is not None:
                times = after
                until |= {(b, a): step + choose.randint(*_TENURE) for a, b in move.swapped}
                break
            now[move.rank] = old
        if times.value < best - 1e-9 * best:
            best, best_orders = times.value, list(now)
    return best, best_orders


def _moves(
    problem: OrderProblem, orders: Sequence[list[int]], times: Times, choose: random.Random
) -> Iterator[_Move]:
    """Returns the moves near the ends of some stretches of the critical path."""
    tails, last_tails = _tails(problem, orders, times)
    time, ends, readers = problem.time, times.ends, problem.readers

    def waits(first: int, second: int) -> bool:
        """Tells whether a path may lead from one task to another one over other ranks."""
        begin, tail = ends[second] - time[second], tails[second]
        return any(ends[n] <= begin and tails[n] >= time[n] + tail for n, _ in readers[first])

    path = [own for own in _stretches(problem, orders, times.ends) if own[1] < own[2]]
    if len(path) > _STRETCHES:
        path = dict.fromkeys(choose.choice(path) for _ in range(_STRETCHES))
    for rank, first, last in path:
        order = orders[rank]
        near = range(1, min(_NEAR, last - first) + 1)
        pairs = [pair for k in near for pair in ((first, first + k), (last - k, last))]
        pairs += [(first - k, first) for k in range(1, min(_BEYOND, first) + 1)]
        seen = set()
        for at, to in (own for pair in pairs for own in (pair, pair[::-1])):
            found = _shifted(problem, rank, order, at, to, waits)
            if found is None or (found[0], *found[1]) in seen:
                continue
            first_changed, segment = found
            seen.add((first_changed, *segment))
            mover, ahead = order[at], to < at
            others = segment[1:] if ahead else segment[:-1]
            swapped = [(mover, other) if ahead else (other, mover) for other in others]
            behind = first_changed + len(segment)
            tail = tails[order[behind]] if behind < len(order) else last_tails[rank]
            before = ends[order[first_changed - 1]] if first_changed else 0.0
            value = _estimate(problem, segment, before, tail, ends, tails)
            yield _Move(value, choose.random(), rank, first_changed, segment, swapped)


def _stretches(
    problem: OrderProblem, orders: Sequence[Sequence[int]], ends: list[float]
) -> Iterator[tuple[int, int, int]]:
    """Finds the stretches of the critical path, from its end: a rank, its first and last place."""
    time, remote = problem.time, problem.remote
    m = problem.num_microbatches

    def value(order: Sequence[int]) -> float:
        begin = ends[order[0]] - time[order[0]] if problem.objective == "span" else 0.0
        return ends[order[-1]] - begin

    rank = max(range(len(orders)), key=lambda r: value(orders[r]))
    place = len(orders[rank]) - 1
    while True:
        order, last = orders[rank], place
        while place > 0:
            n = order[place]
            if ends[order[place - 1]] < ends[n] - time[n] - 1e-9 * ends[n]:
                break
            place -= 1
        yield rank, place, last
        n = order[place]
        if not remote[n] or ends[n] - time[n] <= 0.0:
            return
        need = max(remote[n], key=lambda pair: ends[pair[0]] + pair[1])[0]
        rank = problem.op_rank[need // m]
        end = ends[need]
        own = orders[rank]
        place = bisect_left(own, end, key=lambda n: ends[n])
        while own[place] != need:
            place += 1


def _shifted(
    problem: OrderProblem,
    rank: int,
    order: Sequence[int],
    at: int,
    to: int,
    waits: Callable[[int, int], bool],
) -> tuple[int, list[int]] | None:
    """Moves a task towards a place, as far as the rank's dependencies and memory allow.

    `waits` tells whether, by way of other ranks, the second of two tasks is after the first.
    Returns the first place that changes, and what is to be there and behind it.
    """
    m, local = problem.num_microbatches, problem.local
    n, stop, ahead = order[at], at, to < at
    op, i = divmod(n, m)
    while stop != to:
        near = order[stop - 1 if ahead else stop + 1]
        other, j = divmod(near, m)
        bound = j == i and (other in local[op] if ahead else op in local[other])
        if other == op or bound or (waits(near, n) if ahead else waits(n, near)):
            break
        stop += -1 if ahead else 1
    low, high = min(stop, at), max(stop, at)
    if low == high:
        return None
    segment = [n, *order[low:high]] if ahead else [*order[low + 1 : high + 1], n]
    change, limit = problem.change, problem.limits[rank]
    if limit < math.inf:
        held = math.fsum(change[k] for k in order[:low])
        for k in segment:
            held += change[k]
            if held > limit:
                return None
    return low, segment


def _tails(
    problem: OrderProblem, orders: Sequence[Sequence[int]], times: Times
) -> tuple[list[float], list[float]]:
    """Returns for each task the time from its start to the end of all, and what a rank ends with.

    That is nothing, or for spans less than nothing: the time from the start of all to the rank's.
    """
    time, readers = problem.time, problem.readers
    tails, after = [0.0] * len(time), [0.0] * len(time)
    spans = problem.objective == "span"
    last = [time[own[0]] - times.ends[own[0]] if spans else 0.0 for own in orders]
    for order, tail in zip(orders, last, strict=True):
        after[order[-1]] = tail
    before = {b: a for order in orders for a, b in itertools.pairwise(order)}
    for n in reversed(times.sequence):
        least = after[n]
        for reader, delay in readers[n]:
            if tails[reader] + delay > least:
                least = tails[reader] + delay
        tails[n] = least + time[n]
        if n in before:
            after[before[n]] = tails[n]
    return tails, last


def _estimate(
    problem: OrderProblem,
    segment: Sequence[int],
    now: float,
    tail: float,
    ends: Sequence[float],
    tails: Sequence[float],
) -> float:
    """Returns the longest path through a segment of an order, from `now` on and to the `tail`."""
    time, remote, readers = problem.time, problem.remote, problem.readers
    starts = []
    for n in segment:
        for need, delay in remote[n]:
            if ends[need] + delay > now:
                now = ends[need] + delay
        starts.append(now)
        now += time[n]
    longest = 0.0
    for n, start in zip(reversed(segment), reversed(starts), strict=True):
        for reader, delay in readers[n]:
            if tails[reader] + delay > tail:
                tail = tails[reader] + delay
        tail += time[n]
        if start + tail > longest:
            longest = start + tail
    return longest
