"""`plan_layers`: a plan of a chain of layers from its costs alone, as a value."""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Unpack

from jaxpp._messages import check_number, check_options
from jaxpp.planning import _files
from jaxpp.planning.search._bound import lower_bound
from jaxpp.planning.search._layers import Layers
from jaxpp.planning.search._named import Cutter
from jaxpp.planning.search._search import TimedChoice, find, synthesized, timed
from jaxpp.planning.search._setting import Choice, Options, Setting
from jaxpp.schedules import FromTable, Table, Timeline, check, plot


@dataclasses.dataclass(frozen=True)
class LayersPlan(_files.JsonFile):
    """A plan of a chain of layers: cut, placement and order together.

    Args:
        setting: all that the plan follows from.
        choice: the cut and the placement.
        table: the order of the tasks.
        time: the time of a step, in the unit of the layers' costs.
        lower_bound: a time that no plan beats, of those that were searched.
        order_bound: a time that no order of the tasks beats at this cut and placement, from
            `proved`; 0 where nobody has asked.

    Example:
        >>> from jaxpp.planning.search import Layers, plan_layers
        >>> layers = Layers((1.0,) * 6, (1.0,) * 6, (1.0,) * 6)
        >>> plan = plan_layers(layers, ranks=2, microbatches=4, directions=(1,), tries=50)
        >>> sum(plan.units), plan.timeline.makespan == plan.time
        (6, True)
    """

    KIND: ClassVar[str] = "layers_plan"
    VERSION: ClassVar[int] = 6

    setting: Setting
    choice: Choice
    table: Table
    time: float
    lower_bound: float
    order_bound: float = 0.0

    @property
    def units(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return self.choice.units

    @property
    def parameter_bytes(self) -> tuple[float, ...]:
        """The bytes of parameters that each rank holds; with two directions most are on two."""
        return tuple(self.setting.parameters(self.choice))

    @property
    def cuts(self) -> list[str]:
        """The names of the layers that open a stage, but the first, for `split_stages(at=)`.

        Raises:
            ValueError: the layers have no names.
        """
        names = self.setting.layers.names
        if not names:
            raise ValueError(
                "LayersPlan.cuts: the layers have no names; give Layers(names=...), the "
                "submodules or scopes that split_stages(at=) is to cut at."
            )
        return [names[cut] for cut in self.choice.cuts[1:-1]]

    @property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """For each direction, the rank of each stage."""
        return self.choice.placement

    @property
    def order(self) -> FromTable:
        """The schedule, for `jaxpp.schedule`."""
        return FromTable(self.table)

    @property
    def gap(self) -> float:
        """The most by which the plan may be slower than the best one, over the lower bound."""
        return self.time / self.lower_bound - 1 if self.lower_bound else 0.0

    def proved(self, work: float = 30.0, **options: Any) -> "LayersPlan":
        """Proves with CP-SAT how much a better order of the tasks gains at this cut, at most.

        It suits a few hundred tasks. The solver's workers race: what it proves may differ from run
        to run, and so may the order, where it finds a better one.

        Args:
            work: the solver's deterministic seconds: about seconds of a core.
            **options: as for `jaxpp.schedules.synthesize`, whose tables the solver starts from.

        Returns:
            The plan with the best bound that is known, and the best order.

        Raises:
            ImportError: OR-tools is not installed.
        """
        found = synthesized(self.setting, self.choice, **{"exact": work, **options})
        assert found is not None, "it fits"
        choice = dataclasses.replace(self.choice, **vars(found.windows))
        best = min(self, _with_windows(self.setting, choice, found.table), key=attrgetter("time"))
        bound = min(max(found.lower_bound, self.order_bound, self.lower_bound), best.time)
        made = dict(choice=best.choice, table=best.table, time=best.time, order_bound=bound)
        return dataclasses.replace(self, **made)

    @property
    def timeline(self) -> Timeline:
        """The times of the tasks, and what ranks hold."""
        return self.setting.timeline(self.table, self.choice)

    def check(self) -> None:
        """Checks that the table is sound, fits, and takes the time that the plan says.

        Raises:
            ScheduleError: the table is incomplete, inconsistent or deadlocks.
            ValueError: a rank holds too much, or the time is another one.
        """
        check(self.table)
        timeline, limit = self.timeline, self.setting.memory_limit
        if max(timeline.peak_memory) > limit * (1 + 1e-6):
            raise ValueError(
                f"LayersPlan.check: a rank holds {max(timeline.peak_memory):g}, and may hold "
                f"{limit:g}; plan again."
            )
        if not math.isclose(timeline.makespan, self.time, rel_tol=1e-6):
            raise ValueError(
                f"LayersPlan.check: the step takes {timeline.makespan:g}, and the plan says "
                f"{self.time:g}; plan again."
            )

    def plot(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Draws the timeline; options are those of `jaxpp.schedules.plot`."""
        plot(self.timeline, path, **options)

    def __str__(self) -> str:
        timeline = self.timeline
        lines = [
            f"{self.setting.microbatches} microbatches on {self.setting.ranks} ranks: "
            f"{self.time:.6g}, bubble {timeline.bubble_fraction:.1%}; any plan takes at least "
            f"{self.lower_bound:.6g}, a gap of {self.gap:.1%}",
            f"layers of each stage: {', '.join(map(str, self.units))}",
        ]
        if self.order_bound:
            lines.append(
                f"any order at this cut takes at least {self.order_bound:.6g}, a gap of "
                f"{self.time / self.order_bound - 1:.1%}"
            )
        for n, ranks in enumerate(self.placement):
            name = f" in direction {n}" if len(self.placement) > 1 else ""
            lines.append(f"rank of each stage{name}: {', '.join(map(str, ranks))}")
        if any(self.parameter_bytes):
            held = (f"{own:.4g}" for own in self.parameter_bytes)
            lines.append(f"bytes of parameters of each rank: {', '.join(held)}")
        if any(timeline.peak_memory):
            held = (f"{own:.4g}" for own in timeline.peak_memory)
            lines.append(f"most bytes of each rank: {', '.join(held)}")
        return "\n".join([*lines, *self.setting.described(self.choice)])


def _with_windows(setting: Setting, choice: Choice, table: Table) -> TimedChoice:
    """Finds the best windows of gathers and reductions for the order of a table."""
    if not setting.zero:
        return timed(setting, choice, table)
    cutter = Cutter(setting, FromTable(table))
    best = cutter.best_windows(choice)
    return timed(setting, best, cutter.table(best))


def plan_layers(
    layers: Layers,
    *,
    ranks: int,
    microbatches: int,
    directions: Sequence[int] = (1, 2),
    tries: int = 100_000,
    seed: int = 0,
    time_limit: float = math.inf,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> LayersPlan:
    """Chooses cut, placement and order together, from costs alone: no model, no JAX.

    A stage may be on any rank, and a rank may have any number of stages. With two directions each
    stage is on two ranks, or twice on one, and microbatches take turns.

    Args:
        layers: the costs of the layers.
        ranks: the number of ranks.
        microbatches: their number.
        directions: the numbers of directions to try: `(1,)`, `(2,)` or both. Two need an even
            number of microbatches, and parameters on two ranks.
        tries: how many cuts and placements to judge. The same tries and seed give the same plan on
            any machine; more tries never give a worse one.
        seed: of all random choices.
        time_limit: seconds after which the search ends with what it has.
        progress: whether to show the tries and the best time; by default on a terminal.
        **options: the machine; see `jaxpp.planning.Options`.

    Returns:
        The plan.

    Raises:
        ValueError: an argument is not a number of its kind, or no plan was found that fits.

    Example:
        >>> from jaxpp.planning.search import Layers, plan_layers
        >>> layers = Layers((1.0,) * 7 + (3.0,), (1.0,) * 7 + (3.0,), (1.0,) * 7 + (3.0,))
        >>> plan = plan_layers(layers, ranks=2, microbatches=4, tries=200)
        >>> plan.lower_bound <= plan.time < 65
        True
    """
    check_options(plan_layers, options, Options)
    setting = Setting(layers, ranks, microbatches, **options)
    _check_search(setting, directions, tries, seed, time_limit)
    shown = sys.stderr.isatty() if progress is None else progress

    def report(tried: int, best: float) -> None:
        if shown:
            print(f"\rplan: {tried} of {tries} tries, best {best:.6g}", end="", file=sys.stderr)

    deadline = time.monotonic() + time_limit
    found = find(setting, directions, tries=tries, seed=seed, deadline=deadline, report=report)
    if shown:
        print(file=sys.stderr)
    if found is None:
        raise ValueError(_why_none(setting))
    found = _with_windows(setting, found.choice, found.table)
    bound = lower_bound(setting, max(directions))
    return LayersPlan(setting, found.choice, found.table, found.time, min(bound, found.time))


def _why_none(setting: Setting) -> str:
    state = setting.state_bytes * sum(setting.layers.parameter_bytes) / setting.ranks
    return (
        f"plan_layers: no plan was found that fits into {setting.memory_limit:g} a rank; "
        f"parameters and what goes with them take at least {state:g} a rank. Use more ranks, "
        f"smaller microbatches, one direction, or more tries."
    )


def _check_search(
    setting: Setting, directions: Sequence[int], tries: int, seed: int, time_limit: float
) -> None:
    if not isinstance(directions, Collection) or not 0 < len(directions) or {*directions} - {1, 2}:
        raise ValueError(
            f"plan_layers: directions are 1, 2 or both, as (1, 2), got {directions!r}."
        )
    check_number("plan_layers", "tries", tries, "an integer of at least 1")
    check_number("plan_layers", "seed", seed, "an integer")
    check_number("plan_layers", "time_limit", time_limit, "a positive number")
    if setting.layers.count < setting.ranks:
        raise ValueError(
            f"plan_layers: {setting.ranks} ranks need as many layers, got {setting.layers.count}; "
            f"use fewer ranks."
        )
