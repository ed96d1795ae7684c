"""One clock for processes on several hosts."""

import dataclasses
import pathlib
import platform
import time
from typing import Any

from jaxpp.runtime.trace._records import clock

#: The event of JAX's profiles that has the time of the driver's clock; see `merge_traces`.
CLOCK_EVENT = "jaxpp clock"
#: The number of times that a clock is asked; the shortest of so many round trips has little delay.
ROUND_TRIPS = 10


@dataclasses.dataclass(frozen=True)
class Reading:
    """The times of two clocks at one moment, in nanoseconds: that of a host, and that of the day.

    `host` is the same for all processes that share the first one.
    """

    host: str
    monotonic_ns: int
    unix_ns: int


def read_clock(process: Any = None) -> Reading:
    """Reads the clocks of this process."""
    return Reading(_host(), clock(), time.time_ns())


@dataclasses.dataclass(frozen=True)
class Offset:
    """The nanoseconds to add to a clock's time to have the driver's time.

    Clocks do not run equally fast. The offset is measured at two moments; between and beyond them
    it lies on the line through both.

    >>> Offset(((1000, 50), (2000, 60))).to_driver(1500)
    1555
    """

    points: tuple[tuple[int, int], ...]

    def to_driver(self, time: int) -> int:
        """Returns the driver's time at a time of the other clock."""
        (t0, first), (t1, last) = self.points[0], self.points[-1]
        if t0 == t1:
            return time + first
        return time + first + round((last - first) * (time - t0) / (t1 - t0))


def measure_offset(mesh: Any, number: int) -> tuple[int, int]:
    """Measures how far the clock of a process is behind that of this one, the driver's.

    The process is taken to read its clock in the middle of a round trip. This is wrong by half a
    round trip at most, so the shortest one counts: the clock filter of NTP (D. Mills et al., RFC
    5905, sections 8 and 10).

    Returns:
        The time there, and what to add to it, in nanoseconds; 0 where the clock is the same one.
    """
    readings = []
    for _ in range(ROUND_TRIPS):
        before = clock()
        reading: Reading = mesh.apply(read_clock, {number: ()}, ordered=False)[number]
        after = clock()
        if reading.host == _host():
            return reading.monotonic_ns, 0
        there = reading.monotonic_ns
        readings.append((after - before, there, (before + after) // 2 - there))
    _, there, offset = min(readings)
    return there, offset


def _host() -> str:
    """Names the clock of this process: the start of the system, and the time namespace."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = pathlib.Path("/proc/self/ns/time").readlink()
    except OSError:
        return f"{platform.node()} {_START}"
    return f"{boot} {namespace}"


#: Makes each process's clock one of its own where the system does not name the clock.
_START = time.time_ns()
