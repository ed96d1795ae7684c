"""GPipe: every forward, then every backward."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class GPipe(Schedule):
    """Every forward, then every backward.

    Source: Huang et al., arXiv 1811.06965, section 2.3. With `stages_per_rank` above 1 it is the
    looped breadth-first schedule of Lamy-Poirier, arXiv 2211.05953, section 4 (`looped_bfs` in the
    catalogue): forwards chunk by chunk, backwards with the chunks reversed.

    With p ranks, m microbatches, v stages on each rank, and costs F and B for a rank's share of one
    microbatch: the bubble is (p-1)(F+B)/v where m >= p, and each rank holds the activations of all
    m microbatches.

    Args:
      stages_per_rank: v, the stages on each rank; stage `s` is on rank `s % p`.

    >>> for tasks in GPipe().table(num_stages=2, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
    F1.0 F1.1 F1.2 B1.0 B1.1 B1.2
    """

    stages_per_rank: int = 1

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        microbatches = range(num_microbatches)
        for rank in range(num_ranks):
            stages = range(rank, num_ranks * self.stages_per_rank, num_ranks)
            forwards = [Task(Kind.F, s, i) for s in stages for i in microbatches]
            backwards = [Task(Kind.B, s, i) for s in reversed(stages) for i in microbatches]
            yield forwards + backwards
