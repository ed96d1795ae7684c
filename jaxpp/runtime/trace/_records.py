"""Records of the runs and messages of a process that is traced."""

import dataclasses
import time

#: One clock for all processes of a host, in nanoseconds.
clock = time.monotonic_ns

#: A run: its call, its rank, and its position in the rank's program; None where there is no such.
Where = tuple[int, int, int | None]


@dataclasses.dataclass(frozen=True, slots=True)
class RunRecord:
    """A run of a call: its position in its rank's program, its times of dispatch, start and end.

    Times are nanoseconds of the clock of the process, until `assemble` makes them seconds of the
    trace. `start` is None where only the end was seen.
    Both are None for a run of which a device has nothing to do.
    """

    call: int
    step: int
    rank: int
    position: int
    dispatched: float
    start: float | None = None
    end: float | None = None

    @property
    def where(self) -> Where:
        """The call, the rank and the position."""
        return self.call, self.rank, self.position


@dataclasses.dataclass(frozen=True, slots=True)
class MessageRecord:
    """A message at one of its ends: the start and the end of the sending, or of the receiving."""

    call: int
    tag: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """All records of a process; `errors` tell why some of its runs are not known."""

    runs: tuple[RunRecord, ...] = ()
    sent: tuple[MessageRecord, ...] = ()
    received: tuple[MessageRecord, ...] = ()
    errors: tuple[str, ...] = ()
