"""Gather and Reduce: any schedule, with collectives of a stage as tasks of its own."""

import dataclasses

from jaxpp.schedules._base import is_integer
from jaxpp.schedules._table import Table
from jaxpp.schedules._varied import Varied


@dataclasses.dataclass(frozen=True)
class Gather(Varied):
    """A schedule whose ranks gather the parameters of a stage once for several of its tasks.

    For parameters that are split inside a rank (`place(..., zero3=)`), which each task gathers and
    drops by itself otherwise (Rajbhandari et al., arXiv 1910.02054, section 5.3). It is what
    `reshard_after_forward` and the actions `UNSHARD` and `RESHARD` are to PyTorch. Each `G` or `H`
    runs on the collective lane of the rank, beside the tasks that compute, and the gathered
    parameters are dropped after the last task that reads them, as `Table.with_gathers` says.

    Args:
      schedule: the schedule, or its name for `by_name`.
      stages: the stages whose parameters these are; by default all.
      held: how many stages' parameters a rank holds gathered at once. By default all: each is
        gathered once a step. With 1, a stage is gathered once for each run of its tasks, as in
        breadth-first schedules (`GPipe(stages_per_rank=...)`); with 0, for each task.
      ahead: the number of computing tasks that the rank runs between a gather and its first reader:
        the time for the collective, for which it holds one stage more.

    Raises:
      ValueError: there is no such schedule, or `held` or `ahead` is below 0.

    >>> for held in (None, 1, 0):
    ...     print(*Gather("gpipe", held=held).table(num_stages=1, num_microbatches=2).ranks[0])
    G0.0 F0.0 F0.1 B0.0 B0.1
    G0.0 F0.0 F0.1 B0.0 B0.1
    G0.0 F0.0 G0.1 F0.1 H0.0 B0.0 H0.1 B0.1
    """

    for_backward = False
    held: int | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.held is None or is_integer(self.held, 0)) or not is_integer(self.ahead, 0):
            raise ValueError(
                f"Gather takes integers held and ahead of at least 0, got held={self.held!r} and "
                f"ahead={self.ahead!r}; leave held out to gather once a step."
            )

    def varied(self, table: Table) -> Table:
        """Returns the schedule's table with a `G` or an `H` where a stage is gathered."""
        stages = self.chosen("stages", table.num_stages)
        return table.with_gathers(stages.__contains__, self.held, self.ahead)


@dataclasses.dataclass(frozen=True)
class Reduce(Varied):
    """A schedule whose ranks reduce the gradients of a stage as soon as they are summed.

    For `microbatch(..., replicas=D)` on an axis inside a rank: a device holds the sums of a stage
    from its first backward until an `S`, and not from the start of the step to its end. With
    `place(..., zero1=)` an `S` leaves it the part that its optimizer state is for: this is ZeRO-2
    (Rajbhandari et al., arXiv 1910.02054, section 5.2), and `REDUCE_GRAD` is such an action in
    PyTorch. It saves most where the backwards of a stage follow each other, as in breadth-first
    schedules (`GPipe(stages_per_rank=...)`).

    Args:
      schedule: the schedule, or its name for `by_name`.
      stages: the stages whose gradients these are; by default all.
      every: the number of backwards of a stage after which there is an `S`. By default there is one
        after the last backward, and then the results have the same bits as without it.

    Raises:
      ValueError: there is no such schedule, or `every` is below 1.

    >>> print(*Reduce("gpipe", every=2).table(num_stages=1, num_microbatches=4).ranks[0])
    F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 S0.1 B0.2 B0.3 S0.3
    """

    every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.every is None or is_integer(self.every, 1)):
            raise ValueError(
                f"Reduce takes an integer every of at least 1, got {self.every!r}; leave it out to "
                f"reduce once."
            )

    def varied(self, table: Table) -> Table:
        """Returns the schedule's table with an `S` where the gradients of a stage are reduced."""
        stages = self.chosen("stages", table.num_stages)
        return table.with_reductions(stages.__contains__, self.every)
