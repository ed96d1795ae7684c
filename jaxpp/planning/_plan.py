"""`plan`: chooses cuts, schedule, microbatches and what is kept together, by predicted time."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpp._messages import check_number, check_options, progress
from jaxpp.planning import _files
from jaxpp.planning._device import Device, device_of
from jaxpp.planning._loss import map_sliced
from jaxpp.planning._measure import Measurement
from jaxpp.planning._predict import costs_found
from jaxpp.planning._problem import MADE, SCHEDULES, Candidate, Problem
from jaxpp.planning._profile import Profile, profile
from jaxpp.planning.search import Options
from jaxpp.runtime.executor import format_bytes
from jaxpp.runtime.trace import Trace
from jaxpp.schedules import Costs, Kind, Timeline, by_name
from jaxpp.transforms.stages import UnitCuts

#: A plan prints so many of the other candidates.
_SHOWN = 4
#: Ranks may keep so many times the cores of a machine busy before a plan says so.
_MANY = 1.25


@dataclasses.dataclass(frozen=True)
class Plan(Candidate, _files.JsonFile):
    """The choice of `plan`: the fastest candidate that fits.

    Args:
        problem: all that the plan follows from.
        lower_bound: a time that no cut and no order of tasks beats with these microbatches.
        others: the best candidate of each other schedule and number of microbatches, fastest first.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(weights, x):
        ...     for w in weights:
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> weights, x = [jnp.eye(8) for _ in range(4)], jnp.ones((16, 8))
        >>> options = dict(at_least=4, schedules=["1f1b"], repeats=1)
        >>> plan = jaxpp.plan(loss, weights, x, ranks=2, microbatches=4, **options)
        >>> len(plan.cuts.firsts), plan.order, plan.timeline.num_ranks
        (1, OneFOneB(), 2)
    """

    KIND: ClassVar[str] = "plan"
    VERSION: ClassVar[int] = 10

    problem: Problem = dataclasses.field(kw_only=True, repr=False)
    lower_bound: float = 0.0
    others: tuple[Candidate, ...] = ()

    @property
    def cuts(self) -> UnitCuts:
        """The cuts, for `split_stages(at=)`."""
        own = self.problem.profiles[self.microbatches]
        firsts = tuple(itertools.accumulate(self.units[:-1]))

        def name_of(first: int) -> str:
            before = next(filter(None, reversed(own.names[:first])), "")
            return own.names[first] or (before and f"inside {before}")

        names = tuple(map(name_of, firsts)) if own.names else ()
        return UnitCuts(own.crossing, own.at_least, firsts, names)

    @property
    def gap(self) -> float:
        """The most by which the plan may be slower than the best one, over the lower bound."""
        return self.seconds / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def costs(self) -> Costs:
        """The times of the plan's tasks on the device that was profiled, for `predict`."""
        assert self.choice is not None, "it has a table"
        return self.problem.settings[self.microbatches].costs(self.choice)

    @property
    def timeline(self) -> Timeline:
        """The predicted times of the tasks, and the bytes that ranks hold, for a picture."""
        return self.problem.timeline(self)

    def again(self, costs: Costs | Measurement | Trace) -> "Plan":
        """Plans again, with ranks, links and copies to the host as fast as they are.

        A rank's speed is the time that its tasks were planned to take over the time that they have
        taken. The number of microbatches stays, and the units are not profiled anew.

        Args:
            costs: what `measure` or a trace found of a step of this plan; or its costs alone, which
                do not tell the ranks of a stage apart where a schedule puts it on two.

        Returns:
            The new plan; it may have the same cuts.

        Raises:
            ValueError: a cost is missing, negative or not finite; or nothing fits with these costs,
                nor does the plan.
        """
        table = self.order.table_for_ranks(self.problem.ranks, self.microbatches)
        planned, speed = self.costs, []
        measured, timeline = costs_found(costs)
        factors = _factors_of_ranks(timeline, table.num_ranks)
        for rank, order in enumerate(table.ranks):
            taken, own = [], [task for task in order if task.kind.lane == "compute"]
            for task in own:
                if planned.of(task) > 0 and not measured.of(task) > 0:
                    raise ValueError(
                        f"Plan.again: {task.describe()} takes no time by these costs; give those "
                        f"of a step of this plan: a trace of it, or jaxpp.measure(step, *args)."
                    )
                taken.append(measured.of(task) * factors.get((rank, task.kind, task.stage), 1.0))
            # Rounding is no change of speed: where tasks end together, it could part them.
            speed.append(round(math.fsum(map(planned.of, own)) / math.fsum(taken), 9))
        changed: dict[str, Any] = {
            name: link
            for name, link in (("latency", measured.latency), ("bandwidth", measured.bandwidth))
            if not callable(link)
        }
        count = self.microbatches
        found = self.problem.profiles[count]
        copied = [task for order in table.ranks for task in order if task.kind.lane == "copy"]
        before, after = (sum(map(own.of, copied)) for own in (planned, measured))
        longer = after / before if before and after else 1.0
        copy = tuple(longer * own for own in found.copy)
        found = dataclasses.replace(found, copy=copy)
        problem = dataclasses.replace(
            self.problem, profiles={count: found}, speed=tuple(speed), **changed
        )
        try:
            return solve(problem, self)
        except ValueError as error:
            raise ValueError(
                f"{error} The plan itself no longer fits: copies to the host take {longer:.3g} "
                f"times as long as planned, and ranks have the speeds {speed}."
            ) from None

    def __str__(self) -> str:
        steps = self.problem.steps
        several = f", a step of {steps} in one program" if steps > 1 else ""
        lines = [
            f"{self.schedule}, {self.microbatches} microbatches{several}: {self.seconds:.4g} s, "
            f"bubble {self.bubble:.1%}; any cut and schedule takes at least {self.lower_bound:.4g} "
            f"s, a gap of {self.gap:.1%}",
            f"units of each stage: {', '.join(map(str, self.units))}; {self.cuts}",
        ]
        limit = self.problem.memory_limit
        within = "without a limit" if limit == math.inf else f"of {format_bytes(limit)}"
        peaks = ", ".join(map(format_bytes, self.peak_bytes))
        lines.append(f"most bytes of each rank: {peaks}; {within}")
        if any(self.parameter_bytes):
            held = ", ".join(map(format_bytes, self.parameter_bytes))
            lines.append(f"of these are parameters: {held}")
        tasks = self.order.table_for_ranks(self.problem.ranks, self.microbatches).tasks
        for name, way in (("computed again", Kind.R), ("offloaded", Kind.O)):
            chosen = sorted({task.stage for task in tasks if task.kind is way})
            stages = f"of stages {', '.join(map(str, chosen))}" if chosen else "of no stage"
            lines.append(f"{name}: the activations {stages}")
        if self.choice:
            lines += self.problem.settings[self.microbatches].described(self.choice)
        if self.problem.profiles[self.microbatches].fusing:
            lines.append(f"fused: {self.fuse.replace('none', 'no tasks')}, for place(fuse=)")
        if (busy := self.problem.profiles[self.microbatches].busy * self.problem.ranks) > _MANY:
            lines.append(
                f"tasks kept cores so busy that {self.problem.ranks} ranks need {busy:.1f} times "
                f"those of the machine that was profiled: on it, the step takes longer than this"
            )
        for c in self.others[:_SHOWN]:
            most = f", at most {format_bytes(max(c.peak_bytes))} a rank" if c.peak_bytes else ""
            lines.append(f"not {c.schedule}, {c.microbatches} microbatches: {c.reason}{most}")
        if rest := self.others[_SHOWN:]:
            names = ", ".join(dict.fromkeys(c.schedule for c in rest))
            lines.append(f"and {len(rest)} more, which `others` has, slower or too large: {names}")
        return "\n".join(lines)


