"""Chimera: two 1F1B pipelines in opposite directions, one in the bubbles of the other."""

import dataclasses

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class Chimera(Schedule):
    """Two 1F1B pipelines that run through the ranks in opposite directions.

    Source: Li and Hoefler, arXiv 2107.06925, section 3: the merge of two 1F1B pipelines, and for
    more than p microbatches its "direct concatenation". A stage is on two ranks, each with a copy
    of its parameters. The microbatches come in units of p, of which the first half goes down the
    ranks and the second half up; the last unit may be smaller, and where it is odd, one more goes
    down.

    With p ranks, m a multiple of p, and costs F and B of a stage for one microbatch: the bubble is
    (p-2)(min(F,B)+|B-F|m/p), so (p-2)F where both cost the same, and (p-2)B where m = p and B >= F.
    Where B is twice F it grows with m, and beyond m = p(2p-1)/(p-2) that of 1F1B is smaller. Rank r
    holds the activations of p/2+1+min(r, p-1-r) microbatches where m >= p.

    >>> table = Chimera().table(num_stages=4, num_microbatches=4)
    >>> for tasks in table.ranks:
    ...     print(*tasks)
    F0.0 F0.1 F3.2 B3.2 F3.3 B3.3 B0.0 B0.1
    F1.0 F2.2 F1.1 F2.3 B2.2 B1.0 B2.3 B1.1
    F1.2 F2.0 F1.3 F2.1 B2.0 B1.2 B2.1 B1.3
    F0.2 F0.3 F3.0 B3.0 F3.1 B3.1 B0.2 B0.3
    >>> table.directions
    ((0, 1, 2, 3), (3, 2, 1, 0))
    """

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage for each direction: see `Schedule.placement`."""
        down = building_blocks.loop(num_ranks)
        return down, down[::-1]

    def broken_rule(self, num_ranks: int, num_microbatches: int) -> str | None:
        """Names the rule that a size breaks: see `Schedule.broken_rule`."""
        return "num_ranks to be even" if num_ranks % 2 else None

    def direction_of(self, num_ranks: int, num_microbatches: int) -> list[int]:
        """Returns for each microbatch its direction: see `Schedule.direction_of`."""
        return [taken for taken, _, _ in building_blocks.turns(2, num_ranks, num_microbatches)]

    def orders(self, num_ranks: int, num_microbatches: int) -> list[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        return building_blocks.merge_pipelines(self.placement(num_ranks), num_microbatches)
