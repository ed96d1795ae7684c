"""Local search: moves single tasks along the critical path, each within its rank."""

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from jaxpp.schedules._synthesis._problem import Problem, Times, evaluate


def improve(
    problem: Problem,
    orders: Sequence[Sequence[int]],
    evaluations: int,
    target: float,
    seed: int,
    deadline: float = math.inf,
    heat: float = 0.002,
    length: int = 0,
) -> tuple[float, list[list[int]]]:
    """Improves orders by simulated annealing on the critical path.

    Only a shorter critical path shortens a table. A path is shortened where it enters or leaves a
    rank: a task moves out of the path's stretch on that rank, or to the other end of the stretch
    (the neighbourhoods of Nowicki and Smutnicki, 1996, and Balas and Vazacopoulos, 1998, for job
    shops). Moves that break a dependency within the rank, or its memory limit, are not tried.

    Args:
      problem: the tasks.
      orders: where to start; the orders fit and do not deadlock.
      evaluations: how many moves to evaluate.
      target: a value at which to stop: no better one is possible.
      seed: of the random choices.
      deadline: a time of `time.monotonic` at which to stop.
      heat: by which part of the value a table may be worse than the one before, at first.
      length: the number of evaluations over which that falls to nothing; by default `evaluations`.

    Returns:
      The best value found, and its orders.
    """
    choose, length = random.Random(seed), length or evaluations
    now = [list(order) for order in orders]
    times = evaluate(problem, now)
    assert times is not None, "the orders deadlock"
    best, best_orders = times.value, [list(order) for order in now]
    path = list(stretches(problem, now, times.ends))
    tries = 0
    for step in range(evaluations):
        if best <= target or (step % 32 == 0 and time.monotonic() > deadline):
            break
        allowed = times.value * (1 + heat * (1 - step / length) * choose.random() ** 3)
        moved = None
        while moved is None and tries < 50 * length:
            tries += 1
            moved = _move(problem, now, path, choose)
        if moved is None:
            break
        rank, first, order = moved
        old = now[rank]
        since = times.ends[old[first]] - problem.time[old[first]]
        now[rank] = order
        after = _resume(problem, now, times.ends, since, rank, first)
        if after is None or after.value > allowed:
            now[rank] = old
            continue
        times = after
        path = list(stretches(problem, now, times.ends))
        if times.value < best - 1e-9 * best:
            best, best_orders = times.value, [list(order) for order in now]
    return best, best_orders


def stretches(
    problem: Problem, orders: Sequence[Sequence[int]], ends: list[float]
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


def _move(
    problem: Problem,
    orders: Sequence[Sequence[int]],
    path: Sequence[tuple[int, int, int]],
    choose: random.Random,
) -> tuple[int, int, list[int]] | None:
    """Makes a random move of a task: its rank, the first changed place, and the new order."""
    rank, first, last = path[int(choose.random() * len(path))]
    order = orders[rank]
    at = first + int(choose.random() * (last - first + 1))
    kind = choose.random()
    if kind < 0.35:
        to = first - int(choose.random() ** 2 * 4)
    elif kind < 0.7:
        to = last + int(choose.random() ** 2 * 4)
    elif kind < 0.85:
        at, to = last, last - 1 - int(choose.random() * (last - first))
    else:
        at, to = first, first + 1 + int(choose.random() * (last - first))
    to = min(max(to, 0), len(order) - 1)
    found = shifted(problem, rank, order, at, to)
    if found is None:
        return None
    first, segment = found
    return rank, first, [*order[:first], *segment, *order[first + len(segment) :]]


def shifted(
    problem: Problem,
    rank: int,
    order: Sequence[int],
    at: int,
    to: int,
    waits: Callable[[int, int], bool] = lambda first, second: False,
) -> tuple[int, list[int]] | None:
    """Moves a task towards a place, as far as the rank's dependencies allow, and `waits`.

    `waits` tells whether, by way of other ranks, the second of two tasks is after the first.

    Returns:
      The first place that changes, and what is to be there and behind it; None where nothing may
      change, or the rank would hold too much.
    """
    m, local = problem.num_microbatches, problem.local
    n = order[at]
    op, i = divmod(n, m)
    if to < at:
        stop = at
        while stop > to:
            other, j = divmod(order[stop - 1], m)
            if other == op or (j == i and other in local[op]) or waits(order[stop - 1], n):
                break
            stop -= 1
        low, high = stop, at
        segment = [n, *order[low:high]]
    else:
        stop = at
        while stop < to:
            other, j = divmod(order[stop + 1], m)
            if other == op or (j == i and op in local[other]) or waits(n, order[stop + 1]):
                break
            stop += 1
        low, high = at, stop
        segment = [*order[low + 1 : high + 1], n]
    if low == high:
        return None
    change, limit = problem.change, problem.limits[rank]
    if limit < math.inf:
        held = math.fsum(change[k] for k in order[:low])
        for k in segment:
            held += change[k]
            if held > limit:
                return None
    return low, segment


def _resume(
    problem: Problem,
    orders: Sequence[Sequence[int]],
    ends: list[float],
    since: float,
    changed: int,
    place: int,
) -> Times | None:
    """Evaluates orders again, of which no task that starts before `since` has changed."""
    time = problem.time
    cursors = [
        place if rank == changed else bisect_left(order, since, key=lambda n: ends[n] - time[n])
        for rank, order in enumerate(orders)
    ]
    return evaluate(problem, orders, ends, cursors)
