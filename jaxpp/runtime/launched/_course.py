"""Do all processes make the same calls? Process 0 compares how far each has come."""

import threading
from collections.abc import Callable
from typing import NamedTuple

#: Calls and loaded arrays that are known for a while, to compare them with those of others.
KEPT = 8192


class Called(NamedTuple):
    """A call of a step by a process: its number, and a hash of the step and its arguments."""

    process: int
    call: int
    digest: int

    def apart(self, other: "Called") -> str:
        """Says how it differs from the same call of another process."""
        return (
            f"call {self.call} of process {self.process} and of process {other.process} are not "
            f"of the same step with the same arguments"
        )


class LoadedArray(NamedTuple):
    """An array of a batch that a rank has loaded, by their numbers, and a hash of its values."""

    rank: int
    batch: int
    array: int
    digest: int

    def apart(self, other: "LoadedArray") -> str:
        """Says how it differs from the same array of another rank."""
        return (
            f"ranks {self.rank} and {other.rank} have loaded other values of array {self.array} "
            f"of batch {self.batch} (counted from 0); look at the seed of a shuffle, the order of "
            f"files, and iterators that a function which feeds a step advances"
        )


class At(NamedTuple):
    """The place of a process among the calls that all make.

    Args:
        meeting: the number of the meeting that it comes to, or will come to next.
        calls: the number of its calls of steps.
        what: what it does there, in words; empty where it has not come yet.
        done: what it has called, and its ranks have loaded, since it said so last.
    """

    meeting: int
    calls: int
    what: str = ""
    done: tuple[Called | LoadedArray, ...] = ()


class Course:
    """The places of all processes among their calls, and of those that wait in a meeting of all.

    Args:
        count: the number of processes.
        differ: called with an error, and the number of a process, when two do not do the same.
    """

    def __init__(self, count: int, differ: Callable[[int, RuntimeError], None]):
        self._count, self._differ = count, differ
        self._there: dict[int, dict[int, At]] = {}
        #: The calls and loads as the first one says them, by all but who says so.
        self._done: dict[tuple[int, ...], tuple[int, Called | LoadedArray]] = {}
        self._lock = threading.Lock()

    def hear(self, number: int, at: At) -> None:
        """Takes where a process is: who waits elsewhere, or calls once more, does otherwise."""
        with self._lock:
            for own in at.done:  # a call has one number there, and an array two
                first, theirs = self._done.setdefault(own[1:-1], (number, own))
                if own.digest != theirs.digest:
                    self._differ(number or first, _error(theirs.apart(own)))  # pyright: ignore
            while len(self._done) > KEPT:
                del self._done[next(iter(self._done))]  # the oldest
            there = self._there.setdefault(at.meeting, {})
            for other, theirs in there.items():
                late = at[:3] != theirs[:3] if at.what else at.calls > theirs.calls
                if other != number and late:
                    self._differ(number or other, _error(_apart({number: at, other: theirs})))
            if at.what:
                there[number] = at
            if len(there) in (0, self._count):
                del self._there[at.meeting]


def _apart(each: dict[int, At]) -> str:
    return " and ".join(
        f"process {n} {at.what or 'calls a step again'} after {at.calls} calls"
        for n, at in sorted(each.items())
    )


def _error(told: str) -> RuntimeError:
    return RuntimeError(
        f"the processes do not make the same calls: {told}. Each process calls the steps with the "
        f"same arguments, loads the same for them, fetches results (float, gather, print) and "
        f"saves in the same order; only what it does with plain values may depend on its number"
    )
