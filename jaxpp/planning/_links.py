"""The cost of messages between ranks."""

import dataclasses
import math


def ring_bytes(nbytes: float, devices: int) -> float:
    """Finds the bytes that a device sends where so many add up arrays of so many bytes, in a ring.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2), 2009: each sends its
    parts while they are summed, and once more while the sums go round.

    Example:
        >>> ring_bytes(100, 1), ring_bytes(100, 2), ring_bytes(100, 4)
        (0.0, 100.0, 150.0)
    """
    return 2 * nbytes * (devices - 1) / devices


@dataclasses.dataclass(frozen=True)
class Links:
    """The cost of a message from one rank to another, as `plan` is told.

    Args:
        latency: its seconds, whatever its size.
        bandwidth: the bytes that move in a second.
        overhead: the share of its time for which it keeps the rank that sends it from its tasks;
            the rank that receives it is kept as long.

    Raises:
        ValueError: a number is not one of its kind.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"plan: latency is finite and not negative, got {self.latency!r}.")
        if not self.bandwidth > 0:
            raise ValueError(f"plan: the bandwidth is a positive number, got {self.bandwidth!r}.")
        if not 0 <= self.overhead <= 0.5:
            raise ValueError(f"plan: overhead is a share from 0 to 0.5, got {self.overhead!r}.")

    def seconds(self, nbytes: float) -> float:
        """Returns the time of a message of so many bytes."""
        return self.latency + nbytes / self.bandwidth
