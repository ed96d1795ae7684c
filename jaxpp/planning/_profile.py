"""`profile`: the times and bytes of a function's units, each measured alone on one device."""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from jaxpp._compat import PINNED_HOST
from jaxpp._program import Bundle, Role, Run
from jaxpp._specs import Spec
from jaxpp.planning import _files
from jaxpp.planning._device import Device, device_of
from jaxpp.planning._limited import LimitedCuts
from jaxpp.planning._loss import gradient, map_sliced
from jaxpp.planning._measure import _loaded, _OneByOne, _placed_copies
from jaxpp.planning.search import Choice, Layers, Options, Setting
from jaxpp.runtime.executor import array_bytes
from jaxpp.runtime.local import LocalStep, MpmdMesh
from jaxpp.runtime.trace import Clocked, Key, dependencies_of
from jaxpp.schedules import Costs, Interleaved1F1B, InterleavedZeroBubble, Kind, Schedule
from jaxpp.transforms import place, schedule, split_stages, wrap_forward
from jaxpp.transforms.stages import Finest, UnitCosts

#: The microbatches of a step that is profiled, so that there are sums of gradients, too.
MICROBATCHES = 4


@dataclasses.dataclass(frozen=True)
class Profile(UnitCosts):
    """The times and bytes of the units of a function, made by `profile`.

    A unit is a layer, or what lies before the first layer or after the last one. Times are seconds
    of a task of one microbatch, bytes those of one device.

    Args:
        crossing: the bytes that cross from each unit, but the last, to those behind it.
        at_least: the number of units that was asked for.
        costs: the time of each unit's forward and backward.
        forward: the time of each forward.
        backward: the time of each backward.
        input_grad: the time of each input gradient; 0 where there is none.
        weight_grad: the time of each weight gradient; 0 where there is none.
        activation_bytes: what each unit keeps from its forward for the backward.
        temporary_bytes: what XLA needs beside arrays in a task of each unit.
        parameter_bytes: what each unit reads of the parameters.
        memory_bandwidth: the bytes that an update of the parameters reads or writes in a second.
        copy: the time in which what each unit keeps goes to the memory of the host, or back; empty
            where the device has no such memory, or nobody knows.
        inputs: the units that each unit reads; empty where each reads the one before.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(weights, x):
        ...     for w in weights:
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> weights, x = [jnp.eye(8)] * 4, jnp.ones((4, 8))
        >>> found = jaxpp.profile(loss, weights, x, at_least=4, repeats=1)
        >>> len(found.forward), sum(found.parameter_bytes)
        (4, 1024)
        >>> staged = jaxpp.split_stages(loss, 2, balance=found)
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    temporary_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]
    memory_bandwidth: float = math.inf
    copy: tuple[float, ...] = ()
    inputs: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.memory_bandwidth > 0:
            raise ValueError(
                f"Profile: memory_bandwidth is a positive number, got {self.memory_bandwidth}. "
                f"Profile the function anew."
            )
        for field in dataclasses.fields(self):
            numbers = getattr(self, field.name)
            is_list = isinstance(numbers, tuple) and field.name != "inputs"
            for n, number in enumerate(numbers if is_list else ()):
                if not 0 <= number < math.inf:
                    raise ValueError(
                        f"Profile: {field.name} of unit {n} is {number}; times and bytes are "
                        f"finite and not negative. Profile the function anew."
                    )

    def costs_of(self, units: Sequence[int]) -> Costs:
        """Returns the costs of stages that have so many units each, for `predict` or `simulate`.

        Args:
            units: the number of units of each stage.

        Raises:
            ValueError: these are not all units, or a stage has none.
        """
        if sum(units) != len(self.costs) or not all(n > 0 for n in units):
            raise ValueError(
                f"costs_of: the profile has {len(self.costs)} units, each in one stage, got stages "
                f"of {list(units)} units."
            )
        placement = tuple(range(len(units)))
        choice = Choice((0, *itertools.accumulate(units)), (placement,))
        return self.setting(len(units), 1).costs(choice)

    def setting(self, ranks: int, microbatches: int, **options: Unpack[Options]) -> Setting:
        """Returns what a plan for so many ranks follows from, in seconds and bytes."""
        layers = Layers(
            self.forward, self.input_grad, self.weight_grad, self.backward, self.activation_bytes,
            self.parameter_bytes, self.crossing, self.temporary_bytes, self.copy,
            inputs=self.inputs,
        )  # fmt: skip
        options = {"memory_bandwidth": self.memory_bandwidth, **options}
        return Setting(layers, ranks, microbatches, is_fed=True, unit="s", **options)

    def within(
        self,
        memory_limit: float,
        *,
        microbatches: int,
        schedule: str = "1f1b",
        state_bytes: float = 4.0,
    ) -> LimitedCuts:
        """Returns cuts by these times that fit into the memory of each rank, for `split_stages`.

        Args:
            memory_limit: the bytes that a device of a rank has.
            microbatches: their number.
            schedule: the schedule, as `jaxpp.schedules.by_name` takes it.
            state_bytes: the bytes that a rank holds for each byte of parameters: the parameters,
                their gradients and the optimizer's state. Adam has 4.

        Raises:
            ValueError: the limit is not positive.

        Example:
            >>> units = (1.0, 1.0), (2, 2), (0, 0), (8, 8)
            >>> found = Profile((4.0,), 2, (2.0, 2.0), *[units[0]] * 4, *units[1:])
            >>> found.within(100, microbatches=4).choose(2)
            (1,)
        """
        if not memory_limit > 0:
            raise ValueError(
                f"Profile.within: memory_limit is a positive number of bytes, got {memory_limit!r}."
            )
        own = memory_limit, microbatches, schedule, state_bytes
        return LimitedCuts(self.crossing, self.at_least, self, *own)

    #: The version of the file; other versions are refused.
    VERSION: ClassVar[int] = 4

    def save(self, path: _files.Path) -> None:
        """Writes the profile as JSON."""
        _files.write(path, "profile", self.VERSION, self)

    @staticmethod
    def load(path: _files.Path) -> "Profile":
        """Reads a profile that `save` has written.

        Raises:
            ValueError: the file is no profile, or of another version.
        """
        return _files.read(path, "profile", Profile.VERSION, Profile)


def profile(
    fun: Any,
    *args: Any,
    at_least: int = 32,
    in_axes: PyTree[int | str | None] = None,
    policy: Any = None,
    device: Any = None,
    in_specs: PyTree[PartitionSpec | None] = None,
    repeats: int = 3,
) -> Profile:
    """Measures the units of a loss function, each alone, on one device.

    Args:
        fun: the loss function, before `split_stages`. Its first argument has the parameters. It
            returns the loss, or `(loss, aux)`: metrics, or a new state.
        *args: its arguments, with a batch of the size of a microbatch.
        at_least: how many units there are to be where blocks hold layers of their own, which are
            then the units; and how many in a function without layers.
        in_axes: as in `microbatch`; by default every argument but the first is part of the batch.
        policy: as in `wrap_forward`.
        device: where to measure, by default the first of `jax.devices()`; or a `jaxpp.Device`, or
            its name, whose figures bound the times of what XLA counts; or a `jaxpp.MpmdMesh` of one
            rank, over whose further axes tasks are split: bytes are of a device, `crossing` not.
        in_specs: as in `place`, for a mesh with further axes.
        repeats: how often to measure; the medians count.

    Raises:
        ValueError: `repeats` is below 1, there is no device of that name, the mesh has several
            ranks, the function cannot be cut, or it returns no loss.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(weights, x):
        ...     for w in weights:
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean(x)
        >>> weights, x = [jnp.eye(8) for _ in range(4)], jnp.ones((16, 8))
        >>> found = jaxpp.profile(loss, weights, x, at_least=4, repeats=1)
        >>> all(time > 0 for time in found.forward)
        True
    """
    if repeats < 1:
        raise ValueError(f"profile needs repeats of at least 1, got {repeats}.")
    finest = Finest()
    staged = wrap_forward(split_stages(fun, at_least, balance=finest), policy=policy)
    grad_fn = gradient(staged, args, MICROBATCHES, in_axes)  # this cuts, and notes where
    figures = device_of(device) if isinstance(device, Device | str) else None
    mesh = device if isinstance(device, MpmdMesh) else _mesh_of(None if figures else device)
    if mesh.num_ranks > 1:
        raise ValueError(
            f"profile: each unit is measured alone, on one rank, and {mesh!r} has {mesh.num_ranks} "
            f"ranks; give one of a single rank, jaxpp.MpmdMesh((1, ...), ('mpmd', ...))."
        )
    several = map_sliced(lambda x, axis: jnp.concatenate([x] * MICROBATCHES, axis), in_axes, args)
    count = len(finest.crossing) + 1
    measured = functools.partial(_measured, grad_fn, mesh, in_specs, several, figures, repeats)
    step, whole = measured(Interleaved1F1B(stages_per_rank=count))
    _, halves = measured(InterleavedZeroBubble(stages_per_rank=count))
    return _profile(finest, at_least, step, whole, halves, several[0], mesh, repeats, figures)


def _measured(
    grad_fn: Any,
    mesh: MpmdMesh,
    in_specs: Any,
    args: Sequence[Any],
    figures: Device | None,
    repeats: int,
    order: Schedule,
) -> tuple[LocalStep, dict[Key, float]]:
    """Runs the units one by one in the order of a schedule; returns the time of each task."""
    local, arrays = _loaded(place(schedule(grad_fn, order), mesh, in_specs=in_specs), args)
    runs: list[Clocked] = []
    if figures is not None:
        return local, _times_on(figures, local)
    for repeat in range(repeats + 1):
        clock = _OneByOne(local)
        jax.block_until_ready(local(_placed_copies(local, arrays), clock))
        runs += clock.runs if repeat else []  # the first one fills caches
    return local, _times(local.bundle, runs)


def _profile(
    finest: Finest,
    at_least: int,
    step: LocalStep,
    whole: Mapping[Key, float],
    halves: Mapping[Key, float],
    parameters: Any,
    mesh: MpmdMesh,
    repeats: int,
    figures: Device | None,
) -> Profile:
    count = len(finest.crossing) + 1
    sizes = {} if mesh.inside is None else dict(mesh.inside.shape)
    forward, backward, inputs, weights = (
        tuple(times.get((kind, stage), 0.0) for stage in range(count))
        for times, kind in ((whole, Kind.F), (whole, Kind.B), (halves, Kind.I), (halves, Kind.W))
    )
    kept = _activations(step.bundle, count, sizes)
    needs = dependencies_of(step.bundle)
    reads = [sorted(s for k, s in needs[Kind.F, n] if k is Kind.F) for n in range(count)]
    return Profile(
        finest.crossing,
        at_least,
        tuple(np.add(forward, backward).tolist()),
        forward,
        backward,
        inputs,
        weights,
        tuple(sum(map(_nbytes, own)) for own in kept),
        _temporaries(step, count),
        tuple(
            sum(array_bytes(a.aval, a.spec, sizes) for a in step.bundle.arguments
                if a.role is Role.PARAMETER and stage in a.stages)
            for stage in range(count)
        ),
        _memory_bandwidth(parameters, mesh, repeats) if figures is None else figures.bandwidth,
        _copies(kept, mesh, repeats, figures),
        () if reads == [[n - 1] if n else [] for n in range(count)] else tuple(map(tuple, reads)),
    )  # fmt: skip


def _mesh_of(device: Any) -> MpmdMesh:
    """Makes a mesh of one device, by default the first."""
    return MpmdMesh((1,), devices=[jax.devices()[0] if device is None else device])


def _memory_bandwidth(parameters: Any, mesh: MpmdMesh, repeats: int) -> float:
    """Measures how fast an update of the parameters reads and writes them."""
    device = mesh.devices[0]
    change = jax.device_put(eqx.filter(parameters, eqx.is_inexact_array), device)
    update = jax.jit(lambda old, change: jax.tree.map(jnp.add, old, change), donate_argnums=0)
    old, times = jax.tree.map(jnp.copy, change), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        old = jax.block_until_ready(update(old, change))
        times.append(time.perf_counter() - start)
    moved = 3 * sum(x.nbytes for x in jax.tree.leaves(old))  # two are read, one is written
    return moved / statistics.median(times[1:])


def _copies(
    kept: Sequence[Sequence[Any]], mesh: MpmdMesh, repeats: int, figures: Device | None
) -> tuple[float, ...]:
    """Finds how long what each unit keeps takes to host memory, or back; () if nobody knows."""
    device = mesh.devices[0]
    if figures is not None:
        each = (sum(map(_nbytes, own)) for own in kept)
        return tuple(n / figures.host_bandwidth for n in each) if figures.host_bandwidth else ()
    if PINNED_HOST not in {memory.kind for memory in device.addressable_memories()}:
        return ()
    here, there = (SingleDeviceSharding(device, memory_kind=k) for k in ("device", PINNED_HOST))
    known: dict[tuple[Any, ...], float] = {}  # units that are alike have one time
    for own in set(map(tuple, kept)):
        arrays, times = jax.device_put([jnp.zeros(a.shape, a.dtype) for a in own], here), []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            arrays = jax.block_until_ready(jax.device_put(arrays, there))
            arrays = jax.block_until_ready(jax.device_put(arrays, here))
            times.append(time.perf_counter() - start)
        known[own] = statistics.median(times[1:]) / 2
    return tuple(known[tuple(own)] for own in kept)


def _times(bundle: Bundle, runs: Sequence[Clocked]) -> dict[Key, float]:
    """Returns the median time of each task; those that run the same computation have one time."""
    (program,) = bundle.programs
    own = [i for i in program.instructions if isinstance(i, Run)]
    computations = {run.task: run.computation for run in own if run.task}
    seconds: dict[int, list[float]] = {}
    for _, tasks, start, end in runs:
        for task in tasks:
            seconds.setdefault(computations[task], []).append(end - start)
    return {
        (task.kind, task.stage): statistics.median(seconds[number])
        for task, number in computations.items()
    }


def _times_on(device: Device, step: LocalStep) -> dict[Key, float]:
    """Returns the time of each task by the figures of a device."""
    (rank,) = step.inspect()
    times = {}
    for run in step.bundle.programs[0].instructions:
        if isinstance(run, Run) and (task := run.task):
            found = rank.analyses[run.computation]
            times[task.kind, task.stage] = device.seconds(found.flops, found.accessed_bytes)
    return times


def _activations(bundle: Bundle, count: int, sizes: Mapping[str, int]) -> list[list[Any]]:
    """Finds the types of what each stage's backward reads of what forwards have made.

    They are those of a device of the rank, whose further axes have these sizes.
    """
    made: dict[int, Any] = {}  # the types of what forwards have made, by slot
    kept: list[list[Any]] = [[] for _ in range(count)]
    for instruction in bundle.programs[0].instructions:
        if isinstance(instruction, Run) and (task := instruction.task):
            if task.kind is Kind.F:
                own = bundle.computations[instruction.computation]
                avals = own.jaxpr.out_avals
                specs = own.out_specs or ((),) * len(avals)
                parts = map(lambda a, s: _part(a, s, sizes), avals, specs)
                made |= zip(instruction.outputs, parts, strict=True)
            else:  # the last stage comes first; what several read is the last one's
                kept[task.stage] = [made.pop(s) for s in instruction.inputs if s in made]
    return kept


def _part(aval: Any, spec: Spec, sizes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """Returns the type of the part of an array that one device has."""
    counts = [math.prod(sizes[axis] for axis in entry) for entry in spec] or [1] * aval.ndim
    shape = tuple(-(-n // count) for n, count in zip(aval.shape, counts, strict=True))
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _nbytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _temporaries(step: LocalStep, count: int) -> tuple[int, ...]:
    """Finds the most bytes that a task of each stage needs beside arrays."""
    (rank,) = step.inspect()
    most = [0] * count
    for instruction in step.bundle.programs[0].instructions:
        if isinstance(instruction, Run) and (task := instruction.task):
            own = rank.analyses[instruction.computation].temporary_bytes
            most[task.stage] = max(most[task.stage], own)
    return tuple(most)
