"""Finds a table for any placement, costs and memory, by a portfolio, and a lower bound."""

import contextlib
import dataclasses
import graphlib
import itertools
import math
import numbers
import time
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict, TypeVar, Unpack

from jaxpp._messages import check_number, check_options
from jaxpp.schedules._catalogue import CATALOGUE
from jaxpp.schedules._check import check
from jaxpp.schedules._costs import Costs, Memory
from jaxpp.schedules._custom import FromTable
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._simulation import Machine, Timeline, simulate
from jaxpp.schedules._synthesis._bounds import lower_bound
from jaxpp.schedules._synthesis._exact import solve
from jaxpp.schedules._synthesis._fitting import fitted, offloads_to_fit
from jaxpp.schedules._synthesis._portfolio import as_graph, catalogue_tables, one_at_a_time
from jaxpp.schedules._synthesis._search import Search
from jaxpp.schedules._table import Table, Task
from jaxpp.schedules._windows import Windows
from jaxpp.schedules.simulator import Objective, OrderProblem, shape_of

_Model = TypeVar("_Model", Costs, Memory)


@dataclasses.dataclass(frozen=True)
class Synthesis:
    """The result of `synthesize`.

    Args:
      table: the best table.
      timeline: when its tasks run.
      objective: what was minimised: `"wall"`, the makespan, or `"span"`, a rank's longest span.
      value: the value of the table.
      lower_bound: a value that no table for this problem beats.
      source: which of the portfolio made the table.
      windows: the windows of its gathers and reductions.

    >>> from jaxpp.schedules import Costs, synthesize
    >>> synthesize(Costs(), (0, 1, 2, 3), 8, memory_limit=4)
    Synthesis(objective='wall', value=27.0, lower_bound=27.0, source='zb_h1')
    """

    table: Table = dataclasses.field(repr=False)
    timeline: Timeline = dataclasses.field(repr=False)
    objective: Objective
    value: float
    lower_bound: float
    source: str
    windows: Windows = dataclasses.field(default=Windows(), repr=False)

    @property
    def gap(self) -> float:
        """The most by which the table may be worse than the best, as a fraction of the lower bound.

        >>> from jaxpp.schedules import Costs, synthesize
        >>> synthesize(Costs(), (0, 1, 2, 3), 8).gap
        0.0
        """
        return self.value / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def schedule(self) -> FromTable:
        """The table as a schedule, for `jaxpp.schedule`: of this one size.

        >>> from jaxpp.schedules import Costs, synthesize
        >>> synthesize(Costs(), (0, 1), 4).schedule
        FromTable(2 ranks, 2 stages, 4 microbatches)
        """
        return FromTable(self.table)


class SearchOptions(TypedDict, total=False):
    """The limits of a search by `synthesize`.

    Attributes:
      evaluations: how many tables local search evaluates, fewer where they have more than some 6000
        tasks; a step of tabu search counts as four. Of list schedules, which take about ten times
        as long each, there are a grid of some forty and up to a fiftieth of this number. More
        evaluations never give a worse table. By default 2000.
      exact: for how long the exact solver then proves a bound, in its deterministic seconds; it
        suits a few hundred tasks, and needs the extra `exact`. What it finds may differ from run to
        run. By default not at all.
      seed: of what the search chooses at random.
      time_limit: seconds after which the search ends with what it has, by default 600; a guard, not
        a setting.

    >>> options: SearchOptions = {"evaluations": 10, "seed": 1}
    >>> synthesize(Costs(), (0, 1), 4, **options).value
    13.0
    """

    evaluations: int
    exact: float
    seed: int
    time_limit: float


#: The kinds of number that the options have to be.
_NUMBERS = {
    "evaluations": "an integer of at least 0",
    "exact": "a number of at least 0",
    "seed": "an integer",
    "time_limit": "a number of at least 0",
}


