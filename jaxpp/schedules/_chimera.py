"""Chimera: two 1F1B pipelines in opposite directions, one in the bubbles of the other."""

import dataclasses
from collections.abc import Sequence

from jaxpp.schedules import _placements
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Kind, Task


@dataclasses.dataclass(frozen=True)
class Chimera(Schedule):
    """Two 1F1B pipelines that run through the ranks in opposite directions.

    Source: Li and Hoefler, arXiv 2107.06925, section 3: the merge of two 1F1B pipelines, and for
    more than p microbatches its "direct concatenation". A stage is on two ranks, each with a copy
    of its parameters. The microbatches come in units of p, of which the first half goes down the
    ranks and the second half up; the last unit may be smaller, and where it is odd, one more goes
    down.

    With p ranks, m a multiple of p, and costs F and B of a stage for one microbatch: the bubble is
    (p-2)(min(F,B)+|B-F|m/p), so (p-2)F where both cost the same, and (p-2)B where m = p and B >= F.
    Where B is twice F it grows with m, and beyond m = p(2p-1)/(p-2) that of 1F1B is smaller. Rank r
    holds the activations of p/2+1+min(r, p-1-r) microbatches where m >= p.

    >>> table = Chimera().table(num_stages=4, num_microbatches=4)
    >>> for tasks in table.ranks:
    ...     print(*tasks)
    F0.0 F0.1 F3.2 B3.2 F3.3 B3.3 B0.0 B0.1
    F1.0 F2.2 F1.1 F2.3 B2.2 B1.0 B2.3 B1.1
    F1.2 F2.0 F1.3 F2.1 B2.0 B1.2 B2.1 B1.3
    F0.2 F0.3 F3.0 B3.0 F3.1 B3.1 B0.2 B0.3
    >>> table.directions
    ((0, 1, 2, 3), (3, 2, 1, 0))
    """

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Gives the rank of each stage for each direction: see `Schedule.placement`."""
        down = _placements.loop(num_ranks)
        return down, down[::-1]

    def broken_rule(self, num_ranks: int, num_microbatches: int) -> str | None:
        """Names the rule that a size breaks: see `Schedule.broken_rule`."""
        return "num_ranks to be even" if num_ranks % 2 else None

    def orders(self, num_ranks: int, num_microbatches: int) -> list[list[Task]]:
        """Gives the tasks of each rank: see `Schedule.orders`."""
        return merge_pipelines(self.placement(num_ranks), num_ranks, num_microbatches)


def merge_pipelines(
    placement: Sequence[Sequence[int]], num_ranks: int, num_microbatches: int
) -> list[list[Task]]:
    """Merges pipelines that share the ranks, as Chimera and Hanayo do, slot by slot.

    A slot is the time of one task, forward or backward. A microbatch goes forward one stage a slot,
    then backward one stage a slot. The next one of its direction follows two slots later. A unit is
    as many microbatches as there are ranks, shared out among the directions. The next unit starts
    after as many slots as a rank has tasks in this one. Then no rank has two tasks in a slot: in
    the slots of one parity, each stage of a rank begins where another stage has ended, from one
    unit to the next.

    Args:
      placement: for each direction, the rank of each stage.
      num_ranks: the number of ranks.
      num_microbatches: the number of microbatches.

    Returns:
      For each rank, its tasks by slot.

    >>> for tasks in merge_pipelines([(0, 1, 1, 0)], 2, 2):
    ...     print(*tasks)
    F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1
    F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1
    """
    num_stages = len(placement[0])
    slots: list[list[tuple[int, Task]]] = [[] for _ in range(num_ranks)]
    for microbatch in range(num_microbatches):
        unit, place = divmod(microbatch, num_ranks)
        size = min(num_ranks, num_microbatches - unit * num_ranks)
        direction, place = divmod(place, -(-size // len(placement)))
        start = 2 * num_stages * unit + 2 * place
        for stage, rank in enumerate(placement[direction]):
            slots[rank].append((start + stage, Task(Kind.F, stage, microbatch)))
            turn = start + 2 * num_stages - 1
            slots[rank].append((turn - stage, Task(Kind.B, stage, microbatch)))
    return [[task for _, task in sorted(own, key=lambda entry: entry[0])] for own in slots]
