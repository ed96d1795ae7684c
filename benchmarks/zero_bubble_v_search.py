"""The greedy search of the authors of ZB-V for a V of stages, as a yardstick for `synthesize`.

Source: Qi et al., arXiv 2401.10241, section 6, and the search for V schedules in the code of the
authors. Written anew from what it does; times, memory and transfers are equal for all ranks.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence

from jaxpp.schedules import Kind, Table, Task
from jaxpp.schedules.building_blocks import waves

_KINDS = (Kind.F, Kind.I, Kind.W)


def greedy_search(
    num_ranks: int,
    num_microbatches: int,
    times: Sequence[float],
    changes: Sequence[float],
    limit: float,
    transfer: float,
) -> Table:
    """Makes the best table of the search's four choices, each tried again while that helps.

    Args:
      num_ranks: the ranks, of two stages each, placed as a V.
      num_microbatches: no fewer than twice the ranks.
      times: of `F`, `I` and `W` of a stage.
      changes: what each of them adds to what a rank holds.
      limit: the most that a rank may hold.
      transfer: the time of a transfer between two ranks.
    """
    best, least = None, math.inf
    for fill in ((a, b) for a in (True, False) for b in (True, False)):
        approved = None
        while True:
            attempt = _Attempt(
                (num_ranks, num_microbatches), times, changes, limit, transfer, fill, approved
            )
            idle = attempt.run()
            if idle < least:
                best, least = attempt, idle
            if approved is not None and idle >= max(approved):
                break
            approved = attempt.idle
    assert best is not None
    ranks = tuple(tuple(best.tasks(rank)) for rank in range(num_ranks))
    return Table(ranks, 2 * num_ranks, num_microbatches, (waves(num_ranks),))


class _Attempt:
    """One pass of the search, with its choices: the orders that grow, and the idle time so far.

    A rank has two chunks: 0 on the way down the V, and 1 on the way up.

    Args:
      sizes: the ranks and the microbatches.
      times: of `F`, `I` and `W` of a stage.
      changes: what each of them adds to what a rank holds.
      limit: the most that a rank may hold.
      transfer: the time of a transfer.
      fill: whether a `W` may be put before a task of a kind that would wait for less than that `W`
        takes: before an `F`, and before an `I` of chunk 0.
      approved: the idle time of each rank in the attempt before, if there was one.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        times: Sequence[float],
        changes: Sequence[float],
        limit: float,
        transfer: float,
        fill: tuple[bool, bool],
        approved: Sequence[float] | None,
    ):
        self.p, self.m = sizes
        self.times, self.changes = times, changes
        self.limit, self.transfer, self.fill = limit * (1 + 1e-9), transfer, fill
        self.approved = approved or [-1.0] * self.p
        self.ends: list[dict[tuple[int, int], list[float]]] = [
            {key: [] for key in itertools.product(range(3), range(2))} for _ in range(self.p)
        ]
        self.orders: list[list[tuple[int, int]]] = [[] for _ in range(self.p)]
        self.now, self.held, self.idle = ([0.0] * self.p for _ in range(3))
        self.pending: list[deque[int]] = [deque() for _ in range(self.p)]

    def run(self) -> float:
        """Makes the orders; gives the longest idle time of a rank between its tasks."""
        self._warm_up()
        for _ in range(2 * self.m):
            self._backwards()
            self._forwards()
        for rank in range(self.p):
            while self.pending[rank]:
                self._put_weight_grad(rank)
        return max(self.idle)

    def tasks(self, rank: int) -> Iterator[Task]:
        """Gives the tasks of a rank; backwards meet the chunk of the way up on their way down."""
        stages = rank, 2 * self.p - 1 - rank
        number = {key: itertools.count() for key in self.ends[rank]}
        for kind, chunk in self.orders[rank]:
            stage = stages[chunk] if kind == 0 else stages[1 - chunk]
            yield Task(_KINDS[kind], stage, next(number[kind, chunk]))

    def _count(self, kind: int, chunk: int, rank: int) -> int:
        return len(self.ends[rank][kind, chunk])

    def _arrival(self, kind: int, chunk: int, rank: int) -> float:
        """Gives when the next input of a rank is there: -inf if it is its own, inf if not made."""
        other = rank + 1 if chunk else rank - 1
        if not 0 <= other < self.p:
            return -math.inf
        made, at = self.ends[other][kind, chunk], self._count(kind, chunk, rank)
        return made[at] + self.transfer if at < len(made) else math.inf

    def _put(self, kind: int, chunk: int, rank: int) -> None:
        start = self.now[rank]
        if kind < 2:
            start = max(start, self._arrival(kind, chunk, rank))
            assert start < math.inf, "an input that nobody has made"
        if self.orders[rank]:
            self.idle[rank] += start - self.now[rank]
        self.now[rank] = start + self.times[kind]
        self.held[rank] += self.changes[kind]
        assert self.held[rank] <= self.limit, "more memory than there is"
        self.ends[rank][kind, chunk].append(self.now[rank])
        self.orders[rank].append((kind, chunk))
        if kind == 1:
            self.pending[rank].append(chunk)

    def _put_weight_grad(self, rank: int) -> None:
        self._put(2, self.pending[rank].popleft(), rank)

    def _warm_up(self) -> None:
        """Runs the first microbatch down and up, fills the wait, then levels the ranks."""
        for rank in range(self.p):
            self._put(0, 0, rank)
        for rank in reversed(range(self.p)):
            arrival = self._arrival(0, 1, rank)
            while (
                self.held[rank] + self.changes[0] * (2 + 2 * rank) <= self.limit
                and self.now[rank] + self.times[0] <= arrival
                and self._count(0, 0, rank) < self.m
            ):
                for above in range(rank + 1):
                    self._put(0, 0, above)
            self._put(0, 1, rank)
        chunk = 0
        for rank in range(1, self.p):
            while self._behind(rank):
                for below in reversed(range(rank, self.p)):
                    if self._count(0, chunk, below) < self.m:
                        self._put(0, chunk, below)
                chunk = 1 - chunk

    def _behind(self, rank: int) -> bool:
        """Tells whether a rank has run fewer forwards than the rank before it."""
        own, before = ([self._count(0, c, r) for c in range(2)] for r in (rank, rank - 1))
        return sum(own) < sum(before) or own[1] <= before[1] < self.m

    def _make_room(self, kind: int, rank: int) -> None:
        while self.held[rank] + self.changes[kind] > self.limit:
            self._put_weight_grad(rank)

    def _fill_wait(self, kind: int, chunk: int, rank: int, may_delay: bool) -> None:
        """Puts each `W` that fits before the next task, and one more if that costs nothing."""
        arrival = self._arrival(kind, chunk, rank)
        while self.pending[rank] and arrival >= self.now[rank] + self.times[2]:
            self._put_weight_grad(rank)
        known = max(max(self.idle), max(self.approved) - self.approved[rank])
        late = arrival - self.now[rank] > known - self.idle[rank]
        if self.pending[rank] and late and may_delay:
            self._put_weight_grad(rank)

    def _backwards(self) -> None:
        for rank in range(self.p):
            self._make_room(1, rank)
        up: list[int] = []
        down: list[int] = []
        for rank in range(self.p):
            first, second = (self._count(1, chunk, rank) for chunk in range(2))
            made = self._arrival(1, 1, rank) < math.inf
            (up if second < first and (made or first == self.m) else down).append(rank)
        for rank in reversed(up):
            self._fill_wait(1, 1, rank, may_delay=True)
            self._put(1, 1, rank)
        for rank in down:
            self._fill_wait(1, 0, rank, may_delay=self.fill[1])
            self._put(1, 0, rank)

    def _forwards(self) -> None:
        for rank in range(self.p):
            down, up = (self._count(0, chunk, rank) for chunk in range(2))
            if up >= self.m:
                continue
            if up < down and self._arrival(0, 1, rank) < math.inf:
                chunk = 1
            elif down < self.m and (up >= down or self._arrival(0, 0, rank) < math.inf):
                chunk = 0
            else:
                continue
            self._make_room(0, rank)
            self._fill_wait(0, chunk, rank, may_delay=self.fill[0])
            self._put(0, chunk, rank)
