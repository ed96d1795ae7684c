"""Forward passes alone: evaluation and inference."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Kind, Task


@dataclasses.dataclass(frozen=True)
class ForwardOnly(Schedule):
    """Forward passes alone, chunk by chunk, for a function that is not differentiated.

    With p ranks, m microbatches, v stages on each rank and cost F for a rank's share of one
    microbatch, the bubble is (p-1)F/v where m >= p; one activation is held at a time.

    Args:
      stages_per_rank: v, the stages on each rank; stage `s` is on rank `s % p`.

    >>> for tasks in ForwardOnly().table(num_stages=2, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F0.2
    F1.0 F1.1 F1.2
    """

    stages_per_rank: int = 1

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Gives the tasks of each rank: see `Schedule.orders`."""
        for rank in range(num_ranks):
            stages = range(rank, num_ranks * self.stages_per_rank, num_ranks)
            yield [Task(Kind.F, s, i) for s in stages for i in range(num_microbatches)]
