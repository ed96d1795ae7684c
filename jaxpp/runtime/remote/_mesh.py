"""`RemoteMpmdMesh`: worker processes on the hosts of a Ray cluster, and their settings."""

import dataclasses
import math
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
from jax.sharding import AxisType

from jaxpp._program import PIPELINE_AXIS
from jaxpp._specs import axis_sizes
from jaxpp.runtime.arrays import check_axes
from jaxpp.runtime.site import SiteMesh
from jaxpp.runtime.transport import Transport


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
        # The group brings Ray, which takes long to import.
        from jaxpp.runtime.remote._group import WorkerGroup

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
        self._group = WorkerGroup(settings)
        self._begin(self._group)

    def restart(self) -> None:
        """Makes the mesh fit for work after a failure, without its arrays.

        Workers that are well keep their compiled programs; the others are replaced. All workers are
        replaced where ranks have several processes, or transfers go by JAX. `RemoteArray`s from
        before are lost: load a checkpoint.
        """
        with self._group.order:
            self._group.check_open()
            # This comes before the new workers, which will never make the arrays from before.
            self._arrays.restart()
            self.tracing = None
            self._group.restart()


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all workers start with: the arguments of `RemoteMpmdMesh`, which describes them.

    `inside` has the axes inside a rank, and their sizes. `gpus_per_rank` counts the GPUs for each
    entry of these axes. `x64` tells whether 64-bit types are on in the driver. Workers prove to
    each other that they have the `secret`.

    Raises:
        ValueError: the devices of a rank cannot be divided among so many processes, or have no GPU
            each, or the transport is not known.
    """

    num_ranks: int
    inside: Mapping[str, int]
    processes_per_rank: int
    ranks_per_process: int | None
    gpus_per_rank: float
    cpus_per_rank: float | None
    cores: int | None
    environment: Mapping[str, str] | None
    address: str | None
    transport: Any
    heartbeat_timeout: float
    start_timeout: float
    x64: bool
    secret: bytes = dataclasses.field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def devices_per_rank(self) -> int:
        """The number of devices of a rank."""
        return math.prod(self.inside.values())

    @property
    def may_share(self) -> bool:
        """Tells whether ranks share processes where nothing else was asked for."""
        gpus = self.gpus_per_rank > 0 and self.processes_per_rank == 1
        return self.ranks_per_process is None and gpus and self.transport != "jax"

    def __post_init__(self):
        devices, processes = self.devices_per_rank, self.processes_per_rank
        if devices > 1 and self.gpus_per_rank != int(self.gpus_per_rank):
            raise ValueError(
                f"RemoteMpmdMesh needs a GPU for each of the {devices} devices of a rank, got "
                f"gpus_per_rank={self.gpus_per_rank:g}; only ranks of one device share GPUs."
            )
        if processes < 1 or devices % processes:
            raise ValueError(
                f"RemoteMpmdMesh divides the devices of a rank evenly among its processes: a rank "
                f"of {devices} cannot have processes_per_rank={processes}; take a divisor of "
                f"{devices}."
            )
        ranks = 1 if self.ranks_per_process is None else self.ranks_per_process
        if ranks < 1 or self.num_ranks % ranks:
            raise ValueError(
                f"RemoteMpmdMesh divides its {self.num_ranks} ranks evenly among processes, and "
                f"cannot have ranks_per_process={ranks}; take a divisor of {self.num_ranks}."
            )
        if ranks > 1 and processes > 1:
            raise ValueError(
                f"RemoteMpmdMesh has several processes for a rank or several ranks in a process, "
                f"and got processes_per_rank={processes} and ranks_per_process={ranks}; take 1 for "
                f"one of them."
            )
        if ranks > 1 and self.transport == "jax":
            raise ValueError(
                "RemoteMpmdMesh: transport='jax' is for processes of one rank each; take "
                "ranks_per_process=1, or another transport."
            )
        _check_address(self.address)
        if self.transport not in get_args(Transport):
            raise ValueError(
                f"transport={self.transport!r} is not known; it is one of "
                f"{', '.join(get_args(Transport))}."
            )


def _check_address(address: str | None) -> None:
    """Checks where workers are to listen; the address of a Ray session is another thing."""
    if address in (None, "auto"):
        return
    host, _, port = address.rpartition(":")
    try:
        if "://" in address or (port.isdigit() and host and ":" not in host):
            raise OSError("it has a port")
        socket.getaddrinfo(address, 0)
    except OSError:
        raise ValueError(
            f"RemoteMpmdMesh: address={address!r} is no host at which workers can listen; it is "
            f"'auto' for several hosts, and None for one. A mesh joins the Ray session of this "
            f"process: call ray.init(address=...) before, or set RAY_ADDRESS=HOST:PORT."
        ) from None
