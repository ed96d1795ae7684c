"""Calls that the driver has begun on some ranks: their results, and a count of their ends."""

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Pending:
    """A function that runs on some ranks."""

    def __init__(self, references: Sequence[tuple[int, int, Any]], watch: Any):
        self._references, self._watch = references, watch

    def result(self) -> dict[int, Any]:
        """Waits for all ranks; returns by rank the result of its first process, or raises."""
        return {rank: found[0] for rank, found in self.results().items()}

    def results(self) -> dict[int, list[Any]]:
        """Waits for all ranks; returns by rank the results of its processes."""
        found: dict[int, list[Any]] = {}
        for rank, worker, reference in self._references:
            found.setdefault(rank, []).append(self._watch.value(worker, reference))
        return found


class Countdown:
    """Calls a function once it has counted to `number`, on any threads."""

    def __init__(self, number: int, then: Callable[[], None]):
        self._left, self._then = number, then
        self._lock = threading.Lock()

    def count(self) -> None:
        """Counts once."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._then()
