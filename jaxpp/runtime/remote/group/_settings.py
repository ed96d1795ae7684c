"""Settings for starting the workers of a mesh."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `RemoteMpmdMesh`, which describes them.

    `insides` has for each rank the axes inside it, and their sizes. `gpus_per_rank` counts the GPUs
    for each entry of these axes.
    """

    insides: Sequence[Mapping[str, int]]
    processes_per_rank: int
    gpus_per_rank: float
    cpus_per_rank: float | None
    cores: int | None
    environment: Mapping[str, str] | None
    address: str | None
    transport: Any
    heartbeat_timeout: float
    start_timeout: float

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.insides)

    @property
    def devices_per_rank(self) -> list[int]:
        """The number of devices of each rank."""
        return [math.prod(sizes.values()) for sizes in self.insides]

    @property
    def ranks_differ(self) -> bool:
        """Tells whether there are ranks of different sizes."""
        return any(sizes != self.insides[0] for sizes in self.insides)

    def check(self) -> None:
        """Checks all that does not depend on the cluster.

        Raises:
            ValueError: the devices of a rank cannot be divided among so many processes, or have no
                GPU each, or the transport is for single processes, or for ranks that are alike.
        """
        devices, processes = max(self.devices_per_rank), self.processes_per_rank
        if devices > 1 and self.gpus_per_rank != int(self.gpus_per_rank):
            raise ValueError(
                f"RemoteMpmdMesh needs a GPU for each of the {devices} devices of a rank, got "
                f"gpus_per_rank={self.gpus_per_rank:g}; only ranks of one device share GPUs."
            )
        if self.ranks_differ and (processes != 1 or self.transport == "device"):
            raise ValueError(
                f"RemoteMpmdMesh.of_ranks: ranks that differ in size have one process each, and "
                f"send over sockets, got processes_per_rank={processes} and "
                f"transport={self.transport!r}."
            )
        if processes < 1 or devices % processes:
            raise ValueError(
                f"RemoteMpmdMesh divides the devices of a rank evenly among its processes: a rank "
                f"of {devices} cannot have processes_per_rank={processes}; take a divisor of "
                f"{devices}."
            )
        if processes > 1 and self.transport == "device":
            raise ValueError(
                f"RemoteMpmdMesh sends arrays over sockets where a rank has several processes, got "
                f"transport='device' and processes_per_rank={processes}; use transport='socket'."
            )
