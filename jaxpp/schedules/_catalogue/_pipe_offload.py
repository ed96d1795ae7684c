"""GIS, the schedule of PipeOffload: interleaved, with a short warm-up."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._catalogue._interleaved_zero_bubble import InterleavedZeroBubble
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class GIS(Schedule):
    """Interleaved 1F1B with the backward split and one fewer warm-up forward a hop.

    Source: Wan et al., arXiv 2503.01328 (PipeOffload), the generalised interleaved schedule. The
    result of an `I` is sent before its `W` runs. So a hop adds an F and an I to the bubble, and one
    warm-up forward a hop is enough: less bubble and less memory than interleaved 1F1B.

    With p ranks, m >= p microbatches, v stages on each rank, g the size of the largest group (p
    where p divides m, as the paper asks), and costs F, I and W for a rank's share of one
    microbatch: the bubble is (p-1)(F+I)/v, and rank r holds min((p-1-r) + (v-1)g + 1, mv)
    activations of single stages: where p divides m, p whole microbatches on rank 0.

    Args:
      stages_per_rank: v, the stages on each rank; stage `s` is on rank `s % p`.

    >>> for tasks in GIS(stages_per_rank=2).table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 I2.1 W2.1 I0.0 W0.0 I0.1 W0.1
    F1.0 F1.1 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I1.0 W1.0 I1.1 W1.1
    """

    stages_per_rank: int = 2

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        same = InterleavedZeroBubble(self.stages_per_rank, weight_lag=0)
        return same.orders(num_ranks, num_microbatches)
