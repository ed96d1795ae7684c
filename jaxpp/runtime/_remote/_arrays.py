"""The driver's books on arrays that the ranks hold: ids, releases and fetches."""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp.runtime._array_types import ArrayType, from_host, host_array
from jaxpp.runtime._remote._array import RemoteArray

#: Gives the bytes of the arrays with some ids, asked of one rank.
Fetch = Callable[[dict[int, list[int]]], dict[int, list[Any]]]


class Arrays:
    """Who holds what, as far as it has to be said to the ranks.

    Args:
        num_ranks: the number of ranks.
        fetch: gives the bytes of arrays, whose ids it gets by rank.
    """

    def __init__(self, num_ranks: int, fetch: Fetch):
        self._fetch = fetch
        self._next = 1
        self._released = [collections.deque[int]() for _ in range(num_ranks)]
        self._wanted: dict[int, RemoteArray] = {}
        self._fetched: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def new_ids(self, count: int) -> int:
        """The first of `count` ids that have not been used."""
        with self._lock:
            first = self._next
            self._next += count
        return first

    def release(self, array: RemoteArray) -> None:
        """Notes that nobody wants an array any more; its ranks hear of it with their next call.

        Runs wherever the last reference goes, and so takes no lock.
        """
        for rank in array.ranks:
            self._released[rank].append(array.id)
        self._wanted.pop(array.id, None)
        self._fetched.pop(array.id, None)

    def releases(self, rank: int) -> tuple[int, ...]:
        """What a rank may drop; it is not told again."""
        found, queue = [], self._released[rank]
        while queue:
            found.append(queue.popleft())
        return tuple(found)

    def want(self, array: RemoteArray) -> None:
        """Notes that an array is going to be fetched."""
        self._wanted[array.id] = array

    def fetch(self, arrays: Sequence[RemoteArray]) -> list[np.ndarray]:
        """The values of arrays, and of all that are wanted, in one request to each rank."""
        with self._lock:
            needed = {a.id: a for a in arrays if a.id not in self._fetched}
            if needed:
                # What is not asked for after all must not stay: it goes with the next request.
                self._fetched = {a.id: self._fetched[a.id] for a in arrays if a.id not in needed}
                needed |= {n: a for n, a in self._wanted.items() if not a.is_deleted()}
                self._wanted.clear()
                self._receive(list(needed.values()))
            return [self._fetched.pop(a.id) for a in arrays]

    def _receive(self, arrays: Sequence[RemoteArray]) -> None:
        by_rank: dict[int, list[RemoteArray]] = collections.defaultdict(list)
        for array in arrays:
            by_rank[array.ranks[0]].append(array)
        found = self._fetch({rank: [a.id for a in own] for rank, own in by_rank.items()})
        for rank, own in by_rank.items():
            for array, data in zip(own, found[rank], strict=True):
                # A copy: what comes out of a request is memory of Ray's store.
                self._fetched[array.id] = host_array(data.copy(), ArrayType.of(array))

    def fetch_jax(self, array: RemoteArray) -> jax.Array:
        """The value of an array of any dtype, on the default device of this process."""
        data = self.fetch([array])[0]
        config: Any = jax.config
        device = config.jax_default_device or jax.local_devices()[0]
        return from_host(data.reshape(-1).view(np.uint8), ArrayType.of(array), device)

    def clear(self) -> None:
        """Forgets everything but which ids have been used."""
        for queue in self._released:
            queue.clear()
        self._wanted.clear()
        self._fetched.clear()
