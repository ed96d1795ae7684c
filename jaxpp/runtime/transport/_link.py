"""A connection to another rank, and how messages are read from it."""

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxpp.runtime.transport._frames import HEADER_SIZE, READ_AHEAD, SMALL, Header, header_in

#: Milliseconds after which a thread that waits for a message asks whether it still has to.
_PATIENCE = 10


class Read(NamedTuple):
    """A message that has been read: `start_ns` is when its header was seen."""

    header: Header
    data: Any
    start_ns: int


class Link:
    """A connection to another rank, from which one thread at a time reads.

    It reads small messages together, in one system call, and large ones into memory of their own.
    A thread may stop within a message; the next one goes on there.

    Args:
        connection: the connection; nobody else reads from it.
        begin: called with each header; checks it, and gives the memory for a large message.
    """

    def __init__(self, connection: socket.socket, begin: Callable[[Header], Any]):
        self.connection = connection
        #: Held by the thread that reads.
        self.turn = threading.Lock()
        #: How often a thread that waited for a message has read here.
        self.visits = 0
        self._begin = begin
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._at = self._end = 0  # of what has been read ahead
        #: The message that is being read: its header, its memory if it is large, what is there.
        self._header: Header | None = None
        self._large: Any = None
        self._done = self._start = 0
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def read(self, over: Callable[[], bool] | None = None) -> Read | None:
        """Waits for a message; the caller has its turn.

        Args:
            over: tells whether to stop waiting; None waits until the connection ends.

        Returns:
            The message; None where `over` came first.

        Raises:
            EOFError: the connection has ended between messages.
            OSError: it has ended elsewhere.
        """
        flags = socket.MSG_WAITALL if over is None else 0
        while (found := self._whole()) is None:
            while over is not None and not self._poll.poll(_PATIENCE):
                if over():
                    return None
            self._receive(flags)
        return found

    def _whole(self) -> Read | None:
        """Returns the next message if all of it is there."""
        if self._header is None:
            header = header_in(self._ahead[self._at : self._end])
            if header is None:
                return None
            self._start = time.monotonic_ns()
            self._large = self._begin(header)
            self._header, self._done = header, 0
            self._at += HEADER_SIZE
            if self._large is not None:
                self._done = min(self._end - self._at, header.nbytes)
                self._large[: self._done] = self._ahead[self._at : self._at + self._done]
                self._at += self._done
        header, data = self._header, self._large
        if data is None:
            if self._end - self._at < header.nbytes:
                return None
            data = bytes(self._ahead[self._at : self._at + header.nbytes])
            self._at += header.nbytes
        elif self._done < header.nbytes:
            return None
        self._header = self._large = None
        return Read(header, data, self._start)

    def _receive(self, flags: int) -> None:
        """Waits for more bytes."""
        if self._large is not None:
            count = self.connection.recv_into(self._large.data[self._done :], 0, flags)
            self._done += count
        else:
            if self._end > len(self._ahead) - SMALL - HEADER_SIZE or self._at == self._end:
                rest = bytes(self._ahead[self._at : self._end])
                self._ahead[: len(rest)] = rest
                self._at, self._end = 0, len(rest)
            count = self.connection.recv_into(self._ahead[self._end :])
            self._end += count
        if not count:
            if self._header is None and self._at == self._end:
                raise EOFError
            raise ConnectionError("it ended within a message")
