"""The order of the driver's calls on a worker, where calls come in more than one way."""

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

from jaxpp.runtime.remote.calls._failure import Lost


class Turn(NamedTuple):
    """The sequence number of a call among those of a worker, counted anew in each epoch."""

    epoch: int
    number: int


class Turns:
    """Lets one call in at a time, in the order of sequence numbers.

    Args:
        epoch: the epoch whose calls are let in.

    Example:
        >>> turns = Turns()
        >>> with turns.take(Turn(epoch=0, number=0)):
        ...     print("the first")
        the first
    """

    def __init__(self, epoch: int = 0):
        self._changed = threading.Condition()
        self._next = Turn(epoch, 0)
        self._inside = False
        self._stopped = False

    @contextlib.contextmanager
    def take(self, turn: Turn) -> Iterator[None]:
        """Waits for a call's turn; the next call's turn comes when the block ends.

        Raises:
            Lost: the turns have been stopped, or it was one of an earlier epoch.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over(turn) or self._next == turn)
            if self._over(turn):
                raise Lost("It was called before the ranks ended what they were about.")
            self._inside = True
        try:
            yield
        finally:
            with self._changed:
                self._inside = False
                self._next = self._next._replace(number=turn.number + 1)
                self._changed.notify_all()

    def _over(self, turn: Turn) -> bool:
        return self._stopped or turn.epoch < self._next.epoch

    def stop(self) -> None:
        """Shuts out all calls until the next epoch; does not wait."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def paused_for(self, epoch: int) -> Iterator[None]:
        """Stops, and waits until no call is inside; the new epoch begins when the block ends."""
        self.stop()
        with self._changed:
            self._changed.wait_for(lambda: not self._inside)
        yield
        with self._changed:
            self._next, self._stopped = Turn(epoch, 0), False
            self._changed.notify_all()
