"""`plan`: chooses cuts, schedule, microbatches and recomputation together, by predicted time."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpp.planning._profile import Profile, profile
from jaxpp.runtime.executor import format_bytes
from jaxpp.schedules import Costs, Kind, Memory, Schedule, Table, by_name, simulate
from jaxpp.transforms.stages import UnitCuts

#: The schedules that are tried by default, as `jaxpp.schedules.by_name` takes them.
SCHEDULES = (
    "gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2", "1f1b_v", "zb_v", "v_half", "v_min", "hanayo",
    "interleaved_1f1b(stages_per_rank=2)", "interleaved_1f1b(stages_per_rank=4)",
    "interleaved_zb(stages_per_rank=2)", "gis",
)  # fmt: skip
#: How many cuts are tried for a schedule, at most.
EVALUATIONS = 200


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule at the best cut that was found for it.

    Args:
        schedule: the schedule, as `jaxpp.schedules.by_name` takes it.
        microbatches: their number.
        units: the number of units of each stage, in order.
        recompute: for each stage, whether its backward computes the activations again.
        seconds: the time of the tasks of a step; infinite where it does not fit.
        bubble: the share of the ranks' time in which they do nothing.
        peak_bytes: the most that a device of each rank holds.
        reason: why it is not the plan.
    """

    schedule: str
    microbatches: int
    units: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = ()
    seconds: float = math.inf
    bubble: float = 1.0
    peak_bytes: tuple[float, ...] = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Plan(Candidate):
    """What `plan` has chosen: the fastest candidate that fits.

    Args:
        at_least: as in `profile`.
        crossing: the bytes that cross between units.
        lower_bound: a time that no order of tasks beats at these units and this many ranks.
        others: the best candidate of each other schedule and number of microbatches, fastest first.

    Example:
        >>> plan = Plan("1f1b", 8, (3, 2), (True, False), 0.5, 0.2, (3e9, 2e9))
        >>> plan.cuts.firsts, list(plan.policy), plan.order
        ((3,), [0], OneFOneB())
    """

    at_least: int = 0
    crossing: tuple[float, ...] = ()
    lower_bound: float = 0.0
    others: tuple[Candidate, ...] = ()

    #: The version of the file; other versions are refused.
    VERSION: ClassVar[int] = 1

    @property
    def cuts(self) -> UnitCuts:
        """The cuts, for `split_stages(at=)`."""
        return UnitCuts(self.crossing, self.at_least, tuple(itertools.accumulate(self.units[:-1])))

    @property
    def order(self) -> Schedule:
        """The schedule, for `jaxpp.schedule`."""
        return by_name(self.schedule)

    @property
    def policy(self) -> Mapping[int, Any]:
        """The policy of each stage that computes its activations again, for `wrap_forward`."""
        nothing = jax.checkpoint_policies.nothing_saveable
        return {stage: nothing for stage, again in enumerate(self.recompute) if again}

    def __str__(self) -> str:
        lines = [
            f"{self.schedule}, {self.microbatches} microbatches: {self.seconds:.4g} s, bubble "
            f"{self.bubble:.1%}, at least {self.lower_bound:.4g} s by any schedule",
            f"units of each stage: {', '.join(map(str, self.units))}",
        ]
        if any(self.recompute):
            again = [str(stage) for stage, own in enumerate(self.recompute) if own]
            lines.append(f"computed again: the activations of stages {', '.join(again)}")
        lines.append(f"most bytes of each rank: {', '.join(map(format_bytes, self.peak_bytes))}")
        lines += [
            f"not {c.schedule}, {c.microbatches} microbatches: {c.reason}" for c in self.others
        ]
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON."""
        fields = {"jaxpp_plan": self.VERSION} | dataclasses.asdict(self)
        pathlib.Path(path).write_text(json.dumps(fields, indent=2))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan that `save` has written.

        Raises:
            ValueError: the file is no plan, or of another version.
        """
        try:
            found = json.loads(pathlib.Path(path).read_text())
            version = found.pop("jaxpp_plan")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{path} is no plan; make one: jaxpp.plan(f, *args, ...).") from None
        if version != Plan.VERSION:
            raise ValueError(
                f"{path} is a plan of version {version}, and this jaxpp reads version "
                f"{Plan.VERSION}; make it anew: jaxpp.plan(f, *args, ...)."
            )
        others = tuple(Candidate(**_tuples(own)) for own in found.pop("others"))
        return Plan(**_tuples(found), others=others)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}


