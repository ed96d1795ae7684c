"""`measure`: the times of a placed step's tasks on its mesh, and of the step as a whole."""

import dataclasses
import functools
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxpp._program import Instruction, Message, Receive, Run, Send
from jaxpp.runtime.executor import Chunk
from jaxpp.runtime.local import LocalStep
from jaxpp.runtime.trace import (
    Clocked,
    Key,
    dependencies_of,
    fit_line,
    table_of,
    tasks_of,
    timeline_of,
    typical_times,
)
from jaxpp.schedules import Costs, Dependencies, Table, Task, Timeline, simulate
from jaxpp.transforms.place import Compiled, Placed


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The times of a placed step and of its parts, made by `measure`. All times are seconds.

    The rows of `table`, `before`, `after` and `timeline` are devices: a rank, or the ranks that
    share a device, whose tasks run one after the other in the order in which they are dispatched.
    In a step of several loops, the stages of each are numbered on from those of the loops before.

    Args:
        table: the tasks of each device, in order.
        dependencies: for each kind and stage, the results that it reads.
        times: for each kind and stage, the time of a task while the other devices run theirs.
        times_alone: the same while nothing else runs.
        before: for each device, the time of what it runs and sends before its first task.
        after: the same for all else around the tasks: sums of gradients, the optimizer's update.
        edge_bytes: for each kind and stage, the most bytes that a task sends to another device.
        latency: the time of a transfer between devices whatever its size.
        bandwidth: the bytes that a transfer moves in a second.
        steps: the time of each execution of the whole step, until its results are there.
        timeline: when each task ran in a step whose devices each wait for every task of theirs.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()))
        >>> measured = jaxpp.measure(step, jnp.eye(2), jnp.ones((4, 2)), repeats=1)
        >>> print(*measured.table.ranks[0])
        F0.0 B0.0 F0.1 B0.1
    """

    table: Table
    dependencies: Dependencies
    times: Mapping[Key, float]
    times_alone: Mapping[Key, float]
    before: tuple[float, ...]
    after: tuple[float, ...]
    edge_bytes: Mapping[Key, int]
    latency: float
    bandwidth: float
    steps: tuple[float, ...]
    timeline: Timeline

    @property
    def step(self) -> float:
        """The median time of the step."""
        return statistics.median(self.steps)

    @functools.cached_property
    def costs(self) -> Costs:
        """The cost model of the step, with the times of tasks while other devices work."""
        return self._costs(self.times)

    @functools.cached_property
    def costs_alone(self) -> Costs:
        """The cost model of the step, with the times of tasks that have the machine to themselves.

        Devices that share memory bandwidth, or caches, slow each other down. A step then takes
        longer than these times say.
        """
        return self._costs(self.times_alone)

    def _costs(self, times: Mapping[Key, float]) -> Costs:
        return Costs.measured(
            times,
            latency=self.latency,
            bandwidth=self.bandwidth,
            edge_bytes=lambda task: self.edge_bytes.get((task.kind, task.stage), 0),
        )

    def predict(self, costs: Costs | None = None) -> float:
        """Predicts the time of the step from the times of its parts.

        The time is the makespan of the tasks, and the longest that a device works before and after
        them. Devices that do not wait for each other there may be a little faster.

        Args:
            costs: what tasks cost; by default `costs`.
        """
        timeline = simulate(self.table, costs or self.costs, dependencies=self.dependencies)
        return max(self.before) + timeline.makespan + max(self.after)


def measure(step: Any, *args: Any, repeats: int = 5) -> Measurement:
    """Measures a placed step: its tasks one by one, and the step as a whole.

    Each repeat runs the step three times in a row, so that a change of the machine's speed touches
    all three: as a call runs it; with a wait for each task, and each transfer, before the next one
    starts on any device; and with a thread for each device that waits for its own tasks. Nothing
    else should run on the machine. The arguments stay unchanged: the step gets copies, also of
    those that it consumes, put beforehand where a training loop would have left them.

    Args:
        step: what `place` gave, on a `jaxpp.MpmdMesh`, with a scheduled loop; or what
            `lower(*args).compile()` of it gave.
        *args: its arguments.
        repeats: how often to measure; the medians count.

    Returns:
        The measurement.

    Raises:
        TypeError: `step` is not a placed function, or not on a mesh of this process.
        ValueError: the step has no scheduled loop, or `repeats` is below 1.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss(w, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        ...     return jnp.mean((h @ w) ** 2)
        >>> grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 4)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> step = jaxpp.place(lambda w, x: w - 0.1 * grad(w, x), mesh)
        >>> measured = jaxpp.measure(step, jnp.eye(2), jnp.ones((8, 2)), repeats=1)
        >>> len(measured.times), measured.step > 0, measured.predict() > 0
        (4, True, True)
    """
    if repeats < 1:
        raise ValueError(f"measure needs repeats of at least 1, got {repeats}.")
    local, arrays = _loaded(step, args)
    if not tasks_of(local.bundle):
        raise ValueError(
            "measure: the step has no scheduled loop, so that there are no tasks to measure; wrap "
            "its loop: jaxpp.schedule(grad_fn, jaxpp.schedules.OneFOneB())."
        )
    steps, alone, sent, together = _clocked(local, arrays, repeats)
    table = _table(local)
    latency, bandwidth = fit_line([(size, seconds) for _, size, seconds in sent])
    bytes_of: dict[Key, int] = {}
    for key, size, _ in sent:
        bytes_of[key] = max(bytes_of.get(key, 0), size)
    typical = sorted(together, key=lambda runs: max(end for *_, end in runs))[len(together) // 2]
    return Measurement(
        table, dependencies_of(local.bundle),
        MappingProxyType(typical_times(together)), MappingProxyType(typical_times(alone)),
        *_around(alone, table.num_ranks), MappingProxyType(bytes_of), latency, bandwidth,
        tuple(steps), timeline_of(table, typical),
    )  # fmt: skip


def _clocked(
    local: LocalStep, arrays: Sequence[Any], repeats: int
) -> tuple[list[float], list[list[Clocked]], list[tuple[Key, int, float]], list[list[Clocked]]]:
    """Runs a step three times in each repeat: as it is, one by one, and device by device."""
    steps: list[float] = []
    alone: list[list[Clocked]] = []
    sent: list[tuple[Key, int, float]] = []
    together: list[list[Clocked]] = []
    for repeat in range(repeats + 1):
        copies = _placed_copies(local, arrays)
        start = time.perf_counter()
        jax.block_until_ready(local(copies))
        elapsed = time.perf_counter() - start
        one_by_one = _Clock(local)
        jax.block_until_ready(local(_placed_copies(local, arrays), one_by_one))
        by_device = _Clock(local, by_device=True)
        jax.block_until_ready(local(_placed_copies(local, arrays), by_device))
        if repeat:  # the first one compiles the feeds of the step, and fills caches
            steps.append(elapsed)
            alone.append(one_by_one.runs)
            sent += one_by_one.transfers
            together.append(by_device.runs)
    return steps, alone, sent, together


# ---- the step -----------------------------------------------------------------------------------


def _loaded(step: Any, args: Sequence[Any]) -> tuple[LocalStep, list[Any]]:
    """Finds the step that the mesh has loaded, and the step's arguments that are arrays."""
    if isinstance(step, Placed):
        compiled, leaves = step.compiled_for(*args)
    elif isinstance(step, Compiled):
        compiled = step
        leaves, tree = jtu.tree_flatten(args)
        if not compiled.signature.matches(leaves, tree):
            raise TypeError(
                f"measure: the step was compiled for other arguments: "
                f"{compiled.signature.difference(args)}. Measure the placed function itself."
            )
    else:
        raise TypeError(
            f"measure needs a step that place made, got {step!r}; use jaxpp.place(step, mesh)."
        )
    run: Any = compiled._run
    arrays = [leaves[i] for i in compiled.signature.arrays]
    if not isinstance(getattr(run, "step", None), LocalStep):
        raise TypeError("measure runs steps that are on a jaxpp.MpmdMesh; place the step on one.")
    return run.step, run.flat(arrays)


