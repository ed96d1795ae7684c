"""The problem that a plan solves: cuts, and what is kept, for each schedule."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxpp.planning._profile import Profile
from jaxpp.planning.search import (
    EXACT,
    Choice,
    Cutter,
    Ranks,
    Setting,
    find,
    lower_bound,
    synthesized,
)
from jaxpp.runtime.executor import format_bytes
from jaxpp.schedules import (
    CATALOGUE,
    FromTable,
    Kind,
    Offload,
    Recompute,
    Schedule,
    Table,
    Timeline,
    by_name,
)

#: A table of its own, made by `synthesize` at the cut of the fastest schedule.
SYNTHESIZED = "synthesized"
#: A cut, a placement and a table of its own, which `jaxpp.planning.search` finds together.
SEARCHED = "searched"
#: The choices that are no schedule of the catalogue.
MADE = (SYNTHESIZED, SEARCHED)
#: The schedules that are tried by default, as `jaxpp.schedules.by_name` takes them: all of the
#: catalogue that have a backward and keep sequences whole, deeper ones of two, and what is made.
SCHEDULES = (
    *(name for name in CATALOGUE if name not in ("forward_only", "seq1f1b")),
    "interleaved_1f1b(stages_per_rank=4)",
    "interleaved_zb(stages_per_rank=4)",
    *MADE,
)
#: A schedule that takes longer than this, over the fastest yet, keeps the cut that it starts with.
WORTHWHILE = 1.25
#: The evaluations of `synthesize`, and the seconds that they may take.
EVALUATIONS, SECONDS = 200, 20.0


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule at the best cut that was found for it.

    Args:
        schedule: the schedule, as `jaxpp.schedules.by_name` takes it, or `"synthesized"` or
            `"searched"`.
        microbatches: their number.
        choice: the cut, the placement, and what stages keep; None where there is no table.
        seconds: the time of a step: its tasks, then the sums of gradients of stages that several
            ranks have, and the update of the parameters; infinite where it does not fit.
        bubble: the share of the ranks' time in which they do nothing.
        peak_bytes: the most that a device of each rank holds.
        parameter_bytes: what of that are parameters, each copy for itself.
        reason: why it is not the plan.
        table: the table of a schedule that was made.
    """

    schedule: str
    microbatches: int
    choice: Choice | None = None
    seconds: float = math.inf
    bubble: float = 1.0
    peak_bytes: tuple[float, ...] = ()
    parameter_bytes: tuple[float, ...] = ()
    reason: str = ""
    table: Table | None = None

    @property
    def units(self) -> tuple[int, ...]:
        """The number of units of each stage, in order."""
        return self.choice.units if self.choice else ()

    @property
    def activations(self) -> tuple[str, ...]:
        """For each stage, what becomes of its activations: see `Choice.ways`."""
        return self.choice.ways if self.choice else ()

    @property
    def ahead(self) -> int:
        """The number of tasks ahead that activations are loaded from the memory of the host."""
        return self.choice.ahead if self.choice else 1

    @property
    def fuse(self) -> Literal["none", "pairs", "chains"]:
        """Which tasks become one computation, for `jaxpp.place`."""
        return self.choice.fuse if self.choice else "none"

    @property
    def order(self) -> Schedule:
        """The schedule, for `jaxpp.schedule`."""
        schedule: Schedule = FromTable(self.table) if self.table else by_name(self.schedule)
        if self.choice and (again := self.choice.stages_that(Kind.R)):
            schedule = Recompute(schedule, stages=again)
        away = self.choice.stages_that(Kind.O) if self.choice else ()
        schedule = Offload(schedule, stages=away, ahead=self.ahead) if away else schedule
        return self.choice.of(schedule) if self.choice else schedule


