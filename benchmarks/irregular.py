"""A schedule of six stages that lie on two ranks as no schedule of the catalogue puts them.

    python -m benchmarks.prediction --parts=workers --programs=gpt --remat=none \\
        --schedules=benchmarks.irregular:Irregular
"""

import dataclasses
import functools
from collections.abc import Iterable

from jaxpp.schedules import Costs, Schedule, Table, Task, synthesize

PLACEMENT = (0, 1, 1, 0, 0, 1)


@dataclasses.dataclass(frozen=True)
class Irregular(Schedule):
    """The best order that `synthesize` finds for the placement, if all stages take as long."""

    stages_per_rank: int = dataclasses.field(default=3, init=False, repr=False)

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterable[Iterable[Task]]:
        """Returns the tasks of each rank, in order."""
        return _found(num_microbatches).ranks

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage."""
        return (PLACEMENT,)

    def broken_rule(self, num_ranks: int, num_microbatches: int) -> str | None:
        """Says that there are two ranks."""
        return None if num_ranks == 2 else "num_ranks to be 2"


@functools.cache
def _found(num_microbatches: int) -> Table:
    return synthesize(Costs(per="stage"), PLACEMENT, num_microbatches).table
