"""`LaunchedMpmdMesh`: the same script in each process, started by srun, mpirun or torchrun."""

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
from jax.sharding import AxisType

from jaxpp import _compat
from jaxpp._program import PIPELINE_AXIS
from jaxpp._specs import axis_sizes
from jaxpp.runtime.arrays import Home, check_axes, devices_of, home_over
from jaxpp.runtime.launched._environment import find_position, visible_gpus
from jaxpp.runtime.launched._group import LaunchedGroup
from jaxpp.runtime.launched._puts import Puts, PutTransport
from jaxpp.runtime.launched._watch import host_of_processes
from jaxpp.runtime.site import Hello, RankError, SiteMesh, keep_interrupts
from jaxpp.runtime.transport import SocketTransport, first_devices, free_port, join_processes

#: The ways of arrays between processes.
Transport = Literal["sockets", "device_put"]


class LaunchedMpmdMesh(SiteMesh):
    """A mesh of pipeline ranks in processes that a launcher has started, each with the same script.

    `srun`, `mpirun`, `torchrun` and their like start the script in several processes, and tell each
    its number by variables, which the mesh reads; so it does where `jax.distributed` has joined the
    processes before. There is no driver, and Ray is not needed. Each process has as many ranks, the
    first process the first ones. It traces the whole step, runs its own ranks, and gets
    `RemoteArray`s for all results.

    All processes make the same calls in the same order: they call steps, fetch results (`float`,
    `jaxpp.gather`, `print`), save and load together. What a process then does with plain values may
    depend on its `process` number. When a step is placed, the processes compare it.

    When a process fails, ends or is stopped, the next call or fetch in the others raises a
    `RankError` that names it. The mesh is a context manager: an exception in its block is told to
    the others. Without `with`, call `shutdown`.

    Args:
        shape: the size of each axis; that of `"mpmd"` is the number of ranks.
        axis_names: a name for each axis, one of them `"mpmd"`.
        axis_types: the type of each axis, as in `jax.make_mesh`; by default all are `Auto`.
        devices: those of this process's ranks, one for each entry of their axes, by default the
            first of `jax.local_devices()`. Ranks may share devices.
        transport: the way of the messages of steps between processes: `"sockets"`, or
            `"device_put"`, JAX's own transfers, by NCCL on GPUs. For these the mesh joins the
            processes by `jax.distributed`, unless they have been, and all issue the transfers in
            one order; the script itself must not call `jax.device_put` between processes.
        heartbeat_timeout: seconds without a sign of life after which a process of the same host is
            looked at, and counts as lost if it has been stopped; on another host ten times that.
        start_timeout: seconds that all processes have to come.

    Attributes:
        process: the number of this process.
        num_processes: how many there are.

    Raises:
        ValueError: there is no such transport; no launcher has started this process; the axes are
            not as above; the ranks cannot be divided evenly among the processes; a process has too
            few devices, or other versions than process 0.
        RuntimeError: some processes have not come in time.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, os
        >>> os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}  # as torchrun --nproc-per-node=1 does
        >>> def loss(params, x):
        ...     h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params[0]))
        ...     return jnp.mean((h @ params[1]) ** 2)
        >>> grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 2)
        >>> grad = jaxpp.schedule(grad, jaxpp.schedules.OneFOneB())
        >>> with jaxpp.LaunchedMpmdMesh((2,), devices=jax.local_devices()[:1] * 2) as mesh:
        ...     step = jaxpp.place(grad, mesh)
        ...     value, grads = step([jnp.eye(2), jnp.ones((2, 1))], jnp.ones((4, 2)))
        ...     print(grads[1], f"{value:.3f} in process {mesh.process} of {mesh.num_processes}")
        RemoteArray(float32[2,1] on rank 1) 2.320 in process 0 of 1
        >>> del os.environ["RANK"], os.environ["WORLD_SIZE"]
    """

    processes_per_rank = 1

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str] = (PIPELINE_AXIS,),
        axis_types: Sequence[AxisType] | None = None,
        *,
        devices: Sequence[Any] | None = None,
        transport: Transport = "sockets",
        heartbeat_timeout: float = 3.0,
        start_timeout: float = 300.0,
    ):
        keep_interrupts()
        axes = check_axes("LaunchedMpmdMesh", shape, axis_names, axis_types)
        if transport not in get_args(Transport):
            raise ValueError(
                f"LaunchedMpmdMesh has the transports {get_args(Transport)}, got {transport!r}."
            )
        place = find_position()
        if axes.num_ranks % place.count:
            raise ValueError(
                f"LaunchedMpmdMesh divides its {axes.num_ranks} ranks evenly among the processes, "
                f"and {place.count} have been started; start a divisor of {axes.num_ranks}."
            )
        self.shape, self.axis_names, self.inside = axes.shape, axes.names, axes.inside
        self.num_ranks = axes.num_ranks
        self.process, self.num_processes = place.number, place.count
        each = axes.num_ranks // place.count
        ranks = [tuple(range(n, n + each)) for n in range(0, axes.num_ranks, each)]
        sizes = axis_sizes(axes.inside)
        width = math.prod(sizes.values())

        def start(
            secret: bytes, address: str, group: LaunchedGroup
        ) -> tuple[SocketTransport, Hello]:
            puts = transport == "device_put" and place.count > 1
            if puts:
                _join(address, group)
            _prepare_jax(each * width, visible_gpus(place, each * width))
            own = jax.local_devices() if devices is None else list(devices)
            homes = {
                rank: home_over(first_devices(own[n * width :], sizes, rank), sizes)
                for n, rank in enumerate(ranks[place.number])
            }
            near = place.count == 1 or address.startswith("127.")
            how: Any = {"address": None if near else address}
            if puts:
                way = PutTransport(homes, secret, **how, puts=_puts(homes, sizes, group))
            else:
                way = SocketTransport(homes, secret, **how)
            return way, Hello.of(address, host_of_processes(), own[0], way.addresses)

        config: Any = jax.config
        settings = f"axes {self.shape} {self.axis_names}, x64 {bool(config.jax_enable_x64)}"
        settings += f", transport {transport}"
        self._group = LaunchedGroup(place, settings, start, ranks, heartbeat_timeout, start_timeout)
        self._begin(self._group)
        before = sys.excepthook

        def tell(kind: Any, error: BaseException, traceback: Any) -> None:
            self._group.fail(error)
            before(kind, error, traceback)

        sys.excepthook = tell

    def __exit__(self, _: Any, error: BaseException | None, __: Any):
        left = error is None or isinstance(error, GeneratorExit)
        if left or (isinstance(error, SystemExit) and not error.code):
            self.shutdown()
            return
        self._group.fail(error)
        with contextlib.suppress(RankError):  # of which the error is the cause, or the consequence
            self.shutdown()


