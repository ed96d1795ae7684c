"""Seq1F1B: 1F1B over slices of the sequence."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class Seq1F1B(Schedule):
    """1F1B whose unit is a slice of a microbatch's sequence, for a smaller bubble and less memory.

    Source: Sun et al., arXiv 2406.03488, section 3. The sequence is cut in k slices; each attends
    to itself and to those before it, as in a causal model. Slice j on the layers of rank r is stage
    jp + r. It reads the output of rank r - 1 for that slice. It also reads the keys and values that
    rank r made of the slices before it, which come with the last of these. The microbatches go in
    order; the slices of one go forward in order, and backward in the reverse order. This is the
    paper's partially ordered queue.

    With p ranks, m microbatches, and costs F and B of a rank's layers for one microbatch, the same
    for each slice: the bubble is (p-1)(F+B)/k, and rank r holds min(p-1-r+k, mk) activations of
    single slices.

    Args:
      slices: k, the slices of a sequence.

    >>> schedule = Seq1F1B(slices=2)
    >>> for tasks in schedule.table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F2.0 F0.1 B2.0 F2.1 B0.0 B2.1 B0.1
    F1.0 F3.0 B3.0 F1.1 B1.0 F3.1 B3.1 B1.1
    >>> schedule.stage_inputs(2)
    ((), (0,), (0,), (2, 1))
    """

    slices: int = 2

    def __post_init__(self) -> None:
        if not (type(self.slices) is int and self.slices >= 1):
            raise ValueError(
                f"Seq1F1B needs slices to be an integer of at least 1, got {self.slices!r}; use 1 "
                f"for whole sequences."
            )
        object.__setattr__(self, "stages_per_rank", self.slices)

    def stage_inputs(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the stages that each stage reads from: see `Schedule.stage_inputs`."""
        return tuple(
            (*([stage - 1] if stage % num_ranks else []), *([stage - num_ranks] if j else []))
            for j in range(self.slices)
            for stage in range(j * num_ranks, (j + 1) * num_ranks)
        )

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        for rank in range(num_ranks):
            stages = range(rank, num_ranks * self.slices, num_ranks)
            microbatches = range(num_microbatches)
            forwards = [(s, i) for i in microbatches for s in stages]
            backwards = [(s, i) for i in microbatches for s in reversed(stages)]
            # The first backward is that of the last slice, which the last rank must have reached.
            warmup = num_ranks - 1 - rank + self.slices - 1
            yield building_blocks.one_forward_one_backward(forwards, backwards, warmup)
