"""The flight recorder: a worker notes its instructions in memory that outlives the worker."""

import contextlib
import faulthandler
import mmap
import os
import tempfile
from typing import Any

from jaxpp._program import Instruction, Receive, Run, Send
from jaxpp.runtime.executor import Executor

_TEXT = 120
_SIZE = 8 + _TEXT
_BLANK = bytes(_TEXT)


class BlackBox:
    """A flight recorder: a note of a worker's current call and instruction, and of its crash.

    The driver makes a file, and worker and driver open it. Then the driver unlinks the file, so
    that none is left however the processes end. A killed worker's note stays readable.

    Args:
        path: of the file.

    Example:
        >>> box = BlackBox(BlackBox.create())
        >>> worker_side = BlackBox(box.path)
        >>> box.unlink()
        >>> worker_side.begin(3)
        >>> worker_side.text[:] = BlackBox.encode("F0.1")
        >>> box.read()
        (3, 'F0.1')
        >>> box.close()
    """

    def __init__(self, path: str):
        self.path = path
        self._file = open(path, "r+b", 0)  # noqa: SIM115  `close` closes it
        self._memory = mmap.mmap(self._file.fileno(), _SIZE)
        #: The memory for the current instruction, written as `encode` gives it.
        self.text = memoryview(self._memory)[8:]

    @staticmethod
    def create() -> str:
        """Makes the file, in memory where the system has such files; returns its path."""
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="jaxpp-", dir=directory)
        with open(descriptor, "wb") as file:
            file.write((-1).to_bytes(8, "little", signed=True) + _BLANK)
        return path

    @staticmethod
    def open(path: str) -> "BlackBox | None":
        """Opens the file of the worker; None where another user has made it, and keeps it closed.

        From here on Python notes there what a signal such as SIGSEGV ends the process.
        """
        with contextlib.suppress(OSError):
            box = BlackBox(path)
            box._file.seek(_SIZE)
            faulthandler.enable(box._file, all_threads=False)
            return box

    def unlink(self) -> None:
        """Removes the file; processes that have opened it keep its memory."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Frees the memory; may be repeated."""
        self.text.release()
        self._memory.close()
        self._file.close()

    @staticmethod
    def encode(text: str) -> bytes:
        """Returns a text as the bytes that are written to `text`."""
        return text.encode()[:_TEXT].ljust(_TEXT, b"\0")

    def begin(self, call: int) -> None:
        """Notes the number of a call."""
        self._memory[:8] = call.to_bytes(8, "little", signed=True)

    def read(self) -> tuple[int, str]:
        """Reads the last call's number, -1 before it, and its instruction, empty between calls."""
        call = int.from_bytes(self._memory[:8], "little", signed=True)
        return call, bytes(self.text).rstrip(b"\0").decode(errors="replace")

    def crash(self) -> str:
        """Reads what crashed the worker, such as `Segmentation fault`; empty where it did not."""
        first, *_ = os.pread(self._file.fileno(), _TEXT, _SIZE).decode(errors="replace").split("\n")
        return first.rpartition(": ")[2].rstrip("\0")


class NotingExecutor(Executor):
    """An executor that notes each instruction in a flight recorder; a note takes a quarter of a µs.

    Args:
        box: the flight recorder.
        *args: those of `Executor`.
    """

    def __init__(self, box: BlackBox, *args: Any):
        self._at: Instruction | None = None
        self._text, self._notes = box.text, {}
        super().__init__(*args)
        self._notes = {id(i): BlackBox.encode(doing(i)[0]) for i in self.program.instructions}

    @property
    def at(self) -> Instruction | None:
        """The instruction that runs; None between calls."""
        return self._at

    @at.setter
    def at(self, instruction: Instruction | None) -> None:  # pyright: ignore
        self._at = instruction
        self._text[:] = self._notes.get(id(instruction), _BLANK)


def doing(instruction: Instruction | None) -> tuple[str, int | None]:
    """Describes an instruction in words; also gives the rank that it sends to or waits for."""
    match instruction:
        case Run(label=label):
            return label, None
        case Send(message=message):
            return f"send of {message.names[0]} to rank {message.target}", message.target
        case Receive(message=message):
            return f"receive of {message.names[0]} from rank {message.source}", message.source
    return "", None
