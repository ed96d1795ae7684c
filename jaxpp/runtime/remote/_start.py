"""The start of a worker process: JAX with the devices of its ranks, and their connections."""

import dataclasses
import os
import socket
from collections.abc import Mapping

import jax

from jaxpp.runtime.arrays import Home, devices_of, home_over
from jaxpp.runtime.remote._settings import Settings
from jaxpp.runtime.site import Hello, versions
from jaxpp.runtime.transport import (
    Pulls,
    SocketTransport,
    first_devices,
    join_processes,
    rank_home,
)

#: The flag of XLA that does the same as `jax_num_cpu_devices`.
DEVICE_COUNT_FLAG = "xla_force_host_platform_device_count"

#: The address at which only processes of the same host reach each other.
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a worker needs to start.

    Args:
        settings: of the mesh.
        ranks: its ranks.
        process: its number among the processes of its rank.
        secret: what the connections between workers are authenticated with.
        address: the address of its host that other hosts reach it by; None for loopback only.
        coordinator: where `jax.distributed` joins the processes of the rank; None where it has but
            one.
        x64: whether 64-bit types are on, as they are in the driver.
        epoch: how often the mesh has been restarted.
    """

    settings: Settings
    ranks: tuple[int, ...]
    process: int
    secret: bytes
    address: str | None
    coordinator: str | None
    x64: bool
    epoch: int


def start_ranks(setup: Setup) -> tuple[SocketTransport, Hello]:
    """Starts JAX; returns the ranks' way to others, and the description for the driver."""
    import ray  # only workers call this

    from jaxpp.runtime.remote.cluster import prepare_process

    prepare_process(setup.settings.cores)
    _start_jax(setup)
    transport = _transport(setup, {rank: _home(setup, rank) for rank in setup.ranks})
    devices = devices_of(transport.homes[setup.ranks[0]])
    device = next(d for d in devices if d.process_index == jax.process_index())
    hello = Hello(
        versions(),
        socket.gethostname(),
        ray.util.get_node_ip_address(),
        os.getpid(),
        ray.get_runtime_context().get_node_id(),
        device.platform,
        device.device_kind,
        os.path.realpath("/proc/self/fd/2"),
        transport.addresses,
    )
    return transport, hello


def _start_jax(setup: Setup) -> None:
    """Starts JAX with the devices of this process."""
    settings = setup.settings
    devices = settings.devices_per_rank // settings.processes_per_rank * len(setup.ranks)
    jax.config.update("jax_enable_x64", setup.x64)
    # JAX rejects the option together with the flag, which the driver's environment may have.
    if devices > 1 and DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", devices)
    if settings.cores == 1 and settings.devices_per_rank == len(setup.ranks) == 1:
        # On one core a second thread that computes costs time: tasks of 1 ms took 8% longer
        # with asynchronous dispatch.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if setup.coordinator is not None:
        where = setup.coordinator, settings.processes_per_rank, setup.process
        join_processes(*where, host=setup.address or LOOPBACK)


def _home(setup: Setup, rank: int) -> Home:
    """Makes the home of a rank, of its share of the devices of this process."""
    sizes = setup.settings.inside
    if setup.coordinator is not None:
        return rank_home(sizes, rank)
    shared = min(setup.settings.gpus_per_rank or 1, 1)  # ranks of one device may share a GPU
    first = int(setup.settings.devices_per_rank * setup.ranks.index(rank) * shared)
    return home_over(first_devices(jax.local_devices()[first:], sizes, rank), sizes)


def _transport(setup: Setup, homes: Mapping[int, Home]) -> SocketTransport:
    kind, pulls = setup.settings.transport, None
    if kind == "jax":
        kind, pulls = "auto", Pulls(homes[setup.ranks[0]], setup.address)
    transport = SocketTransport(homes, setup.secret, address=setup.address, kind=kind, pulls=pulls)
    if setup.epoch:
        transport.reset(setup.epoch)
    return transport
