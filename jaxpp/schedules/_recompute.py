"""Recompute: any schedule, with activations computed again instead of kept."""

import dataclasses
from collections.abc import Iterable

from jaxpp.schedules._table import Table
from jaxpp.schedules._varied import Varied


@dataclasses.dataclass(frozen=True)
class Recompute(Varied):
    """A schedule whose ranks drop activations, and compute them again before the backward.

    Source: Chen et al., arXiv 1604.06174, section 4, with a stage as the segment. Each `R` stands
    right before its backward, as `Table.with_recomputation` puts it: a rank that waits for a
    gradient recomputes meanwhile. The rank then holds the activations of one microbatch, and the
    stages' inputs of the others.

    Args:
      schedule: the schedule, or its name for `by_name`.
      stages: the stages whose activations are computed again; by default all.
      microbatches: the microbatches whose activations these are; by default all.

    Raises:
      ValueError: there is no such schedule.

    >>> schedule = Recompute("1f1b", stages=[0])
    >>> for tasks in schedule.table(num_stages=2, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 R0.0 B0.0 F0.2 R0.1 B0.1 R0.2 B0.2
    F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
    >>> from jaxpp.schedules import by_name
    >>> by_name("jaxpp.schedules:Recompute(schedule='1f1b', stages=[0])") == schedule
    True
    """

    microbatches: Iterable[int] | None = None

    def varied(self, table: Table) -> Table:
        """Returns the schedule's table with an `R` for each activation that is dropped."""
        stages = self.chosen("stages", table.num_stages)
        microbatches = self.chosen("microbatches", table.num_microbatches)
        return table.with_recomputation(
            lambda task: task.stage in stages and task.microbatch in microbatches
        )
