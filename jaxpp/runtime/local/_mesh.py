"""`MpmdMesh`: all ranks in this process."""

import itertools
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpp._program import PIPELINE_AXIS, PROVIDED, Bundle
from jaxpp.runtime.arrays import Home, StackedStep, check_axes, devices_of
from jaxpp.runtime.executor import Dispatcher
from jaxpp.runtime.local._step import LocalStep
from jaxpp.runtime.trace import Recorder, Times, Trace, Tracing, start_trace, stop_trace


class _OneProcess:
    """The one process of a local mesh, as traces reach it and its transport."""

    first_ranks = (0,)

    def __init__(self):
        self.transport = self
        self.recorder: Recorder | None = None

    def apply(self, function: Any, args: Mapping[int, tuple], **_: Any) -> dict[int, Any]:
        """Runs `function(process, *args)`."""
        return {number: function(self, *own) for number, own in args.items()}


class MpmdMesh:
    """A mesh of pipeline ranks over the devices of this process.

    The mesh is a context manager, as `RemoteMpmdMesh` is, but has nothing to end. Threads may share
    it: its calls are dispatched one after the other.

    Each rank is a mesh of its own over the axes other than `"mpmd"`, if there are any. Its tasks
    are ordinary SPMD programs, split as `place`'s `in_specs` and the constraints in the model say.

    Args:
        shape: the size of each axis; that of `"mpmd"` is the number of ranks.
        axis_names: a name for each axis, one of them `"mpmd"`.
        devices: as many devices as the product of the sizes, in the order of the axes, by default
            the first of `jax.devices()`. Ranks may share devices; those of one rank differ.
        axis_types: the type of each axis, as in `jax.make_mesh`; by default all are `Auto`.

    Raises:
        ValueError: if the axes are not as above, there are fewer devices than entries, or a rank
            has a device twice.

    Example:
        >>> import jax, jaxpp
        >>> mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=[jax.devices()[0]] * 2)
        >>> mesh.num_ranks
        2
        >>> wide = jaxpp.MpmdMesh((1, 1, 1), ("mpmd", "data", "model"))
        >>> wide.inside.axis_names
        ('data', 'model')
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str] = (PIPELINE_AXIS,),
        devices: Sequence[Any] | np.ndarray | None = None,
        axis_types: Sequence[AxisType] | None = None,
    ):
        axes = check_axes("MpmdMesh", shape, axis_names, axis_types)
        wanted = math.prod(axes.shape)
        available = list(jax.devices() if devices is None else np.asarray(devices, object).ravel())
        if len(available) < wanted or (devices is not None and len(available) != wanted):
            sizes = dict(zip(axes.names, axes.shape, strict=True))
            raise ValueError(
                f"MpmdMesh needs a device for each entry of its axes {sizes}, {wanted} in all, got "
                f"{len(available)}. To share some between ranks, repeat them: "
                f"devices=[jax.devices()[0]] * {axes.num_ranks}; to have more CPU devices, call "
                f"jax.config.update('jax_num_cpu_devices', {wanted}) before JAX starts."
            )
        grid = np.array(available[:wanted], object).reshape(axes.shape)
        by_rank = np.moveaxis(grid, axes.names.index(PIPELINE_AXIS), 0)
        for rank, own in enumerate(by_rank.reshape(axes.num_ranks, -1)):
            if len(set(own)) < len(own):
                raise ValueError(
                    f"MpmdMesh: rank {rank} has a device twice: {list(own)}. Ranks may share "
                    f"devices, but those of one rank must differ."
                )
        inside = axes.inside
        self.homes: tuple[Home, ...] = tuple(
            Mesh(own, inside.axis_names) if inside else own for own in by_rank
        )
        self.shape, self.axis_names, self.inside = axes.shape, axes.names, inside
        self.num_ranks = axes.num_ranks
        self._process = _OneProcess()
        self._tracing: Tracing | None = None
        self._calls = itertools.count()
        self._lock = threading.RLock()

    def __repr__(self):
        return f"MpmdMesh({self.shape}, {self.axis_names})"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices, rank after rank."""
        return tuple(device for home in self.homes for device in devices_of(home))

    def load(self, bundle: Bundle) -> Any:
        """Compiles a step; returns the function that runs the step on its arguments."""
        return StackedStep(LocalStep(bundle, self.homes, self._dispatch, self._lock), bundle)

    def _dispatch(self, dispatcher: Dispatcher, bundle: Bundle) -> None:
        """Dispatches a step; records it, by its id as the number, where the mesh is traced."""
        if (recorder := self._process.recorder) is None:
            dispatcher.run()
            return
        assert self._tracing is not None
        self._tracing.steps[id(bundle)] = bundle  # kept alive, so that no other gets its id
        recorder.run(dispatcher, next(self._calls), id(bundle))

    def start_trace(self, directory: str | os.PathLike[str], *, times: Times = "profile") -> None:
        """Starts to record the tasks and messages of the ranks.

        JAX's profiler records, too, into `<directory>/profile-0`: what each task consists of.

        Args:
            directory: where `stop_trace` writes its files; those of an earlier trace are replaced.
            times: where the times of tasks come from: JAX's profile (`"profile"`), or threads that
                wait for the results (`"waits"`). On GPUs they always come from threads.

        Raises:
            RuntimeError: the mesh is traced already, or JAX's profiler runs.
            ValueError: `times` is neither.
            OSError: the directory cannot be written to.

        Example:
            >>> import jax, jax.numpy as jnp, jaxpp, tempfile
            >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
            >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
            >>> mesh = jaxpp.MpmdMesh((1,))
            >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()), mesh)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     mesh.start_trace(folder)
            ...     gradient = step(jnp.eye(2), jnp.ones((4, 2)))
            ...     trace = mesh.stop_trace()
            >>> [run.label for run in trace.runs if run.label[0] in "FB"]
            ['F0.0', 'B0.0', 'F0.1', 'B0.1']
        """
        with self._lock:
            self._tracing = start_trace(self._process, directory, times, self._tracing)

    def stop_trace(self) -> Trace:
        """Ends the trace once all calls have been computed, and writes its files.

        The files are, in the directory: `timeline.json`, which ui.perfetto.dev opens, and
        `timeline.png`, a typical call beside its simulation. JAX's profile, in
        `<directory>/profile-0`, is what TensorBoard opens; each task is an annotation there.

        Returns:
            When each task and each message was, and the paths of the files.

        Raises:
            RuntimeError: the mesh is not traced.
        """
        with self._lock:
            tracing, self._tracing = self._tracing, None
            distinct = list(dict.fromkeys(self.homes))
            return stop_trace(self._process, tracing, [distinct.index(h) for h in self.homes])


PROVIDED["mesh"] = lambda num_ranks: MpmdMesh((num_ranks,))
PROVIDED["mesh_of"] = MpmdMesh