def _placed_copies(local: LocalStep, arrays: Sequence[Any]) -> list[Any]:
    """Copies arguments to the devices that read them, as the step before would leave them."""
    copies = []
    for array, feed in zip(arrays, local.feeds, strict=True):
        sharding = feed.sharding()
        copies.append(jnp.copy(array if sharding is None else jax.device_put(array, sharding)))
    return jax.block_until_ready(copies)


def _device_of(local: LocalStep) -> tuple[int, ...]:
    """Returns for each rank the number of its home among those of the mesh."""
    homes = list(dict.fromkeys(local.homes))
    return tuple(homes.index(home) for home in local.homes)


def _table(local: LocalStep) -> Table:
    """Makes the table of the tasks of each device, in the order of dispatch."""
    device_of = _device_of(local)
    orders: list[list[tuple[Task, ...]]] = [[] for _ in set(device_of)]
    for rank, chunk in local.order:
        orders[device_of[rank]] += [i.tasks for i in chunk if isinstance(i, Run)]
    return table_of(orders, dependencies_of(local.bundle))


# ---- the clock ----------------------------------------------------------------------------------


class _Clock:
    """Runs a step's instructions, waits for each, and clocks them.

    All are run one after the other, or by a thread for each device, which waits for its own.
    """

    def __init__(self, local: LocalStep, by_device: bool = False):
        self.runs: list[Clocked] = []
        self.transfers: list[tuple[Key, int, float]] = []
        self._local, self._device_of, self._by_device = local, _device_of(local), by_device
        self._failed = False
        self._arrived = {
            i.message.tag: threading.Event() for _, chunk in local.order
            for i in chunk if isinstance(i, Send)
        }  # fmt: skip

    def __call__(self) -> None:
        devices = set(self._device_of)
        parts = [{device} for device in devices] if self._by_device else [devices]
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(self._run, parts))

    def _run(self, devices: set[int]) -> None:
        try:
            for rank, chunk in self._local.order:
                if self._device_of[rank] in devices and not self._failed:
                    self._run_chunk(rank, chunk)
        except BaseException:
            self._failed = True
            for event in self._arrived.values():  # or the other devices wait for ever
                event.set()
            raise

    def _run_chunk(self, rank: int, chunk: Chunk) -> None:
        """Runs a computation and its messages; the wait for messages is no part of its time."""
        tasks: tuple[Task, ...] = ()
        for instruction in chunk:
            if isinstance(instruction, Receive):
                self._arrived[instruction.message.tag].wait()
                if self._failed:
                    return
            start = time.perf_counter()
            _execute(self._local, rank, instruction, wait_for_sends=not self._by_device)
            end = time.perf_counter()
            if isinstance(instruction, Run):
                tasks = instruction.tasks
                self.runs.append((self._device_of[rank], tasks, start, end))
            elif isinstance(instruction, Send):
                self._arrived[instruction.message.tag].set()
                if not self._by_device:
                    self._clock_message(rank, instruction.message, tasks, start, end)

    def _clock_message(
        self, rank: int, message: Message, tasks: tuple[Task, ...], start: float, end: float
    ) -> None:
        device = self._device_of[rank]
        if "edge" not in message.kinds or not tasks:
            self.runs.append((device, (), start, end))
        elif self._device_of[message.target] != device:
            sent = message.nbytes, end - start
            self.transfers += [((task.kind, task.stage), *sent) for task in tasks]


def _execute(
    local: LocalStep, rank: int, instruction: Instruction, wait_for_sends: bool = True
) -> None:
    """Executes one instruction, and waits for its results."""
    executor = local.executors[rank]
    executor.execute((instruction,))
    if isinstance(instruction, Run | Receive):
        slots = instruction.outputs if isinstance(instruction, Run) else instruction.slots
        jax.block_until_ready([executor.slots[slot] for slot in slots])
    elif isinstance(instruction, Send) and wait_for_sends:
        jax.block_until_ready(local.transport.copies_of(instruction.message))


# ---- the figures --------------------------------------------------------------------------------


def _around(
    calls: Sequence[Sequence[Clocked]], num_devices: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Finds for each device the time of runs that are no task, before its first task and after."""
    sums = []
    for runs in calls:
        for device in range(num_devices):
            mine = [run for run in runs if run[0] == device]
            first = next(n for n, (_, tasks, _, _) in enumerate(mine) if tasks)
            for part in (mine[:first], mine[first:]):
                sums.append(sum(t1 - t0 for _, tasks, t0, t1 in part if not tasks))
    before, after = np.median(np.reshape(sums, (-1, num_devices, 2)), axis=0).T.tolist()
    return tuple(before), tuple(after)