def plan(
    fun: Any,
    *args: Any,
    ranks: int,
    microbatches: int | Sequence[int],
    memory_limit: float = math.inf,
    state_bytes: float = 4.0,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    schedules: Sequence[str] = SCHEDULES,
    at_least: int = 32,
    in_axes: PyTree[int | None] = None,
    device: Any = None,
    repeats: int = 3,
) -> Plan:
    """Chooses cuts, schedule, number of microbatches and recomputation for a step.

    Args:
        fun: the loss function, before `split_stages`. Its first argument has the parameters.
        *args: its arguments, with a whole batch.
        ranks: the number of ranks.
        microbatches: the number of microbatches, or those to choose from.
        memory_limit: the bytes that a device of a rank has.
        state_bytes: the bytes that a rank holds for each byte of parameters: the parameters, their
            gradients and the optimizer's state. Adam has 4.
        latency: the seconds that a message takes whatever its size.
        bandwidth: the bytes of messages that go from one rank to another in a second.
        schedules: those to choose from, as `jaxpp.schedules.by_name` takes them.
        at_least: as in `profile`.
        in_axes: as in `microbatch`; by default every argument but the first is part of the batch.
        device: where to measure; by default the first of `jax.devices()`.
        repeats: how often to measure; the medians count.

    Returns:
        The plan.

    Raises:
        ValueError: nothing fits into the limit, with the bytes that are missing; there are more
            ranks than units; or a number of microbatches does not divide the batch.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(weights, x):
        ...     for w in weights:
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> weights, x = [jnp.eye(8) for _ in range(4)], jnp.ones((16, 8))
        >>> options = dict(at_least=4, schedules=["1f1b"], repeats=1)
        >>> found = jaxpp.plan(loss, weights, x, ranks=2, microbatches=4, **options)
        >>> sum(found.units), found.schedule
        (4, '1f1b')
        >>> staged = jaxpp.split_stages(loss, at=found.cuts)
    """
    candidates: list[Candidate] = []
    shared: dict[int, Profile] = {}
    for count in [microbatches] if isinstance(microbatches, int) else microbatches:
        own = _one_microbatch(args, count, in_axes)
        options = dict(at_least=at_least, in_axes=in_axes, device=device, repeats=repeats)
        nothing = jax.checkpoint_policies.nothing_saveable
        kept = profile(fun, *own, **options)
        again = profile(fun, *own, policy=nothing, **options)
        shared[count] = kept
        search = _Search(kept, again, ranks, count, memory_limit, state_bytes, latency, bandwidth)
        candidates += [search.best(name) for name in schedules]
    return choose(candidates, shared, ranks, memory_limit)


def choose(
    candidates: Sequence[Candidate],
    profiles: Mapping[int, Profile],
    ranks: int,
    memory_limit: float,
) -> Plan:
    """Makes a plan of the fastest of some candidates.

    Args:
        candidates: the best of each schedule and number of microbatches.
        profiles: the units, by the number of microbatches.
        ranks: the number of ranks.
        memory_limit: the bytes that a device of a rank has.
    """
    by_time = sorted(candidates, key=lambda c: (c.seconds, max(c.peak_bytes, default=math.inf)))
    best = by_time[0]
    if best.seconds == math.inf:
        least = min((max(c.peak_bytes) for c in candidates if c.peak_bytes), default=None)
        if least is None:
            reasons = "; ".join(dict.fromkeys(c.reason for c in candidates))
            raise ValueError(f"plan: no schedule can be made: {reasons}")
        raise ValueError(
            f"plan: nothing fits into {format_bytes(memory_limit)} a rank: the leanest candidate "
            f"needs {format_bytes(least)}, {format_bytes(least - memory_limit)} more. Use more "
            f"ranks, more microbatches that are smaller, or split parameters and optimizer state "
            f"inside a rank (zero1=, zero3=)."
        )
    found = profiles[best.microbatches]
    others = tuple(
        c if c.reason else dataclasses.replace(
            c, reason=f"{c.seconds / best.seconds - 1:.1%} slower, bubble {c.bubble:.1%}")
        for c in by_time[1:]
    )  # fmt: skip
    total = best.microbatches * sum(found.costs)
    bound = max(total / ranks, best.microbatches * max(found.costs))
    fields = {f.name: getattr(best, f.name) for f in dataclasses.fields(Candidate)}
    return Plan(**fields, at_least=found.at_least, crossing=found.crossing,
                lower_bound=bound, others=others)  # fmt: skip


