"""Lower bounds: times that no table of a pipeline can beat, with their proofs.

**Order.** Let costs and memory not depend on the microbatch (where they do, take the least of each
op: that only makes the problem easier). Then some best table runs the microbatches of each op in
order: call the `j`-th run of each op of a given table microbatch `j`. A task still starts after
its inputs, as before the `j`-th run of an op there are `j` earlier runs, each with inputs of its
own, so at least `j + 1` runs of what it reads have ended; and each rank holds what it held. So a
bound for tables in order is one for all.

**Heads** (`_earliest`): the earliest start of microbatch `j` of an op is at least

- the earliest end of each of its inputs, for the same `j`, and the transfer;
- the earliest end of its own microbatch `j - 1`, as one rank runs both;
- for a forward: the end of the `I` of `j - c` and of the `W` of `j - d`, where memory asks for it.
  Let a microbatch hold `a` from its `F` to its `I` and `b` from there to its `W`. When `F` of `j`
  starts, `j + 1` forwards have started; if `i` input gradients and `w` weight gradients have
  ended, the rank holds at least `(j + 1 - i) a + (i - w) b` of the limit `C`. As `w <= i <= j`,
  that gives `i >= j + 1 - C / a` and, where `b <= a`, `w >= j - (C - a) / b`;
- the earliest time at which the rank can have run, one at a time, any of what has to come before on
  it: `j` runs of the op, `j + 1` of each of its ancestors there, and of each `I` and `W` what
  memory asks for. All of it from the rank's first start on; the last few of each op by their
  heads, in whose order no rank is idle for longer than it has to;
- the same, with what the stages of a rank have to free together (`_excess`). Where the forwards
  and all that has to come before would hold `e` more than the limit, more tasks have freed `e`: the
  `I`, and perhaps the `W`, of microbatches whose `F` has to come before. (One more `F` frees
  nothing, even with its `I` and `W`.) The least time of these, were they divisible, is that of
  those that free the most in their time;
- where the forwards alone would hold `e` more than the limit: the earliest head of an `I` of the
  rank, and the time of what cannot start before it. That is all `I` and `W` from above, and
  forwards that hold `e`: at least the time of those that hold the most in theirs.

**Tails**: the time from a task's end to the end of all, by the same rules read from the
end: time reversed, a table is a table of the reversed pipeline. There a `W` takes `b`, an `I` the
rest of `a`, and an `F` frees all of it, so an `F` is what frees, and an `I` costs nothing.

**One rank** (`_one_machine`): the tasks of a rank, each no earlier than its head, one at a time,
each followed by its tail. Let them be interrupted at will: then Jackson's rule, at each moment the
task of the longest tail, is optimal (Carlier, 1982), and its value is a bound.

**Residence** (`_residence`): the rank holds `a` for at least the time from the start of an `F` to
the end of its `I`, and `b` for its `W`; the sum over its tasks is an area of at most `C` times the
time from the rank's first start to its end.

**Spans.** For the span of a rank, time begins with its first start, and ends with its last end.
Of other ranks only the tasks count that have to start after that first start, and to end before
that last end: the descendants and the ancestors of the rank's own tasks.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules.simulator import OrderProblem

#: The number of last tasks of each op whose heads count where earlier tasks are added up.
_RECENT = 6


@dataclass(frozen=True)
class _Ops:
    """The problem for one microbatch, the cheapest, as the proofs need it."""

    time: list[float]
    inputs: list[list[tuple[int, float]]]
    readers: list[list[tuple[int, float]]]
    #: The ops, each after its inputs.
    sorted: list[int]
    #: For each op, the ops of its rank that must come before it, and those after it.
    before: list[list[int]]
    after: list[list[int]]
    #: For each forward, the ops that free its memory, and how far they may be behind.
    frees: list[list[tuple[int, int]]]
    change: list[float]
    #: For each rank, by stage, its ops in order; none where memory does not bound the rank.
    chains: list[list[list[int]]]


@dataclass(frozen=True)
class _Direction:
    """The rules of the heads, in time, or against it."""

    #: 1 in time; -1 against it, where changes of memory have the other sign.
    sign: int
    order: Sequence[int]
    inputs: Sequence[Sequence[tuple[int, float]]]
    waits: Sequence[Sequence[tuple[int, int]]]
    #: For each op, what must end before its microbatch `j`: pairs (other, k) for 0 to `j - k`.
    sets: Sequence[Sequence[tuple[int, int]]]
    #: For each rank, the ops that may free memory.
    freeing: Sequence[Sequence[int]]
    #: For each op and microbatch: see `_excess`.
    excess: Sequence[Sequence[tuple[float, float]]]


def lower_bound(problem: OrderProblem) -> float:
    """Returns a value that no table beats; the proofs are above.

    Args:
      problem: the tasks, with the backward in halves, or whole.

    Returns:
      A lower bound on the problem's objective.
    """
    ops = _ops(problem)
    ways = [_direction(problem, ops, sign) for sign in (1, -1)]
    ranks = [None] if problem.objective == "wall" else _telling(problem, ops)
    return max(_bound(problem, ops, ways, rank) for rank in ranks)


def _telling(problem: OrderProblem, ops: _Ops, most: int = 6) -> list[int]:
    """Finds the ranks whose spans are likely to be the longest; a bound on any is a bound."""
    ranks = range(problem.num_ranks)
    work = [sum(ops.time[op] for op in own) for own in problem.rank_ops]
    trip = [_longest(ops, own[0], own[-1]) for own in problem.rank_ops]
    longest = sorted(ranks, key=lambda r: -trip[r])
    return sorted({*longest[: most // 2], *sorted(ranks, key=lambda r: -work[r])[: most // 2]})


def _bound(problem: OrderProblem, ops: _Ops, ways: Sequence[_Direction], rank: int | None) -> float:
    """Returns a bound on the makespan, or on the span of a rank."""
    m = problem.num_microbatches
    heads, tails = (_earliest(problem, ops, way, rank) for way in ways)
    best = 0.0
    for own in problem.rank_ops:
        jobs = [
            (heads[op][j], ops.time[op], tails[op][m - 1 - j])
            for op in own
            for j in range(m)
            if heads[op][j] > -math.inf and tails[op][m - 1 - j] > -math.inf
        ]
        best = max(best, _one_machine(jobs))
    for r in range(problem.num_ranks) if rank is None else (rank,):
        begin = 0.0 if rank is not None else min(heads[op][0] for op in problem.rank_ops[r])
        best = max(best, begin + _residence(problem, ops, r))
    return best


def _ops(problem: OrderProblem) -> _Ops:
    m, count = problem.num_microbatches, len(problem.ops)
    time = [min(problem.time[op * m : op * m + m]) for op in range(count)]
    change = [min(problem.change[op * m : op * m + m]) for op in range(count)]
    inputs = [[(need, min(delays)) for need, delays in own] for own in problem.inputs]
    readers = [[(reader, min(delays)) for reader, delays in own] for own in problem.outputs]
    ancestors: list[set[int]] = [set() for _ in range(count)]
    for op in problem.sorted_ops:
        for need, _ in inputs[op]:
            ancestors[op] |= ancestors[need] | {need}
    rank = problem.op_rank
    before = [[a for a in sorted(ancestors[op]) if rank[a] == rank[op]] for op in range(count)]
    after = [[b for b in range(count) if op in before[b]] for op in range(count)]
    frees: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    at = {key: op for op, key in enumerate(problem.ops)}
    for op, (kind, stage) in enumerate(problem.ops):
        if kind is Kind.F and change[op] > 0:
            frees[op] = _freed_by(problem, at, change, op, stage)
    chains = [_chains(problem, change, r) for r in range(problem.num_ranks)]
    return _Ops(time, inputs, readers, problem.sorted_ops, before, after, frees, change, chains)


def _chains(problem: OrderProblem, change: Sequence[float], rank: int) -> list[list[int]]:
    """Groups a rank's ops by stage; none where a microbatch leaves or lends memory."""
    if problem.limits[rank] == math.inf:
        return []
    stages: dict[int, list[int]] = {}
    for op in problem.rank_ops[rank]:
        stages.setdefault(problem.ops[op][1], []).append(op)
    held = [list(itertools.accumulate(change[op] for op in own)) for own in stages.values()]
    room = 1e-9 * max(map(max, held))
    sound = all(min(own) >= -room and own[-1] <= room for own in held)
    return list(stages.values()) if sound else []


