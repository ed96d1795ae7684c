"""1F1B and eager 1F1B: one stage on each rank, one forward, one backward."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class OneFOneB(Schedule):
    """Runs each backward as soon as it can, so that few activations are held.

    Source: Narayanan et al., arXiv 1806.03377 (PipeDream), section 3.2, with the flush at the end
    of each step of arXiv 2006.09503, section 3.2.

    With p ranks, m microbatches, and costs F and B of a stage for one microbatch: the bubble is
    (p-1)(F+B), as GPipe's, and rank r holds the activations of min(p-r, m) microbatches.

    >>> for tasks in OneFOneB().table(num_stages=2, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        for rank in range(num_ranks):
            yield _stage_order(rank, num_microbatches, warmup=num_ranks - 1 - rank)


@dataclasses.dataclass(frozen=True)
class Eager1F1B(Schedule):
    """1F1B with twice the warm-up, so that a transfer has the time of one task to arrive.

    Source: Zhuang et al., arXiv 2211.05322, section 4.

    With p ranks, m microbatches, and costs F and B of a stage for one microbatch: the bubble is
    (p-1)(F+B), as 1F1B's, but stays so while sending costs no more than F; rank r holds the
    activations of min(2(p-1-r)+1, m) microbatches.

    >>> for tasks in Eager1F1B().table(num_stages=2, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F0.2 B0.0 B0.1 B0.2
    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    """

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        for rank in range(num_ranks):
            yield _stage_order(rank, num_microbatches, warmup=2 * (num_ranks - 1 - rank))


def _stage_order(stage: int, num_microbatches: int, warmup: int) -> list[Task]:
    passes = [(stage, i) for i in range(num_microbatches)]
    return building_blocks.one_forward_one_backward(passes, passes, warmup)
