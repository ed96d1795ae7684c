"""`MpmdMesh`: all ranks in this process."""

import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp._program import Bundle, Message, default_mesh
from jaxpp.runtime import _compile, _worker
from jaxpp.runtime._arguments import check_arguments
from jaxpp.runtime._axes import PIPELINE_AXIS, check_axes
from jaxpp.runtime._stacked import put_together, with_stacked
from jaxpp.runtime._trace import LocalTracing, Trace


class MpmdMesh:
    """A mesh of pipeline ranks over the devices of this process.

    Args:
        shape: the size of each axis; that of `"mpmd"` is the number of ranks.
        axis_names: a name for each axis, one of them `"mpmd"`; the others have size 1.
        devices: the device of each rank, by default the first of `jax.devices()`. A device may be
            repeated: its ranks share it.

    Raises:
        ValueError: if the axes are not as above, or there are fewer devices than ranks.

    Example:
        >>> import jax, jaxpp
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> mesh.num_ranks
        2
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str] = (PIPELINE_AXIS,),
        devices: Sequence[Any] | None = None,
    ):
        shape, axis_names, ranks = check_axes("MpmdMesh", shape, axis_names)
        available = list(jax.devices() if devices is None else np.asarray(devices, object).ravel())
        if len(available) < ranks or (devices is not None and len(available) != ranks):
            raise ValueError(
                f"MpmdMesh needs a device for each of its {ranks} ranks, got {len(available)}. To "
                f"share one, repeat it: devices=[jax.devices()[0]] * {ranks}; to have more CPU "
                f"devices, call jax.config.update('jax_num_cpu_devices', {ranks}) before JAX "
                f"starts."
            )
        self.shape, self.axis_names = shape, axis_names
        self.devices = tuple(available[:ranks])
        self._tracing = LocalTracing()

    def __repr__(self):
        return f"MpmdMesh({self.shape}, {self.axis_names})"

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.devices)

    def load(self, bundle: Bundle) -> Any:
        """Compiles a step, and gives the function that runs it on its arguments."""
        return with_stacked(LocalStep(bundle, self.devices, self._tracing), bundle)

    def start_trace(self, directory: str | os.PathLike[str], *, profiler: bool = True) -> None:
        """Starts to record what the ranks run and send.

        Args:
            directory: where `stop_trace` writes its files; those of an earlier trace are replaced.
            profiler: whether JAX's profiler records, too, into `<directory>-0`: what each task
                consists of. It costs more than the rest.

        Raises:
            RuntimeError: the mesh is traced already, or JAX's profiler runs.
            OSError: the directory cannot be written to.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpp, tempfile
            >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
            >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
            >>> mesh = jaxpp.MpmdMesh((1,))
            >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     mesh.start_trace(folder, profiler=False)
            ...     gradient = step(jnp.eye(2), jnp.ones((4, 2)))
            ...     trace = mesh.stop_trace()
            >>> [run.label for run in trace.runs if run.label[0] in "FB"]
            ['F0.0', 'B0.0', 'F0.1', 'B0.1']
        """
        self._tracing.start(directory, profiler)

    def stop_trace(self) -> Trace:
        """Ends the trace, once all that was called has been computed, and writes its files.

        They are, in the directory: `timeline.json`, which ui.perfetto.dev opens; `timeline.png`, a
        typical call beside its simulation; and what TensorBoard opens with the directory as its
        `--logdir`.

        Returns:
            When each task and each message was, and the paths of the files.

        Raises:
            RuntimeError: the mesh is not traced.
        """
        return self._tracing.stop(self.devices)


default_mesh.set(lambda num_ranks: MpmdMesh((num_ranks,)))


#: How many received messages a rank's dispatch may be ahead of what has arrived.
RUN_AHEAD = 2


class _LocalTransport:
    """Moves arrays between ranks of one process, from device to device.

    Dispatch is asynchronous, and memory is taken when a computation is dispatched. So that a rank
    holds what its schedule says, and not what the host's lead over the devices makes of it, a
    receive waits for the message of `RUN_AHEAD` receives before.
    """

    def __init__(self, devices: Sequence[Any]):
        self._devices = devices
        self._mail: dict[int, Any] = {}
        self._recent: list[deque[Any]] = [deque() for _ in devices]

    def clear(self) -> None:
        """Forgets a step: the last messages, and those that a step that failed has left."""
        self._mail.clear()
        for recent in self._recent:
            recent.clear()

    def send(self, arrays: list[Any], message: Message) -> None:
        target = self._devices[message.target]
        if target is not self._devices[message.source]:
            arrays = jax.device_put(arrays, target)
        self._mail[message.tag] = arrays

    def arrays_of(self, message: Message) -> list[Any]:
        """What has been sent and not received, on the device it goes to."""
        return self._mail[message.tag]

    def wait_for(self, message: Message) -> None:
        """Waits until what has been sent is where it goes."""
        jax.block_until_ready(self._mail[message.tag])

    def receive(self, message: Message) -> Any:
        arrays = self._mail.pop(message.tag)
        recent = self._recent[message.target]
        recent.append(arrays[0])
        if len(recent) > RUN_AHEAD:
            oldest = recent.popleft()
            if not oldest.is_deleted():
                oldest.block_until_ready()
        return arrays


#: A rank's worker, its device, and a slot.
_Place = tuple[_worker.Worker, Any, int]


class LocalStep:
    """A step's programs, loaded on the devices of one process; called with its flat arguments.

    `order` has the pieces of all ranks' programs in the order of their dispatch.
    """

    def __init__(self, bundle: Bundle, devices: Sequence[Any], tracing: LocalTracing):
        self.bundle = bundle
        self.devices = devices
        self._tracing = tracing
        self.transport = transport = _LocalTransport(devices)
        executables = _compile.compile_all(bundle, devices)
        self.workers: list[_worker.Worker] = []
        for program, own, device in zip(bundle.programs, executables, devices, strict=True):
            calls = [own.get(n) for n in range(len(bundle.computations))]
            worker = _worker.Worker(program, calls, transport)
            for slot, value in program.constants:
                worker.slots[slot] = jax.device_put(value, device)
            self.workers.append(worker)
        self.order = _worker.interleave(bundle.programs)
        self._calls = [(self.workers[rank].execute, chunk) for rank, chunk in self.order]
        inputs = self._places([p.inputs for p in bundle.programs], len(bundle.in_avals))
        outputs = self._places([p.outputs for p in bundle.programs], len(bundle.out_avals))
        self.feeds = [_Feed(places, n in bundle.donated) for n, places in enumerate(inputs)]
        self._fetches = [
            _Fetch(places, aval.shape)
            for places, aval in zip(outputs, bundle.out_avals, strict=True)
        ]

    def _places(self, pairs: Sequence[Sequence[tuple[int, int]]], count: int) -> list[list[_Place]]:
        """For each argument or result, the worker, device and slot of each rank that has it."""
        places: list[list[_Place]] = [[] for _ in range(count)]
        for own, worker, device in zip(pairs, self.workers, self.devices, strict=True):
            for number, slot in own:
                places[number].append((worker, device, slot))
        return places

    def __call__(
        self, args: Sequence[Any], dispatch: Callable[[], None] | None = None
    ) -> list[Any]:
        """Runs the step; returns when everything has been dispatched, here or by `dispatch`."""
        if dispatch is None and (results := put_together(self, args)) is not None:
            return results
        check_arguments(self.bundle, args)
        for feed, arg in zip(self.feeds, args, strict=True):
            feed(arg)
        try:
            (dispatch or self._dispatch)()
        finally:
            self.transport.clear()
        results = [fetch() for fetch in self._fetches]
        for n in self.bundle.donated:
            if isinstance(args[n], jax.Array):
                args[n].delete()  # on all its devices, also where a computation has taken it on one
        return results

    def input_shardings(self) -> list[Any]:
        """Where an argument is put without a copy by the step; None where nothing reads it."""
        return [feed.sharding() for feed in self.feeds]

    def _dispatch(self) -> None:
        if self._tracing.recorder is not None:
            self._tracing.dispatch(self)
            return
        for execute, chunk in self._calls:
            execute(chunk)


class _Feed:
    """Puts one argument where the ranks read it, without a copy where it is there already."""

    def __init__(self, places: Sequence[_Place], donated: bool):
        self._places = places
        self._donated = donated
        self._sharding: Any = None
        self._known: list[int | None] = []

    def __call__(self, arg: Any) -> None:
        if not self._places:
            return
        if not isinstance(arg, jax.Array):
            arg = jnp.array(
                arg
            )  # a copy: the caller may write to a NumPy array while the step runs
        if arg.sharding is not self._sharding:
            self._learn(arg)
        taken = set()
        for (worker, device, slot), shard in zip(self._places, self._known, strict=True):
            if shard is None:
                value = jax.device_put(arg, device)
            elif shard < 0:
                value = arg
            else:
                value = arg.addressable_shards[shard].data
            if len(self._places) > 1 and self._donated:
                if id(device) in taken:  # ranks that share a device need a copy each
                    value = jnp.copy(value)
                taken.add(id(device))
            worker.slots[slot] = value

    def sharding(self) -> Any:
        """Where an argument is put without a copy by the step; None where nothing reads it."""
        devices = tuple(dict.fromkeys(device for _, device, _ in self._places))
        if len(devices) > 1:
            return _replicated(devices)
        return SingleDeviceSharding(devices[0]) if devices else None

    def _learn(self, arg: Any) -> None:
        """Notes on which devices an argument's sharding has it: itself (-1), a shard, or not."""
        devices = list(arg.sharding.device_set)
        self._sharding = arg.sharding
        if len(devices) == 1:
            self._known = [-1 if d == devices[0] else None for _, d, _ in self._places]
            return
        on = {s.device: i for i, s in enumerate(arg.addressable_shards)}
        whole = arg.sharding.is_fully_replicated
        self._known = [on.get(d) if whole else None for _, d, _ in self._places]


class _Fetch:
    """Makes one result of what the ranks left in their slots."""

    def __init__(self, places: Sequence[_Place], shape: tuple[int, ...]):
        by_device: dict[Any, tuple[Any, int]] = {}
        for worker, device, slot in places:
            by_device.setdefault(device, (worker, slot))
        self._sources = list(by_device.values())
        self._places = places
        self._shape = shape
        self._sharding = _replicated(tuple(by_device)) if len(by_device) > 1 else None

    def __call__(self) -> Any:
        values = [worker.slots[slot] for worker, slot in self._sources]
        for worker, _, slot in self._places:  # the caller alone holds the result from here on
            worker.slots[slot] = None
        if self._sharding is None:
            return values[0]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, values)


@functools.cache
def _replicated(devices: tuple[Any, ...]) -> NamedSharding:
    """One sharding object for each set of devices, so that it can be recognised by identity."""
    return NamedSharding(Mesh(np.array(devices, object), ("ranks",)), PartitionSpec())
