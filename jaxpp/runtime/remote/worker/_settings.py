"""Settings for starting the workers of a mesh."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from jaxpp.runtime.transport import Transport


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `RemoteMpmdMesh`, which describes them.

    `inside` has the axes inside a rank, and their sizes. `gpus_per_rank` counts the GPUs for each
    entry of these axes.

    Raises:
        ValueError: the devices of a rank cannot be divided among so many processes, or have no GPU
            each, or the transport is not known.
    """

    num_ranks: int
    inside: Mapping[str, int]
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
        if self.transport not in get_args(Transport):
            raise ValueError(
                f"transport={self.transport!r} is not known; it is one of "
                f"{', '.join(get_args(Transport))}."
            )