def _direction(problem: OrderProblem, ops: _Ops, sign: int) -> _Direction:
    count = range(len(ops.time))
    freed: list[list[tuple[int, int]]] = [[] for _ in count]
    for op, pairs in enumerate(ops.frees):
        for need, behind in pairs:
            freed[need].append((op, behind))
    frees = [
        [op for op in own if (problem.ops[op][0] is Kind.F) == (sign < 0)]
        for own in problem.rank_ops
    ]
    if sign > 0:
        rules = ops.sorted, ops.inputs, ops.frees, [_before(ops, op) for op in count]
    else:
        rules = ops.sorted[::-1], ops.readers, freed, [_after(ops, freed, op) for op in count]
    return _Direction(sign, *rules, frees, _excess(problem, ops, rules[-1], frees, sign))


def _excess(
    problem: OrderProblem,
    ops: _Ops,
    sets: Sequence[Sequence[tuple[int, int]]],
    freeing: Sequence[Sequence[int]],
    sign: int,
) -> list[list[tuple[float, float]]]:
    """Returns for each op and microbatch two times of tasks that run before it, for its memory.

    The least time of freeing tasks that `sets` lack, and the least time of all tasks that cannot
    start before the rank's first freeing task; 0 where there need not be one.
    """
    m = problem.num_microbatches
    excess = [[(0.0, 0.0)] * m for _ in ops.time]
    for rank, chains in enumerate(ops.chains):
        limit = problem.limits[rank] / (1 + 1e-9)
        change = {op: sign * ops.change[op] for op in problem.rank_ops[rank]}
        ways = [_ways(ops, chain[::sign], freeing[rank], change) for chain in chains]
        taking = {op: own for op, own in change.items() if op not in freeing[rank]}
        for op in problem.rank_ops[rank] if chains else ():
            behinds = dict(sets[op]) | {op: 0}
            if m * sum(max(change[need], 0.0) for need in behinds) <= limit:
                continue
            for j in range(m):
                counts = {need: max(j - behind + 1, 0) for need, behind in behinds.items()}
                over = sum(change[need] * count for need, count in counts.items()) - limit
                counts[op] -= 1
                more = _least_time(_options(chains, ways, counts, sign), over)
                over = sum(taking[n] * count for n, count in counts.items() if n in taking) - limit
                over += taking.get(op, 0.0)
                late = 0.0
                if over > 1e-9 * limit and min(taking.values()) >= 0:
                    left = [(taking[n], ops.time[n], count) for n, count in counts.items()
                            if taking.get(n, 0.0) > 0]  # fmt: skip
                    late = more + _least_time(left, over - taking.get(op, 0.0))
                    late += sum(ops.time[n] * k for n, k in counts.items() if n not in taking)
                excess[op][j] = more, late
    return excess


