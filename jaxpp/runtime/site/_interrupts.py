"""Lets a Ctrl-C wait for the end of a change that must be whole."""

import signal
import threading
from typing import Any


class uninterrupted:  # noqa: N801  read as a word of the `with` statement
    """A block that a Ctrl-C does not interrupt: the signal's handler runs when the block ends.

    The block should be short.

    Example:
        >>> before = signal.signal(signal.SIGINT, lambda *_: print("Ctrl-C"))
        >>> with uninterrupted():
        ...     signal.raise_signal(signal.SIGINT)
        ...     print("whole")
        whole
        Ctrl-C
        >>> _ = signal.signal(signal.SIGINT, before)
    """

    #: Tells whether the main thread is in such a block; Python runs handlers on this thread only.
    _inside = False

    def __enter__(self):
        self._came: tuple[Any, ...] | None = None
        self._handler = None
        if not uninterrupted._inside and threading.current_thread() is threading.main_thread():
            if callable(handler := signal.getsignal(signal.SIGINT)):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
                uninterrupted._inside = True

    def _note(self, *what: Any) -> None:
        self._came = what

    def __exit__(self, *_):
        if self._handler is not None:
            uninterrupted._inside = False
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)
