"""The driver's records of arrays that the ranks hold: ids, releases and fetches."""

import collections
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp.runtime.arrays import (
    ArrayType,
    Box,
    boxes_of_process,
    from_host,
    host_array,
    join_shares,
)
from jaxpp.runtime.remote._array import RemoteArray

#: Fetches the bytes of arrays from workers, by their ids.
Fetch = Callable[[dict[int, list[int]]], dict[int, list[Any]]]


class Arrays:
    """The ids of arrays on the ranks, those that ranks may drop, and those that are to be fetched.

    Args:
        fetch: gives the bytes of arrays, or of the worker's share of them; ids come by worker.
        insides: for each rank the axes inside it, and their sizes.
        processes: how many workers a rank has.
    """

    def __init__(self, fetch: Fetch, insides: Sequence[Mapping[str, int]], processes: int = 1):
        self._fetch = fetch
        self._insides, self._processes = insides, processes
        self._next = 1
        self._released = [collections.deque[int]() for _ in insides]
        self._wanted: dict[int, RemoteArray] = {}
        self._fetched: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def new_ids(self, count: int) -> int:
        """Gives the first of `count` successive ids that have not been used."""
        with self._lock:
            first = self._next
            self._next += count
        return first

    def release(self, array: RemoteArray) -> None:
        """Notes that nobody wants an array any more; its ranks are told with their next call.

        It runs on any thread, where the last reference goes, and so takes no lock.
        """
        for rank in array.ranks:
            self._released[rank].append(array.id)
        self._wanted.pop(array.id, None)
        self._fetched.pop(array.id, None)

    def releases(self, rank: int) -> tuple[int, ...]:
        """Gives, once only, the ids of arrays that a rank may drop."""
        found, queue = [], self._released[rank]
        while queue:
            found.append(queue.popleft())
        return tuple(found)

    def want(self, array: RemoteArray) -> None:
        """Notes that an array is going to be fetched."""
        self._wanted[array.id] = array

    def fetch(self, arrays: Sequence[RemoteArray]) -> list[np.ndarray]:
        """Fetches the values of arrays and of all that are wanted, in one request a worker."""
        with self._lock:
            needed = {a.id: a for a in arrays if a.id not in self._fetched}
            if needed:
                # Values that were wanted but never asked for are dropped at the next request.
                self._fetched = {a.id: self._fetched[a.id] for a in arrays if a.id not in needed}
                needed |= {n: a for n, a in self._wanted.items() if not a.is_deleted()}
                self._wanted.clear()
                self._receive(list(needed.values()))
            return [self._fetched.pop(a.id) for a in arrays]

    def _receive(self, arrays: Sequence[RemoteArray]) -> None:
        by_worker: dict[int, list[int]] = collections.defaultdict(list)
        shares: dict[int, list[tuple[int, Any]]] = {}
        for array in arrays:
            first = array.ranks[0] * self._processes
            own = enumerate(self._shares(array))
            shares[array.id] = [(first + process, boxes) for process, boxes in own]
            for worker, _ in shares[array.id]:
                by_worker[worker].append(array.id)
        found = self._fetch(by_worker)
        data = {
            (worker, number): part
            for worker, numbers in by_worker.items()
            for number, part in zip(numbers, found[worker], strict=True)
        }
        for array in arrays:
            own = [(boxes, data[worker, array.id]) for worker, boxes in shares[array.id]]
            if self._processes > 1:
                self._fetched[array.id] = join_shares(ArrayType.of(array), own)
            else:
                self._fetched[array.id] = host_array(own[0][1], ArrayType.of(array))

    def _shares(self, array: RemoteArray) -> list[tuple[Box, ...]]:
        """Gives the boxes to ask of a rank's processes; of the first one alone if it has all."""
        if self._processes == 1:
            return [()]
        sizes, every = self._insides[array.ranks[0]], self._processes
        boxes = [boxes_of_process(array.shape, array.spec, sizes, n, every) for n in range(every)]
        return boxes[:1] if set(boxes[0]) >= {box for own in boxes for box in own} else boxes

    def fetch_jax(self, array: RemoteArray) -> jax.Array:
        """Fetches the value of an array of any dtype to the default device of this process."""
        data = self.fetch([array])[0]
        config: Any = jax.config
        device = config.jax_default_device or jax.local_devices()[0]
        return from_host(data.reshape(-1).view(np.uint8), ArrayType.of(array), device)

    def clear(self) -> None:
        """Forgets everything but the ids that have been used."""
        for queue in self._released:
            queue.clear()
        self._wanted.clear()
        self._fetched.clear()
