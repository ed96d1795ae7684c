"""Hanayo: waves that go down the ranks and up again, without a second copy of any stage."""

import dataclasses

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class Hanayo(Schedule):
    """Chimera with its two directions folded into one wave, or cut finer into several.

    Source: Liu et al., arXiv 2308.15762, section 3: the stages go down the ranks and up again, once
    for each wave. The bubble is Chimera's, without its second copy of the parameters. The order is
    that of Chimera's unit of p microbatches on these stages. More microbatches come in units, one
    after the other; the last unit may be smaller.

    With p ranks, m a multiple of p, w waves, and costs F and B for a rank's share of one
    microbatch: the bubble is (p-1)(min(F,B)+|B-F|m/p)/w, so (p-1)F/w where both cost the same, and
    (p-1)B/w where m = p and B >= F. Where B is twice F it grows with m; that of `Interleaved1F1B`
    does not. Rank r holds 2wp-(p-1-r) activations of single stages where m >= p.

    Args:
      num_waves: w; a rank has 2w stages.

    >>> schedule = Hanayo(num_waves=2)
    >>> schedule.placement(2)
    ((0, 1, 1, 0, 0, 1, 1, 0),)
    >>> print(*schedule.table(num_stages=8, num_microbatches=2).ranks[0])
    F0.0 F0.1 F3.0 F4.0 F3.1 F4.1 F7.0 B7.0 F7.1 B7.1 B4.0 B3.0 B4.1 B3.1 B0.0 B0.1
    """

    num_waves: int = 1

    def __post_init__(self) -> None:
        if not (type(self.num_waves) is int and self.num_waves >= 1):
            raise ValueError(
                f"Hanayo needs num_waves to be an integer of at least 1, got {self.num_waves!r}; "
                f"use 1 for two stages on each rank."
            )
        object.__setattr__(self, "stages_per_rank", 2 * self.num_waves)

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage: see `Schedule.placement`."""
        return (building_blocks.waves(num_ranks, self.stages_per_rank),)

    def orders(self, num_ranks: int, num_microbatches: int) -> list[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        return building_blocks.merge_pipelines(self.placement(num_ranks), num_microbatches)
