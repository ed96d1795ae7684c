"""The best cut for a schedule, and what its stages keep."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from jaxpp.planning.search._search import search
from jaxpp.planning.search._setting import Choice, Setting
from jaxpp.schedules import Kind, Schedule, Table, Timeline

#: A cut that gains less than this over an even one is not taken: no prediction is so exact, and
#: stages that are equal share their executables.
EXACT = 0.01
#: So many choices are tried for a schedule from each start, at most. So many cuts are all tried.
EVALUATIONS = 200


@dataclasses.dataclass(frozen=True, eq=False)
class Cutter:
    """Cuts layers for a schedule.

    Args:
        setting: the layers and the machine.
        schedule: the schedule.
        ways: what may become of activations that do not fit: they are computed again, `"R"`, or
            offloaded, `"O"`.
    """

    setting: Setting
    schedule: Schedule
    ways: tuple[str, ...] = ()

    @functools.cached_property
    def plain(self) -> Table:
        """The schedule's table, in which all activations are kept."""
        return self.schedule.table_for_ranks(self.setting.ranks, self.setting.microbatches)

    @functools.cached_property
    def _tables(self) -> dict[Choice, Table]:
        return {}

    @functools.cached_property
    def _known(self) -> dict[Choice, tuple[float, float, float]]:
        return {}

    def table(self, choice: Choice) -> Table:
        """Returns the table in which stages keep, gather and reduce what a choice says."""
        ways, key = choice.ways, dataclasses.replace(choice, cuts=())
        if key not in self._tables:
            table = self.plain
            if any(ways):
                table = table.with_recomputation(lambda task: ways[task.stage] == Kind.R)
                table = table.with_offload(lambda task: ways[task.stage] == Kind.O, choice.ahead)
            self._tables[key] = choice.added_to(table)
        return self._tables[key]

    def windows(self, choice: Choice) -> list[Choice]:
        """Returns a choice with each of the windows that its parameters and sums may have."""
        return choice.choices(self.plain, self.setting.zero == 3, self.setting.zero > 0)

    def best_windows(self, choice: Choice) -> Choice:
        """Returns the choice, whose activations are all kept, with the best of its windows."""
        kept = dataclasses.replace(choice, ways=("",) * choice.num_stages)
        return min(self.windows(kept), key=self.value)

    def best_fuse(self, choice: Choice) -> Choice:
        """Returns the choice with the tasks fused that make it faster; a small gain is not taken.

        Chains hold what all of their tasks need at once, so there are none within a memory limit.
        """
        choice = dataclasses.replace(choice, fuse="none")
        if not self.setting.fusing or self.setting.steps > 1:
            return choice
        ways = ("pairs", "chains") if self.setting.memory_limit == math.inf else ("pairs",)
        best = min((dataclasses.replace(choice, fuse=own) for own in ways), key=self.value)
        over, seconds, _ = self.value(best)
        return best if not over and seconds < (1 - EXACT) * self.value(choice)[1] else choice

    def hopeless(self) -> str:
        """Says why there is no cut for the schedule; empty where there may be one."""
        try:
            stages, layers = self.plain.num_stages, self.setting.layers
        except ValueError as error:
            return str(error)
        if stages > layers.count:
            return f"{stages} stages, but the function has {layers.count} units"
        if "copy" in self.plain.lanes and not layers.copy:
            return "it offloads, and nobody knows the host_bandwidth of the device"
        return ""

    def kept(self, cuts: tuple[int, ...]) -> Choice:
        """Returns a choice in which all activations are kept."""
        return Choice(cuts, self.plain.directions, ways=("",) * (len(cuts) - 1))

    @functools.cached_property
    def even(self) -> Choice:
        """The even cut."""
        stages, layers = self.plain.num_stages, self.setting.layers.count
        return self.kept(tuple(round(layers * n / stages) for n in range(stages + 1)))

    def start(self) -> Choice:
        """Returns the better of an even cut and one that balances the stages."""
        work = self.setting.sums["whole"]
        cuts = [0]
        for n in range(1, self.plain.num_stages):
            last = self.setting.layers.count - self.plain.num_stages + n
            wanted = work[-1] * n / self.plain.num_stages
            near = range(cuts[-1] + 1, last + 1)
            cuts.append(min(near, key=lambda cut: abs(work[cut] - wanted)))
        balanced = self.kept((*cuts, self.setting.layers.count))
        starts = (own for cut in (self.even, balanced) for own in self.windows(cut))
        return min(starts, key=self.value)

    def timeline(self, choice: Choice) -> Timeline:
        """Simulates the tasks, with the bytes that ranks hold."""
        return self.setting.timeline(self.table(choice), choice)

    def value(self, choice: Choice, most: object = None) -> tuple[float, float, float]:
        """Returns what is over the limit, the time, and the slowest stage: less is better."""
        del most
        if choice not in self._known:
            timeline = self.timeline(choice)
            over = max(0.0, max(timeline.peak_memory) - self.setting.memory_limit)
            whole, cuts = self.setting.sums["whole"], choice.cuts
            slowest = max(whole[b] - whole[a] for a, b in itertools.pairwise(cuts))
            self._known[choice] = over, self.setting.time_of(timeline, choice), slowest
        return self._known[choice]

    def improve(self, choice: Choice) -> Choice:
        """Moves cuts, and lets as many stages recompute or offload as the limit demands."""

        def climb(start: Choice, near: Any) -> Choice:
            return search(start, self.value, near, EVALUATIONS)[1]

        moved = climb(choice, self._moved)
        if not self.value(choice)[0] or not self.ways:
            return moved
        starts = [dataclasses.replace(choice, ways=(w,) * choice.num_stages) for w in self.ways]
        starts = [min(self.windows(own), key=self.value) for own in starts]
        return min((climb(own, self._near) for own in (choice, *starts)), key=self.value)

    def even_if_as_fast(self, choice: Choice) -> Choice:
        """Returns an even cut where that fits, too, and another one gains next to nothing."""
        even = dataclasses.replace(choice, cuts=self.even.cuts)
        over, seconds, _ = self.value(even)
        return even if not over and seconds <= (1 + EXACT) * self.value(choice)[1] else choice

    def _near(self, choice: Choice, _: object = None) -> Iterator[Choice]:
        """Returns choices in which a stage keeps more or less, or whose cuts have moved."""
        ways = choice.ways
        for stage, way in itertools.product(range(len(ways)), ("", *self.ways)):
            if way != ways[stage]:
                yield dataclasses.replace(choice, ways=(*ways[:stage], way, *ways[stage + 1 :]))
        if Kind.O in ways:
            for ahead in (choice.ahead + 1, choice.ahead - 1):
                if ahead >= 0:
                    yield dataclasses.replace(choice, ahead=ahead)
        yield from self._moved(choice)

    def _moved(self, choice: Choice, _: object = None) -> Iterator[Choice]:
        """Returns choices with other windows, or cuts: all where they are few, else the near."""
        cuts, last = choice.cuts, choice.cuts[-1]
        yield from (own for own in self.windows(choice) if own != choice)
        if math.comb(last - 1, len(cuts) - 2) <= EVALUATIONS:
            for own in itertools.combinations(range(1, last), len(cuts) - 2):
                yield dataclasses.replace(choice, cuts=(0, *own, last))
            return
        for first, step in itertools.product(range(1, len(cuts) - 1), (1, -1, 2, -2)):
            for end in range(first + 1, len(cuts)):
                moved = (n + step for n in cuts[first:end])
                other = (*cuts[:first], *moved, *cuts[end:])
                if all(a < b for a, b in itertools.pairwise(other)):
                    yield dataclasses.replace(choice, cuts=other)