@dataclasses.dataclass(frozen=True)
class Problem(Ranks):
    """All that a plan follows from: what units take, and what the ranks are.

    Args:
        profiles: the units, for each number of microbatches.
        ranks: the number of ranks.
        schedules: those to choose from, as `jaxpp.schedules.by_name` takes them, and
            `"synthesized"` and `"searched"`.
        tries: how many cuts and placements the search judges for each number of microbatches.
        seed: of its random choices.
        memory_limit: see `jaxpp.planning.Options`, as for all other fields.
    """

    profiles: Mapping[int, Profile]
    ranks: int
    schedules: tuple[str, ...] = SCHEDULES
    tries: int = 2000
    seed: int = 0

    @functools.cached_property
    def settings(self) -> dict[int, Setting]:
        """For each number of microbatches, the layers and the machine."""
        return {
            count: profile.setting(self.ranks, count, **self.machine)
            for count, profile in self.profiles.items()
        }

    def candidates(
        self, known: Candidate | None = None, update: Callable[[], object] = lambda: None
    ) -> list[Candidate]:
        """Returns the best candidate of each schedule and number of microbatches, fastest first.

        Args:
            known: a candidate of an earlier problem, which is one of these, and the first of
                those that are as fast.
            update: called whenever a schedule has been tried with a number of microbatches.

        Raises:
            ValueError: nothing fits, or no schedule can be made.
        """
        found, starts, least = [], [], math.inf
        if known is not None and known.choice:
            if known.table:
                made = known.schedule, known.microbatches, known.choice, known.table
                found.append(self.timed(*made))
            else:
                cutter = self.cutter(known.microbatches, by_name(known.schedule))
                found.append(_candidate(known.schedule, cutter, known.choice))
        for count in self.profiles:
            for name in self.schedules:
                if name not in MADE:
                    cutter = self.cutter(count, by_name(name))
                    if reason := cutter.hopeless():
                        found.append(Candidate(name, count, reason=reason))
                        update()
                    else:
                        starts.append((cutter.start(), name, cutter))
        for choice, name, cutter in sorted(starts, key=lambda start: start[2].value(start[0])):
            over, seconds, _ = cutter.value(choice)
            if over or seconds <= WORTHWHILE * least:
                choice = cutter.improve(choice)
            found.append(_candidate(name, cutter, cutter.even_if_as_fast(choice)))
            least = min(least, found[-1].seconds)
            update()
        if SYNTHESIZED in self.schedules:
            found += self._synthesized(found)
            update()
        if SEARCHED in self.schedules:
            found += self._searched(min(found, key=_rank_of))
            update()
        found = sorted(dict.fromkeys(found), key=_rank_of)
        if found[0].seconds == math.inf:
            raise ValueError(self._why_nothing_fits(found))
        return found

    def lower_bound(self, microbatches: int) -> float:
        """Returns a time that no cut and no order of tasks beats, with so many microbatches."""
        # Where microbatches go in two directions, two ranks share the slowest unit.
        named = [
            len(by_name(own).placement(self.ranks)) for own in self.schedules if own not in MADE
        ]
        copies = max([*named, 2 if SEARCHED in self.schedules else 1])
        # A stage that computes again holds less than the layers' activations: no limit counts.
        free = dataclasses.replace(self.settings[microbatches], memory_limit=math.inf)
        # Fused, a task of several layers gains once: each layer gains no more than that.
        less: dict[str, Any] = {
            name: tuple(max(0.0, time - free.fusing) for time in getattr(free.layers, name))
            for name in ("forward", "input_grad", "weight_grad", "backward")
        }
        free = dataclasses.replace(free, layers=dataclasses.replace(free.layers, **less))
        return lower_bound(free, copies)

    def timeline(self, candidate: Candidate) -> Timeline:
        """Simulates the tasks of a candidate, with the bytes that ranks hold."""
        assert candidate.choice is not None, "it has no table"
        table = candidate.order.table_for_ranks(self.ranks, candidate.microbatches)
        return self.settings[candidate.microbatches].timeline(table, candidate.choice)

    def cutter(self, count: int, schedule: Schedule) -> Cutter:
        """Returns what cuts for a schedule and a number of microbatches."""
        # Nothing is offloaded where nobody knows how long that takes.
        ways = (Kind.R, Kind.O) if self.profiles[count].copy else (Kind.R,)
        return Cutter(self.settings[count], schedule, tuple(map(str, ways)))

    def timed(self, name: str, count: int, choice: Choice, table: Table) -> Candidate:
        """Returns a candidate with a table of its own, which says what becomes of activations."""
        cutter = self.cutter(count, FromTable(table))
        return _candidate(name, cutter, cutter.best_windows(choice), table)

    def _searched(self, best: Candidate) -> list[Candidate]:
        """Searches cut, placement and order together; gives what is faster than the best."""
        made = []
        for count, setting in self.settings.items():
            if setting.layers.count < self.ranks:
                continue
            found = find(setting.one_step, tries=self.tries, seed=self.seed)
            if found is not None:
                own = self.timed(SEARCHED, count, found.choice, found.table)
                # Stages of all sizes share no executables: a small gain is not taken.
                if own.seconds < (1 - EXACT) * best.seconds:
                    made.append(own)
        return made

    def _synthesized(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Makes a table at the cut of the fastest candidate with one direction, if it is faster."""
        limited = self.memory_limit < math.inf
        for best in sorted(found, key=_rank_of):
            if best.choice and len(best.choice.placement) == 1:
                count = best.microbatches
                offloads = limited and bool(self.profiles[count].copy)
                ordered = synthesized(
                    self.settings[count].one_step, best.choice, whole=True, recompute=limited,
                    offload=offloads, evaluations=EVALUATIONS, time_limit=SECONDS,
                )  # fmt: skip
                if ordered is None:
                    return []
                choice = dataclasses.replace(best.choice, **vars(ordered.windows))
                own = self.timed(SYNTHESIZED, count, choice, ordered.table)
                return [own] if _rank_of(own) < _rank_of(best) else []
        return []

    def _why_nothing_fits(self, found: Sequence[Candidate]) -> str:
        least = min((max(c.peak_bytes) for c in found if c.peak_bytes), default=None)
        if least is None:
            reasons = "; ".join(dict.fromkeys(c.reason for c in found))
            return f"plan: no schedule can be made: {reasons}"
        count, profile = next(iter(self.profiles.items()))
        state = self.settings[count].copies(True) * sum(profile.parameter_bytes) / self.ranks
        alone = (
            f" Parameters, their gradients and the optimizer's state alone take "
            f"{format_bytes(state)} a rank."
            if state > self.memory_limit
            else ""
        )
        return (
            f"plan: nothing fits into {format_bytes(self.memory_limit)} a rank: the leanest "
            f"candidate needs {format_bytes(least)}, {format_bytes(least - self.memory_limit)} "
            f"more.{alone} Use more ranks, more microbatches that are smaller, or split parameters "
            f"and optimizer state inside a rank (zero1=, zero3=)."
        )


def _rank_of(candidate: Candidate) -> tuple[float, float]:
    return candidate.seconds, max(candidate.peak_bytes, default=math.inf)


def _candidate(name: str, cutter: Cutter, choice: Choice, table: Table | None = None) -> Candidate:
    choice = cutter.best_fuse(choice)
    setting, timeline = cutter.setting, cutter.timeline(choice)
    peaks = timeline.peak_memory
    over = max(peaks) - setting.memory_limit
    parts = setting.replicas if setting.zero == 3 else 1
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    return Candidate(
        name,
        setting.microbatches,
        choice,
        setting.time_of(timeline, choice) if over <= 0 else math.inf,
        timeline.bubble_fraction,
        tuple(peaks),
        tuple(own / parts for own in setting.parameters(choice)),
        f"{format_bytes(over)} more than its limit on rank {worst}" if over > 0 else "",
        table,
    )
