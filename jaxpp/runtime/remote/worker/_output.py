"""Brings what a worker prints to the driver."""

import threading
from collections.abc import Callable, Iterable
from typing import Any


class Output:
    """A text stream of which whole lines go to the driver, those of a thread in their order.

    Args:
        tell: sends a text to the driver; returns whether the driver is there.
        before: the stream that it stands for, which takes what the driver does not.

    Example:
        >>> import sys
        >>> output = Output(lambda text: print("sent:", text) is None, sys.stdout)
        >>> print("loss", 0.5, file=output)
        sent: loss 0.5
    """

    def __init__(self, tell: Callable[[str], bool], before: Any):
        self._tell, self._before = tell, before
        self._own = threading.local()

    def write(self, text: str) -> int:
        """Sends the lines that are whole, and keeps the rest."""
        whole, end, rest = (getattr(self._own, "rest", "") + text).rpartition("\n")
        self._own.rest = rest
        if end:
            self._send(whole)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes texts, as files do."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Sends what this thread has written of its last line."""
        if rest := getattr(self._own, "rest", ""):
            self._own.rest = ""
            self._send(rest)

    def _send(self, text: str) -> None:
        if not self._tell(text):
            self._before.write(f"{text}\n")
            self._before.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)