def _ways(
    ops: _Ops, chain: Sequence[int], freeing: Sequence[int], change: dict[int, float]
) -> list[list[tuple[float, float]]]:
    """Returns for a microbatch after each op of a chain the ways to free: (freed, time) each.

    They are the segments of the concave hull of what the next ops free over their times: each way
    comes after the one before it, and frees less in its time.
    """
    ways = []
    for done in range(1, len(chain) + 1):
        freed = time = 0.0
        points = []
        for op in chain[done:]:
            freed -= change[op]
            time += ops.time[op] if op in freeing else 0.0
            points.append((freed, time))
        own, at = [], (0.0, 0.0)
        while further := [point for point in points if point[0] > at[0]]:
            point = min(further, key=lambda point: (point[1] - at[1]) / (point[0] - at[0]))
            own.append((point[0] - at[0], point[1] - at[1]))
            at = point
        ways.append(own)
    return ways


def _options(
    chains: Sequence[Sequence[int]],
    ways: Sequence[Sequence[Sequence[tuple[float, float]]]],
    counts: dict[int, int],
    sign: int,
) -> list[tuple[float, float, int]]:
    """Returns the ways to free, as (freed, time, number), of the microbatches that `counts` has."""
    options = []
    for chain, own in zip(chains, ways, strict=True):
        done = 0
        for op, steps in zip(reversed(chain[::sign]), reversed(own), strict=True):
            count = counts.get(op, 0) - done
            if count > 0:
                done += count
                options += [(freed, time, count) for freed, time in steps]
    return options


def _least_time(options: Sequence[tuple[float, float, int]], amount: float) -> float:
    """Returns the least time for an amount by divisible options: (amount, time, number) each."""
    least = 0.0
    for own, time, count in sorted(options, key=lambda option: option[1] / option[0]):
        if amount <= 0:
            break
        part = min(amount / own, count)
        part = round(part) if abs(part - round(part)) < 1e-9 * count else part
        least += part * time
        amount -= part * own
    return least


def _freed_by(
    problem: OrderProblem, at: dict[tuple[Kind, int], int], change: list[float], op: int, stage: int
) -> list[tuple[int, int]]:
    limit, a = problem.limits[problem.op_rank[op]], change[op]
    if limit == math.inf:
        return []
    whole = at.get((Kind.B, stage))
    if whole is not None:
        return [(whole, math.floor(limit / a))] if change[whole] >= -a else []
    half, rest = at[Kind.I, stage], at[Kind.W, stage]
    b = a + change[half]
    if not (0 <= b <= a and b + change[rest] >= -1e-9 * a):
        return []
    frees = [(half, math.floor(limit / a))]
    if b > 0:
        frees.append((rest, math.floor((limit - a) / b) + 1))
    return frees


