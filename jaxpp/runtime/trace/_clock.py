"""One clock for processes on several hosts."""

import dataclasses
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxpp.runtime.transport import host_identity

#: One clock for all processes of a host, in nanoseconds.
clock = time.monotonic_ns
#: The event of JAX's profiles that has the time of the driver's clock; see `merge_traces`.
CLOCK_EVENT = "jaxpp clock"
#: The number of times that a clock is asked; the shortest of so many round trips has little delay.
ROUND_TRIPS = 10
#: Names the clock of this process; one of its own where the system does not name it.
_CLOCK = host_identity("time") if sys.platform == "linux" else f"{platform.node()} {time.time_ns()}"
#: A time of another clock, and what to add to it to have the driver's, in nanoseconds.
Offset = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Reading:
    """The times of the clock of a host, which it names, and of the day, in nanoseconds."""

    host: str
    monotonic_ns: int
    unix_ns: int


def read_clock(process: Any = None) -> Reading:
    """Reads the clocks of this process."""
    return Reading(_CLOCK, clock(), time.time_ns())


def measure_offset(mesh: Any, number: int) -> Offset:
    """Measures how far the clock of a process is behind that of this one, the driver's.

    The process is taken to read its clock in the middle of a round trip. This is wrong by half a
    round trip at most, so the shortest one counts: the clock filter of NTP (D. Mills et al., RFC
    5905, sections 8 and 10). The offset is 0 where the clock is the same one.
    """
    readings = []
    for _ in range(ROUND_TRIPS):
        before = clock()
        reading: Reading = mesh.apply(read_clock, {number: ()}, ordered=False)[number]
        after = clock()
        if reading.host == _CLOCK:
            return reading.monotonic_ns, 0
        there = reading.monotonic_ns
        readings.append((after - before, there, (before + after) // 2 - there))
    _, there, offset = min(readings)
    return there, offset


def to_driver(time: int, offsets: Sequence[Offset]) -> int:
    """Returns the driver's time at a time of another clock.

    Clocks do not run equally fast. The offset is on the line through those at two moments.

    >>> to_driver(1500, [(1000, 50), (2000, 60)])
    1555
    """
    (t0, first), (t1, last) = offsets
    return time + first + round((last - first) * (time - t0) / ((t1 - t0) or 1))
