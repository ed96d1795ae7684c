"""Cuts by the costs of units within the memory of each rank."""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxpp.runtime.executor import format_bytes
from jaxpp.schedules import Table, by_name
from jaxpp.transforms.stages import Units


@dataclasses.dataclass(frozen=True)
class LimitedCuts(Units):
    """The cuts whose slowest stage is fastest, of those that keep a memory limit.

    `Profile.within` makes it, for `split_stages(balance=)`.

    Args:
        crossing: the bytes that cross from each unit, but the last, to those behind it.
        at_least: the number of units that was asked for when the function was cut.
        costs: the time of each unit.
        state: the bytes of each unit's parameters, gradients and optimizer state.
        kept: the bytes that each unit keeps of a microbatch.
        temporary: the bytes that a task of each unit needs while it runs.
        memory_limit: the bytes that a device of a rank has.
        schedule: the schedule, as `jaxpp.schedules.by_name` takes it, with a stage on each rank.
        microbatches: their number.
    """

    costs: tuple[float, ...]
    state: tuple[float, ...]
    kept: tuple[float, ...]
    temporary: tuple[float, ...]
    memory_limit: float
    schedule: str
    microbatches: int

    def choose(self, num_stages: int) -> Sequence[int]:
        """Chooses the first unit of each stage but the first.

        Raises:
            ValueError: no cut keeps the limit; the schedule has several stages on a rank; or there
                are fewer units than stages.
        """
        units = len(self.costs)
        if num_stages > units:
            raise ValueError(
                f"{num_stages} stages need {num_stages - 1} cuts, but the profile has {units} "
                f"units; ask for at most {units} stages."
            )
        table = by_name(self.schedule).table(num_stages, self.microbatches)
        if table.num_ranks != num_stages or len(table.directions) > 1:
            raise ValueError(
                f"Profile.within cuts for schedules with one stage on each rank, and "
                f"{self.schedule} has more; use jaxpp.plan(f, *args, memory_limit=...)."
            )
        # The best way to reach each end with so many stages: its slowest stage, then a sum that is
        # least where stages are alike, then its cuts.
        best = {0: (0.0, 0.0, ())}
        for stage in range(num_stages):
            held = self._bytes(table, stage, units)
            reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            for start, (slowest, squares, cuts) in best.items():
                cost = 0.0
                for end in range(start + 1, units - num_stages + stage + 2):
                    cost += self.costs[end - 1]
                    if held(start, end) <= self.memory_limit:
                        own = max(slowest, cost), squares + cost * cost, (*cuts, start)
                        reached[end] = min(own, reached.get(end, own))
            best = reached
        if units not in best:
            raise ValueError(self._why(table, num_stages))
        return best[units][2][1:]

    def _bytes(self, table: Table, stage: int, units: int):
        """Makes the function that gives the bytes of a stage from its first unit to its end."""
        in_flight = table.peak_in_flight()[stage]
        each = (s + in_flight * k for s, k in zip(self.state, self.kept, strict=True))
        sums = [0.0, *itertools.accumulate(each)]
        return lambda start, end: sums[end] - sums[start] + max(self.temporary[start:end])

    def _why(self, table: Table, num_stages: int) -> str:
        units = len(self.costs)
        held = [self._bytes(table, stage, units) for stage in range(num_stages)]
        largest = max(range(units), key=lambda unit: min(own(unit, unit + 1) for own in held))
        alone = min(own(largest, largest + 1) for own in held)
        state, limit = sum(self.state), num_stages * self.memory_limit
        if alone > self.memory_limit:
            reason = f"unit {largest} alone needs {format_bytes(alone)}"
        elif state > limit:
            reason = (
                f"parameters, gradients and optimizer state need {format_bytes(state)} together, "
                f"{format_bytes(state - limit)} more than all ranks have"
            )
        else:
            reason = "no cut leaves room for the activations of every rank"
        return (
            f"no cut into {num_stages} stages fits into {format_bytes(self.memory_limit)} a rank "
            f"with {self.schedule} and {self.microbatches} microbatches: {reason}. Use more ranks "
            f"or smaller microbatches, or let jaxpp.plan recompute or offload activations."
        )
