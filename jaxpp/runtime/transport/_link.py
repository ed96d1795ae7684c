"""A connection to another process, and how messages are read from it."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxpp.runtime.transport._frames import HEADER_SIZE, READ_AHEAD, SMALL, Header


class Read(NamedTuple):
    """A message that has been read, and its bytes or its arrays.

    `start_ns` and `end_ns` are when its header was seen, and when it was ready.
    """

    header: Header
    data: Any
    start_ns: int
    end_ns: int


class Link:
    """A connection to another process, from which one thread at a time reads.

    It reads small messages together, in one system call, and large ones into memory of their own.
    A thread may stop within a message; the next one goes on there.

    Args:
        connection: the connection; nobody else reads from it.
        begin: called with each header; checks it, and gives the memory for a large message.
    """

    def __init__(self, connection: socket.socket, begin: Callable[[Header], Any]):
        self.connection = connection
        self._begin = begin
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._at = self._end = 0  # of what has been read ahead
        #: The message that is being read: its header, its memory if it is large, what is there.
        self._header: Header | None = None
        self._large: Any = None
        self._done = self._start = 0

    def read(self) -> Iterator[Read]:
        """Reads once, what has come or comes next; gives the messages that are whole by then.

        Raises:
            EOFError: the connection has ended between messages.
            OSError: it has ended elsewhere.
        """
        self._receive()
        while (found := self._whole()) is not None:
            yield found

    def _whole(self) -> Read | None:
        """Returns the next message if all of it is there."""
        if self._header is None:
            if self._end - self._at < HEADER_SIZE:
                return None
            header = Header.at(self._ahead, self._at)
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
        return Read(header, data, self._start, time.monotonic_ns())

    def _receive(self) -> None:
        try:
            if self._large is not None:
                # All of the rest in one call: its sender is a thread that waits for nothing else.
                rest = self._large.data[self._done :]
                count = self.connection.recv_into(rest, 0, socket.MSG_WAITALL)
                self._done += count
            else:
                if self._end > len(self._ahead) - SMALL - HEADER_SIZE or self._at == self._end:
                    rest = bytes(self._ahead[self._at : self._end])
                    self._ahead[: len(rest)] = rest
                    self._at, self._end = 0, len(rest)
                count = self.connection.recv_into(self._ahead[self._end :])
                self._end += count
        except BlockingIOError:  # nothing has come within the connection's limit of time
            return
        if not count:
            if self._header is None and self._at == self._end:
                raise EOFError
            raise ConnectionError("it ended within a message")
