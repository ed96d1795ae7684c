"""List scheduling: a free rank takes the first task by priority that may run."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules.simulator._problem import OrderProblem


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """A rule that decides between the tasks that a free rank may run.

    The microbatches of an op go in order. The op runs first whose next microbatch `i` has the
    smallest `offsets[op] + i * periods[op]`: its time in a plan of these periods.

    Args:
      offsets: for each op, when the plan has its first microbatch.
      periods: for each op, the plan's time between microbatches.
      in_flight: for each stage, how many forwards may be ahead of its input gradients; by default
        any number.
      idle: for each rank, up to which idle time it may wait for a more urgent task rather than run
        another one; by default no rank waits.
      patience: how much longer a wait may be than the delay that it avoids.
    """

    offsets: Sequence[float]
    periods: Sequence[float]
    in_flight: Sequence[float] = ()
    idle: Sequence[float] = ()
    patience: float = math.inf

    def places(self, microbatches: int) -> tuple[list[int], list[int]]:
        """Returns the place of each task in the order of the rule, and the task of each place."""
        if microbatches not in self._places:
            keys = [
                offset + i * period
                for offset, period in zip(self.offsets, self.periods, strict=True)
                for i in range(microbatches)
            ]
            tasks = sorted(range(len(keys)), key=keys.__getitem__)
            places = [0] * len(tasks)
            for place, n in enumerate(tasks):
                places[n] = place
            self._places[microbatches] = places, tasks
        return self._places[microbatches]

    @functools.cached_property
    def _places(self) -> dict[int, tuple[list[int], list[int]]]:
        return {}


def list_schedule(
    problem: OrderProblem, rule: Rule, room: Sequence[float] = ()
) -> tuple[list[list[int]], list[float]] | None:
    """Schedules all tasks in the order of time, each rank by the rule.

    Args:
      problem: the tasks.
      rule: decides between tasks.
      room: for each rank, the time that it may be idle; by default any time. Where spans count,
        the time before its first task does not.

    Returns:
      The orders, and when each rank ends; None where a rank is idle for longer, or ranks get stuck.
    """
    return _RankQueues(problem, rule, room or [math.inf] * problem.num_ranks).run()


class _RankQueues:
    """The ranks of a problem while a rule schedules their tasks.

    A forward runs only if the rank's memory allows it. After it, the rank must still be able to end
    the microbatches that it has begun one after the other, oldest first, in the memory that is left
    (the banker's algorithm of Dijkstra, EWD 108, with a fixed order). All ranks keep the same
    order, so the oldest microbatch can always go on. So memory never causes a deadlock, as long as
    one microbatch alone fits and input gradients free memory or keep it.
    """

    def __init__(self, problem: OrderProblem, rule: Rule, room: Sequence[float]):
        m, ranks = problem.num_microbatches, range(problem.num_ranks)
        self.problem, self.rule, self.room = problem, rule, list(room)
        self.m, (self.places, self.tasks) = m, rule.places(m)
        #: For each rank, the places of the tasks that it may run.
        self.ready: list[list[int]] = [[] for _ in ranks]
        #: For each rank, when tasks arrive whose inputs have started, where it may wait for them.
        self.coming: list[dict[int, float]] = [{} for _ in ranks]
        self.orders: list[list[int]] = [[] for _ in ranks]
        self.free = [0.0] * problem.num_ranks
        self.limited = min(problem.limits) < math.inf
        self.late = problem.objective == "wall"
        self.plain = not (self.limited or rule.in_flight or rule.idle)
        if not self.plain:
            self.done = [0] * len(problem.ops)
            self.held, self.waited = [0.0] * problem.num_ranks, [0.0] * problem.num_ranks
            self._remember()

    def _remember(self) -> None:
        """Collects what decides whether a forward may run."""
        problem, m = self.problem, self.m
        self.end_of = {
            s: op for op, (kind, s) in enumerate(problem.ops) if kind in (Kind.I, Kind.B)
        }
        #: For each rank, its forwards, and the most that a microbatch of each holds.
        self.forwards = [
            [(op, max(problem.change[op * m : op * m + m])) for op in own
             if problem.ops[op][0] is Kind.F]
            for own in problem.rank_ops
        ]  # fmt: skip
        # Up to this much, there is room for one more microbatch: any forward is safe.
        self.ample = [
            limit - sum(a for _, a in own)
            for limit, own in zip(problem.limits, self.forwards, strict=True)
        ]

    def run(self) -> tuple[list[list[int]], list[float]] | None:
        """Runs all tasks: at each moment each rank that is free takes one."""
        m, free, ready, places, late = self.m, self.free, self.ready, self.places, self.late
        time, op_rank, outputs = self.problem.time, self.problem.op_rank, self.problem.outputs
        pending, handed = self._start()
        arrival, left = [0.0] * len(time), len(time)
        # The next events: the inputs of a task arrive, or a rank is free, as the task -1.
        events = [(0.0, rank, -1) for rank in range(len(free))]
        busy, plain, orders, room = [True] * len(free), self.plain, self.orders, self.room
        while events:
            now, rank, n = heappop(events)
            woken = [rank]
            while True:
                if n >= 0:
                    heappush(ready[rank], places[n])
                    self.coming[rank].pop(n, None)
                else:
                    busy[rank] = False
                    for n in handed[rank]:
                        heappush(ready[rank], places[n])
                    handed[rank].clear()
                if not events or events[0][0] != now:
                    break
                _, rank, n = heappop(events)
                woken.append(rank)
            for rank in woken:
                if busy[rank] or not ready[rank]:
                    continue
                n = self.tasks[heappop(ready[rank])] if plain else self._take(rank, now)
                if n < 0:
                    continue
                if now > free[rank] and (late or orders[rank]):
                    room[rank] -= now - free[rank]
                    if room[rank] < 0.0:
                        return None
                free[rank] = end = now + time[n]
                busy[rank] = True
                orders[rank].append(n)
                left -= 1
                heappush(events, (end, rank, -1))
                op, i = divmod(n, m)
                for reader, delays in outputs[op]:
                    k, target, at = reader * m + i, op_rank[reader], end + delays[i]
                    if arrival[k] > at:
                        at = arrival[k]
                    if pending[k] > 1:
                        pending[k], arrival[k] = pending[k] - 1, at
                    elif target == rank and at <= end:
                        handed[rank].append(k)
                    else:
                        heappush(events, (at, target, k))
                        if not plain:
                            self.coming[target][k] = at
        return None if left else (orders, free)

    def _start(self) -> tuple[list[int], list[list[int]]]:
        """Returns how many inputs each task waits for, and the tasks of each rank without any."""
        problem, counts, pending = self.problem, [0] * len(self.problem.ops), []
        handed: list[list[int]] = [[] for _ in self.free]
        for own in problem.outputs:
            for reader, _ in own:
                counts[reader] += 1
        for op, count in enumerate(counts):
            pending += [count] * self.m
            if not count:
                handed[problem.op_rank[op]] += range(op * self.m, op * self.m + self.m)
        return pending, handed

    def _take(self, rank: int, now: float) -> int:
        """Takes the first task that may run; -1 where there is none, or the rank waits."""
        ready, tasks = self.ready[rank], self.tasks
        best = next((p for p in sorted(ready) if self._allows(rank, tasks[p])), -1)
        if best < 0 or self.rule.idle and self.coming[rank] and self._waits(rank, now, best):
            return -1
        n = tasks[best]
        ready.remove(best)
        heapify(ready)
        self.done[n // self.m] += 1
        self.held[rank] += self.problem.change[n]
        if self.orders[rank]:
            self.waited[rank] += now - self.free[rank]
        return n

    def _waits(self, rank: int, now: float, best: int) -> bool:
        """Tells whether a more urgent task arrives so soon that the rank waits for it."""
        urgent = (
            at for n, at in self.coming[rank].items()
            if self.places[n] < best and self._allows(rank, n)
        )  # fmt: skip
        soon = min(urgent, default=math.inf)
        wait, avoided = soon - now, now + self.problem.time[self.tasks[best]] - soon
        idle = self.waited[rank] + (now - self.free[rank] if self.orders[rank] else 0.0)
        return (
            avoided > 0.0
            and idle + wait <= self.rule.idle[rank]
            and wait <= self.rule.patience * avoided
        )

    def _allows(self, rank: int, n: int) -> bool:
        """Tells whether a task may run: whether the memory, and the plan's window, have room."""
        problem, (op, i) = self.problem, divmod(n, self.m)
        change = problem.change[n]
        if change > 0.0 and self.held[rank] + change > problem.limits[rank]:
            return False
        kind, stage = problem.ops[op]
        if kind is not Kind.F:
            return True
        if self.rule.in_flight and i - self.done[self.end_of[stage]] >= self.rule.in_flight[stage]:
            return False
        own = self.forwards[rank]
        if len(own) < 2 or self.held[rank] + change <= self.ample[rank]:
            return True
        return _safe(own, op, self.done, problem.limits[rank])


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
