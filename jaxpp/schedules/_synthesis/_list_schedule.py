"""List scheduling: a free rank takes the first task by priority that may run."""

import dataclasses
import heapq
import math
from collections.abc import Sequence

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._synthesis._problem import Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A rule that decides between the tasks that a free rank may run.

    The microbatches of an op go in order. The op runs first whose next microbatch `i` has the
    smallest `offsets[op] + i * period`: its time in a plan of that period.

    Args:
      offsets: for each op, when the plan has its first microbatch.
      period: the plan's time between microbatches.
      in_flight: for each stage, how many forwards may be ahead of its input gradients.
      idle: for each rank, up to which idle time it may wait for a more urgent task rather than run
        another one.
      patience: how much longer a wait may be than the delay that it avoids.
    """

    offsets: Sequence[float]
    period: float
    in_flight: Sequence[float]
    idle: Sequence[float]
    patience: float = math.inf


def list_schedule(problem: Problem, rule: Rule, most: float = math.inf) -> list[list[int]] | None:
    """Schedules all tasks in the order of time, each rank by the rule; None if ranks get stuck.

    It gives up, too, where a rank has been idle for so long that the value is more than `most`.

    A forward runs only if the rank's memory allows it. After it, the rank must still be able to end
    the microbatches that it has begun one after the other, oldest first, in the memory that is left
    (the banker's algorithm of Dijkstra, EWD 108, with a fixed order). All ranks keep the same
    order, so the oldest microbatch can always go on. So memory never causes a deadlock, as long as
    one microbatch alone fits and input gradients free memory or keep it.
    """
    m, period, patience = problem.num_microbatches, rule.period, rule.patience
    time, change, readers, op_rank = problem.time, problem.change, problem.readers, problem.op_rank
    limits, num_ranks = problem.limits, problem.num_ranks
    views = _views(problem, rule)
    room_for = [_forwards(problem, rank) for rank in range(num_ranks)]
    # Up to this much, there is room for one more microbatch: any forward is safe.
    ample_room = [
        limit - sum(a for _, a in own) for limit, own in zip(limits, room_for, strict=True)
    ]
    done = [0] * len(problem.ops)
    pending = [len(pairs) for pairs in problem.remote]
    arrival = [0.0] * len(time)
    free, held = [0.0] * num_ranks, [0.0] * num_ranks
    begun, busy = [0.0] * num_ranks, [0.0] * num_ranks
    orders: list[list[int]] = [[] for _ in range(num_ranks)]
    # A rank's work may begin late: that counts for the makespan, and not for its span.
    late = float(problem.objective == "wall")
    ample = [most - sum(sum(time[op * m : op * m + m]) for op in own) for own in problem.rank_ops]
    events = [(0.0, rank) for rank in range(num_ranks)]
    while events:
        now, rank = heapq.heappop(events)
        if now < free[rank]:
            continue
        best, best_key = -1, math.inf
        soon_key = soon_at = math.inf
        for op, offset, local, window, backward in views[rank]:
            i = done[op]
            if i == m:
                continue
            n = op * m + i
            if pending[n]:
                continue
            key = offset + i * period
            at = arrival[n]
            if key >= best_key and (at <= now or key >= soon_key):
                continue
            for need in local:
                if done[need] <= i:
                    break
            else:
                if change[n] > 0.0 and held[rank] + change[n] > limits[rank]:
                    continue
                if backward >= 0:
                    if i - done[backward] >= window:
                        continue
                    own = room_for[rank]
                    if (
                        held[rank] + change[n] > ample_room[rank]
                        and len(own) > 1
                        and not _safe(own, op, done, limits[rank])
                    ):
                        continue
                if at <= now:
                    best, best_key = n, key
                elif at < soon_at or key < soon_key:
                    soon_key, soon_at = key, at
        if best < 0:
            if soon_at < math.inf:
                heapq.heappush(events, (soon_at, rank))
            continue
        if soon_key < best_key:
            wait = soon_at - now
            avoided = now + time[best] - soon_at
            idle = now - begun[rank] - busy[rank] if orders[rank] else 0.0
            if avoided > 0.0 and idle + wait <= rule.idle[rank] and wait <= patience * avoided:
                heapq.heappush(events, (soon_at, rank))
                continue
        if not orders[rank]:
            begun[rank] = now
        if now - (1.0 - late) * begun[rank] - busy[rank] > ample[rank]:
            return None
        end = now + time[best]
        busy[rank] += time[best]
        done[best // m] += 1
        held[rank] += change[best]
        free[rank] = end
        orders[rank].append(best)
        heapq.heappush(events, (end, rank))
        for reader, delay in readers[best]:
            pending[reader] -= 1
            at = end + delay
            if at > arrival[reader]:
                arrival[reader] = at
            target = op_rank[reader // m]
            # A rank that is busy then finds the task itself when it is free.
            if arrival[reader] >= free[target]:
                heapq.heappush(events, (arrival[reader], target))
    return orders if sum(map(len, orders)) == len(time) else None


def _views(problem: Problem, rule: Rule) -> list[list[tuple[int, float, list[int], float, int]]]:
    """Returns for each rank, by op, the data of its decisions; last, a forward's backward or -1."""
    ends = {s: op for op, (kind, s) in enumerate(problem.ops) if kind in (Kind.I, Kind.B)}
    views = []
    for own in problem.rank_ops:
        view = []
        for op in own:
            kind, stage = problem.ops[op]
            forward = kind is Kind.F
            window = rule.in_flight[stage] if forward else math.inf
            end = ends[stage] if forward else -1
            view.append((op, rule.offsets[op], problem.local[op], window, end))
        views.append(view)
    return views


def _forwards(problem: Problem, rank: int) -> list[tuple[int, float]]:
    """Returns the forwards of a rank, and the most that a microbatch of each holds."""
    m = problem.num_microbatches
    own = [op for op in problem.rank_ops[rank] if problem.ops[op][0] is Kind.F]
    return [(op, max(problem.change[op * m : op * m + m])) for op in own]


def _safe(own: Sequence[tuple[int, float]], op: int, done: Sequence[int], limit: float) -> bool:
    """Tells whether a rank can still end all begun microbatches after one more forward `op`."""
    begun = [done[f] + (f == op) for f, _ in own]
    least = min(begun)
    if done[op] < least:
        return True  # `op` continues the oldest microbatch that lacks a forward: safe before.
    # Once all microbatches with every forward have ended, the rank holds only the others.
    room = limit - sum((n - least) * a for n, (_, a) in zip(begun, own, strict=True))
    for i in range(least, max(begun)):
        need = holds = 0.0
        for n, (_, a) in zip(begun, own, strict=True):
            if n > i:
                holds += a
            else:
                need += a
        if need > room:
            return False
        room += holds
    return True
