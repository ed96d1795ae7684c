"""Justification: moves all tasks as late as they can go, then as early, and so on while it helps.

Each pass takes the tasks in the order of the times of the pass before it, and puts each into the
first gap of its rank that it fits. So idle time that a table has in many places is brought
together, and is lost at an end (Li and Willis, 1992; Valls, Ballestin and Quintanilla, 2005).
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from jaxpp.schedules.simulator import OrderProblem, Times, evaluate


class Justifier:
    """Justifies the orders of a problem."""

    def __init__(self, problem: OrderProblem):
        """Collects for each task what it waits for, in time and against it."""
        m = problem.num_microbatches
        self.problem = problem
        self.needs = [
            [(need * m + i, delays[i]) for need, delays in own] + [(op * m + i - 1, 0.0)] * (i > 0)
            for op, own in enumerate(problem.inputs)
            for i in range(m)
        ]
        self.readers: list[list[tuple[int, float]]] = [[] for _ in self.needs]
        for n, own in enumerate(self.needs):
            for need, delay in own:
                self.readers[need].append((n, delay))

    def improve(self, orders: Sequence[Sequence[int]], times: Times) -> list[list[int]]:
        """Justifies orders as long as that makes them better.

        Args:
          orders: orders that fit and do not deadlock.
          times: their times.

        Returns:
          The best orders; the given ones where none are better.
        """
        best, found = times.value, [list(order) for order in orders]
        ends: Sequence[float] = times.ends
        last = math.inf
        while best < (1 - 1e-9) * last:
            last = best
            for forward in (False, True):
                made, ends = self._pass(ends, forward)
                after = evaluate(self.problem, made) if made and self.problem.fits(made) else None
                if after is None:
                    return found
                if after.value < best:
                    best, found = after.value, made
        return found

    def _pass(self, ends: Sequence[float], forward: bool) -> tuple[list[list[int]], list[float]]:
        """Moves tasks to the front or to the back; gives orders, or none if it fails, and ends."""
        problem = self.problem
        time = problem.time
        starts = [end - own for end, own in zip(ends, time, strict=True)]
        if forward:
            sequence = sorted(range(len(ends)), key=lambda n: (starts[n], ends[n], n))
            return self._insert(sequence, 1, [0.0] * problem.num_ranks)
        sequence = sorted(range(len(ends)), key=lambda n: (-ends[n], -starts[n], -n))
        m = problem.num_microbatches
        first = [min(starts[op * m] for op in own) for own in problem.rank_ops]
        if problem.objective == "wall":
            first = [0.0] * len(first)
        release = [max(first) - own for own in first]
        orders, found = self._insert(sequence, -1, release)
        found = [own - end for end, own in zip(found, time, strict=True)]
        return [order[::-1] for order in orders], found

    def _insert(
        self, sequence: Sequence[int], sign: int, release: Sequence[float]
    ) -> tuple[list[list[int]], list[float]]:
        """Puts each task into the first gap that it fits; no orders where it fits none."""
        problem = self.problem
        m, time, change, op_rank = (
            problem.num_microbatches, problem.time, problem.change, problem.op_rank
        )  # fmt: skip
        needs = self.needs if sign > 0 else self.readers
        room = 1e-9 * sum(time) / problem.num_ranks
        ends = [-1.0] * len(time)
        # For each rank, its tasks by now: numbers, starts, ends, and what it holds after each.
        ranks: list[tuple[list[int], list[float], list[float], list[float]]] = [
            ([], [], [], []) for _ in release
        ]
        for n in sequence:
            rank = op_rank[n // m]
            at = release[rank]
            for need, delay in needs[n]:
                ready = ends[need]
                if ready < 0.0:
                    return [], ends
                ready += delay
                if ready > at:
                    at = ready
            order, begun, ended, held = ranks[rank]
            own, more = time[n], sign * change[n]
            k = len(order)
            if k and at < ended[-1]:
                if more > 0.0:
                    most = problem.limits[rank] - more
                    while k and ended[k - 1] > at and held[k - 1] <= most:
                        k -= 1
                    if k and held[k - 1] > most:
                        k += 1
                else:
                    k = bisect_right(ended, at)
                if 0 < k <= len(order) and ended[k - 1] > at:
                    at = ended[k - 1]
                while k < len(order) and begun[k] < at + own - room:
                    if ended[k] > at:
                        at = ended[k]
                    k += 1
            if k > len(order):
                return [], ends
            end = ends[n] = at + own
            order.insert(k, n)
            begun.insert(k, at)
            ended.insert(k, end)
            held.insert(k, (held[k - 1] if k else 0.0) + more)
            for later in range(k + 1, len(held)):
                held[later] += more
        return [order for order, *_ in ranks], ends