class PlanOptions(Options, total=False):
    """The machine that `plan` is for, see `Options`, and how it profiles the function.

    Attributes:
        steps: how many steps of a delay of 1 (`jaxpp.delay`) are one program. Its ranks do not
            drain between them (`jaxpp.schedules.joined`), and hold the parameters and the sums of
            gradients once more. Times are then those of one step of them. By default 1, no delay.
        at_least: as in `profile`, as are all that follow.
        in_axes: by default every argument but the first is part of the batch.
        device: where to measure, or a `jaxpp.Device` or the name of one, for a plan without a
            measurement; its memory is then the limit, unless one is given.
        in_specs: for a mesh with further axes.
        repeats: how often to measure; the medians count.
        fuse: whether to measure what fused tasks gain; the plan then chooses `fuse`, for `place`.
    """

    steps: int
    at_least: int
    in_axes: PyTree[int | str | None]
    device: Any
    in_specs: PyTree[PartitionSpec | None]
    repeats: int
    fuse: bool


#: Those of the options that `profile` takes.
_OF_PROFILE = {*PlanOptions.__annotations__} - {*Options.__annotations__, "steps"}


def plan(
    fun: Any,
    *args: Any,
    ranks: int,
    microbatches: int | Sequence[int],
    schedules: Sequence[str] = SCHEDULES,
    tries: int = 2000,
    seed: int = 0,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Chooses cuts, schedule, number of microbatches, and which activations are kept, for a step.

    Where a rank cannot hold its stages' activations, some are computed again, or are in the memory
    of the host meanwhile (`Recompute` and `Offload` of `jaxpp.schedules`), whichever takes less.
    With `zero=`, parameters are gathered and gradients reduced in tasks of their own (`Gather` and
    `Reduce`), where that takes less or holds less.

    Args:
        fun: the loss function, before `split_stages`, as for `profile`.
        *args: its arguments, with a whole batch.
        ranks: the number of ranks.
        microbatches: the number of microbatches of a replica, or those to choose from.
        schedules: those to choose from, as `by_name` takes them; `"synthesized"` is a table that
            `synthesize` makes at the cut of the fastest, `"searched"` a cut, a placement and a
            table that are searched together, as by `plan_layers`. By default all.
        tries: how many cuts and placements the search judges. As many tries give the same plan on
            any machine from the same profile.
        seed: of its random choices.
        **options: the machine, and how to profile; see `jaxpp.planning.PlanOptions`.

    Raises:
        ValueError: nothing fits into the limit, with the bytes that are missing; there are more
            ranks than units; a number of microbatches does not divide the batch; or an argument is
            not a number of its kind.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = lambda weights, x: jnp.mean(jnp.tanh(x @ weights[0]) @ weights[1])
        >>> args, options = ([jnp.eye(8)] * 2, jnp.ones((16, 8))), dict(at_least=2, device="h100")
        >>> sum(jaxpp.plan(loss, *args, ranks=2, microbatches=4, tries=9, **options).units)
        2
    """
    check_options(plan, options, PlanOptions)
    given = microbatches if isinstance(microbatches, Iterable) else [microbatches]
    counts = [*dict.fromkeys(given)]
    for count in counts:
        check_number("plan", "a number of microbatches", count, "an integer of at least 1")
    if not counts or isinstance(schedules, str) or not {*schedules} - {*MADE}:
        raise ValueError(
            f"plan: give one number of microbatches at least, and a list of schedules by name that "
            f"has more than {' and '.join(MADE)}; got {microbatches!r} and {schedules!r}."
        )
    for name in {*schedules} - {*MADE}:
        by_name(name)
    how: dict[str, Any] = {name: own for name, own in options.items() if name in _OF_PROFILE}
    machine: dict[str, Any] = {name: own for name, own in options.items() if name not in how}
    device, replicas = how.get("device"), machine.get("replicas", 1)
    if isinstance(device, Device | str):
        machine = {"memory_limit": device_of(device).memory, **machine}
    problem = Problem({}, ranks, tuple(schedules), tries, seed, **machine)  # it checks these
    profiles: dict[int, Profile] = {}
    made = len({*schedules} & {*MADE})
    with progress("planning", len(counts) * (1 + len(schedules) - made) + made) as update:
        for count in counts:
            own = _one_microbatch(args, count, replicas, how.get("in_axes"))
            profiles[count] = profile(fun, *own, **how)
            update()
        return solve(dataclasses.replace(problem, profiles=profiles), update=update)


def solve(
    problem: Problem,
    known: Candidate | None = None,
    update: Callable[[], object] = lambda: None,
) -> Plan:
    """Makes a plan of the fastest candidate of a problem; one that is known is among them.

    `update` is called for each schedule and number of microbatches.

    Raises:
        ValueError: nothing fits, or no schedule can be made.
    """
    best, *others = problem.candidates(known, update)
    reasons = [
        c.reason or f"{c.seconds / best.seconds - 1:.1%} slower, bubble {c.bubble:.1%}"
        for c in others
    ]
    named = (dataclasses.replace(c, reason=r) for c, r in zip(others, reasons, strict=True))
    fields = {f.name: getattr(best, f.name) for f in dataclasses.fields(Candidate)}
    bound = problem.lower_bound(best.microbatches)
    return Plan(**fields, problem=problem, lower_bound=bound, others=tuple(named))


def _factors_of_ranks(
    timeline: Timeline | None, num_ranks: int
) -> Mapping[tuple[int, Kind, int], float]:
    """Finds by rank, kind and stage the time of tasks there over that on all ranks of the stage."""
    if timeline is None or timeline.num_ranks != num_ranks:
        return {}
    times: dict[tuple[int | None, Kind, int], list[float]] = {}
    for span in timeline.spans:
        for rank in (span.rank, None):
            key = rank, span.task.kind, span.task.stage
            times.setdefault(key, []).append(span.end - span.start)
    means = {key: statistics.fmean(own) for key, own in times.items()}
    return {
        (rank, kind, stage): mean / means[None, kind, stage]
        for (rank, kind, stage), mean in means.items()
        if rank is not None and means[None, kind, stage] > 0
    }


def _one_microbatch(args: Sequence[Any], number: int, replicas: int, in_axes: Any) -> list[Any]:
    """Takes the first microbatch of the arguments."""
    count, each = number * replicas, f" of {replicas} replicas each" if replicas > 1 else ""

    def first(x: Any, axis: int) -> Any:
        size = x.shape[axis]
        if size % count:
            raise ValueError(
                f"plan: {number} microbatches{each} do not divide the {size} examples of a batch."
            )
        return jax.lax.slice_in_dim(x, 0, size // count, axis=axis)

    return map_sliced(first, in_axes, args)
