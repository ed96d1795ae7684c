"""What a worker is at, noted in memory that outlives it, for the error when it has been killed."""

import contextlib
import mmap
import os
import tempfile
from typing import Any

from jaxpp._program import Instruction, Receive, Run, Send
from jaxpp.runtime._worker import Worker

_TEXT = 120
_BLANK = bytes(_TEXT)


class BlackBox:
    """A note of the call and the instruction that a worker is at.

    The driver makes a file, worker and driver map it into their memory, and then it is unlinked, so
    that nothing is left whatever becomes of them. What a process has written there stays when it is
    killed.

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
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 + _TEXT)
        #: Where what the call is at is written, as `encode` gives it.
        self.text = memoryview(self._memory)[8:]

    @staticmethod
    def create() -> str:
        """Makes the file, in memory where the system has such files."""
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="jaxpp-", dir=directory)
        with open(descriptor, "wb") as file:
            file.write(bytes(8 + _TEXT))
        return path

    def unlink(self) -> None:
        """Removes the file; who has mapped it keeps it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Gives the memory back; may be repeated."""
        self.text.release()
        self._memory.close()

    @staticmethod
    def encode(text: str) -> bytes:
        """What is written to `text`."""
        return text.encode()[:_TEXT].ljust(_TEXT, b"\0")

    def begin(self, call: int) -> None:
        """Notes the number of a call."""
        self._memory[:8] = call.to_bytes(8, "little", signed=True)

    def read(self) -> tuple[int, str]:
        """The call, and what it is at; nothing between calls."""
        call = int.from_bytes(self._memory[:8], "little", signed=True)
        return call, bytes(self.text).rstrip(b"\0").decode(errors="replace")


class NotingWorker(Worker):
    """A worker that notes each instruction in a black box, which takes a quarter of a µs.

    Args:
        box: the black box.
        *args: those of `Worker`.
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
    """What an instruction is, in words, and the rank that it sends to or waits for."""
    match instruction:
        case Run(label=label):
            return label, None
        case Send(message=message):
            return f"send of {message.names[0]} to rank {message.target}", message.target
        case Receive(message=message):
            return f"receive of {message.names[0]} from rank {message.source}", message.source
    return "", None