def synthesize(
    costs: Costs,
    placement: Sequence[int] | Sequence[Sequence[int]],
    num_microbatches: int,
    *,
    memory: Memory | None = None,
    memory_limit: float | Sequence[float] = math.inf,
    objective: Objective = "wall",
    stage_inputs: Sequence[Sequence[int]] | None = None,
    split_backward: bool = True,
    recompute: bool = False,
    offload: bool = False,
    gather: bool = False,
    reduce: bool = False,
    **options: Unpack[SearchOptions],
) -> Synthesis:
    """Finds a table for any placement, costs and memory, and a lower bound on any table's value.

    A portfolio makes tables: the schedules of the catalogue with this placement, list scheduling
    by many rules, the best of these with all tasks moved late, and then early, and local search
    from the best. None is over the memory limit, and the result is never worse than the best
    schedule of the catalogue that fits. The same arguments give the same table, unless `time_limit`
    cuts the search short, or the exact solver is asked for. Tasks do not overlap here:
    `costs.overlapped` is not used, and overlapping pairs count as one task after the other. What
    `jaxpp.place` fuses is none of its choices.

    Args:
      costs: the time of tasks and transfers, as `simulate` takes them.
      placement: the rank of each stage; or that for each direction, as in `Table.placement`.
        Microbatches then take the directions in turns.
      num_microbatches: the number of microbatches; each direction has as many.
      memory: what tasks hold; by default activations.
      memory_limit: the most that a rank may hold, or that each rank may.
      objective: what to minimise: `"wall"` the makespan, `"span"` the longest span of a rank.
      stage_inputs: the stages that each stage reads from; by default the one before it.
      split_backward: whether backwards may be run as their halves.
      recompute: whether activations may be computed again: besides the tables that fit, those that
        are best without the limit then have an `R` for what they would hold longest.
      offload: the same with an `O` and an `L`, at the costs of these.
      gather: whether parameters are split, so that tasks of a `Gather` have to gather them: at
        least once for each stage of a rank, at most for each task, as the limit allows. A gather
        comes right before its first reader.
      reduce: whether gradients are reduced over replicas: after the last backward of a stage, as by
        `Reduce`, or those of a rank after all its tasks. Then it holds what `memory` has of a
        reduction all the time. Sums of stages that two ranks have are reduced after all tasks, so
        that with two directions `Reduce` of a schedule of the catalogue may take less.
      **options: how long to search; see `SearchOptions`.

    Raises:
      ValueError: the placement is not one, the directions do not divide the microbatches, or not
        even one microbatch fits the memory limit, with what it gathers.
      ImportError: `exact` is asked for, and OR-tools is not installed.

    >>> found = synthesize(Costs(latency=0.25), (0, 1, 2, 3), 8, memory_limit=4)
    >>> found.value, found.lower_bound, max(Memory().peaks(found.table))
    (30.0, 30.0, 4.0)
    >>> costs, memory = Costs(gather=0.5), Memory(gather=1.0)
    >>> found = synthesize(costs, (0, 1, 0, 1), 2, memory=memory, memory_limit=1.5, gather=True)
    >>> print(found.windows.held, found.value, *found.table.ranks[0][:6])
    1 9.5 G0.0 F0.0 G2.0 F2.0 I2.0 W2.0
    """
    check_options(synthesize, options, SearchOptions)
    for name, value in options.items():
        check_number("synthesize", name, value, _NUMBERS[name])
    placement = _directions(placement)
    _check_arguments(num_microbatches, len(placement), objective)
    return Case(
        costs.by_stage(placement[0]), placement, num_microbatches,
        (memory or Memory()).by_stage(placement[0]),
        _limits(memory_limit, max(map(max, placement)) + 1), objective,
        _graph(stage_inputs, len(placement[0])),
        split_backward, gather, reduce,
    ).synthesized(recompute, offload, options)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A case that a table is made for; the fields are the arguments of `synthesize`."""

    costs: Costs
    placement: tuple[tuple[int, ...], ...]
    num_microbatches: int
    memory: Memory
    limits: list[float]
    objective: Objective
    graph: tuple[tuple[int, ...], ...] | None
    split_backward: bool
    gather: bool = False
    reduce: bool = False

    def synthesized(self, recompute: bool, offload: bool, options: SearchOptions) -> Synthesis:
        """Returns the best table that is found."""
        deadline = time.monotonic() + options.get("time_limit", 600.0)
        # Of equals, the first counts: a schedule with a plain name comes before one with knobs.
        tables = sorted(
            catalogue_tables(self.placement, self.num_microbatches, self.graph),
            key=lambda named: named[0] not in CATALOGUE,
        )
        plain = dataclasses.replace(self, gather=False, reduce=False)
        found, bound = plain._searched(tables, options, deadline)
        if self._has_both:
            found += [(name, dataclasses.replace(table, overlaps=frozenset()))
                      for name, table in tables if self._fits(table)]  # fmt: skip
        # Tables that others may come of, by windows, recomputation or offload.
        starts = [(name, table) for name, table in tables
                  if self.split_backward or not table.splits_backward]  # fmt: skip
        recompute, offload = (own and min(self.limits) < math.inf for own in (recompute, offload))
        if recompute or offload:
            free = dataclasses.replace(plain, limits=[math.inf] * len(self.limits))
            left = max(0.0, deadline - time.monotonic())
            best = free.synthesized(False, False, {**options, "time_limit": left, "exact": 0.0})
            bound = min(bound, best.lower_bound)
            starts.insert(0, (best.source, best.table))
        alone = [("one at a time", p.to_table(one_at_a_time(p))) for p in self._problems]
        results: list[Synthesis] = []
        if self.gather or self.reduce:
            bound = self._with_collectives(bound)
            for limits in self._rooms():
                with contextlib.suppress(ValueError):  # not even one microbatch fits
                    within = dataclasses.replace(plain, limits=limits)
                    found += within._searched(tables, {**options, "exact": 0.0}, deadline)[0]
            starts = [*found, *starts, *alone]
        else:
            results = [self._simulated(name, table) for name, table in found]
            starts = starts if recompute or offload else []
        least = min((own.value for own in results), default=math.inf)
        for name, table in starts:
            if least < math.inf and time.monotonic() > deadline:
                break
            for own in self._varied(name, table, recompute, offload, least):
                least = min(least, own.value)
                results.append(own)
        if not results:
            made = (self._simulated("", windows.added_to(table), windows)
                    for _, table in alone for windows in self._windows(table))  # fmt: skip
            what = ", with gathered parameters and sums of gradients,"
            _check_feasible((own.timeline.peak_memory for own in made), self.limits, what)
        best = min(results, key=lambda own: own.value)
        check(best.table)
        # The bound adds the same times in another order: it may be too high by a rounding error.
        assert bound <= best.value * (1 + 1e-6), "a table beats the lower bound"
        return dataclasses.replace(best, lower_bound=min(bound, best.value))

    @property
    def _has_both(self) -> bool:
        """Tells whether a backward has two forms: its halves together are not the whole."""
        whole = self.costs.backward is None and self.memory.backward is None
        return self.split_backward and not whole

    @property
    def _problems(self) -> list[OrderProblem]:
        return [*map(self.problem, [True, False] if self._has_both else [self.split_backward])]

    def problem(self, split: bool) -> OrderProblem:
        """Numbers the tasks, with the backward whole or split; microbatches take turns."""
        sizes = len(self.placement[0]), len(self.placement), self.num_microbatches
        table, ops, readers = shape_of(*sizes, self.graph, split)
        table = dataclasses.replace(table, placement=self.placement)
        ranks = [*itertools.chain(*self.placement)]
        op_rank = [ranks[stage] for _, stage in ops]
        limits = [limit + 1e-9 * abs(limit) for limit in self.limits]
        empty = OrderProblem(table, ops, op_rank, [], [], limits, [], self.objective)
        m = empty.num_microbatches
        tasks = [empty.task(n) for n in range(len(ops) * m)]

        def delays(op: int, here: int, there: int) -> Sequence[float]:
            if here == there:
                return (0.0,) * m
            return [self.costs.transfer(task, here, there) for task in tasks[op * m : op * m + m]]

        return dataclasses.replace(
            empty,
            time=[*map(self.costs.of, tasks)],
            change=[*map(self.memory.of, tasks)],
            outputs=[
                [(reader, delays(op, op_rank[op], op_rank[reader])) for reader in own]
                for op, own in enumerate(readers)
            ],
        )

    def _searched(
        self, tables: Sequence[tuple[str, Table]], options: SearchOptions, deadline: float
    ) -> tuple[list[tuple[str, Table]], float]:
        """Returns the best table with each form of a backward, and a bound on all."""
        problems = self._problems
        _check_feasible([p.peaks(one_at_a_time(p)) for p in problems], self.limits)
        bound = lower_bound(problems[0])
        if self._has_both:
            least = dataclasses.replace(self, costs=_least(self.costs), memory=_least(self.memory))
            bound = lower_bound(least.problem(True))
        found, exact, seed = [], options.get("exact", 0.0), options.get("seed", 0)
        for problem in problems:
            search = Search(problem, bound, deadline)
            given = [(name, problem.to_orders(table)) for name, table in tables
                     if problem.splits or not table.splits_backward]  # fmt: skip
            search.run(given, options.get("evaluations", 2000), seed)
            if exact > 0 and not search.over:
                orders, proved = solve(problem, search.best.orders, bound, exact, seed)
                search.add("exact solver", orders)
                bound = bound if self._has_both else proved
            found.append((search.best.source, problem.to_table(search.best.orders)))
        return found, bound

    def _fits(self, table: Table) -> bool:
        return _fits(self.memory.peaks(table), self.limits)

    def _varied(
        self, name: str, table: Table, recompute: bool, offload: bool, least: float
    ) -> Iterator[Synthesis]:
        """Returns what fits of a table, with each of its windows, and may take less than `least`.

        Where all is not kept, some activations are computed again, or offloaded.
        """
        alone = dataclasses.replace(table, overlaps=frozenset())
        if self._is_slow(self._simulated(name, alone, None), least):
            return
        for windows in self._windows(alone):
            kept = self._simulated(name, windows.added_to(alone), windows)
            if self._is_slow(kept, least):
                continue
            tables = [(name, kept.table)]
            if not _fits(kept.timeline.peak_memory, self.limits):
                resident = kept.timeline.machine.held(len(self.limits))
                limits = [a - b for a, b in zip(self.limits, resident, strict=True)]
                again = fitted(kept.table, self.memory, limits, Table.with_recomputation)
                tables = [(f"{name}, recomputed", again)] if recompute and again else []
                if offload:
                    away = offloads_to_fit(kept.table, self.memory, limits)
                    tables += [(f"{name}, offloaded", own) for own in away]
            for source, own in tables:
                made = self._simulated(source, own, windows)
                if _fits(made.timeline.peak_memory, self.limits):
                    least = min(least, made.value)
                    yield made

    def _windows(self, table: Table) -> list[Windows]:
        """Returns the windows that a table may have; what is split has to be gathered."""
        found = Windows().choices(table, self.gather, self.reduce)
        return [own for own in found if not self.gather or own.held is not None]

    def _is_slow(self, found: Synthesis, least: float) -> bool:
        """Tells that nothing which has the tasks of a table, and more, takes less."""
        return self.objective == "wall" and found.value >= least

    def _simulated(self, source: str, table: Table, windows: Windows | None = None) -> Synthesis:
        """Simulates a table; sums that its windows do not reduce are reduced after its tasks."""
        machine = Machine()
        if self.reduce and windows and not windows.reduces:
            times, sizes = (self._collectives(model)[1] for model in (self.costs, self.memory))
            machine = Machine(optimizer=[*map(sum, times)], resident=[*map(sum, sizes)])
        timeline = simulate(table, self.costs, memory=self.memory, machine=machine)
        value = timeline.makespan if self.objective == "wall" else timeline.longest_span
        return Synthesis(table, timeline, self.objective, value, 0.0, source, windows or Windows())

    def _collectives(self, model: Costs | Memory) -> list[list[list[float]]]:
        """Returns of gathers and of reductions, for each rank, the least of each of its stages."""
        stages: list[set[int]] = [set() for _ in self.limits]
        for stage, rank in itertools.chain(*map(enumerate, self.placement)):
            stages[rank].add(stage)
        return [
            [[asked and min(model.of(Task(kind, stage, i)) for i in range(self.num_microbatches))
              for stage in own] for own in stages]
            for kind, asked in ((Kind.G, self.gather), (Kind.S, self.reduce))
        ]  # fmt: skip

    def _rooms(self) -> list[list[float]]:
        """Returns what windows leave of the limits, at least: for each number of stages held."""
        gathered, sums = self._collectives(self.memory)
        rooms = [
            [limit - sum(sorted(own, reverse=True)[:held]) - sum(rest)
             for limit, own, rest in zip(self.limits, gathered, sums, strict=True)]
            for held in range(1, 1 + max(map(len, gathered)))
        ]  # fmt: skip
        return [room for n, room in enumerate(rooms) if room not in [self.limits, *rooms[:n]]]

    def _with_collectives(self, bound: float) -> float:
        """Adds collectives to a bound on the tasks that compute.

        One gather at least comes before all of these, also in a span, and one reduction after them.
        Those of a rank do not overlap.
        """
        gathers, sums = self._collectives(self.costs)
        first = min(map(min, gathers))
        together = max(sum(a) + sum(b) for a, b in zip(gathers, sums, strict=True))
        return max(bound + first + min(map(min, sums)), together)


def _directions(
    placement: Sequence[int] | Sequence[Sequence[int]],
) -> tuple[tuple[int, ...], ...]:
    """Checks a placement; gives it for each direction."""
    given: typing.Any = tuple(placement)
    given = tuple(map(tuple, given if given and isinstance(given[0], Iterable) else [given]))
    ranks = {*itertools.chain(*given)}
    integers = all(isinstance(rank, numbers.Integral) for rank in ranks)
    if not ranks or not integers or ranks != set(range(max(ranks) + 1)):
        raise ValueError(
            f"placement has the rank of each stage, and ranks are numbered from 0 without gaps, "
            f"got {given}; renumber the ranks."
        )
    if len({*map(len, given)}) > 1:
        raise ValueError(
            f"placement has the rank of each stage in each direction, got "
            f"{', '.join(map(str, map(len, given)))} stages; give all directions all stages."
        )
    return given


def _limits(memory_limit: float | Sequence[float], num_ranks: int) -> list[float]:
    each = memory_limit if isinstance(memory_limit, Iterable) else [memory_limit] * num_ranks
    limits = [*each]
    if len(limits) != num_ranks:
        raise ValueError(
            f"memory_limit has {len(limits)} numbers, but the placement has {num_ranks} ranks; "
            f"give a number for each, or one for all."
        )
    for rank, limit in enumerate(limits):
        check_number("synthesize", f"memory_limit of rank {rank}", limit, "a number")
    return [*map(float, limits)]


def _graph(
    stage_inputs: Sequence[Sequence[int]] | None, num_stages: int
) -> tuple[tuple[int, ...], ...] | None:
    """Checks that stages read from stages, and none from itself by way of others."""
    if stage_inputs is None:
        return None
    given = tuple(map(tuple, stage_inputs))
    if len(given) != num_stages or {*itertools.chain(*given)} - {*range(num_stages)}:
        raise ValueError(
            f"stage_inputs has for each of the {num_stages} stages the numbers of those that it "
            f"reads from, got {given}; give () for one that reads from none."
        )
    try:
        graphlib.TopologicalSorter(dict(enumerate(given))).prepare()
    except graphlib.CycleError as error:
        raise ValueError(
            f"stage_inputs: no stage waits for itself, and stages {error.args[1]} wait for each "
            f"other in a circle; correct {given}."
        ) from None
    return as_graph(given)


def _check_arguments(num_microbatches: int, directions: int, objective: str) -> None:
    if not isinstance(num_microbatches, int) or num_microbatches < 1:
        raise ValueError(
            f"num_microbatches is an integer of at least 1, got {num_microbatches!r}; use 1 to "
            f"run the batch whole."
        )
    if num_microbatches % directions:
        raise ValueError(
            f"{num_microbatches} microbatches do not go in {directions} directions, as many in "
            f"each; use {num_microbatches + -num_microbatches % directions}."
        )
    if objective not in typing.get_args(Objective):
        raise ValueError(f"objective is 'wall' or 'span', got {objective!r}.")


def _check_feasible(
    each: Iterable[Sequence[float]], limits: Sequence[float], what: str = ""
) -> None:
    """Checks that one microbatch alone fits, in some way; then all fit, one after the other."""
    over = ([own - limit for own, limit in zip(peaks, limits, strict=True)] for peaks in each)
    most, rank = min(max((own, -rank) for rank, own in enumerate(peaks)) for peaks in over)
    limit = limits[-rank]
    if most > 1e-9 * abs(limit):
        raise ValueError(
            f"rank {-rank} may hold {limit:g}, but a microbatch alone{what} makes it hold "
            f"{limit + most:g}: no table fits; raise memory_limit to {limit + most:g} or more, or "
            f"give the rank less."
        )


def _fits(peaks: Sequence[float], limits: Sequence[float]) -> bool:
    return all(peak <= limit + 1e-9 * abs(limit) for peak, limit in zip(peaks, limits, strict=True))


def _least(model: _Model) -> _Model:
    """Makes costs, or changes of memory, by halves: together no more than these or the whole."""

    def of(task: Task, kind: Kind) -> float:
        return model.of(dataclasses.replace(task, kind=kind))

    def first(task: Task) -> float:
        return min(of(task, Kind.I), max(of(task, Kind.B), 0.0))

    def rest(task: Task) -> float:
        return min(of(task, Kind.I) + of(task, Kind.W), of(task, Kind.B)) - first(task)

    return dataclasses.replace(model, input_grad=first, weight_grad=rest, backward=None)
