"""Schedules of your own without a class: from lists of tasks, or from a table."""

import dataclasses
import re
from collections.abc import Iterable

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._kinds import Kind, listed
from jaxpp.schedules._table import Table, Task

_STAGE_FIRST = re.compile(r"(\d+)([A-Z])(\d+)")


@dataclasses.dataclass(frozen=True)
class FromTable(Schedule):
    """A schedule of one size: the table that it was made from.

    The table may come from a list of tasks (`from_tasks`), a file (`from_csv`), or another program.
    `check` says whether it can be run.

    Args:
      given: the table.

    >>> table = from_tasks([["F0.0", "B0.0"], ["F1.0", "B1.0"]])
    >>> schedule = FromTable(table)
    >>> schedule
    FromTable(2 ranks, 2 stages, 1 microbatches)
    >>> schedule.table(num_stages=2, num_microbatches=1) is table
    True
    """

    given: Table

    def __post_init__(self) -> None:
        most = -(-self.given.num_stages // max(1, self.given.num_ranks))
        object.__setattr__(self, "stages_per_rank", most)

    def __repr__(self) -> str:
        given = self.given
        return (
            f"FromTable({given.num_ranks} ranks, {given.num_stages} stages, "
            f"{given.num_microbatches} microbatches)"
        )

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Returns the table, which must be of this size.

        Args:
          num_stages: the number of stages of the table.
          num_microbatches: the number of microbatches of the table.

        Raises:
          ValueError: the table is of another size.
        """
        given = self.given
        if (num_stages, num_microbatches) != (given.num_stages, given.num_microbatches):
            raise ValueError(
                f"{self} has a table for {given.num_stages} stages and {given.num_microbatches} "
                f"microbatches only, got {num_stages} stages and {num_microbatches} microbatches; "
                f"use that size, give a table for this one, or a schedule with a rule for all."
            )
        return given

    def num_ranks(self, num_stages: int) -> int:
        """Returns the number of ranks of the table."""
        return self.given.num_ranks

    def table_for_ranks(self, num_ranks: int, num_microbatches: int) -> Table:
        """Returns the table, which must be of this size."""
        given = self.given
        if num_ranks != given.num_ranks:
            raise ValueError(f"{self} is for {given.num_ranks} ranks, got {num_ranks}; use those.")
        return self.table(given.num_stages, num_microbatches)

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage, for each direction of the table."""
        return self.given.directions

    def stage_inputs(self, num_ranks: int) -> tuple[tuple[int, ...], ...] | None:
        """Returns the stages that each stage of the table reads from."""
        return self.given.stage_inputs

    def orders(self, num_ranks: int, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
        """Returns the tasks of each rank of the table."""
        return self.given.ranks


def from_tasks(
    ranks: Iterable[Iterable[Task | str]],
    *,
    placement: Iterable[Iterable[int]] = (),
    stage_inputs: Iterable[Iterable[int]] | None = None,
    overlaps: Iterable[Task | str] = (),
    direction_of: Iterable[int] = (),
) -> Table:
    """Makes a table from the tasks of each rank, with as many stages and microbatches as they name.

    A task may be written as it prints, `"F2.5"`, or as torch writes it, stage first, `"2F5"`.

    Args:
      ranks: for each rank, its tasks in order.
      placement: for each direction, the rank of each stage: see `Table`.
      stage_inputs: for each stage, the stages whose results it reads: see `Table`.
      overlaps: the tasks that run together with the next one of their rank.
      direction_of: for each microbatch, the number of its direction, where there are several.

    Returns:
      The table, not yet checked: `check` does that, and `jaxpp.schedule` calls it.

    Raises:
      ValueError: there is no task at all, or one cannot be read.

    >>> table = from_tasks([["F0.0", "F0.1", "B0.0", "B0.1"], ["1F0", "1B0", "1F1", "1B1"]])
    >>> print(*table.ranks[1])
    F1.0 B1.0 F1.1 B1.1
    >>> table.num_stages, table.num_microbatches
    (2, 2)
    """
    orders = tuple(
        tuple(_task(task, f"in place {n} of rank {rank}") for n, task in enumerate(order))
        for rank, order in enumerate(ranks)
    )
    tasks = [task for order in orders for task in order]
    if not tasks:
        raise ValueError(
            f"a table needs tasks, got {len(orders)} ranks without any; give each rank a list such "
            f'as ["F0.0", "B0.0"].'
        )
    return Table(
        orders,
        1 + max(task.stage for task in tasks),
        1 + max(task.microbatch for task in tasks),
        tuple(map(tuple, placement)),
        None if stage_inputs is None else tuple(map(tuple, stage_inputs)),
        frozenset(_task(task, "of the overlaps") for task in overlaps),
        tuple(direction_of),
    )


def _task(task: Task | str, where: str) -> Task:
    if isinstance(task, Task):
        return task
    if isinstance(task, str):
        stage_last = _STAGE_FIRST.sub(r"\2\1.\3", task.strip())
        if found := Task.from_text(stage_last):
            return found
    raise ValueError(
        f"{task!r} {where} is no task; write a Task, or a kind of {listed(Kind)} with its "
        f'stage and microbatch, as "F2.5" or, stage first, "2F5".'
    )
