"""`Windows`: how long ranks hold gathered parameters, and whole sums of gradients, as a choice."""

import dataclasses
from typing import Self

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._gather import Gather, Reduce
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table


@dataclasses.dataclass(frozen=True)
class Windows:
    """The time for which ranks hold gathered parameters, and whole sums: a choice of plans.

    Args:
      held: of how many stages a rank holds gathered parameters at once, as in `Gather`; None where
        no task gathers them.
      reduces: whether the sums of a stage are reduced after its last backward, as by `Reduce`, and
        not after all tasks.

    >>> from jaxpp.schedules import GPipe
    >>> table = GPipe().table(num_stages=1, num_microbatches=1)
    >>> for windows in Windows().choices(table, gather=True, reduce=False):
    ...     print(windows.held, *windows.added_to(table).ranks[0])
    None F0.0 B0.0
    0 G0.0 F0.0 H0.0 B0.0
    1 G0.0 F0.0 B0.0
    """

    held: int | None = dataclasses.field(default=None, kw_only=True)
    reduces: bool = dataclasses.field(default=False, kw_only=True)

    def choices(self, table: Table, gather: bool, reduce: bool) -> list[Self]:
        """Returns this with each of the windows that a table may have; those it has, it keeps.

        Sums of stages that two ranks have are reduced after all tasks.
        """
        most = max(len({task.stage for task in order}) for order in table.ranks)
        held, reduces = (None, *range(most + 1)) if gather else (None,), (False,)
        if Kind.G in table.kinds or Kind.H in table.kinds:
            held = (most if self.held is None else self.held,)
        if reduce and len(table.directions) == 1:
            reduces = (True,) if Kind.S in table.kinds else (False, True)
        return [dataclasses.replace(self, held=n, reduces=own) for n in held for own in reduces]

    def added_to(self, table: Table) -> Table:
        """Returns the table with these windows."""
        if self.held is not None:
            table = table.with_gathers(lambda _: True, self.held)
        return table.with_reductions(lambda _: True) if self.reduces else table

    def of(self, schedule: Schedule) -> Schedule:
        """Returns the schedule with these windows."""
        schedule = schedule if self.held is None else Gather(schedule, held=self.held)
        return Reduce(schedule) if self.reduces else schedule
