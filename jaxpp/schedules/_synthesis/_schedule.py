"""`Synthesized`: the schedule that `synthesize` makes for the stages of a function."""

import dataclasses
import functools
import math

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._costs import Costs, Memory
from jaxpp.schedules._synthesis._synthesize import Synthesis, synthesize
from jaxpp.schedules._table import Table, Task


@dataclasses.dataclass(frozen=True)
class Synthesized(Schedule):
    """The table that `synthesize` makes for these costs, and for the stages of a function.

    `jaxpp.schedule` tells it which stage reads which. So stages of two towers, which read nothing
    of each other, run at the same time.

    Args:
      costs: the time of tasks and transfers.
      rank_of: the rank of each stage; by default stage `s` is on rank `s`.
      memory: what tasks hold; by default activations.
      memory_limit: the most that a rank may hold.
      split_backward: whether backwards may be run as their halves.
      recompute: whether activations may be computed again: see `synthesize`, as for the next three.
      offload: whether they may be offloaded.
      gather: whether the table has windows of gathers.
      reduce: whether it has windows of reductions.
      evaluations: how long to search: see `SearchOptions`.
      graph: for each stage the stages that it reads from, where no function says it; by default the
        one before.

    >>> towers = Synthesized(Costs(latency=0.1), graph=((), (0,), (), (1, 2)))
    >>> towers.synthesis(num_stages=4, num_microbatches=8).value
    26.2
    >>> print(*towers.table(num_stages=4, num_microbatches=2).ranks[3])
    F3.0 I3.0 F3.1 I3.1 W3.0 W3.1
    """

    costs: Costs = Costs()
    rank_of: tuple[int, ...] = ()
    memory: Memory | None = dataclasses.field(default=None, kw_only=True)
    memory_limit: float = dataclasses.field(default=math.inf, kw_only=True)
    split_backward: bool = dataclasses.field(default=True, kw_only=True)
    recompute: bool = dataclasses.field(default=False, kw_only=True)
    offload: bool = dataclasses.field(default=False, kw_only=True)
    gather: bool = dataclasses.field(default=False, kw_only=True)
    reduce: bool = dataclasses.field(default=False, kw_only=True)
    evaluations: int = dataclasses.field(default=2000, kw_only=True)
    graph: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank_of", tuple(self.rank_of))
        object.__setattr__(self, "graph", tuple(map(tuple, self.graph)))
        if self.rank_of:
            most = -(-len(self.rank_of) // (1 + max(self.rank_of)))
            object.__setattr__(self, "stages_per_rank", most)

    def synthesis(self, num_stages: int, num_microbatches: int) -> Synthesis:
        """Returns the table with its time, and the bound of any table.

        Raises:
          ValueError: `rank_of` or `graph` is for another number of stages, or nothing fits.
        """
        self.num_ranks(num_stages)
        return _synthesis(self, num_stages, num_microbatches)

    def for_graph(self, stage_inputs: tuple[tuple[int, ...], ...]) -> "Synthesized":
        """Returns the schedule for stages that read from these: see `Schedule.for_graph`."""
        return dataclasses.replace(self, graph=stage_inputs)

    def stage_inputs(self, num_ranks: int) -> tuple[tuple[int, ...], ...] | None:
        """Returns the stages that each stage reads from: see `Schedule.stage_inputs`."""
        return self.graph or None

    def num_ranks(self, num_stages: int) -> int:
        """Returns the number of ranks: see `Schedule.num_ranks`.

        Raises:
          ValueError: `rank_of` or `graph` is for another number of stages.
        """
        for name in ("rank_of", "graph"):
            own = getattr(self, name)
            if own and len(own) != num_stages:
                raise ValueError(
                    f"Synthesized has a {name} for {len(own)} stages, got {num_stages} stages; "
                    f"give it for these, or leave it out."
                )
        return 1 + max(self.rank_of) if self.rank_of else super().num_ranks(num_stages)

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage: see `Schedule.placement`."""
        return (self.rank_of,) if self.rank_of else super().placement(num_ranks)

    def orders(self, num_ranks: int, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        return self.synthesis(len(self.rank_of) or num_ranks, num_microbatches).table.ranks

    def table_for_ranks(self, num_ranks: int, num_microbatches: int) -> Table:
        """Returns the table of the ranks: see `Schedule.table_for_ranks`."""
        return self.table(len(self.rank_of) or num_ranks, num_microbatches)


@functools.lru_cache(maxsize=64)
def _synthesis(schedule: Synthesized, num_stages: int, num_microbatches: int) -> Synthesis:
    """Makes a table once, however often a function is traced."""
    return synthesize(
        schedule.costs,
        schedule.rank_of or tuple(range(num_stages)),
        num_microbatches,
        memory=schedule.memory,
        memory_limit=schedule.memory_limit,
        stage_inputs=schedule.graph or None,
        split_backward=schedule.split_backward,
        recompute=schedule.recompute,
        offload=schedule.offload,
        gather=schedule.gather,
        reduce=schedule.reduce,
        evaluations=schedule.evaluations,
    )
