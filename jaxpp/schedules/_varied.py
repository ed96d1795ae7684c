"""`Varied`: any schedule, with tasks added to its table."""

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._catalogue import OneFOneB, by_name
from jaxpp.schedules._table import Table, Task


@dataclasses.dataclass(frozen=True)
class Varied(Schedule):
    """A schedule whose table has further tasks: the base of `Recompute` and its like."""

    # True where the further tasks serve the backward alone; no field of the dataclass.
    for_backward = True
    schedule: Schedule | str = OneFOneB()
    stages: Iterable[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", by_name(self.schedule))
        if not isinstance(self.schedule, Schedule):
            name = getattr(self.schedule, "__name__", "")
            raise TypeError(
                f"{type(self).__name__} takes a schedule or its name, got {self.schedule!r}; "
                f"write {name or 'OneFOneB'}()."
            )
        for name in ("stages", "microbatches"):
            if (given := getattr(self, name, None)) is not None:
                own: list[Any] = [*given] if isinstance(given, Iterable) else [None]
                if not all(hasattr(n, "__index__") for n in own):
                    raise ValueError(
                        f"{type(self).__name__} takes {name} as a list of numbers, got {given!r}; "
                        f"leave {name} out for all."
                    )
                object.__setattr__(self, name, tuple(sorted(set(own))))
        object.__setattr__(self, "stages_per_rank", self._plain.stages_per_rank)

    @property
    def _plain(self) -> Schedule:
        assert not isinstance(self.schedule, str)
        return self.schedule

    @abc.abstractmethod
    def varied(self, table: Table) -> Table:
        """Returns the schedule's table with the further tasks."""

    def num_ranks(self, num_stages: int) -> int:
        """Returns the number of ranks: see `Schedule.num_ranks`."""
        return self._plain.num_ranks(num_stages)

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage: see `Schedule.placement`."""
        return self._plain.placement(num_ranks)

    def for_graph(self, stage_inputs: tuple[tuple[int, ...], ...]) -> Schedule:
        """Returns the schedule for stages that read from these: see `Schedule.for_graph`."""
        return dataclasses.replace(self, schedule=self._plain.for_graph(stage_inputs))

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
        if table.forward_only and self.for_backward:
            raise ValueError(
                f"{self._plain} has no backward, for which {type(self).__name__} could keep less; "
                f"use it as it is."
            )
        return self.varied(table)

    def chosen(self, name: str, count: int) -> frozenset[int]:
        """Returns the stages or microbatches that a field names, or all of so many."""
        own = getattr(self, name)
        found = frozenset(range(count) if own is None else own)
        if wrong := found - frozenset(range(count)):
            raise ValueError(
                f"{type(self).__name__} names {name} {sorted(wrong)}, but the table has {count} "
                f"{name}, numbered from 0; name some of these, or leave {name} out for all."
            )
        return found
