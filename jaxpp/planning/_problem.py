"""The problem that a plan solves, and the search: cuts, and what is kept, for each schedule."""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxpp.planning._links import Links, ring_bytes
from jaxpp.planning._profile import Profile, costs_of_stages, of_stages
from jaxpp.planning.search import Layers, Setting, find, lower_bound
from jaxpp.runtime.executor import format_bytes
from jaxpp.schedules import (
    CATALOGUE,
    FromTable,
    Kind,
    Machine,
    Memory,
    Offload,
    Recompute,
    Schedule,
    Table,
    Timeline,
    by_name,
    from_csv,
    simulate,
    synthesize,
    to_csv,
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
#: A cut that gains less than this over an even one is not taken: no prediction is so exact, and
#: stages that are equal share their executables.
EXACT = 0.01
#: How many cuts are tried for a schedule, at most.
EVALUATIONS = 200


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule at the best cut that was found for it.

    Args:
        schedule: the schedule, as `jaxpp.schedules.by_name` takes it, or `"synthesized"` or
            `"searched"`.
        microbatches: their number.
        units: the number of units of each stage, in order.
        activations: for each stage, what becomes of its activations before its backward: they are
            kept, `""`, computed again, `"R"`, or in the memory of the host meanwhile, `"O"`.
        ahead: how many tasks ahead they are loaded from there, as in `jaxpp.schedules.Offload`.
        seconds: the time of a step: its tasks, then the sums of gradients of stages that several
            ranks have, and the update of the parameters; infinite where it does not fit.
        bubble: the share of the ranks' time in which they do nothing.
        peak_bytes: the most that a device of each rank holds.
        reason: why it is not the plan.
        table: the table of a schedule that was made, as `jaxpp.schedules.to_csv` writes it.
        placement: for each direction of that table, the rank of each stage.
        direction_of: the direction of each of its microbatches.
    """

    schedule: str
    microbatches: int
    units: tuple[int, ...] = ()
    activations: tuple[str, ...] = ()
    ahead: int = 1
    seconds: float = math.inf
    bubble: float = 1.0
    peak_bytes: tuple[float, ...] = ()
    reason: str = ""
    table: str = ""
    placement: tuple[tuple[int, ...], ...] = ()
    direction_of: tuple[int, ...] = ()

    @property
    def order(self) -> Schedule:
        """The schedule, for `jaxpp.schedule`."""
        if self.table:
            table = from_csv(self.table, placement=self.placement, direction_of=self.direction_of)
            own: Schedule = FromTable(table)
        else:
            own = by_name(self.schedule)
        if again := self.stages_that(Kind.R):
            own = Recompute(own, stages=again)
        away = self.stages_that(Kind.O)
        return Offload(own, stages=away, ahead=self.ahead) if away else own

    def stages_that(self, way: str) -> list[int]:
        """Returns the stages whose activations are computed again, `"R"`, or offloaded, `"O"`."""
        return [stage for stage, own in enumerate(self.activations) if own == way]


class Choice(NamedTuple):
    """A choice of the search for a schedule; `ways` and `ahead` are those of a `Candidate`.

    Args:
        at: the first unit of each stage, and the number of all units.
        ways: what becomes of each stage's activations.
        ahead: how many tasks ahead those are loaded that are offloaded.
    """

    at: tuple[int, ...]
    ways: tuple[str, ...]
    ahead: int = 1

    def with_way(self, stage: int, way: str) -> "Choice":
        return self._replace(ways=(*self.ways[:stage], way, *self.ways[stage + 1 :]))


@dataclasses.dataclass(frozen=True)
class Problem:
    """All that a plan follows from: what units take, and what the ranks are.

    Args:
        profiles: the units, for each number of microbatches.
        ranks: the number of ranks.
        memory_limit: the bytes that a device of a rank has.
        state_bytes: the bytes that a rank holds for each byte of parameters.
        links: what messages take.
        speed: the speed of each rank, over that of the device that was profiled.
        schedules: those to choose from, as `jaxpp.schedules.by_name` takes them, and
            `"synthesized"` and `"searched"`.
        tries: how many cuts and placements the search judges for each number of microbatches.
        seed: of its random choices.
        replicas: the number of replicas, each with its own microbatches.
        reduction_bandwidth: the bytes that a device exchanges with replicas in a second.
    """

    profiles: Mapping[int, Profile]
    ranks: int
    memory_limit: float
    state_bytes: float
    links: Links
    speed: tuple[float, ...]
    schedules: tuple[str, ...]
    tries: int = 2000
    seed: int = 0
    replicas: int = 1
    reduction_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        limits = {
            "memory_limit": self.memory_limit, "ranks": self.ranks, "replicas": self.replicas,
            "reduction_bandwidth": self.reduction_bandwidth,
            **{f"speed of rank {rank}": own for rank, own in enumerate(self.speed)},
        }  # fmt: skip
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"plan: the {name} is a positive number, got {value!r}.")
        if not 0 <= self.state_bytes < math.inf:
            raise ValueError(
                f"plan: state_bytes is finite and not negative, got {self.state_bytes!r}."
            )
        if len(self.speed) != self.ranks:
            raise ValueError(
                f"plan: speed is one number or one for each rank, got {len(self.speed)} for "
                f"{self.ranks} ranks."
            )

    def candidates(self) -> list[Candidate]:
        """Returns the best candidate of each schedule and number of microbatches, fastest first.

        Raises:
            ValueError: nothing fits, or no schedule can be made.
        """
        searches = [
            _Search(self, count, name)
            for count in self.profiles
            for name in self.schedules
            if name not in MADE
        ]
        found = [search.hopeless for search in searches if search.hopeless is not None]
        starts = [(search.start(), search) for search in searches if search.hopeless is None]
        least = math.inf
        for choice, search in sorted(starts, key=lambda start: start[1].value(start[0])):
            over, seconds, _ = search.value(choice)
            if over or seconds <= WORTHWHILE * least:
                choice = search.improve(choice)
            choice = search.even_if_as_fast(choice)
            found.append(search.candidate(choice))
            least = min(least, found[-1].seconds)
        found.sort(key=_rank_of)
        if found[0].seconds == math.inf:
            raise ValueError(self._why_nothing_fits(found))
        if SYNTHESIZED in self.schedules:
            found += self._synthesized(found)
        if SEARCHED in self.schedules:
            found += self._searched(min(found, key=_rank_of))
        return sorted(found, key=_rank_of)

    def lower_bound(self, microbatches: int) -> float:
        """Returns a time that no cut and no order of tasks beats, with so many microbatches."""
        own = self.profiles[microbatches]
        halves = np.add(own.input_grad, own.weight_grad)
        costs = np.add(own.forward, np.minimum(own.backward, halves)).tolist()
        total = sum(own.parameter_bytes)
        update = self.update_seconds(own, total)
        update = (update + min(self.speed) * self.reduction_seconds(total)) / microbatches
        shared = (sum(costs) + update) / sum(self.speed)
        # Where microbatches go in two directions, two ranks share the slowest unit.
        copies = max(
            len(by_name(name).placement(self.ranks))
            for name in self.schedules if name not in MADE
        )  # fmt: skip
        copies = max(copies, 2 if SEARCHED in self.schedules else 1)
        alone = max(costs) / max(self.speed) / copies
        if len(costs) < self.ranks:
            return microbatches * max(shared, alone)
        # A stage that computes again holds less than the layers' activations: no limit counts.
        free = dataclasses.replace(self._setting(microbatches), memory_limit=math.inf)
        return max(microbatches * max(shared, alone), lower_bound(free, copies))

    def _setting(self, microbatches: int) -> Setting:
        """Returns the problem of the search; a rank has room for what its largest task needs."""
        own = self.profiles[microbatches]
        layers = Layers(
            own.forward, own.input_grad, own.weight_grad, own.backward, own.activation_bytes,
            own.parameter_bytes, own.crossing,
        )  # fmt: skip
        limit = max(self.memory_limit - max(own.temporary_bytes), 1e-9)
        return Setting(
            layers, self.ranks, microbatches, limit, self.state_bytes, self.links.latency,
            self.links.bandwidth, self.speed,
        )  # fmt: skip

    def _searched(self, best: Candidate) -> list[Candidate]:
        """Searches cut, placement and order together; gives what is faster than the best."""
        made = []
        for count, own in self.profiles.items():
            if len(own.costs) < self.ranks:
                continue
            found = find(self._setting(count), tries=self.tries, seed=self.seed)
            if found is not None:
                one = _Search(self, count, SEARCHED, FromTable(found.table))
                candidate = dataclasses.replace(
                    one.candidate(_all_kept(found.choice.cuts)),
                    table=to_csv(found.table),
                    placement=found.choice.placement,
                    direction_of=found.table.direction_of,
                )
                # Stages of all sizes share no executables: a small gain is not taken.
                if candidate.seconds < (1 - EXACT) * best.seconds:
                    made.append(candidate)
        return made

    def update_seconds(self, found: Profile, parameter_bytes: float) -> float:
        """Finds the time of an update: it reads all of the state, and writes all but gradients."""
        moved = max(0.0, 2 * self.state_bytes - 1) * parameter_bytes
        return moved / found.memory_bandwidth

    def reduction_seconds(self, nbytes: float) -> float:
        """Returns the time in which replicas add up gradients of so many bytes."""
        return ring_bytes(nbytes, self.replicas) / self.reduction_bandwidth

    def timeline(self, candidate: Candidate) -> Timeline:
        """Simulates the tasks of a candidate, with the bytes that ranks hold."""
        search = _Search(self, candidate.microbatches, schedule=candidate.order)
        return search.timeline(_all_kept((0, *itertools.accumulate(candidate.units))))

    def timed(self, candidate: Candidate) -> Candidate:
        """Returns a candidate that has a table of its own, as fast as it is in this problem."""
        search = _Search(self, candidate.microbatches, candidate.schedule, candidate.order)
        own = search.candidate(_all_kept((0, *itertools.accumulate(candidate.units))))
        return dataclasses.replace(
            own, activations=candidate.activations, ahead=candidate.ahead, table=candidate.table,
            placement=candidate.placement, direction_of=candidate.direction_of,
        )  # fmt: skip

    def _synthesized(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Makes a table at the cut of the fastest candidate with one direction, if it is faster."""
        for best in sorted(found, key=_rank_of):
            if len(by_name(best.schedule).placement(self.ranks)) == 1 and best.units:
                search = _Search(self, best.microbatches, best.schedule)
                own = search.synthesized((0, *itertools.accumulate(best.units)))
                return [own] if own and _rank_of(own) < _rank_of(best) else []
        return []

    def _why_nothing_fits(self, found: Sequence[Candidate]) -> str:
        least = min((max(c.peak_bytes) for c in found if c.peak_bytes), default=None)
        if least is None:
            reasons = "; ".join(dict.fromkeys(c.reason for c in found))
            return f"plan: no schedule can be made: {reasons}"
        own = next(iter(self.profiles.values()))
        state = self.state_bytes * sum(own.parameter_bytes) / self.ranks
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


def _all_kept(at: tuple[int, ...]) -> Choice:
    return Choice(at, ("",) * (len(at) - 1))


class _Search:
    """The search for the best cut of a schedule, and for what becomes of activations."""

    def __init__(
        self, problem: Problem, microbatches: int, name: str = "", schedule: Schedule | None = None
    ):
        self._problem, self._microbatches, self._name = problem, microbatches, name
        self._profile = problem.profiles[microbatches]
        self._schedule = schedule or by_name(name)
        self._known: dict[Choice, tuple[float, float, float]] = {}
        self._tables: dict[tuple[tuple[str, ...], int], Table] = {}
        # How a stage may have less: nothing is offloaded where nobody knows how long that takes.
        self._ways = (Kind.R, Kind.O) if self._profile.copy else (Kind.R,)

    @functools.cached_property
    def _plain(self) -> Table:
        return self._schedule.table_for_ranks(self._problem.ranks, self._microbatches)

    def _table(self, ways: tuple[str, ...], ahead: int) -> Table:
        """Returns the table in which some stages do not keep their activations."""
        if not any(ways):
            return self._plain
        if (ways, ahead) not in self._tables:
            table = self._plain.with_recomputation(lambda task: ways[task.stage] == Kind.R)
            table = table.with_offload(lambda task: ways[task.stage] == Kind.O, ahead)
            self._tables[ways, ahead] = table
        return self._tables[ways, ahead]

    @functools.cached_property
    def hopeless(self) -> Candidate | None:
        """The candidate, with the reason, where the schedule has no table or too many stages."""
        empty = Candidate(self._name, self._microbatches)
        try:
            stages, units = self._plain.num_stages, len(self._profile.costs)
        except ValueError as error:
            return dataclasses.replace(empty, reason=str(error))
        if stages > units:
            reason = f"{stages} stages, but the function has {units} units"
        elif self._plain.copies and not self._profile.copy:
            reason = "it offloads, and nobody knows the host_bandwidth of the device"
        else:
            return None
        return dataclasses.replace(empty, reason=reason)

    def start(self) -> Choice:
        """Returns the better of an even cut and one that balances the stages."""
        stages, units = self._plain.num_stages, len(self._profile.costs)
        balanced = (0, *self._profile.choose(stages), units)
        return min(map(_all_kept, (self._even, balanced)), key=self.value)

    @property
    def _even(self) -> tuple[int, ...]:
        stages, units = self._plain.num_stages, len(self._profile.costs)
        return tuple(round(units * n / stages) for n in range(stages + 1))

    def even_if_as_fast(self, choice: Choice) -> Choice:
        """Returns an even cut where that fits, too, and another one gains next to nothing."""
        even = choice._replace(at=self._even)
        over, seconds, _ = self.value(even)
        return even if not over and seconds <= (1 + EXACT) * self.value(choice)[1] else choice

    def improve(self, choice: Choice) -> Choice:
        """Moves cuts, and lets as many stages recompute or offload as the limit demands."""
        found = [self._climb(choice)]
        if not self.value(choice)[0]:
            return found[0]
        for way in self._ways:
            some = choice
            while self.value(some)[0] > 0 and not all(some.ways):
                some = self._keep_less(some, way)
            every = choice._replace(ways=(way,) * len(choice.ways))
            own = min(map(self._refine, (some, every)), key=self.value)
            while (better := self._refine(self._climb(own))) != own:
                own = better
            found.append(own)
        return min(found, key=self.value)

    def timeline(self, choice: Choice) -> Timeline:
        """Simulates the tasks, with the bytes that ranks hold."""
        at, ways, ahead = choice
        problem, table, found = self._problem, self._table(ways, ahead), self._profile
        costs = costs_of_stages(found, at, problem.links, table.directions[0])
        kept = of_stages(found.activation_bytes, at)
        # A stage that computes again keeps its input; the first one's is the batch.
        inputs = (0.0, *(found.crossing[cut - 1] for cut in at[1:-1]))
        memory = Memory(
            forward=kept,
            recompute=tuple(max(0.0, k - i) for k, i in zip(kept, inputs, strict=True)),
            input_grad=0.0,
            weight_grad=tuple(-k for k in kept),
        )
        parameters = of_stages(found.parameter_bytes, at)
        stages_of = [sorted({task.stage for task in own}) for own in table.ranks]
        copies = Counter(itertools.chain(*stages_of))
        resident, gradients, updates = [], [], []
        for stages, speed in zip(stages_of, problem.speed, strict=True):
            own = sum(parameters[s] for s in stages)
            needed = max(max(found.temporary_bytes[at[s] : at[s + 1]]) for s in stages)
            resident.append(problem.state_bytes * own + needed)
            shared = [parameters[s] for s in stages if copies[s] > 1]
            copied = sum(shared) / problem.links.bandwidth
            gradients.append(copied + problem.reduction_seconds(own))
            latencies = problem.links.latency * len(shared)
            updates.append(latencies + problem.update_seconds(found, own) / speed)
        machine = Machine(
            speed=problem.speed, resident=tuple(resident), optimizer=tuple(updates),
            gradient_bytes=tuple(gradients), reduction_bandwidth=1.0,  # two kinds of links: seconds
        )  # fmt: skip
        # The executor runs the tasks of a pair one after the other.
        return simulate(table, costs, memory=memory, machine=machine, overlap="none")

    def synthesized(self, at: tuple[int, ...]) -> Candidate | None:
        """Makes a candidate with a table of its own at a cut; None where nothing fits."""
        placement, problem = self._plain.directions[0], self._problem
        timeline = self.timeline(_all_kept(at))
        limited = problem.memory_limit < math.inf
        speed = [problem.speed[rank] for rank in placement]
        costs = costs_of_stages(self._profile, at, problem.links, placement, speed)
        limits = [problem.memory_limit - held for held in timeline.machine.held(problem.ranks)]
        try:
            found = synthesize(
                costs, placement, self._microbatches, memory=timeline.memory, memory_limit=limits,
                stage_inputs=self._plain.stage_inputs, recompute=limited,
                offload=limited and Kind.O in self._ways, evaluations=EVALUATIONS, time_limit=20.0,
            )  # fmt: skip
        except ValueError:  # not even one microbatch fits
            return None
        made = _Search(problem, self._microbatches, SYNTHESIZED, found.schedule)
        return dataclasses.replace(made.candidate(_all_kept(at)), table=to_csv(found.table))

    def _climb(self, choice: Choice) -> Choice:
        """Moves cuts as long as that helps; tries all cuts where these are few."""
        stages, units = len(choice.at) - 1, choice.at[-1]
        if math.comb(units - 1, stages - 1) <= EVALUATIONS:
            cuts = itertools.combinations(range(1, units), stages - 1)
            return min((choice._replace(at=(0, *own, units)) for own in cuts), key=self.value)
        best, tried, improved = self.value(choice), 0, True
        while improved and tried < EVALUATIONS:
            improved = False
            for other in _moved(choice.at):
                tried += 1
                if (value := self.value(moved := choice._replace(at=other))) < best:
                    choice, best, improved = moved, value, True
                    break
        return choice

    def value(self, choice: Choice) -> tuple[float, float, float]:
        """Returns what is over the limit, the time, and the slowest stage: less is better."""
        if choice not in self._known:
            timeline = self.timeline(choice)
            over = max(0.0, max(timeline.peak_memory) - self._problem.memory_limit)
            slowest = max(of_stages(self._profile.costs, choice.at))
            self._known[choice] = over, timeline.makespan, slowest
        return self._known[choice]

    def _keep_less(self, choice: Choice, way: str) -> Choice:
        """Lets the stage recompute or offload that keeps most, on the rank that holds most."""
        peaks, ways = self.timeline(choice).peak_memory, choice.ways
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        own = {task.stage for task in self._plain.ranks[worst]}
        left = [s for s in sorted(own) if not ways[s]]
        left = left or [s for s, other in enumerate(ways) if not other]
        kept = of_stages(self._profile.activation_bytes, choice.at)
        return choice.with_way(max(left, key=kept.__getitem__), way)

    def _refine(self, choice: Choice) -> Choice:
        """Changes what stages do, and how far ahead loads are, those first that gain most."""
        best = choice
        changes = [
            (stage, other)
            for stage, way in enumerate(choice.ways)
            for other in ("", *self._ways)
            if way and other != way
        ]
        for change in sorted(changes, key=lambda own: self.value(choice.with_way(*own))):
            best = min(best, best.with_way(*change), key=self.value)
        if Kind.O in best.ways:
            near = (best._replace(ahead=best.ahead + step) for step in (0, -1, 1))
            best = min((own for own in near if own.ahead >= 0), key=self.value)
        return choice if best == choice else self._refine(best)

    def candidate(self, choice: Choice) -> Candidate:
        timeline, (at, ways, ahead) = self.timeline(choice), choice
        peaks = timeline.peak_memory
        over = max(peaks) - self._problem.memory_limit
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        return Candidate(
            self._name,
            self._microbatches,
            tuple(b - a for a, b in itertools.pairwise(at)),
            tuple(map(str, ways)),
            ahead,
            timeline.makespan if over <= 0 else math.inf,
            timeline.bubble_fraction,
            tuple(peaks),
            f"{format_bytes(over)} more than its limit on rank {worst}" if over > 0 else "",
        )


def _moved(at: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Returns cuts that differ by a few units, in one cut or in a row of them."""
    for first, step in itertools.product(range(1, len(at) - 1), (1, -1, 2, -2)):
        for last in range(first + 1, len(at)):
            moved = (n + step for n in at[first:last])
            other = (*at[:first], *moved, *at[last:])
            if all(a < b for a, b in itertools.pairwise(other)):
                yield other
