"""Do all processes make the same calls? Process 0 compares how far each has come."""

import threading
from collections.abc import Callable
from typing import NamedTuple


class At(NamedTuple):
    """Where a process is.

    Args:
        meeting: the number of the meeting that it comes to, or will come to next.
        calls: the number of its calls of steps.
        what: what it does there, in words; empty where it has not come yet.
        digest: a hash of which steps it has called, with which arguments.
    """

    meeting: int
    calls: int
    what: str = ""
    digest: int = 0


class Course:
    """Where the processes are that wait in a meeting of all.

    Args:
        count: the number of processes.
        differ: called with an error, and the number of a process, when two do not do the same.
    """

    def __init__(self, count: int, differ: Callable[[int, RuntimeError], None]):
        self._count, self._differ = count, differ
        self._there: dict[int, dict[int, At]] = {}
        self._lock = threading.Lock()

    def hear(self, number: int, at: At) -> None:
        """Takes where a process is: who waits elsewhere, or calls once more, does otherwise."""
        with self._lock:
            there = self._there.setdefault(at.meeting, {})
            for other, theirs in there.items():
                if other != number and (at != theirs if at.what else at.calls > theirs.calls):
                    self._differ(number or other, _error({number: at, other: theirs}))
            if at.what:
                there[number] = at
            if len(there) in (0, self._count):
                del self._there[at.meeting]


def _error(each: dict[int, At]) -> RuntimeError:
    told = " and ".join(
        f"process {n} {at.what or 'calls a step again'} after {at.calls} calls"
        for n, at in sorted(each.items())
    )
    if len({(at.meeting, at.calls, at.what) for at in each.values()}) == 1:
        told += ", with other arguments, or of other steps"
    return RuntimeError(
        f"the processes do not make the same calls: {told}. Each process calls the steps with the "
        f"same arguments, fetches results (float, gather, print) and saves in the same order; only "
        f"what it does with plain values may depend on its number"
    )
