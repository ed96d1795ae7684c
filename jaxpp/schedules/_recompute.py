"""Recompute: any schedule, with activations computed again instead of kept."""

import dataclasses
from collections.abc import Iterable

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._catalogue import OneFOneB, by_name
from jaxpp.schedules._table import Table, Task


@dataclasses.dataclass(frozen=True)
class Recompute(Schedule):
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
    >>> by_name("jaxpp.schedules:Recompute(schedule='1f1b', stages=[0])") == schedule
    True
    """

    schedule: Schedule | str = OneFOneB()
    stages: Iterable[int] | None = None
    microbatches: Iterable[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", by_name(self.schedule))
        for name in ("stages", "microbatches"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(sorted(set(given))))
        object.__setattr__(self, "stages_per_rank", self._plain.stages_per_rank)

    @property
    def _plain(self) -> Schedule:
        assert not isinstance(self.schedule, str)
        return self.schedule

    def num_ranks(self, num_stages: int) -> int:
        """Returns the number of ranks: see `Schedule.num_ranks`."""
        return self._plain.num_ranks(num_stages)

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage: see `Schedule.placement`."""
        return self._plain.placement(num_ranks)

    def stage_inputs(self, num_ranks: int) -> tuple[tuple[int, ...], ...] | None:
        """Returns the stages that each stage reads from: see `Schedule.stage_inputs`."""
        return self._plain.stage_inputs(num_ranks)

    def orders(self, num_ranks: int, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        return self.table_for_ranks(num_ranks, num_microbatches).ranks

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Returns the table: see `Schedule.table`.

        Raises:
          ValueError: there is no such table, or it has no such stage or microbatch, or no backward.
        """
        table = self._plain.table(num_stages, num_microbatches)
        if table.forward_only:
            raise ValueError(
                f"{self._plain} has no backward, for which {type(self).__name__} could compute "
                f"activations again; use it as it is."
            )
        chosen = []
        for name, own, count in (
            ("stages", self.stages, num_stages),
            ("microbatches", self.microbatches, num_microbatches),
        ):
            chosen.append(set(range(count) if own is None else own))
            if wrong := chosen[-1] - set(range(count)):
                raise ValueError(
                    f"{type(self).__name__} is to compute {name} {sorted(wrong)} again, but the "
                    f"table has {count} {name}, numbered from 0; name some of these, or leave "
                    f"{name} out for all."
                )
        stages, microbatches = chosen
        return table.with_recomputation(
            lambda task: task.stage in stages and task.microbatch in microbatches
        )