def _earliest(
    problem: OrderProblem, ops: _Ops, direction: _Direction, rank: int | None
) -> list[list[float]]:
    """Returns for each op and microbatch the earliest start, from 0 or a rank's first start.

    Against time: the least time from its end to the end of all or of the rank, the last
    microbatch first.
    """
    time = ops.time
    begins = [0.0 if rank in (None, r) else -math.inf for r in range(problem.num_ranks)]
    earliest: list[list[float]] = [[] for _ in time]
    for j in range(problem.num_microbatches):
        for op in direction.order:
            own_rank = problem.op_rank[op]
            at = begins[own_rank]
            for need, delay in direction.inputs[op]:
                at = max(at, earliest[need][j] + time[need] + delay)
            for need, behind in direction.waits[op]:
                if j >= behind:
                    at = max(at, earliest[need][j - behind] + time[need])
            more, late = direction.excess[op][j]
            count, work, heads = 0, more, []
            for need, behind in direction.sets[op]:
                if j >= behind:
                    count = j - behind + 1
                    work += count * time[need]
                    recent = earliest[need][max(0, count - _RECENT) : count]
                    heads += [(head, time[need]) for head in recent]
            at = max(at, begins[own_rank] + work)
            if late > 0 and j:
                at = max(at, late + min(earliest[n][0] for n in direction.freeing[own_rank]))
            ready = -math.inf
            for head, own in sorted(heads):
                ready = max(ready, head) + own
            earliest[op].append(max(at, ready))
        if j == 0:
            # A rank's first task has all its inputs on other ranks, so its head has no such term.
            begins = [min(earliest[op][0] for op in own) for own in problem.rank_ops]
    return earliest


def _before(ops: _Ops, op: int) -> list[tuple[int, int]]:
    """Finds what must end before microbatch `j` of an op: pairs (other, k) for 0 to `j - k`."""
    behinds = dict.fromkeys(ops.before[op], 0)
    behinds[op] = 1
    for forward in (op, *ops.before[op]):
        for need, behind in ops.frees[forward]:
            behinds[need] = min(behinds.get(need, behind), behind)
    return list(behinds.items())


def _after(ops: _Ops, freed: Sequence[Sequence[tuple[int, int]]], op: int) -> list[tuple[int, int]]:
    """Does the same as `_before` against time: microbatches are counted from the last."""
    behinds = dict.fromkeys(ops.after[op], 0)
    behinds[op] = 1
    for end in (op, *ops.after[op]):
        for forward, behind in freed[end]:
            for o in (forward, *ops.after[forward]):
                behinds[o] = min(behinds.get(o, behind), behind)
    return list(behinds.items())


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Runs Jackson's preemptive schedule of (head, time, tail) jobs; returns the latest end."""
    jobs = sorted(jobs)
    ready: list[tuple[float, float]] = []
    now = best = 0.0
    at = 0
    while at < len(jobs) or ready:
        if not ready:
            now = max(now, jobs[at][0])
        while at < len(jobs) and jobs[at][0] <= now:
            heapq.heappush(ready, (-jobs[at][2], jobs[at][1]))
            at += 1
        tail, left = heapq.heappop(ready)
        until = jobs[at][0] if at < len(jobs) else math.inf
        if now + left <= until:
            now += left
            best = max(best, now - tail)
        else:
            heapq.heappush(ready, (tail, left - (until - now)))
            now = until
    return best


def _residence(problem: OrderProblem, ops: _Ops, rank: int) -> float:
    """Returns the area of memory and time that a rank's tasks take up, over the rank's limit."""
    m, limit = problem.num_microbatches, problem.limits[rank]
    if limit == math.inf:
        return 0.0
    at = {key: op for op, key in enumerate(problem.ops)}
    area = 0.0
    for op in problem.rank_ops[rank]:
        kind, stage = problem.ops[op]
        if kind is not Kind.F or not ops.frees[op]:
            continue
        held = min(problem.change[op * m : op * m + m])
        last = at[Kind.B, stage] if (Kind.B, stage) in at else at[Kind.I, stage]
        area += held * _longest(ops, op, last)
        if last != at.get((Kind.B, stage)):
            rest = held + min(problem.change[last * m : last * m + m])
            area += rest * ops.time[at[Kind.W, stage]]
    return m * area / limit


def _longest(ops: _Ops, first: int, last: int) -> float:
    """Returns the time from the start of an op to the end of another, for one microbatch."""
    ends = {first: ops.time[first]}
    for op in ops.sorted:
        arrivals = [ends[need] + delay for need, delay in ops.inputs[op] if need in ends]
        if arrivals and op != first:
            ends[op] = max(arrivals) + ops.time[op]
    return ends.get(last, 0.0)
