"""`profile`: the times and bytes of a function's units, each measured alone on one device."""

import dataclasses
import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from jaxpp._compat import PINNED_HOST
from jaxpp._messages import check_number
from jaxpp._program import Role, Run
from jaxpp._specs import Spec
from jaxpp.planning import _files
from jaxpp.planning._device import Device, device_of
from jaxpp.planning._limited import LimitedCuts
from jaxpp.planning._loss import gradient, map_sliced
from jaxpp.planning._measure import _Clock, _loaded, _placed_copies
from jaxpp.planning.search import Choice, Layers, Options, Setting
from jaxpp.runtime.executor import array_bytes
from jaxpp.runtime.local import LocalStep, MpmdMesh
from jaxpp.runtime.trace import Key, dependencies_of
from jaxpp.schedules import Costs, FromTable, GPipe, Interleaved1F1B, InterleavedZeroBubble, Kind
from jaxpp.transforms import place, schedule, split_stages, wrap_forward
from jaxpp.transforms.stages import Finest, UnitCosts

#: The microbatches of a step that is profiled, so that there are sums of gradients, too.
MICROBATCHES = 4


@dataclasses.dataclass(frozen=True)
class Profile(UnitCosts, _files.JsonFile):
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
        batch: for each argument that is sliced, its bytes in a microbatch, and the units that read
            it.
        names: the module, scope or parameters that each unit begins with; empty for others.
        busy: the share of this machine's cores that tasks kept busy, each alone; 0 where they were
            not measured on a CPU.
        fusing: what a step gains by each task that is in one computation with the one before it
            (`place(fuse=)`); 0 where it gains nothing, or was not measured.

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

    KIND: ClassVar[str] = "profile"
    VERSION: ClassVar[int] = 6

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
    batch: tuple[tuple[float, tuple[int, ...]], ...] = ()
    names: tuple[str, ...] = ()
    busy: float = 0.0
    fusing: float = 0.0

    def __post_init__(self) -> None:
        if not self.memory_bandwidth > 0:
            raise ValueError(
                f"Profile: memory_bandwidth is a positive number, got {self.memory_bandwidth}. "
                f"Profile the function anew."
            )
        _ = self.layers  # they check their numbers

    @functools.cached_property
    def layers(self) -> Layers:
        """The units as layers, for `plan_layers`."""
        return Layers(
            self.forward, self.input_grad, self.weight_grad, self.backward, self.activation_bytes,
            self.parameter_bytes, self.crossing, self.temporary_bytes, self.copy, self.names,
            self.inputs,
        )  # fmt: skip

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
        if options.get("memory_bandwidth", math.inf) == math.inf:
            options["memory_bandwidth"] = self.memory_bandwidth
        return Setting(
            self.layers, ranks, microbatches, is_fed=True, unit="s", batch=self.batch,
            fusing=self.fusing, **options,
        )  # fmt: skip

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