def _one_microbatch(args: Sequence[Any], count: int, in_axes: Any) -> list[Any]:
    """Takes the first microbatch of the arguments."""
    axes = (None, *(0 for _ in args[1:])) if in_axes is None else in_axes

    def part(axis, arg):
        def cut(x):
            size = x.shape[axis]
            if size % count:
                raise ValueError(
                    f"plan: {count} microbatches do not divide the {size} examples of a batch."
                )
            return jax.lax.slice_in_dim(x, 0, size // count, axis=axis)

        return arg if axis is None else jax.tree.map(cut, arg)

    return [part(axis, arg) for axis, arg in zip(axes, args, strict=True)]


class _Search:
    """The search for the best cut of a schedule, and for the stages that compute again."""

    def __init__(
        self, kept: Profile, again: Profile, ranks: int, microbatches: int, limit: float,
        state: float, latency: float, bandwidth: float,
    ):  # fmt: skip
        self._profiles = kept, again
        self._ranks, self._microbatches, self._limit = ranks, microbatches, limit
        self._state, self._latency, self._bandwidth = state, latency, bandwidth
        # The sums over the first units, for each profile: those of a stage are differences.
        self._sums = [
            {
                name: np.concatenate([[0.0], np.cumsum(getattr(own, name))])
                for name in ("forward", "backward", "input_grad", "weight_grad",
                             "activation_bytes", "parameter_bytes")
            }
            for own in (kept, again)
        ]  # fmt: skip

    def best(self, name: str) -> Candidate:
        """Finds the best candidate of a schedule."""
        empty = Candidate(name, self._microbatches)
        try:
            table = by_name(name).table_for_ranks(self._ranks, self._microbatches)
        except ValueError as error:
            return dataclasses.replace(empty, reason=str(error))
        units, stages = len(self._profiles[0].costs), table.num_stages
        if stages > units:
            return dataclasses.replace(
                empty, reason=f"{stages} stages, but the function has {units} units"
            )
        even = tuple(round(units * n / stages) for n in range(stages + 1))
        balanced = (0, *self._profiles[0].choose(stages), units)
        recompute = (False,) * stages
        at = min((even, balanced), key=lambda at: self._value(table, at, recompute))
        at = self._climb(table, at, recompute)
        while self._value(table, at, recompute)[0] > 0 and not all(recompute):
            recompute = self._recompute_more(table, at, recompute)
            at = self._climb(table, at, recompute)
        if not self._value(table, at, recompute)[0]:
            recompute = self._recompute_less(table, at, recompute)
        return self._candidate(name, table, at, recompute)

    def _climb(self, table: Table, at: tuple[int, ...], recompute: tuple[bool, ...]):
        """Moves cuts, one or two units at a time, as long as that helps."""
        best, tried = self._value(table, at, recompute), 0
        improved = True
        while improved and tried < EVALUATIONS:
            improved = False
            for n, move in itertools.product(range(1, len(at) - 1), (1, -1, 2, -2)):
                other = (*at[:n], at[n] + move, *at[n + 1 :])
                if not at[n - 1] < other[n] < at[n + 1]:
                    continue
                tried += 1
                value = self._value(table, other, recompute)
                if value < best:
                    at, best, improved = other, value, True
        return at

    def _value(self, table: Table, at: tuple[int, ...], recompute: tuple[bool, ...]):
        """Gives what is over the limit, and the time: less is better."""
        peaks = self._peaks(table, at, recompute)
        over = max(0.0, max(peaks) - self._limit)
        return over, self._timeline(table, at, recompute).makespan

    def _recompute_more(self, table: Table, at: tuple[int, ...], recompute: tuple[bool, ...]):
        """Lets the stage compute again that saves most bytes, on the rank that holds most."""
        peaks = self._peaks(table, at, recompute)
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        own = {task.stage for task in table.ranks[worst]}
        left = [s for s in sorted(own) if not recompute[s]]
        left = left or [s for s, again in enumerate(recompute) if not again]

        def saved(stage: int) -> float:
            kept, again = (
                own["activation_bytes"][at[stage + 1]] - own["activation_bytes"][at[stage]]
                for own in self._sums
            )
            return kept - again

        chosen = max(left, key=saved)
        return tuple(again or stage == chosen for stage, again in enumerate(recompute))

    def _recompute_less(self, table: Table, at: tuple[int, ...], recompute: tuple[bool, ...]):
        """Lets stages keep their activations where there is room, those first that gain most."""
        best = self._value(table, at, recompute)
        while True:
            fewer = [
                tuple(again and stage != n for stage, again in enumerate(recompute))
                for n in range(len(recompute))
                if recompute[n]
            ]
            value, chosen = min(
                ((self._value(table, at, own), own) for own in fewer),
                default=(best, recompute),
            )
            if value >= best:
                return recompute
            best, recompute = value, chosen

    def _of_stages(self, name: str, at: tuple[int, ...], recompute: Sequence[bool]) -> list[float]:
        return [
            float(self._sums[again][name][b] - self._sums[again][name][a])
            for again, (a, b) in zip(recompute, itertools.pairwise(at), strict=True)
        ]

    def _timeline(self, table: Table, at: tuple[int, ...], recompute: tuple[bool, ...]):
        forward, backward, inputs, weights = (
            tuple(self._of_stages(name, at, recompute))
            for name in ("forward", "backward", "input_grad", "weight_grad")
        )
        edges = [*(self._profiles[0].crossing[cut - 1] for cut in at[1:-1]), 0.0]

        def sent(task) -> float:
            return edges[task.stage] if task.kind is Kind.F else edges[task.stage - 1]

        costs = Costs(forward, inputs, weights, backward, latency=self._latency,
                      bandwidth=self._bandwidth, edge_bytes=sent)  # fmt: skip
        return simulate(table, costs)

    def _peaks(self, table: Table, at: tuple[int, ...], recompute: tuple[bool, ...]):
        """Finds the most bytes of each rank: activations, what a task needs, and what stays."""
        held = tuple(self._of_stages("activation_bytes", at, recompute))
        parameters = self._of_stages("parameter_bytes", at, recompute)
        # A stage that computes again has all of its activations while its backward runs, and from
        # the input gradient to the weight gradient where these are apart.
        whole = self._of_stages("activation_bytes", at, [False] * len(recompute))
        made = tuple(w if again else 0.0 for w, again in zip(whole, recompute, strict=True))
        activations = Memory(
            forward=held,
            input_grad=made,
            weight_grad=tuple(-h - m for h, m in zip(held, made, strict=True)),
            backward=tuple(-h for h in held),
        )
        split = any(task.kind is Kind.I for own in table.ranks for task in own)
        temporary = self._profiles[0].temporary_bytes
        needed = [
            max(temporary[a:b]) + (0.0 if split else own)
            for (a, b), own in zip(itertools.pairwise(at), made, strict=True)
        ]
        peaks = []
        for own, peak in zip(table.ranks, activations.peaks(table), strict=True):
            stages = {task.stage for task in own}
            resident = self._state * sum(parameters[s] for s in stages)
            peaks.append(peak + resident + max(needed[s] for s in stages))
        return tuple(peaks)

    def _candidate(
        self, name: str, table: Table, at: tuple[int, ...], recompute: tuple[bool, ...]
    ) -> Candidate:
        timeline, peaks = self._timeline(table, at, recompute), self._peaks(table, at, recompute)
        over = max(peaks) - self._limit
        fits = over <= 0
        return Candidate(
            name,
            self._microbatches,
            tuple(b - a for a, b in itertools.pairwise(at)),
            recompute,
            timeline.makespan if fits else math.inf,
            timeline.bubble_fraction,
            peaks,
            ""
            if fits
            else f"{format_bytes(over)} more than its limit on rank "
            f"{max(range(len(peaks)), key=peaks.__getitem__)}",
        )
