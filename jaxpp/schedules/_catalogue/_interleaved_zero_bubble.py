"""Interleaved zero bubble: several stages on each rank, and weight gradients in the bubble."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class InterleavedZeroBubble(Schedule):
    """ZB-H1 over several stages on each rank, which divides the bubble by the number of stages.

    Source: Qi et al., arXiv 2401.10241, section 2, applied to the order of Narayanan et al.,
    arXiv 2104.04473, section 2.2, as PyTorch's `ScheduleInterleavedZeroBubble` does. Microbatches
    go in the groups of `Interleaved1F1B`, so that m may be anything.

    With p ranks, m >= p microbatches, v stages on each rank, g the size of the largest group (p
    where p divides m), and costs F, I and W for a rank's share of one microbatch: the bubble is
    (p-1)(F+I-W)/v where W <= F and W <= I, and each rank holds no more than
    min((v-1)g + p, mv) activations of single stages: where p divides m, p whole microbatches.

    Args:
      stages_per_rank: v, the stages on each rank; stage `s` is on rank `s % p`.
      weight_lag: the most `W` that a rank leaves behind its `I`; by default r on rank r. Less
        holds less on the later ranks, for a longer bubble: 0 is `GIS`.

    >>> schedule = InterleavedZeroBubble(stages_per_rank=2)
    >>> for tasks in schedule.table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 I2.1 W2.1 I0.0 W0.0 I0.1 W0.1
    F1.0 F1.1 F3.0 I3.0 F3.1 I3.1 W3.0 I1.0 W3.1 I1.1 W1.0 W1.1
    """

    stages_per_rank: int = 2
    weight_lag: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_lag is not None and self.weight_lag < 0:
            raise ValueError(
                f"InterleavedZeroBubble needs weight_lag to be at least 0, got {self.weight_lag}; "
                f"a W reads what its I makes; use 0 to run it at once."
            )

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        v = self.stages_per_rank
        groups = building_blocks.split_in_groups(num_microbatches, num_ranks)
        for rank in range(num_ranks):
            forwards, backwards = building_blocks.interleave(rank, num_ranks, v, groups)
            # One forward a hop is enough: an I is shorter than a whole backward.
            warmup = (num_ranks - 1 - rank) + (v - 1) * len(groups[0])
            lag = rank if self.weight_lag is None else min(rank, self.weight_lag)
            yield building_blocks.split_one_forward_one_backward(forwards, backwards, warmup, lag)
