"""The worker process: a site that Ray starts, and the settings for its start."""

import dataclasses
import functools
import gc
import math
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import ray

from jaxpp import _compat
from jaxpp.runtime.arrays import Home, devices_of, home_over
from jaxpp.runtime.remote._environment import prepare_process
from jaxpp.runtime.site import LANES as SITE_LANES
from jaxpp.runtime.site import Failed, Hello, Process, in_order, lane
from jaxpp.runtime.trace import stop_recording
from jaxpp.runtime.transport import (
    Addresses,
    Pulls,
    SocketTransport,
    first_devices,
    free_port,
    join_processes,
    rank_home,
)

#: The threads of each lane, which is a concurrency group of the actor.
LANES = {**SITE_LANES, "life": 1}

#: The flag of XLA that does the same as `jax_num_cpu_devices`.
DEVICE_COUNT_FLAG = "xla_force_host_platform_device_count"

#: The address at which only processes of the same host reach each other.
LOOPBACK = "127.0.0.1"

#: The ways of arrays between workers: over connections of some kind, or by JAX's transfers.
TRANSPORTS = "auto", "unix", "tcp", "jax"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The start of all workers: the arguments of `RemoteMpmdMesh`, which describes them.

    `inside` has the axes inside a rank, and their sizes. `x64` tells whether 64-bit types are on in
    the driver. A `ValueError` says what does not fit together.
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

    @property
    def devices_per_rank(self) -> int:
        """The number of devices of a rank."""
        return math.prod(self.inside.values())

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
        if self.transport not in TRANSPORTS:
            raise ValueError(
                f"transport={self.transport!r} is not known; it is one of {', '.join(TRANSPORTS)}."
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


class Worker(Process):
    """A worker process: its ranks, whose failure is one. Ray makes an actor of this class."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Ray's stream writes each piece of a line at once, and Ray shows what it finds as a line.
        sys.stdout = getattr(sys.stdout, "stream", sys.stdout)
        # Ray's handler waits for `live`, which ends with the process, and takes no more calls.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def free_port(self, host: str) -> int:
        """Finds a port that is free here; `host` is this host's own address."""
        return free_port(host)

    def start(
        self, settings: Settings, secret: bytes, address: str | None, coordinator: str | None
    ) -> Hello:
        """Starts JAX and the connections of the ranks; describes the process.

        Others reach this host by its `address`; None is for loopback only. `jax.distributed` joins
        the processes of the rank at the `coordinator`; None where it has but one.
        """
        number = self.numbers[0] * settings.processes_per_rank + self.process
        prepare_process(settings.cores, number // len(self.numbers))
        self._start_jax(settings)
        if coordinator is not None:
            where = coordinator, settings.processes_per_rank, self.process
            join_processes(*where, host=address or LOOPBACK)
        homes = {rank: self._home(settings, rank) for rank in self.numbers}
        first = homes[self.numbers[0]]
        kind, pulls = settings.transport, None
        if kind == "jax":
            kind, pulls = "auto", Pulls(first, address)
        how: Any = {"address": address, "kind": kind, "pulls": pulls}
        self._new_transport: Any = functools.partial(SocketTransport, homes, **how)
        self.have(self._new_transport(secret), ray.get)
        device = next(d for d in devices_of(first) if d.process_index == jax.process_index())
        here = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        output = os.path.realpath("/proc/self/fd/2")
        return Hello.of(*here, device, self.transport.addresses, output)

    def _start_jax(self, settings: Settings) -> None:
        """Starts JAX with the devices of this process."""
        ranks = len(self.numbers)
        devices = settings.devices_per_rank // settings.processes_per_rank * ranks
        jax.config.update("jax_enable_x64", settings.x64)
        # JAX rejects the option together with the flag, which the driver's environment may have.
        if devices > 1 and DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", devices)
        if settings.cores == 1 and settings.devices_per_rank == ranks == 1:
            # On one core a second thread that computes costs time: tasks of 1 ms took 8% longer
            # with asynchronous dispatch.
            jax.config.update("jax_cpu_enable_async_dispatch", False)

    def _home(self, settings: Settings, rank: int) -> Home:
        """Makes the home of a rank, of its share of the devices of this process."""
        sizes = settings.inside
        if settings.processes_per_rank > 1:
            return rank_home(sizes, rank)
        shared = min(settings.gpus_per_rank or 1, 1)  # ranks of one device may share a GPU
        first = int(settings.devices_per_rank * self.numbers.index(rank) * shared)
        return home_over(first_devices(jax.local_devices()[first:], sizes, rank), sizes)

    @in_order
    def reset(self, secret: bytes) -> Addresses:
        """Makes the process, which has been aborted, fit for work again; it keeps its programs.

        All others have been aborted, too, or one would take the end of its connections for a loss.
        It waits for functions on its ranks: a write must not go on beside the next checkpoint.

        Returns:
            Where the others connect to it from now on.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self.applying)
        _compat.forget_effects()
        stop_recording(self)
        self.transport.close(timeout=0)
        self.have(self._new_transport(secret), ray.get)
        gc.collect()  # the error that ended the step has references to its arrays
        return self.transport.addresses

    @lane("life")
    def live(self) -> NoReturn:
        """Raises the failure once the process has failed; Ray ends the call when it has died."""
        raise Failed(self.end.result(), ends=True) from None

    @lane("control")
    def pulse(self) -> None:
        """Answers a heartbeat; in another lane, once all calls before have begun there."""
