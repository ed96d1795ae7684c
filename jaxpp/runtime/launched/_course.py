"""Do all processes make the same calls? Process 0 compares how far each has come."""

import threading
from collections.abc import Callable
from typing import NamedTuple

#: Loaded arrays whose values are known for a while, to compare them with those of others.
KEPT = 4096


class Loaded(NamedTuple):
    """An array that a rank has loaded: which of which batch, and a hash of its values."""

    rank: int
    batch: int
    array: int
    values: int


class At(NamedTuple):
    """The place of a process among the calls that all make.

    Args:
        meeting: the number of the meeting that it comes to, or will come to next.
        calls: the number of its calls of steps.
        what: what it does there, in words; empty where it has not come yet.
        digests: hashes of all calls so far, after each of the last ones: which steps it has called,
            with which arguments.
        loaded: what its ranks have loaded since it said so last.
    """

    meeting: int
    calls: int
    what: str = ""
    digests: tuple[int, ...] = ()
    loaded: tuple[Loaded, ...] = ()

    def digest_after(self, calls: int) -> int | None:
        """Returns the hash after a number of calls, if it is known."""
        place = len(self.digests) - 1 - (self.calls - calls)
        return self.digests[place] if 0 <= place < len(self.digests) else None

    def differs(self, other: "At") -> bool:
        """Tells whether the calls were not those of another process, as far as both have come."""
        calls = min(self.calls, other.calls)
        own, theirs = self.digest_after(calls), other.digest_after(calls)
        return None not in (own, theirs) and own != theirs


class Course:
    """The places of all processes among their calls, and of those that wait in a meeting of all.

    Args:
        count: the number of processes.
        differ: called with an error, and the number of a process, when two do not do the same.
    """

    def __init__(self, count: int, differ: Callable[[int, RuntimeError], None]):
        self._count, self._differ = count, differ
        self._there: dict[int, dict[int, At]] = {}
        self._last: dict[int, At] = {}
        #: By batch and number of the array.
        self._loaded: dict[tuple[int, int], Loaded] = {}
        self._lock = threading.Lock()

    def hear(self, number: int, at: At) -> None:
        """Takes where a process is: who waits elsewhere, or calls once more, does otherwise."""
        with self._lock:
            self._last[number] = at
            for other, theirs in self._last.items():
                if at.differs(theirs):
                    self._differ(number or other, _error({number: at, other: theirs}))
            there = self._there.setdefault(at.meeting, {})
            for other, theirs in there.items():
                late = at[:3] != theirs[:3] if at.what else at.calls > theirs.calls
                if other != number and late:
                    self._differ(number or other, _error({number: at, other: theirs}))
            if at.what:
                there[number] = at
            if len(there) in (0, self._count):
                del self._there[at.meeting]
            for loaded in at.loaded:
                before = self._loaded.setdefault((loaded.batch, loaded.array), loaded)
                if before.values != loaded.values:
                    self._differ(number, _not_the_same(before, loaded))
            while len(self._loaded) > KEPT:
                del self._loaded[next(iter(self._loaded))]  # the oldest


def _not_the_same(one: Loaded, other: Loaded) -> RuntimeError:
    return RuntimeError(
        f"ranks {one.rank} and {other.rank} have loaded other values of array {one.array} of batch "
        f"{one.batch} (both counted from 0). The function that feeds a step runs for each rank "
        f"that reads the batch, and has to give the same whenever it is given the same: look at "
        f"the seed of a shuffle, the order of files, and iterators that it advances"
    )


def _error(each: dict[int, At]) -> RuntimeError:
    (number, at), (other, theirs) = sorted(each.items())
    if at.differs(theirs):
        told = (
            f"those of process {number} and process {other}, up to call "
            f"{min(at.calls, theirs.calls)}, are not of the same steps with the same arguments"
        )
    else:
        told = " and ".join(
            f"process {n} {own.what or 'calls a step again'} after {own.calls} calls"
            for n, own in ((number, at), (other, theirs))
        )
    return RuntimeError(
        f"the processes do not make the same calls: {told}. Each process calls the steps with the "
        f"same arguments, fetches results (float, gather, print) and saves in the same order; only "
        f"what it does with plain values may depend on its number"
    )
