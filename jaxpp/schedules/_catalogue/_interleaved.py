"""Interleaved 1F1B: several stages on each rank, for a smaller bubble."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class Interleaved1F1B(Schedule):
    """1F1B over several stages on each rank, which divides the bubble by the number of stages.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2. The microbatches go through the chunks
    of a rank in groups: all of a group through one chunk, then through the next. The paper has
    groups of p microbatches, and p must divide m. Here m may be anything: there are max(m // p, 1)
    groups, and their sizes differ by one at most.

    A short last group would deadlock or stall: the ranks would come back to a chunk before the
    microbatches have been round all p ranks. Groups of at least p do not stall, and keep the bubble
    of the paper.

    With p ranks, m >= p microbatches, v stages on each rank, g the size of the largest group (p
    where p divides m), and costs F and B for a rank's share of one microbatch: the bubble is
    (p-1)(F+B)/v, and rank r holds min(2(p-1-r) + (v-1)g + 1, mv) activations of single stages.

    Args:
      stages_per_rank: v, the stages on each rank; stage `s` is on rank `s % p`.
      extra_warmup: forwards that each rank runs ahead of the paper's order. Each holds one more
        activation, and leaves the bubble as it is. With 1, as in Kimi K2 (arXiv 2507.20534, section
        2.4.2), no backward comes right after the forward that it waits for, so that of the two one
        can compute while the other communicates.
      group_size: the fewest microbatches in a group, at least p: by default p. Larger ones, up to
        m, hold more and send less often back and forth between chunks (Llama 3, arXiv 2407.21783,
        section 3.3.2).

    >>> schedule = Interleaved1F1B(stages_per_rank=2)
    >>> for tasks in schedule.table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1
    F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1
    """

    stages_per_rank: int = 2
    extra_warmup: int = dataclasses.field(default=0, kw_only=True)
    group_size: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extra_warmup < 0:
            raise ValueError(
                f"Interleaved1F1B needs extra_warmup to be at least 0, got {self.extra_warmup}; "
                f"with fewer forwards ahead, the last rank would wait for its own; use 0."
            )

    def broken_rule(self, num_ranks: int, num_microbatches: int) -> str | None:
        """Names the rule that a size breaks: see `Schedule.broken_rule`."""
        if self.group_size is not None and self.group_size < num_ranks:
            return "a group_size of no less than the number of ranks"
        return None

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        v = self.stages_per_rank
        groups = building_blocks.split_in_groups(num_microbatches, self.group_size or num_ranks)
        for rank in range(num_ranks):
            forwards, backwards = building_blocks.interleave(rank, num_ranks, v, groups)
            # The last rank may start its first backward once the largest group has reached the last
            # chunk. Each rank before it runs two more forwards, for the way there and back.
            warmup = 2 * (num_ranks - 1 - rank) + (v - 1) * len(groups[0])
            if v == 1:
                warmup = num_ranks - 1 - rank  # plain 1F1B is as fast, and holds less
            yield building_blocks.one_forward_one_backward(
                forwards, backwards, warmup + self.extra_warmup
            )
