"""DualPipe: forwards and backwards overlap, from both ends of the pipeline or folded on a V."""

import abc
import collections
import dataclasses
from collections.abc import Iterator

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class _EightSteps(Schedule):
    """The common part of both forms: `_ranks` gives each rank's tasks, and those that overlap."""

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        for order, _ in self._ranks(num_ranks, num_microbatches):
            yield order

    def overlaps(self, num_ranks: int, num_microbatches: int) -> Iterator[Task]:
        """Returns the forwards that run together with a backward: see `Schedule.overlaps`."""
        for _, overlaps in self._ranks(num_ranks, num_microbatches):
            yield from overlaps

    @abc.abstractmethod
    def _ranks(
        self, num_ranks: int, num_microbatches: int
    ) -> Iterator[tuple[list[Task], list[Task]]]: ...


@dataclasses.dataclass(frozen=True)
class DualPipe(_EightSteps):
    """Microbatches from both ends, and forwards that run together with backwards.

    Source: DeepSeek-AI, arXiv 2412.19437, section 3.2.1, and the code at
    github.com/deepseek-ai/DualPipe, whose eight steps are followed one by one. A stage is on two
    ranks, each with a copy of its parameters: the first half of the microbatches goes down the
    ranks, the second half up.

    With p ranks, an even number m >= 2p of microbatches, costs F, I, W and B = I + W of a stage for
    one microbatch, and F&B the time of a forward and a backward that overlap: the bubble is
    (p/2-1)(F&B+B-3W), exactly so where F = I >= W and F&B = F + B, and each rank holds the
    activations of p+1 microbatches.

    >>> table = DualPipe().table(num_stages=2, num_microbatches=4)
    >>> for tasks in table.ranks:
    ...     print(*tasks)
    F0.0 F1.2 F0.1 B1.2 F1.3 B0.0 B1.3 I0.1 W0.1
    F0.2 F1.0 F0.3 B1.0 F1.1 B0.2 B1.1 I0.3 W0.3
    >>> table.directions
    ((0, 1), (1, 0))
    >>> print(*sorted(map(str, table.overlaps)))
    F1.1 F1.3
    """

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage for each direction: see `Schedule.placement`."""
        down = building_blocks.loop(num_ranks)
        return down, down[::-1]

    def broken_rule(self, num_ranks: int, num_microbatches: int) -> str | None:
        """Names the rule that a size breaks: see `Schedule.broken_rule`."""
        if num_ranks % 2:
            return "num_ranks to be even"
        if num_microbatches % 2 or num_microbatches < 2 * num_ranks:
            return "num_microbatches to be even and at least twice the ranks"
        return None

    def direction_of(self, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
        """Returns for each microbatch its direction: see `Schedule.direction_of`."""
        half = num_microbatches // 2
        return (0,) * half + (1,) * half

    def _ranks(self, num_ranks: int, num_microbatches: int):
        depth, half = num_ranks // 2, num_microbatches // 2
        for rank in range(num_ranks):
            # Phase 0 of a rank is the direction that comes from the end nearer to the rank.
            near = min(rank, num_ranks - 1 - rank)
            stages = near, num_ranks - 1 - near
            firsts = (0, half) if rank < depth else (half, 0)
            yield _tasks(_steps(near, depth, half), stages, firsts)


@dataclasses.dataclass(frozen=True)
class DualPipeV(_EightSteps):
    """DualPipe folded: one direction on a V, so that no parameter is held twice.

    Source: the "cut-in-half" of Sea AI Lab (hackmd.io/@ufotalent/r1lVXsa9Jg), as in the code at
    github.com/deepseek-ai/DualPipe. Rank r has the stages r and 2p-1-r.

    With p ranks, m >= 2p microbatches, costs F, I, W and B = I + W for a rank's share of one
    microbatch, and F&B the time of a forward and a backward that overlap: the bubble is
    (p-1)(F&B+B-3W)/2, exactly so where F = I >= W and F&B = F + B, and each rank holds 2p+1
    activations of single stages, of which it has two.

    >>> table = DualPipeV().table(num_stages=4, num_microbatches=4)
    >>> for tasks in table.ranks:
    ...     print(*tasks)
    F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 F0.3 B3.1 F3.2 B0.0 B3.2 F3.3 B0.1 B3.3 I0.2 W0.2 I0.3 W0.3
    F1.0 F2.0 F1.1 F2.1 F1.2 B2.0 F2.2 B1.0 F1.3 B2.1 F2.3 B1.1 B2.2 B1.2 I2.3 I1.3 W2.3 W1.3
    """

    stages_per_rank: int = dataclasses.field(default=2, init=False, repr=False)

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage: see `Schedule.placement`."""
        return (building_blocks.waves(num_ranks),)

    def broken_rule(self, num_ranks: int, num_microbatches: int) -> str | None:
        """Names the rule that a size breaks: see `Schedule.broken_rule`."""
        if num_microbatches < 2 * num_ranks:
            return "num_microbatches to be at least twice the ranks"
        return None

    def _ranks(self, num_ranks: int, num_microbatches: int):
        for rank in range(num_ranks):
            stages = rank, 2 * num_ranks - 1 - rank
            yield _tasks(_steps(rank, num_ranks, num_microbatches), stages, (0, 0))


def _steps(rank: int, depth: int, count: int) -> list[str]:
    """Returns the eight steps of a rank: kind and phase of each task, `&` where two overlap.

    Args:
      rank: the place of the rank in its half of the ranks, 0 for the one that is nearest the end.
      depth: the number of ranks in that half.
      count: the microbatches of each phase.
    """
    inner = depth - 1 - rank  # the ranks between this one and the middle
    main = ["F0&B1", "F1&B0"] * (count - 2 * depth + rank + 1)
    if inner == 0:
        main[:1] = ["F0", "B1"]  # apart, as in the source, so that each result is sent at once
    late = ["1", "0"] * (rank + 1)
    return [
        *["F0"] * (2 * inner),
        *["F0", "F1"] * (rank + 1),
        *["I1", "W", "F1"] * inner,
        *main,
        *["B1", "F1&B0"] * inner,
        *[f"B{phase}" for phase in late[: rank + 1]],
        *[f"I{phase}" for phase in late[rank + 1 :]],
        *["W", "I0"] * inner,
        *["W"] * (rank + 1),
    ]


def _tasks(
    steps: list[str], stages: tuple[int, int], firsts: tuple[int, int]
) -> tuple[list[Task], list[Task]]:
    """Returns the tasks of a rank, and those that overlap with the next one.

    Args:
      steps: the steps of the rank.
      stages: its stage in each phase.
      firsts: the first microbatch of each phase.
    """
    forwards, backwards = list(firsts), list(firsts)
    pending: collections.deque[Task] = collections.deque()
    order: list[Task] = []
    overlaps: list[Task] = []
    for step in steps:
        for word in step.split("&"):
            kind = Kind(word[0])
            if kind is Kind.W:
                order.append(pending.popleft())
                continue
            phase = int(word[1])
            counter = forwards if kind is Kind.F else backwards
            order.append(Task(kind, stages[phase], counter[phase]))
            if kind is Kind.I:
                pending.append(Task(Kind.W, stages[phase], counter[phase]))
            counter[phase] += 1
        if "&" in step:
            overlaps.append(order[-2])
    return order, overlaps
