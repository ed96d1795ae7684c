"""Says how far the compilation of a step is, where someone watches."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: The environment variable that asks for the report ("1") or forbids it ("0"). Without it there is
#: one on a terminal, and none in a notebook or a log.
VARIABLE = "JAXPP_PROGRESS"

#: Nothing is said of what takes less than this, in seconds.
PATIENCE = 2.0


class Progress:
    """The report of one compilation, on stderr: one line, which is written anew and then erased.

    Where stderr is no terminal, each computation gets a line of its own.
    """

    def __init__(self, total: int, patience: float = PATIENCE):
        asked = os.environ.get(VARIABLE)
        self._terminal = sys.stderr.isatty()
        self._wanted = total > 0 and (self._terminal if asked is None else asked != "0")
        self._total, self._done = total, 0
        self._running: dict[str, int] = {}
        self._begun, self._patience = time.monotonic(), patience
        self._lock = threading.Lock()
        self._written = 0

    def __enter__(self) -> "Progress":
        self._timer = threading.Timer(self._patience, self._say)
        self._timer.daemon = True
        if self._wanted:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._wanted = False
            if self._written and self._terminal:
                self._write("\r" + " " * self._written + "\r")

    @contextmanager
    def compiling(self, name: str, size: int) -> Iterator[None]:
        """Notes that a computation, of so many equations, is compiled in the block."""
        with self._lock:
            self._running[name] = size
        self._say()
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(name, None)
                self._done += 1
            self._say()

    def _say(self) -> None:
        with self._lock:
            if not self._wanted or time.monotonic() - self._begun < self._patience:
                return
            now = ", ".join(f"{name} ({size} equations)" for name, size in self._running.items())
            line = f"jaxpp: compiled {self._done} of {self._total} computations"
            line += f"; now {now}" if now else ""
            if not self._terminal:
                self._write(f"{line}\n")
                return
            line = line[: max(shutil.get_terminal_size().columns - 1, 20)]
            self._write(f"\r{line.ljust(self._written)}")
            self._written = len(line)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
