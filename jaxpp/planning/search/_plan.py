"""`plan_layers`: a plan of a chain of layers from its costs alone, as a value."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxpp.planning.search._bound import lower_bound
from jaxpp.planning.search._layers import Layers
from jaxpp.planning.search._rounds import find
from jaxpp.planning.search._setting import Choice, Setting
from jaxpp.schedules import FromTable, Table, Timeline, check, from_csv, plot, simulate, to_csv


@dataclasses.dataclass(frozen=True)
class LayersPlan:
    """A plan of a chain of layers: cut, placement and order together.

    Args:
        setting: all that the plan follows from.
        choice: the cut and the placement.
        table: the order of the tasks.
        time: the time of a step, in the unit of the layers' costs.
        lower_bound: a time that no plan beats, of those that were searched.

    Example:
        >>> from jaxpp.planning.search import Layers, plan_layers
        >>> layers = Layers((1.0,) * 6, (1.0,) * 6, (1.0,) * 6)
        >>> plan = plan_layers(layers, ranks=2, microbatches=4, directions=(1,), tries=50)
        >>> sum(plan.units), plan.timeline.makespan == plan.time
        (6, True)
    """

    setting: Setting
    choice: Choice
    table: Table
    time: float
    lower_bound: float

    #: The version of the file; other versions are refused.
    VERSION: ClassVar[int] = 1

    @property
    def units(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(b - a for a, b in itertools.pairwise(self.choice.cuts))

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
        return self.time / self.lower_bound - 1

    @property
    def timeline(self) -> Timeline:
        """The times of the tasks, and what ranks hold."""
        setting, choice = self.setting, self.choice
        return simulate(
            self.table, setting.costs(choice), memory=setting.memory(choice),
            machine=setting.machine(choice),
        )  # fmt: skip

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
        for n, ranks in enumerate(self.placement):
            name = f" in direction {n}" if len(self.placement) > 1 else ""
            lines.append(f"rank of each stage{name}: {', '.join(map(str, ranks))}")
        if any(timeline.peak_memory):
            held = (f"{own:.4g}" for own in timeline.peak_memory)
            lines.append(f"most bytes of each rank: {', '.join(held)}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON."""
        setting = dataclasses.asdict(self.setting)
        numbers = {"time": self.time, "lower_bound": self.lower_bound}
        fields = {"setting": setting, "choice": dataclasses.asdict(self.choice), **numbers}
        whole = {"jaxpp_layers_plan": self.VERSION, **fields, "table": to_csv(self.table)}
        pathlib.Path(path).write_text(json.dumps(whole, indent=2))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "LayersPlan":
        """Reads a plan that `save` has written.

        Raises:
            ValueError: the file is no plan of layers, or of another version.
        """
        try:
            found = _tuples(json.loads(pathlib.Path(path).read_text()))
            version = found.pop("jaxpp_layers_plan")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{path} is no plan of layers; make one: plan_layers(...).") from None
        if version != LayersPlan.VERSION:
            raise ValueError(
                f"{path} is a plan of version {version}, and this jaxpp reads version "
                f"{LayersPlan.VERSION}; make it anew: plan_layers(...)."
            )
        layers = Layers(**found["setting"].pop("layers"))
        setting, choice = Setting(layers, **found.pop("setting")), Choice(**found.pop("choice"))
        count = len(choice.placement)
        directions = [n % count for n in range(setting.microbatches)]
        table = from_csv(found.pop("table"), placement=choice.placement, direction_of=directions)
        return LayersPlan(setting, choice, table, **found)


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {k: _tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


def plan_layers(
    layers: Layers,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: float = math.inf,
    state_bytes: float = 4.0,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    speed: float | Sequence[float] = 1.0,
    directions: Sequence[int] = (1, 2),
    tries: int = 20_000,
    seed: int = 0,
    time_limit: float = math.inf,
    progress: bool | None = None,
) -> LayersPlan:
    """Chooses cut, placement and order together, from costs alone: no model, no JAX.

    A stage may be on any rank, and a rank may have any number of stages. With two directions each
    stage is on two ranks, or twice on one, and microbatches take turns.

    Args:
        layers: the costs of the layers.
        ranks: the number of ranks.
        microbatches: their number.
        memory_limit: the bytes that a rank has; by default no limit.
        state_bytes: the bytes that a rank holds for each byte of parameters.
        latency: what a message takes whatever its size.
        bandwidth: the bytes that move from one rank to another in a unit of time.
        speed: the speed of a rank, or of each rank; tasks take their time divided by it.
        directions: the numbers of directions to try: `(1,)`, `(2,)` or both. Two need an even
            number of microbatches, and parameters on two ranks.
        tries: how many cuts and placements to judge. The same tries and seed give the same plan on
            any machine; more tries never give a worse one.
        seed: of all random choices.
        time_limit: seconds after which the search ends with what it has.
        progress: whether to show the tries and the best time; by default on a terminal.

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
    if not set(directions) <= {1, 2} or not directions or tries < 1:
        raise ValueError(
            f"plan_layers: directions are 1, 2 or both, and tries is at least 1, got "
            f"{tuple(directions)} and {tries}."
        )
    speeds = (float(speed),) * ranks if isinstance(speed, int | float) else tuple(speed)
    setting = Setting(
        layers, ranks, microbatches, memory_limit, state_bytes, latency, bandwidth, speeds
    )
    shown = sys.stderr.isatty() if progress is None else progress

    def report(tried: int, best: float) -> None:
        if shown:
            print(f"\rplan: {tried} of {tries} tries, best {best:.6g}", end="", file=sys.stderr)

    found = find(
        setting, directions, tries=tries, seed=seed, deadline=time.monotonic() + time_limit,
        report=report,
    )  # fmt: skip
    if shown:
        print(file=sys.stderr)
    if found is None:
        state = state_bytes * sum(layers.parameter_bytes) / ranks
        raise ValueError(
            f"plan_layers: no plan was found that fits into {memory_limit:g} a rank; parameters "
            f"and what goes with them take at least {state:g} a rank. Use more ranks, smaller "
            f"microbatches, one direction, or more tries."
        )
    bound = lower_bound(setting, max(directions))
    return LayersPlan(setting, found.choice, found.table, found.time, min(bound, found.time))
