"""Interleaved 1F1B: several stages on each rank, for a smaller bubble."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._one_f_one_b import one_forward_one_backward
from jaxpp.schedules._table import Kind, Task


@dataclasses.dataclass(frozen=True)
class Interleaved1F1B(Schedule):
    """1F1B over several stages on each rank, which divides the bubble by their number.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2. The microbatches go through the chunks
    of a rank in groups: all of a group through one chunk, then through the next. The paper has
    groups of p microbatches, and p must divide m. Here m may be anything: there are max(m // p, 1)
    groups, and their sizes differ by one at most.

    A short last group instead would deadlock or stall: the ranks come back to a chunk before the
    microbatches have been round all p of them. Groups of at least p never do so, and keep the
    bubble of the paper.

    With p ranks, m >= p microbatches, v stages on each rank, g the size of the largest group (p
    where p divides m), and costs F and B for a rank's share of one microbatch: the bubble is
    (p-1)(F+B)/v, and rank r holds min(2(p-1-r) + (v-1)g + 1, mv) activations of single stages.

    Args:
      stages_per_rank: v, the stages on each rank; stage `s` is on rank `s % p`.

    >>> schedule = Interleaved1F1B(stages_per_rank=2)
    >>> for tasks in schedule.table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1
    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
    """

    stages_per_rank: int = 2

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Gives the tasks of each rank: see `Schedule.orders`."""
        groups = _groups(num_microbatches, max(num_microbatches // num_ranks, 1))
        largest = max(len(group) for group in groups)
        for rank in range(num_ranks):
            stages = range(rank, num_ranks * self.stages_per_rank, num_ranks)
            forwards = [Task(Kind.F, s, i) for group in groups for s in stages for i in group]
            backwards = [
                Task(Kind.B, s, i) for group in groups for s in reversed(stages) for i in group
            ]
            # The last rank may start its first backward once the largest group has reached the last
            # chunk; each rank before it runs two more, for the way there and back.
            warmup = 2 * (num_ranks - 1 - rank) + (self.stages_per_rank - 1) * largest
            if self.stages_per_rank == 1:
                warmup = num_ranks - 1 - rank  # plain 1F1B: as fast, and it holds less
            yield one_forward_one_backward(forwards, backwards, warmup)


def _groups(num_microbatches: int, num_groups: int) -> list[range]:
    """Cuts the microbatches into runs whose lengths differ by one at most, longer ones first."""
    bounds = [-(-num_microbatches * group // num_groups) for group in range(num_groups + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
