"""Says how far the compilation of a step is."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: The environment variable that asks for a line for each computation ("1"), or for nothing ("0").
#: Without it a terminal has a line that is written anew, and a notebook or a log has a line after
#: ten seconds, and then seldom.
VARIABLE = "JAXPP_PROGRESS"

#: Nothing is said of what takes less than this, in seconds: on a terminal, and in a log.
PATIENCE, PATIENCE_OF_A_LOG = 2.0, 10.0

#: Each line of a log comes after so many times the seconds of the one before.
_SELDOM = 4.0


class Progress:
    """The report of one compilation, on stderr.

    On a terminal it is one line, which is written anew and then erased. In a log it is a line after
    `PATIENCE_OF_A_LOG`, a few more, each after four times as long, and one at the end; if
    `VARIABLE` asks for it, a line for each computation.
    """

    def __init__(self, total: int, patience: float | None = None):
        asked = os.environ.get(VARIABLE)
        self._terminal = sys.stderr.isatty()
        self._wanted = total > 0 and asked != "0"
        self._seldom = not self._terminal and asked is None
        self._total, self._done = total, 0
        self._running: dict[str, int] = {}
        usual = PATIENCE_OF_A_LOG if self._seldom else PATIENCE
        self._begun, self._patience = time.monotonic(), usual if patience is None else patience
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._written = 0

    def __enter__(self) -> "Progress":
        if self._wanted:
            threading.Thread(target=self._watch, name="jaxpp-progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._lock:
            self._wanted = False
            if self._written and self._terminal:
                self._write("\r" + " " * self._written + "\r")
            elif self._written and self._seldom:
                self._write(f"jaxpp: compiled {self._total} computations in {self._seconds}\n")

    @contextmanager
    def compiling(self, name: str, size: int) -> Iterator[None]:
        """Notes that a computation, of so many equations, is compiled in the block."""
        with self._lock:
            self._running[name] = size
        self._say(often=True)
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(name, None)
                self._done += 1
            self._say(often=True)

    def _watch(self) -> None:
        """Says where the compilation is once it takes long, and then at ever longer intervals."""
        wait = self._patience
        while not self._over.wait(wait):
            self._say()
            wait = (_SELDOM - 1) * (time.monotonic() - self._begun) if self._seldom else 3600.0

    @property
    def _seconds(self) -> str:
        return f"{time.monotonic() - self._begun:.0f} s"

    def _say(self, often: bool = False) -> None:
        with self._lock:
            early = time.monotonic() - self._begun < self._patience
            if not self._wanted or early or (often and self._seldom):
                return
            now = ", ".join(f"{name} ({size} equations)" for name, size in self._running.items())
            line = f"jaxpp: compiled {self._done} of {self._total} computations"
            line += f" in {self._seconds}" if self._seldom else ""
            line += f"; now {now}" if now else ""
            if not self._terminal:
                self._written = 1
                self._write(f"{line}\n")
                return
            line = line[: max(shutil.get_terminal_size().columns - 1, 20)]
            self._write(f"\r{line.ljust(self._written)}")
            self._written = len(line)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
