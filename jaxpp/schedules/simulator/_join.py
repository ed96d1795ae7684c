"""Joins loops: ranks begin one before they have ended the one before it, where they have room."""

import collections
import heapq
from collections.abc import Collection, Sequence

#: For each rank the tasks of each of its loops, by number, in the loop's order.
Loops = Sequence[Sequence[Sequence[int]]]


def join(
    loops: Loops,
    behind: Sequence[Collection[int]],
    change: Sequence[float],
    time: Sequence[float],
    beside: Collection[int] = (),
) -> list[int] | None:
    """Puts the tasks of several loops in one order.

    A rank runs the tasks of each loop in the loop's order. If a later loop has one that can run,
    such as a forward, and the rank will never hold more than it would without, it takes that; else
    that of the earliest loop that can run.

    Args:
      loops: the tasks of each rank. A task that is in none takes no time, and may be on any rank.
      behind: for each task, those that come before it.
      change: what each task adds to what its rank holds.
      time: the time of each task, on a clock that decides the order.
      beside: the tasks that do not keep their rank from others.

    Returns:
      All tasks, each after those that it waits for; None where that gains no time.
    """
    joined, apart = (
        _Joining(loops, behind, change, time, beside, has_room) for has_room in (True, False)
    )
    return list(joined.order) if joined.run() < apart.run() else None


class _Joining:
    """The tasks of all loops while ranks take them; they may have room for a later loop, or not."""

    def __init__(
        self,
        loops: Loops,
        behind: Sequence[Collection[int]],
        change: Sequence[float],
        time: Sequence[float],
        beside: Collection[int],
        has_room: bool,
    ):
        self.behind, self.time, self.beside = behind, time, beside
        self.readers: list[list[int]] = [[] for _ in behind]
        for n, before in enumerate(behind):
            for other in before:
                self.readers[other].append(n)
        #: For each task, how many of those behind it have not ended.
        self.waits = list(map(len, behind))
        self.ranks = [_LeftOfRank(own, change, has_room) for own in loops]
        self.in_loops = {n for own in loops for row in own for n in row}
        #: The tasks that have their place.
        self.order: dict[int, None] = {}

    def run(self) -> float:
        """Puts the tasks in the order in which ranks take them; returns when the last one ends."""
        now = 0.0
        ending = [n for n, count in enumerate(self.waits) if not count and n not in self.in_loops]
        for n in ending:  # no loop is behind them: they come before the first task that reads them
            ending += self._end(n)
        running: list[tuple[float, int]] = []  # when tasks end
        while True:
            for rank in self.ranks:
                while rank.free_at <= now and (n := rank.take(self.waits)) is not None:
                    self._place(n)
                    end = now + self.time[n]
                    heapq.heappush(running, (end, n))
                    rank.free_at = rank.free_at if n in self.beside else end
            if not running:
                break
            now = running[0][0]
            ending = []
            while running and running[0][0] == now:
                ending.append(heapq.heappop(running)[1])
            for n in ending:
                self._place(n)
                ending += self._end(n)
        for n in range(len(self.behind)):
            self._place(n)
        return now

    def _end(self, number: int) -> list[int]:
        """Notes that a task has ended; returns what is in no loop and can then run."""
        for n in self.readers[number]:
            self.waits[n] -= 1
        return [n for n in self.readers[number] if not self.waits[n] and n not in self.in_loops]

    def _place(self, number: int) -> None:
        """Gives a task its place, after all that are behind it."""
        todo = [number]
        while todo:
            lacking = [n for n in self.behind[todo[-1]] if n not in self.order]
            if not lacking:
                self.order.setdefault(todo.pop())
            todo += lacking


class _LeftOfRank:
    """The tasks that a rank has left to run: a row for each loop."""

    def __init__(self, loops: Sequence[Sequence[int]], change: Sequence[float], has_room: bool):
        self.rows, self.change = [collections.deque(row) for row in loops], change
        #: By how much what the rank holds grows at most from a task to the end of its loop.
        self.rise: dict[int, float] = {}
        for row in loops:
            most = 0.0
            for n in reversed(row):
                self.rise[n] = most = max(0.0, change[n] + most)
        most = max((self.rise[row[0]] for row in loops if row), default=0.0)
        self.limit = most if has_room else -1.0
        self.held = self.free_at = 0.0

    def take(self, waits: Sequence[int]) -> int | None:
        """Takes what the rank runs next; None where nothing can run, or has room."""
        taken: collections.deque[int] | None = None
        rise = 0.0  # in what is left of the loops before
        for place, row in enumerate(filter(None, self.rows)):
            n = row[0]
            has_room = not place or self.held + self.change[n] + rise <= self.limit
            if has_room and not waits[n] and (taken is None or self.change[n] > 0):
                taken = row
            rise += self.rise[n]
        if taken is None:
            return None
        self.held += self.change[taken[0]]
        return taken.popleft()
