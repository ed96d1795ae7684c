"""Forward passes alone: evaluation and inference."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class ForwardOnly(Schedule):
    """Forward passes alone, chunk by chunk, for a function that is not differentiated.

    With p ranks, m microbatches, v stages on each rank and cost F for a rank's share of one
    microbatch, the bubble is (p-1)F/v where m >= p. On a V it is (p-1)F, since the last microbatch
    goes up through all ranks again. A rank holds one activation at a time.

    Args:
      stages_per_rank: v, the stages on each rank; stage `s` is on rank `s % p`.
      like: a schedule to take the placement and the stages per rank from, so that an evaluation
        runs where training keeps the parameters. Of two directions, it takes the first.

    >>> for tasks in ForwardOnly().table(num_stages=2, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F0.2
    F1.0 F1.1 F1.2
    >>> from jaxpp.schedules import VHalf
    >>> for tasks in ForwardOnly(like=VHalf()).table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F3.0 F3.1
    F1.0 F1.1 F2.0 F2.1
    """

    stages_per_rank: int = 1
    like: Schedule | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.like is not None:
            own = self.like.stages_per_rank
            if self.stages_per_rank not in (1, own):
                raise ValueError(
                    f"ForwardOnly has stages_per_rank={self.stages_per_rank}, but {self.like}, "
                    f"which it is to be like, has {own}; leave stages_per_rank out."
                )
            object.__setattr__(self, "stages_per_rank", own)
        super().__post_init__()

    def num_ranks(self, num_stages: int) -> int:
        """Returns the number of ranks for a number of stages: see `Schedule.num_ranks`."""
        if self.like is None:
            return super().num_ranks(num_stages)
        return self.like.num_ranks(num_stages)

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage: see `Schedule.placement`."""
        if self.like is None:
            return (building_blocks.loop(num_ranks, self.stages_per_rank),)
        return self.like.placement(num_ranks)[:1]

    def for_graph(self, stage_inputs: tuple[tuple[int, ...], ...]) -> Schedule:
        """Returns the schedule for stages that read from these: see `Schedule.for_graph`."""
        like = None if self.like is None else self.like.for_graph(stage_inputs)
        return dataclasses.replace(self, like=like)

    def stage_inputs(self, num_ranks: int) -> tuple[tuple[int, ...], ...] | None:
        """Returns the stages that each stage reads from: see `Schedule.stage_inputs`."""
        return None if self.like is None else self.like.stage_inputs(num_ranks)

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        (ranks,) = self.placement(num_ranks)
        for rank in range(num_ranks):
            stages = [stage for stage, home in enumerate(ranks) if home == rank]
            yield [Task(Kind.F, s, i) for s in stages for i in range(num_microbatches)]
