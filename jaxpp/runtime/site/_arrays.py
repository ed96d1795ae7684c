"""The driver's records of arrays that the ranks hold: ids, releases and fetches."""

import collections
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpp.runtime.arrays import ArrayType, host_array, join_shares
from jaxpp.runtime.site._array import RemoteArray
from jaxpp.runtime.site._interrupts import uninterrupted


class _Handle(weakref.ref):
    """A weak reference to a handle, with the id of its array and the ranks that hold it."""

    __slots__ = ("id", "ranks")
    id: int
    ranks: tuple[int, ...]


class Arrays:
    """The ids of arrays on the ranks, those that ranks may drop, and those that are to be fetched.

    Args:
        mesh: the mesh whose ranks hold the arrays.
        group: the workers.
    """

    def __init__(self, mesh: Any, group: Any):
        self.mesh = mesh
        #: How often the mesh has been restarted; arrays from before are lost.
        self.incarnation = 0
        self.group = group
        self._processes = mesh.processes_per_rank
        self._next = 1
        #: The handles that are referred to, by id, and those that are not any more. The end of a
        #: handle runs no Python code, in which a Ctrl-C could come.
        self._live: dict[int, _Handle] = {}
        self._dead: collections.deque[Any] = collections.deque()
        self._wanted: dict[int, RemoteArray] = {}
        #: By id where an array that has been asked for arrives: call, worker, place in the answer.
        self._asked: dict[int, list[tuple[Any, int, int]]] = {}
        #: The calls that may not have read their arrays yet; while these are here, none is dropped.
        self._reading: list[tuple[Any, Sequence[RemoteArray]]] = []
        #: Held while arrays are asked for, or consumed.
        self.lock = threading.RLock()

    def new_ids(self, count: int) -> int:
        """Returns the first of `count` successive ids that have not been used."""
        with self.lock:
            first = self._next
            self._next += count
        return first

    # ---- their end ------------------------------------------------------------------------------

    def note(self, array: RemoteArray) -> None:
        """Notes a new handle, so that its ranks drop the array when its last reference goes."""
        handle = _Handle(array, self._dead.append)
        handle.id, handle.ranks = array.id, array.ranks
        self._live[array.id] = handle

    def forget(self, array: RemoteArray) -> None:
        """Notes that a call consumes an array."""
        self._live.pop(array.id, None)

    def release(self, array: RemoteArray) -> None:
        """Notes that nobody wants an array any more; its ranks are told with their next call."""
        if (handle := self._live.get(array.id)) is not None:
            self._dead.append(handle)

    def releases(self) -> list[tuple[int, ...]]:
        """Returns, once only, the ids of arrays that each rank may drop."""
        self._reading = [(call, own) for call, own in self._reading if not call.wait(0)]
        found: list[list[int]] = [[] for _ in range(self.mesh.num_ranks)]
        while self._dead:
            handle = self._dead.popleft()
            if self._live.pop(handle.id, None) is not None:
                self._wanted.pop(handle.id, None)
                self._asked.pop(handle.id, None)
                for rank in handle.ranks:
                    found[rank].append(handle.id)
        return [tuple(own) for own in found]

    def restart(self) -> None:
        """Notes that all arrays are lost."""
        self.incarnation += 1
        for records in (self._live, self._dead, self._wanted, self._asked, self._reading):
            records.clear()

    # ---- their values ---------------------------------------------------------------------------

    def check(self, array: RemoteArray) -> None:
        """Checks that an array exists, and that no rank has failed.

        Raises:
            ValueError: it was donated or deleted, or lost when the mesh was restarted or shut down.
            RankError: a rank has failed.
        """
        self.check_exists(array)
        self.group.check()

    def check_exists(self, array: RemoteArray) -> None:
        """Raises the `ValueError` of `check`."""
        name = f"This RemoteArray of {array.dtype.name}{list(array.shape)}"
        if array.is_deleted():
            raise ValueError(f"{name} was {array.why_deleted}; {array.way_out}.")
        if lost := self.why_lost(array):
            way_out = "load the last checkpoint"
            if self.group.stopped:
                way_out = (
                    "fetch what you keep (jaxpp.gather, float) or save it (jaxpp.save_state) "
                    "before mesh.shutdown(), or the end of `with`"
                )
            raise ValueError(f"{name} was {lost}; {way_out}.")

    def why_lost(self, array: RemoteArray) -> str:
        """Says why its ranks have lost an array, as the end of a sentence; else empty."""
        if self.group.stopped:
            return f"lost when its {type(self.mesh).__name__} was shut down"
        restarted = array.incarnation != self.incarnation
        return "lost when the mesh was restarted" if restarted else ""

    def want(self, array: RemoteArray) -> None:
        """Notes that an array is going to be fetched; the next fetch asks for all of these."""
        self.check(array)
        self._wanted[array.id] = array

    def readers(self, arrays: Sequence[RemoteArray]) -> list[Any]:
        """Returns the calls that have yet to read some of the arrays, which nobody may consume.

        The caller holds `lock`.
        """
        ids = {array.id for array in arrays}
        found = [call for call, own in self._reading if ids and any(a.id in ids for a in own)]
        return [call for call in found if not call.wait(0)]

    def wait_for(self, array: RemoteArray) -> None:
        """Waits until an array has been computed."""
        self.check(array)
        with self.lock, uninterrupted():
            self.check_exists(array)
            call, worker = self.group.wait(array.ranks[0], array.id)
            self._reading.append((call, [array]))
        call.value(worker)

    def fetch(self, array: RemoteArray) -> np.ndarray:
        """Fetches the value of an array; asks for all that are wanted, in one call a worker."""
        self.check(array)
        with self.lock, uninterrupted():
            self.check_exists(array)
            asked = self._asked.pop(array.id, None)
            if asked is None:
                wanted, self._wanted = self._wanted | {array.id: array}, {}
                self._ask([a for a in wanted.values() if a.id not in self._asked])
                asked = self._asked.pop(array.id)
        parts = [call.value(worker, place) for call, worker, place in asked]
        if self._processes > 1:
            return join_shares(ArrayType.of(array), parts)
        return np.array(host_array(parts[0], ArrayType.of(array)))  # the memory is not ours

    def _ask(self, arrays: Sequence[RemoteArray]) -> None:
        """Asks the first ranks that hold some arrays for them."""
        arrays = [a for a in arrays if not a.is_deleted() and a.incarnation == self.incarnation]
        wanted: dict[tuple[int, bool], list[RemoteArray]] = collections.defaultdict(list)
        for array in arrays:
            split = self._processes > 1 and any(array.spec)
            wanted[array.ranks[0], split].append(array)
        for (rank, split), own in wanted.items():
            for call, worker in self.group.fetch(rank, tuple(a.id for a in own), split):
                self._reading.append((call, own))
                for place, array in enumerate(own):
                    self._asked.setdefault(array.id, []).append((call, worker, place))
