"""The Ray actor of a worker: starts JAX, the transport and the RPC server."""

import dataclasses
import importlib.metadata
import os
import platform
import socket
import sys
import threading
from typing import Any

import jax
import ray

from jaxpp._version import __version__
from jaxpp.runtime.arrays import Home, devices_of, home_over
from jaxpp.runtime.remote.cluster import prepare_process
from jaxpp.runtime.remote.worker._black_box import BlackBox
from jaxpp.runtime.remote.worker._output import Output
from jaxpp.runtime.remote.worker._process import Process
from jaxpp.runtime.remote.worker._server import Server
from jaxpp.runtime.remote.worker._settings import Settings
from jaxpp.runtime.transport import (
    Addresses,
    Pulls,
    SocketTransport,
    first_devices,
    free_port,
    join_processes,
    rank_home,
)

#: Seconds after which a Python thread of a worker yields to one that waits.
SWITCH_INTERVAL = 1e-4

#: The flag of XLA that does the same as `jax_num_cpu_devices`.
DEVICE_COUNT_FLAG = "xla_force_host_platform_device_count"

#: The address at which only processes of the same host reach each other.
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a worker needs to start.

    Args:
        settings: of the mesh.
        rank: its rank.
        process: its number in the rank.
        secret: what the connections between workers are authenticated with.
        address: the address of its host that other hosts reach it by; None for loopback only.
        coordinator: where `jax.distributed` joins the processes of the rank; None where it has but
            one.
        x64: whether 64-bit types are on, as they are in the driver.
        epoch: how often the mesh has been restarted.
        box: the path of its flight recorder; None on another host than the driver's.
    """

    settings: Settings
    rank: int
    process: int
    secret: bytes
    address: str | None
    coordinator: str | None
    x64: bool
    epoch: int
    box: str | None


@dataclasses.dataclass(frozen=True)
class Hello:
    """A worker's description of itself once it has started."""

    versions: dict[str, str]
    host: str
    address: str
    pid: int
    node: str
    platform: str
    device: str
    addresses: Any
    server: Addresses


def versions() -> dict[str, str]:
    """Returns the versions that driver and workers must agree on."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {"python": python, **found, "jaxpp": __version__}


#: Ray's decorator; its overloads do not know its options.
_remote: Any = ray.remote


def _start_jax(setup: Setup) -> tuple[Home, SocketTransport]:
    """Starts JAX with the devices of this rank; returns the rank's home and its transport."""
    settings, sizes = setup.settings, setup.settings.inside
    devices = settings.devices_per_rank // settings.processes_per_rank
    jax.config.update("jax_enable_x64", setup.x64)
    # JAX rejects the option together with the flag, which the driver's environment may have.
    if devices > 1 and DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", devices)
    if settings.cores == 1 and settings.devices_per_rank == 1:
        # On one core a second thread that computes costs time: tasks of 1 ms took 8% longer
        # with asynchronous dispatch.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if setup.coordinator is not None:
        where = setup.coordinator, settings.processes_per_rank, setup.process
        join_processes(*where, host=setup.address or LOOPBACK)
        home = rank_home(sizes, setup.rank)
    else:
        home = home_over(first_devices(jax.local_devices(), sizes, setup.rank), sizes)
    kind, pulls = settings.transport, None
    if kind == "jax":
        kind, pulls = "auto", Pulls(home, setup.address)
    transport = SocketTransport(
        {setup.rank: home}, setup.secret, address=setup.address, kind=kind, pulls=pulls
    )
    if setup.epoch:
        transport.reset(setup.epoch)
    return home, transport


def actor_of(rank: int, process: int | None = None) -> Any:
    """Makes the class of a worker's Ray actor, whose name `ps` shows for the process.

    Args:
        rank: the rank of the worker.
        process: its number among those of the rank, if a rank has several.
    """
    name = f"jaxpp_rank_{rank}" + ("" if process is None else f"_process_{process}")
    return _remote(concurrency_groups={"life": 1})(type(name, (Actor,), {"__doc__": Actor.__doc__}))


class Actor:
    """The Ray actor of a worker process: starts it; all else comes through the RPC server."""

    def __init__(self):
        self._server: Any = None

    def free_port(self, host: str) -> int:
        """Finds a port that is free here; `host` is this host's own address."""
        return free_port(host)

    def start(self, setup: Setup) -> Hello:
        """Starts JAX, the transport and the RPC server; describes the worker."""
        prepare_process(setup.settings.cores)
        # The transport's threads must not wait for the end of Python's time slice of 5 ms.
        sys.setswitchinterval(SWITCH_INTERVAL)
        home, transport = _start_jax(setup)
        device = next(d for d in devices_of(home) if d.process_index == jax.process_index())
        box = BlackBox.open(setup.box) if setup.box else None
        process = Process(setup.rank, home, transport, box, setup.process)
        self._server = Server(process, setup.secret, setup.address)
        sys.stdout = Output(self._server.tell, sys.stdout)
        return Hello(
            versions(),
            socket.gethostname(),
            ray.util.get_node_ip_address(),
            os.getpid(),
            ray.get_runtime_context().get_node_id(),
            device.platform,
            device.device_kind,
            transport.addresses,
            self._server.addresses,
        )

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never returns; the call fails, and so tells its caller, when the process ends."""
        threading.Event().wait()
