"""`RemoteMpmdMesh`: a worker process for each rank, on the hosts of a Ray cluster."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from jaxpp._program import PIPELINE_AXIS
from jaxpp._specs import axis_sizes
from jaxpp.runtime.arrays import check_axes
from jaxpp.runtime.site import SiteMesh


class RemoteMpmdMesh(SiteMesh):
    """A mesh of pipeline ranks in worker processes, on one host or many.

    Each rank is a mesh of its own over the axes other than `"mpmd"`, if there are any, as on an
    `MpmdMesh`. A worker process has one rank, by default, or several, with devices for each. Or a
    rank has several processes, on one host or many; `jax.distributed` joins them.

    It joins the Ray session that is there (`RAY_ADDRESS`, `ray.init`, a cluster on this host). It
    starts a session on this host where there is none, or where `RAY_ADDRESS=local`, and `shutdown`
    ends that session. The mesh is a context manager; without `with`, call `shutdown`.

    A placed function on this mesh returns `RemoteArray`s at once; their values stay on the ranks.
    When a worker fails, the step ends on all workers, and the next call or fetch raises a
    `RankError`; `restart` makes the mesh fit for work again.

    Args:
        shape: the size of each axis; that of `"mpmd"` is the number of ranks.
        axis_names: a name for each axis, one of them `"mpmd"`.
        axis_types: the type of each axis, as in `jax.make_mesh`; by default all are `Auto`.
        processes_per_rank: how many processes a rank has, each with as many of its devices: 2 of 4
            devices each, for a rank of 8 devices on two hosts. A function that feeds the step has
            to give the same in all of them.
        ranks_per_process: how many ranks a worker process has, a divisor of their number: arrays go
            from one to another of them from device to device. They fail together. By default one,
            and with GPUs as many as a host has.
        gpus_per_rank: of each rank, for each entry of the axes inside a rank: a rank of 2 x 2
            devices takes 4 GPUs with 1; a fraction where ranks of one device share a GPU. With 0
            they run on CPU, each with as many CPU devices as its axes need.
        cpus_per_rank: CPUs that Ray counts for a rank; by default one, and next to nothing in a
            session that was started for this mesh.
        cores: how many of its host's cores a worker is bound to: the workers of a mesh take them in
            turn; None for all of them.
        environment: variables of the workers' environment, such as `XLA_FLAGS` or
            `XLA_PYTHON_CLIENT_MEM_FRACTION`.
        address: `"auto"` where workers and the driver reach a worker of another host at the address
            that Ray knows of it; by default only processes of the same host can connect to it.
        transport: how arrays go between ranks: `"auto"`, over sockets (`"unix"` and `"tcp"` say
            which); `"jax"`, by `jax.experimental.transfer` where they are large, which is slower
            than sockets on CPU, and faster between GPUs for arrays above 16 MiB.
        heartbeat_timeout: seconds without a sign of life after which a worker counts as lost whose
            process has been stopped, or whose host does not answer. One that runs is never lost for
            being slow, since C code may hold Python's lock.
        start_timeout: seconds that the cluster has to make room for the workers, if others hold too
            much of it, and then to start them.

    Raises:
        ValueError: the axes are not as above, the cluster cannot hold the ranks, or a worker has
            too few devices, or other versions of Python, JAX or this package than the driver.

    Example:
        >>> import jaxpp
        >>> import jax, jax.numpy as jnp
        >>> def loss(params, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params[0]))
        ...     return jnp.mean((h @ params[1]) ** 2)
        >>> grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 2)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> with jaxpp.RemoteMpmdMesh((2, 1), ("mpmd", "data")) as mesh:
        ...     step = jaxpp.place(grad, mesh)
        ...     value, grads = step([jnp.eye(2), jnp.ones((2, 1))], jnp.ones((4, 2)))
        ...     print(grads[1], f"{value:.3f}")
        RemoteArray(float32[2,1] on rank 1) 2.320
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str] = (PIPELINE_AXIS,),
        axis_types: Sequence[AxisType] | None = None,
        *,
        processes_per_rank: int = 1,
        ranks_per_process: int | None = None,
        gpus_per_rank: float = 0,
        cpus_per_rank: float | None = None,
        cores: int | None = None,
        environment: Mapping[str, str] | None = None,
        address: str | None = None,
        transport: str = "auto",
        heartbeat_timeout: float = 3.0,
        start_timeout: float = 60.0,
    ):
        axes = check_axes("RemoteMpmdMesh", shape, axis_names, axis_types)
        # Of what ranks print, Ray would show lines that differ in numbers alone only once.
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # it is read as Ray is imported
        # These bring Ray, which takes long to import.
        from jaxpp.runtime.remote._group import WorkerGroup
        from jaxpp.runtime.remote._worker import Settings

        config: Any = jax.config
        settings = Settings(
            axes.num_ranks,
            axis_sizes(axes.inside),
            processes_per_rank,
            ranks_per_process,
            gpus_per_rank,
            cpus_per_rank,
            cores,
            environment,
            address,
            transport,
            heartbeat_timeout,
            start_timeout,
            config.jax_enable_x64,
        )
        self.shape, self.axis_names, self.inside = axes.shape, axes.names, axes.inside
        self.num_ranks, self.processes_per_rank = axes.num_ranks, processes_per_rank
        self._start_timeout = start_timeout
        self._group = WorkerGroup(settings)
        self._begin(self._group)

    def restart(self) -> None:
        """Makes the mesh fit for work after a failure, without its arrays.

        Workers that are well keep their compiled programs; the others are replaced, and so is one
        in which a function of `apply`, or a write, goes on for 5 s more. All workers are replaced
        where ranks have several processes, or transfers go by JAX. `RemoteArray`s from before are
        lost: load a checkpoint. Other threads that wait for the mesh get an error. Where no rank
        has failed, it first waits for checkpoints that are being written, each for `start_timeout`
        at most.
        """
        with self._group.restarts:
            self._group.check_open()
            self._wait_for_saves(self._start_timeout)
            self._group.end_waits()
            with self._group.order:
                self._group.check_open()
                # This comes before the new workers, which will never make the arrays from before.
                self._arrays.restart()
                self.tracing = None
                self._group.restart()
