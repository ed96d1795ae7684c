"""Settings for starting the workers of a mesh."""

import dataclasses
import math
import socket
from collections.abc import Mapping
from typing import Any

#: The ways of arrays between workers: over connections of some kind, or by JAX's transfers.
TRANSPORTS = "auto", "unix", "tcp", "jax"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The start of all workers: the arguments of `RemoteMpmdMesh`, which describes them.

    `inside` has the axes inside a rank, and their sizes. `gpus_per_rank` counts the GPUs for each
    entry of these axes. `x64` tells whether 64-bit types are on in the driver.

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
