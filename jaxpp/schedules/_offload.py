"""Offload: any schedule, with activations in the memory of the host while nothing reads them."""

import dataclasses
import math

from jaxpp.schedules._base import is_integer
from jaxpp.schedules._table import Table
from jaxpp.schedules._varied import Varied


@dataclasses.dataclass(frozen=True)
class Offload(Varied):
    """A schedule whose ranks offload activations to the host, and load them for the backward.

    Source: Wan et al., arXiv 2503.01328 (PipeOffload), section 3.3, for any schedule. Each `O`
    stands right after a task that needs the activations, each `L` a number of tasks ahead of the
    next one that does, as `Table.with_offload` puts them. Both run on the copy lane of the rank,
    beside the tasks that compute: a backward waits for its `L` alone. They move what the stage
    keeps for its backward, what it has received among that, but no parameters, and nothing that
    other stages of the rank read.

    Args:
      schedule: the schedule, or its name for `by_name`.
      stages: the stages whose activations are offloaded; by default all.
      share: the share of each stage's bytes that is offloaded: that of so many microbatches, evenly
        among all.
      ahead: the number of computing tasks that the rank runs between an `L` and its backward: the
        time for the copy. Activations that are needed no later than that stay on the device.

    Raises:
      ValueError: there is no such schedule; `share` is not above 0 and at most 1, or `ahead` is
        below 0.

    >>> schedule = Offload("1f1b", stages=[0])
    >>> for tasks in schedule.table(num_stages=3, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 O0.0 F0.1 O0.1 L0.0 F0.2 O0.2 L0.1 B0.0 L0.2 B0.1 B0.2
    F1.0 F1.1 B1.0 F1.2 B1.1 B1.2
    F2.0 B2.0 F2.1 B2.1 F2.2 B2.2
    """

    share: float = 1.0
    ahead: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1 or not is_integer(self.ahead, 0):
            raise ValueError(
                f"Offload takes a share above 0 and at most 1, and an integer ahead of at least 0, "
                f"got share={self.share} and ahead={self.ahead}; use the schedule itself to "
                f"offload nothing."
            )

    def varied(self, table: Table) -> Table:
        """Returns the schedule's table with an `O` and an `L` for each activation that moves."""
        stages = self.chosen("stages", table.num_stages)
        before = [math.floor(i * self.share + 1e-9) for i in range(table.num_microbatches + 1)]
        return table.with_offload(
            lambda task: (
                task.stage in stages and before[task.microbatch] < before[task.microbatch + 1]
            ),
            self.ahead,
        )
