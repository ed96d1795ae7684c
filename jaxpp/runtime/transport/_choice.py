"""Chooses the transport of a mesh."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

Flag = Literal["auto", "socket", "unix", "tcp", "device"]


@dataclasses.dataclass(frozen=True, slots=True)
class RankDevices:
    """The devices that a rank computes on.

    Args:
        platform: the JAX platform, such as `"cpu"` or `"gpu"`.
        host: names the host, or Ray's node.
        devices: what tells each device of the rank from others of the host: UUIDs, bus ids or the
            host's own numbers, but not numbers within a process.
    """

    platform: str
    host: str
    devices: tuple[str, ...]


def choose_transport(
    ranks: Sequence[RankDevices], flag: Flag = "auto"
) -> Literal["socket", "device"]:
    """Chooses the transport for arrays between ranks.

    Args:
        ranks: what each rank computes on.
        flag: `"device"` goes from device to device: to be tried, for it has not been run between
            GPUs yet; all others go over sockets, through the memory of the hosts (`"unix"`,
            `"tcp"`: which).

    Returns:
        `"device"` for `DeviceTransport`, `"socket"` for `SocketTransport`.

    Raises:
        ValueError: if the flag is none of these, or asks for what NCCL cannot do: a GPU that
            several ranks share, or GPUs in some ranks only.

    Example:
        >>> one, other = [RankDevices("gpu", "host", (device,)) for device in ("0", "1")]
        >>> choose_transport([one, other]), choose_transport([one, other], "device")
        ('socket', 'device')
    """
    flags = get_args(Flag)
    if flag not in flags:
        raise ValueError(f"transport={flag!r} is not known; it is one of {', '.join(flags)}.")
    if flag != "device":
        return "socket"
    if obstacle := _obstacle(ranks):
        raise ValueError(
            f"transport='device' cannot be had: {obstacle}. Use transport='auto', which goes over "
            f"sockets, or give each rank a GPU of its own (gpus_per_rank=1)."
        )
    return "device"


def _obstacle(ranks: Sequence[RankDevices]) -> str:
    """Gives the reason why arrays cannot go from device to device; empty where they can."""
    if len({rank.platform for rank in ranks}) > 1:
        by = ", ".join(f"rank {n} on {rank.platform}" for n, rank in enumerate(ranks))
        return f"the ranks are on different platforms ({by})"
    if ranks[0].platform == "cpu":  # each process has CPU devices of its own
        return ""
    users: dict[tuple[str, str], int] = {}
    for number, rank in enumerate(ranks):
        if not rank.devices:
            return f"the devices of rank {number} on host {rank.host} are not known"
        for device in rank.devices:
            other = users.setdefault((rank.host, device), number)
            if other != number:
                return (
                    f"ranks {other} and {number} share device {device} of host {rank.host}, which "
                    f"NCCL does not allow"
                )
    return ""
