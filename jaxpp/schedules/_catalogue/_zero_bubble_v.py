"""ZB-V: zero bubble on a V, at the memory of 1F1B."""

import dataclasses
import itertools
from collections.abc import Iterator

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class ZeroBubbleV(Schedule):
    """Two stages on each rank, down the ranks and up again, so that no rank waits between tasks.

    Source: Qi et al., arXiv 2401.10241, section 6 (ZB-V), published for m >= 2p-1. With fewer
    microbatches the order here is that of 2p-1 microbatches without the missing ones.

    Rank r has the stages r and 2p-1-r, so that the first rank also has the last stage and starts
    the backward at once. With p ranks, m >= 2p-1 microbatches, and costs F, I and W for a rank's
    share of one microbatch, where F = I = W: no rank waits between its first task and its last; the
    ranks start one after the other, so the makespan is (p-1)F/2 more than m(F+I+W); and each rank
    holds the activations of p microbatches, as the first rank of 1F1B.

    >>> for tasks in ZeroBubbleV().table(num_stages=4, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2
    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2
    """

    stages_per_rank: int = dataclasses.field(default=2, init=False, repr=False)

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage: see `Schedule.placement`."""
        return (building_blocks.waves(num_ranks),)

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        for rank in range(num_ranks):
            order = _rank_order(rank, num_ranks, max(num_microbatches, 2 * num_ranks - 1))
            yield [task for task in order if task.microbatch < num_microbatches]


def _rank_order(rank: int, num_ranks: int, num_microbatches: int) -> list[Task]:
    """Returns the order of a rank, for at least 2p-1 microbatches."""
    above, below = rank, num_ranks - rank
    # The microbatches that are not yet under way when the steady phase begins.
    fresh = num_microbatches - (2 * below - 1) - above
    words = [
        *("F0",) * (2 * below - 1),
        *("F1", "F0") * above,
        *("F1", "I1", "W1") * below,
        *("F0", "I0", "W0", "F1", "I1", "W1") * fresh,
        *("I0", "W0", "F1", "I1", "W1") * (num_microbatches - num_ranks - fresh),
        *("I0", "I1") * above,
        *("I0", "W0") * below,
        *("W1",) * above,
        *("W0",) * above,
    ]
    stages = {"0": rank, "1": 2 * num_ranks - 1 - rank}
    microbatch = {word: itertools.count() for word in words}
    return [Task(Kind(word[0]), stages[word[1]], next(microbatch[word])) for word in words]