def profile(
    fun: Any,
    *args: Any,
    at_least: int = 32,
    in_axes: PyTree[int | str | None] = None,
    policy: Any = None,
    device: Any = None,
    in_specs: PyTree[PartitionSpec | None] = None,
    repeats: int = 3,
    fuse: bool = False,
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
        fuse: whether to measure what fused tasks gain, too: that of pairs of one rank, against the
            same step whose tasks are apart, as a call runs both.

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
    for name, value in (("at_least", at_least), ("repeats", repeats)):
        check_number("profile", name, value, "an integer of at least 1")
    figures, mesh = _place_to_measure(device)
    finest = Finest()
    staged = wrap_forward(split_stages(fun, at_least, balance=finest), policy=policy)
    grad_fn = gradient(staged, args, MICROBATCHES, in_axes)  # this cuts, and notes where
    several = map_sliced(lambda x, axis: jnp.concatenate([x] * MICROBATCHES, axis), in_axes, args)
    bench = _Bench(mesh, in_specs, several, figures, repeats)
    found = _profiled(finest, at_least, grad_fn, bench)
    fusing = bench.fusing(grad_fn, len(finest.crossing) + 1) if fuse else 0.0
    return dataclasses.replace(found, fusing=fusing)


def _place_to_measure(device: Any) -> tuple[Device | None, MpmdMesh]:
    """Finds the figures that count instead of a measurement, and the mesh of one rank."""
    if device is None or isinstance(device, Device | str):
        figures = None if device is None else device_of(device)
        return figures, MpmdMesh((1,), devices=jax.devices()[:1])
    mesh = MpmdMesh((1,), devices=[device]) if isinstance(device, jax.Device) else device
    if not isinstance(mesh, MpmdMesh) or mesh.num_ranks > 1:
        raise ValueError(
            f"profile: each unit is measured alone, on one rank; device is a jax.Device, a "
            f"jaxpp.Device or the name of one, or a mesh of a single rank, jaxpp.MpmdMesh((1, "
            f"...), ('mpmd', ...)), got {device!r}."
        )
    return None, mesh


def _profiled(finest: Finest, at_least: int, grad_fn: Any, bench: "_Bench") -> Profile:
    count = len(finest.crossing) + 1
    step, whole, busy = bench.run(schedule(grad_fn, Interleaved1F1B(stages_per_rank=count)))
    _, halves, _ = bench.run(schedule(grad_fn, InterleavedZeroBubble(stages_per_rank=count)))
    forward, backward, input_grad, weight_grad = (
        tuple(times.get((kind, unit), 0.0) for unit in range(count))
        for times, kind in ((whole, Kind.F), (whole, Kind.B), (halves, Kind.I), (halves, Kind.W))
    )
    sizes = {} if bench.mesh.inside is None else dict(bench.mesh.inside.shape)
    kept = _activations(step, count, sizes)
    needs = dependencies_of(step.bundle)
    reads = tuple(
        tuple(sorted(s for kind, s in needs[Kind.F, unit] if kind is Kind.F))
        for unit in range(count)
    )
    return Profile(
        finest.crossing, at_least, tuple(np.add(forward, backward).tolist()),
        forward, backward, input_grad, weight_grad,
        activation_bytes=tuple(sum(map(_nbytes, own)) for own in kept),
        temporary_bytes=_temporaries(step, count),
        parameter_bytes=tuple(
            sum(array_bytes(a.aval, a.spec, sizes) for a in step.bundle.arguments
                if a.role is Role.PARAMETER and unit in a.stages)
            for unit in range(count)
        ),
        memory_bandwidth=bench.memory_bandwidth(),
        copy=bench.copies(kept),
        inputs=() if reads == tuple((n - 1,) if n else () for n in range(count)) else reads,
        batch=tuple(
            (array_bytes(a.aval, a.spec, sizes) / MICROBATCHES, tuple(sorted(a.stages)))
            for a in step.bundle.arguments if a.role is Role.BATCH
        ),
        names=finest.names,
        busy=busy,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Bench:
    """The place where the units of a function are measured, or what tells their times without."""

    mesh: MpmdMesh
    in_specs: Any
    args: Sequence[Any]
    figures: Device | None
    repeats: int

    def run(self, grad_fn: Any) -> tuple[LocalStep, dict[Key, float], float]:
        """Runs units one by one; those of one computation have one time. Returns `busy`, too."""
        local, arrays = _loaded(place(grad_fn, self.mesh, in_specs=self.in_specs), self.args)
        number = {run.task: run.computation for run in _task_runs(local)}
        busy = 0.0
        if self.figures is not None:
            (rank,) = local.inspect()
            found = {n: rank.analyses[n] for n in number.values()}
            seconds = {
                n: self.figures.seconds(own.flops, own.accessed_bytes) for n, own in found.items()
            }
        else:
            times: dict[int, list[float]] = {}
            for repeat in range(self.repeats + 1):
                clock, copies = _Clock(local), _placed_copies(local, arrays)
                start, used = time.perf_counter(), time.process_time()
                jax.block_until_ready(local(copies, clock))
                elapsed, used = time.perf_counter() - start, time.process_time() - used
                if self.mesh.devices[0].platform == "cpu":
                    busy = used / elapsed / len(os.sched_getaffinity(0))
                for _, tasks, start, end in clock.runs if repeat else ():  # it fills caches first
                    for task in tasks:
                        times.setdefault(number[task], []).append(end - start)
            seconds = {n: statistics.median(own) for n, own in times.items()}
        known = {(task.kind, task.stage): seconds[n] for task, n in number.items() if task}
        return local, known, busy

    def fusing(self, grad_fn: Any, count: int) -> float:
        """Finds what each task gains that is in one computation with the one before it.

        The least time of each counts, by turns: a load that comes and goes is no gain.
        """
        if self.figures is not None:
            return 0.0
        table = GPipe(stages_per_rank=count).table(count, MICROBATCHES)
        pairs = frozenset(task for task in table.tasks if task.microbatch % 2 == 0)
        paired = schedule(grad_fn, FromTable(dataclasses.replace(table, overlaps=pairs)))
        ways: list[tuple[Any, list[Any]]] = [
            _loaded(place(paired, self.mesh, in_specs=self.in_specs, fuse=fuse), self.args)
            for fuse in ("none", "pairs")
        ]
        least = [math.inf, math.inf]
        for _, (n, (local, arrays)) in itertools.product(range(4 * self.repeats), enumerate(ways)):
            copies, start = _placed_copies(local, arrays), time.perf_counter()
            jax.block_until_ready(local(copies))
            least[n] = min(least[n], time.perf_counter() - start)
        apart, joined = (len(_task_runs(local)) for local, _ in ways)
        return max(0.0, least[0] - least[1]) / (apart - joined)

    def timed(self, run: Callable[[Any], Any], value: Any) -> tuple[Any, float]:
        """Runs a function of its own result again and again; returns the last, and the time."""
        times = []
        for _ in range(self.repeats + 1):
            start = time.perf_counter()
            value = jax.block_until_ready(run(value))
            times.append(time.perf_counter() - start)
        return value, statistics.median(times[1:])

    def memory_bandwidth(self) -> float:
        """Finds how fast an update of the parameters reads and writes them."""
        if self.figures is not None:
            return self.figures.bandwidth
        parameters = eqx.filter(self.args[0], eqx.is_inexact_array)
        change = jax.device_put(parameters, self.mesh.devices[0])
        update = jax.jit(lambda old, change: jax.tree.map(jnp.add, old, change), donate_argnums=0)
        old, seconds = self.timed(lambda old: update(old, change), jax.tree.map(jnp.copy, change))
        return 3 * sum(x.nbytes for x in jax.tree.leaves(old)) / seconds  # 2 are read, 1 is written

    def copies(self, kept: Sequence[Sequence[Any]]) -> tuple[float, ...]:
        """Finds how long what each unit keeps takes to host memory; () if nobody knows."""
        device = self.mesh.devices[0]
        if self.figures is not None:
            speed = self.figures.host_bandwidth
            return tuple(sum(map(_nbytes, own)) / speed for own in kept) if speed else ()
        if PINNED_HOST not in {memory.kind for memory in device.addressable_memories()}:
            return ()
        here, there = (SingleDeviceSharding(device, memory_kind=k) for k in ("device", PINNED_HOST))

        def there_and_back(arrays: Any) -> Any:
            return jax.device_put(jax.block_until_ready(jax.device_put(arrays, there)), here)

        known: dict[tuple[Any, ...], float] = {}  # units that are alike have one time
        for own in set(map(tuple, kept)):
            arrays = jax.device_put([jnp.zeros(a.shape, a.dtype) for a in own], here)
            known[own] = self.timed(there_and_back, arrays)[1] / 2
        return tuple(known[tuple(own)] for own in kept)


def _task_runs(step: LocalStep) -> list[Run]:
    return [i for i in step.bundle.programs[0].instructions if isinstance(i, Run) and i.task]


def _activations(step: LocalStep, count: int, sizes: Mapping[str, int]) -> list[list[Any]]:
    """Finds the types of what each stage's backward reads of what forwards have made.

    They are those of a device of the rank, whose further axes have these sizes.
    """
    made: dict[int, Any] = {}  # the types of what forwards have made, by slot
    kept: list[list[Any]] = [[] for _ in range(count)]
    for run in _task_runs(step):
        assert run.task
        if run.task.kind is Kind.F:
            own = step.bundle.computations[run.computation]
            specs = own.out_specs or ((),) * len(own.jaxpr.out_avals)
            parts = (_part(a, s, sizes) for a, s in zip(own.jaxpr.out_avals, specs, strict=True))
            made |= zip(run.outputs, parts, strict=True)
        else:  # the last stage comes first; what several read is the last one's
            kept[run.task.stage] = [made.pop(s) for s in run.inputs if s in made]
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
    for run in _task_runs(step):
        assert run.task
        needed = rank.analyses[run.computation].temporary_bytes
        most[run.task.stage] = max(most[run.task.stage], needed)
    return tuple(most)