def _prepare_jax(devices: int, gpus: str) -> None:
    """Lets JAX start with the devices of this process, if it has not started yet."""
    config: Any = jax.config
    if _compat.started_platform() is not None:
        return
    for name in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
        if gpus and config.read(name) == "all":
            jax.config.update(name, gpus)
    flags = os.environ.get("XLA_FLAGS", "")
    if config.jax_num_cpu_devices < devices and "platform_device_count" not in flags:
        jax.config.update("jax_num_cpu_devices", devices)


def _join(address: str, group: LaunchedGroup) -> None:
    """Joins the processes for JAX's transfers, if they have not been, before JAX starts.

    Args:
        address: of this host, at which the others reach it.
        group: all processes.
    """
    config: Any = jax.config
    joined = _compat.joined_processes() is not None
    served = config.read("jax_cross_host_transfer_socket_address")  # for platforms without NCCL
    if _compat.started_platform() is not None:
        if not joined or (_compat.started_platform() == "cpu" and not served):
            raise ValueError(
                'LaunchedMpmdMesh: transport="device_put" has to be asked for before JAX is used; '
                "make the mesh first, right behind jax.distributed.initialize if you call that."
            )
        return
    host = f"[{address}]" if ":" in address else address
    if not served:
        at = f"{host}:{free_port(address)}"  # JAX does not find a port itself
        jax.config.update("jax_cross_host_transfer_socket_address", at)
        jax.config.update("jax_cross_host_transport_addresses", f"{host}:0")
    if not joined:
        place = group.place
        own = "" if place.number else f"{host}:{free_port(address)}"
        coordinator = group.meet("joins the processes", own).values()[0]
        join_processes(coordinator, place.count, place.number, host=address)


def _puts(homes: Mapping[int, Home], sizes: Mapping[str, int], group: LaunchedGroup) -> Puts:
    """Makes this process's part in JAX's transfers, once all have told the devices of their ranks.

    Args:
        homes: those of this process's ranks.
        sizes: the axes inside a rank, and their sizes.
        group: all processes.
    """
    group.puts = True
    numbers = {rank: [d.id for d in devices_of(home)] for rank, home in homes.items()}
    told = group.meet("tells its devices", numbers).values()
    platform = devices_of(homes[min(homes)])[0].platform
    devices = {device.id: device for device in jax.devices(platform)}
    every = {
        rank: home_over([devices[n] for n in own], sizes)
        for of_process in told.values()
        for rank, own in of_process.items()
    }
    return Puts({**every, **homes}, homes.keys(), group.meet_compiled)
