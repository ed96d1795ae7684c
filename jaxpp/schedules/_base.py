"""`Schedule`: the base of all schedules, frozen dataclasses that give a table for any size."""

import abc
import dataclasses
from collections.abc import Iterable

from jaxpp.schedules import building_blocks
from jaxpp.schedules._table import Table, Task


@dataclasses.dataclass(frozen=True)
class Schedule(abc.ABC):
    """A rule that orders the tasks of a pipeline: a value, compared and hashed by its fields.

    A new schedule is a frozen dataclass with one method, `orders`. If a rank runs several stages,
    it has the field `stages_per_rank`, too. If stage `s` is not on rank `s % p`, it has the method
    `placement`. If microbatches go in several directions, it has the method `direction_of`. If
    some sizes are not possible, it has the method `broken_rule`.

    >>> import dataclasses
    >>> from jaxpp.schedules import Kind
    >>> @dataclasses.dataclass(frozen=True)
    ... class OneAtATime(Schedule):
    ...     def orders(self, num_ranks, num_microbatches):
    ...         return [
    ...             [Task(kind, r, i) for i in range(num_microbatches) for kind in (Kind.F, Kind.B)]
    ...             for r in range(num_ranks)
    ...         ]
    >>> print(*OneAtATime().table(num_stages=2, num_microbatches=2).ranks[0])
    F0.0 B0.0 F0.1 B0.1
    """

    # No field of the dataclass: it would come before the fields of each schedule, by position, too.
    stages_per_rank = 1

    def __post_init__(self) -> None:
        if not is_integer(self.stages_per_rank):
            raise ValueError(
                f"{type(self).__name__} needs stages_per_rank to be an integer of at least 1, got "
                f"{self.stages_per_rank!r}; use 1 for one stage on each rank."
            )

    @abc.abstractmethod
    def orders(self, num_ranks: int, num_microbatches: int) -> Iterable[Iterable[Task]]:
        """Returns the tasks of each rank, in the order it runs them.

        Args:
          num_ranks: the number of ranks, at least 1.
          num_microbatches: the number of microbatches, at least 1.

        Returns:
          For each rank in turn, its tasks; the stages are numbered up to
          `num_ranks * stages_per_rank`.
        """

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage, for each direction in which microbatches go.

        By default there is one direction, and stage `s` is on rank `s % num_ranks`.

        Returns:
          A tuple for each direction, with the rank of each of the `num_ranks * stages_per_rank`
          stages. With one direction that is a tuple that holds one tuple.

        >>> from jaxpp.schedules import Interleaved1F1B
        >>> Interleaved1F1B(stages_per_rank=2).placement(4)
        ((0, 1, 2, 3, 0, 1, 2, 3),)
        """
        return (building_blocks.loop(num_ranks, self.stages_per_rank),)

    def for_graph(self, stage_inputs: tuple[tuple[int, ...], ...]) -> "Schedule":
        """Returns the schedule for stages that read from these; by default itself.

        `jaxpp.schedule` asks for it with what it finds in the function, and then for the table,
        which gets these stage inputs, whatever the schedule took them to be. An order that is right
        for a chain of stages is right for each graph whose stages read from earlier ones; a
        schedule that chooses its order by the graph has a method of its own.

        Args:
          stage_inputs: for each stage the stages that it reads from.

        >>> from jaxpp.schedules import OneFOneB
        >>> OneFOneB().for_graph(((), (), (0, 1)))
        OneFOneB()
        """
        return self

    def stage_inputs(self, num_ranks: int) -> tuple[tuple[int, ...], ...] | None:
        """Returns the stages that each stage reads from; by default the one before it.

        Returns:
          For each stage a tuple of numbers of stages: `((), (0,), (0, 1))` where the third stage
          reads from both others. None for the default.
        """
        return None

    def overlaps(self, num_ranks: int, num_microbatches: int) -> Iterable[Task]:
        """Returns the tasks that run together with the one after them; by default none."""
        return ()

    def direction_of(self, num_ranks: int, num_microbatches: int) -> Iterable[int]:
        """Returns for each microbatch the number of its direction, where there are several.

        Returns:
          As many numbers as microbatches, each a place in `placement`: `(0, 0, 1, 1)`.
        """
        return ()

    def broken_rule(self, num_ranks: int, num_microbatches: int) -> str | None:
        """Names the rule that a size breaks, as `"num_microbatches to be even"`; else None."""
        return None

    def num_ranks(self, num_stages: int) -> int:
        """Returns the number of ranks that this schedule puts a number of stages on.

        Args:
          num_stages: the number of stages; a multiple of `stages_per_rank`.

        Raises:
          ValueError: the stages do not divide among the ranks.

        >>> from jaxpp.schedules import Interleaved1F1B
        >>> Interleaved1F1B(stages_per_rank=2).num_ranks(8)
        4
        """
        if not is_integer(num_stages):
            raise ValueError(
                f"{self} needs num_stages to be an integer of at least 1, got {num_stages!r}; "
                f"use {self.stages_per_rank} for a single rank."
            )
        ranks, remainder = divmod(num_stages, self.stages_per_rank)
        if remainder:
            below, above = num_stages - remainder, num_stages - remainder + self.stages_per_rank
            near = " or ".join(
                f"{stages} stages on {ranks + n} rank{'s'[: ranks + n != 1]}"
                for n, stages in enumerate((below, above))
                if stages
            )
            raise ValueError(
                f"{self} needs num_stages divisible by its {self.stages_per_rank} stages_per_rank, "
                f"got {num_stages} stages; use {near}, or another schedule."
            )
        return ranks

    def table(self, num_stages: int, num_microbatches: int) -> Table:
        """Returns the table for a number of stages and microbatches.

        Args:
          num_stages: the number of stages; a multiple of `stages_per_rank`.
          num_microbatches: the number of microbatches, at least 1.

        Returns:
          The table, of `num_ranks(num_stages)` ranks.

        Raises:
          ValueError: there is no such table.

        >>> from jaxpp.schedules import GPipe
        >>> GPipe().table(num_stages=4, num_microbatches=8).num_ranks
        4
        """
        num_ranks = self.num_ranks(num_stages)
        if not is_integer(num_microbatches):
            raise ValueError(
                f"{self} needs num_microbatches to be an integer of at least 1, got "
                f"{num_microbatches!r}; use 1 to run the batch whole."
            )
        if rule := self.broken_rule(num_ranks, num_microbatches):
            raise ValueError(
                f"{self} needs {rule}, got {num_ranks} ranks and {num_microbatches} microbatches; "
                f"use {self._nearest_valid(num_ranks, num_microbatches)}."
            )
        orders = self.orders(num_ranks, num_microbatches)
        return Table(
            tuple(tuple(order) for order in orders),
            num_stages,
            num_microbatches,
            self.placement(num_ranks),
            self.stage_inputs(num_ranks),
            frozenset(self.overlaps(num_ranks, num_microbatches)),
            tuple(self.direction_of(num_ranks, num_microbatches)),
        )

    def table_for_ranks(self, num_ranks: int, num_microbatches: int) -> Table:
        """Returns the table for a number of ranks, each with all of its `stages_per_rank`.

        Args:
          num_ranks: the number of ranks.
          num_microbatches: the number of microbatches, at least 1.

        Raises:
          ValueError: there is no such table.

        >>> from jaxpp.schedules import Interleaved1F1B
        >>> Interleaved1F1B(stages_per_rank=2).table_for_ranks(4, num_microbatches=8).num_stages
        8
        """
        return self.table(num_ranks * self.stages_per_rank, num_microbatches)

    def _nearest_valid(self, num_ranks: int, num_microbatches: int) -> str:
        """Names the nearest valid sizes: fewer or more microbatches, or else ranks."""
        most = 4 * max(num_ranks, num_microbatches) + 64

        def near(number: int, valid) -> list[int]:
            below = next((n for n in range(number - 1, 0, -1) if valid(n)), None)
            above = next((n for n in range(number + 1, most + 1) if valid(n)), None)
            return [n for n in (below, above) if n is not None]

        found = near(num_microbatches, lambda m: not self.broken_rule(num_ranks, m))
        if found:
            return f"{' or '.join(map(str, found))} microbatches"
        found = near(
            num_ranks,
            lambda p: any(not self.broken_rule(p, num_microbatches + n) for n in range(4 * p)),
        )
        ranks = " or ".join(map(str, found))
        stages = " or ".join(str(p * self.stages_per_rank) for p in found)
        return f"{ranks} ranks ({stages} stages)" if found else "another schedule"


def is_integer(value: object, least: int = 1) -> bool:
    """Tells whether something is an integer of at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
