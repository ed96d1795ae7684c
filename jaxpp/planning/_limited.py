"""Cuts by the costs of units within the memory of each rank."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxpp.planning.search import Choice, Cutter
from jaxpp.runtime.executor import format_bytes
from jaxpp.schedules import by_name
from jaxpp.transforms.stages import Units


@dataclasses.dataclass(frozen=True)
class LimitedCuts(Units):
    """The fastest cut for a schedule, of those that keep a memory limit.

    `Profile.within` makes it, for `split_stages(balance=)`.

    Args:
        crossing: the bytes that cross from each unit, but the last, to those behind it.
        at_least: the number of units that was asked for when the function was cut.
        profile: the units.
        memory_limit: the bytes that a device of a rank has.
        microbatches: their number.
        schedule: the schedule, as `jaxpp.schedules.by_name` takes it.
        state_bytes: the bytes that a rank holds for each byte of parameters.
    """

    profile: Any
    memory_limit: float
    microbatches: int
    schedule: str
    state_bytes: float

    def choose(self, num_stages: int) -> Sequence[int]:
        """Chooses the first unit of each stage but the first.

        Raises:
            ValueError: no cut keeps the limit; or there are fewer units than stages.
        """
        units, schedule = len(self.profile.costs), by_name(self.schedule)
        if num_stages > units:
            raise ValueError(
                f"{num_stages} stages need {num_stages - 1} cuts, but the profile has {units} "
                f"units; ask for at most {units} stages."
            )
        setting = self.profile.setting(
            schedule.num_ranks(num_stages), self.microbatches, memory_limit=self.memory_limit,
            state_bytes=self.state_bytes,
        )  # fmt: skip
        cutter = Cutter(setting, schedule)
        choice = cutter.improve(cutter.start())
        if cutter.value(choice)[0] > 0:
            raise ValueError(self._why(cutter, choice))
        return choice.cuts[1:-1]

    def _why(self, cutter: Cutter, choice: Choice) -> str:
        held, limit = cutter.timeline(choice).peak_memory, self.memory_limit
        state, all_limits = self.state_bytes * sum(self.profile.parameter_bytes), len(held) * limit
        worst = max(range(len(held)), key=held.__getitem__)
        reason = f"rank {worst} needs {format_bytes(held[worst])} at the leanest cut"
        if state > all_limits:
            reason = (
                f"parameters, gradients and optimizer state need {format_bytes(state)} together, "
                f"{format_bytes(state - all_limits)} more than all ranks have"
            )
        return (
            f"no cut into {choice.num_stages} stages fits into {format_bytes(limit)} a rank with "
            f"{self.schedule} and {self.microbatches} microbatches: {reason}. Use more ranks or "
            f"smaller microbatches, or let jaxpp.plan recompute or offload activations."
        )
