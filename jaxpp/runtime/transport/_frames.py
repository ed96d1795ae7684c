"""The format of a message on a stream: a header, and the bytes of its arrays one after the other.

Both sides know the types of a message. So the header has only the numbers that tell messages apart,
and the number of bytes that follow. Each array starts at a multiple of 64 bytes, so that the
receiver can use it in the memory that it was read into.
"""

import dataclasses
import functools
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxpp._program import Message
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayType, Copier, Home, Share, from_host, resplit, spans

#: The alignment of memory that JAX uses without a copy.
ALIGNMENT = 64
#: The most pieces that the system takes in one call (IOV_MAX on Linux).
_MOST_PIECES = 1024
_PADDING = bytes(ALIGNMENT)
_HEADER = struct.Struct("<qqqq")
#: Bytes up to which a message is small. The caller of `send` writes it in one piece if it can do so
#: at once; it is read together with its header, and the caller of `receive` makes its arrays.
#: Another thread, or memory of its own, would take longer than a copy.
SMALL = 1 << 15
_READ_AHEAD = 2 * SMALL

Bytes = bytes | memoryview


class Header(NamedTuple):
    """The header of a message: its program, call and tag, and the number of bytes that follow."""

    program: int
    call: int
    tag: int
    nbytes: int

    def pack(self) -> bytes:
        """Gives the bytes of the header."""
        return _HEADER.pack(*self)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The places of a message's arrays in its bytes.

    `array_types` and `offsets` are those of the arrays, and `nbytes` the size of the message.
    """

    array_types: tuple[ArrayType, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, message: Message) -> "Layout":
        """Makes the layout of a message."""
        return _layout(tuple(ArrayType.of(aval) for aval in message.avals))


@functools.lru_cache(4096)
def _layout(array_types: tuple[ArrayType, ...]) -> Layout:
    offsets, end = [], 0
    for array_type in array_types:
        offsets.append(end)
        end += padded(array_type.nbytes)
    return Layout(array_types, tuple(offsets), end)


class Unpacker:
    """Makes the arrays of messages of one layout from their bytes.

    Args:
        layout: of the messages.
        home: where the arrays go.
        specs: how each is split there; none where all are whole.
    """

    def __init__(self, layout: Layout, home: Home, specs: Sequence[Spec] = ()):
        self.layout = layout
        self._home = home
        self._specs = tuple(specs) or ((),) * len(layout.array_types)
        self._copier = Copier(layout.array_types, layout.offsets, home, specs)

    @staticmethod
    def of(message: Message, home: Home) -> "Unpacker | ShareUnpacker":
        """Makes the unpacker of a message for a home."""
        if spans(home):
            return ShareUnpacker(message, home)
        return Unpacker(Layout.of(message), home, message.specs)

    def prepared(self, arrays: list[Any]) -> list[Any]:
        """Gives the arrays of a message as they are sent: unchanged."""
        return arrays

    def __call__(self, buffer: Any) -> list[Any]:
        """Makes the arrays of a message; those of a large one read the buffer, and keep it."""
        layout = self.layout
        if layout.nbytes <= SMALL:
            return self._copier(buffer)
        return [
            from_host(buffer[start : start + t.nbytes], t, self._home, spec)
            for start, t, spec in zip(layout.offsets, layout.array_types, self._specs, strict=True)
        ]


class ShareUnpacker:
    """Makes the arrays of a message where a rank has several processes.

    Processes of the same number in their ranks send each other their shares.

    Args:
        message: the message.
        home: of the rank that it comes to, or goes from; the devices of several processes.
    """

    def __init__(self, message: Message, home: Any):
        self._home = home
        self._specs = message.specs or ((),) * len(message.avals)
        pairs = zip(message.avals, self._specs, strict=True)
        self._shares = [Share(ArrayType.of(aval), home, spec) for aval, spec in pairs]
        self.layout = _layout(tuple(share.type for share in self._shares))

    def prepared(self, arrays: list[Any]) -> list[Any]:
        """Gives the arrays of a message as they are sent: split by the message's specs."""
        return [resplit(a, self._home, s) for a, s in zip(arrays, self._specs, strict=True)]

    def __call__(self, buffer: Any) -> list[Any]:
        """Makes the arrays of a message; they may read the buffer, and keep it."""
        layout = self.layout
        pairs = zip(self._shares, layout.offsets, strict=True)
        return [share(buffer[at : at + share.type.nbytes]) for share, at in pairs]


def padded(nbytes: int) -> int:
    """Gives the bytes that an array takes in a message, for its own number of bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def send_frame(connection: socket.socket, header: Header, arrays: Sequence[Bytes]) -> None:
    """Sends a message: `arrays` are the bytes of each array.

    Raises:
        OSError: if the connection ends first.
    """
    pieces: list[Bytes] = [header.pack()]
    for array in arrays:
        if array:
            pieces.append(array)
        if rest := -len(array) % ALIGNMENT:
            pieces.append(_PADDING[:rest])
    if header.nbytes <= SMALL:
        connection.sendall(b"".join(pieces))
        return
    send_pieces(connection, pieces)


def send_pieces(
    connection: socket.socket, pieces: list[Bytes], wait: Callable[[], None] | None = None
) -> None:
    """Sends bytes one after the other.

    Args:
        connection: what nobody else writes to meanwhile.
        pieces: the bytes, none of them empty; the list is emptied.
        wait: returns once the connection takes more, or raises; by default the system waits.

    Raises:
        OSError: if the connection ends first.
    """
    flags = 0 if wait is None else socket.MSG_DONTWAIT
    while pieces:
        try:
            sent = connection.sendmsg(pieces[:_MOST_PIECES], [], flags)
        except BlockingIOError:
            assert wait is not None
            wait()
            continue
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if sent:
            pieces[0] = memoryview(pieces[0])[sent:]


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills a buffer of bytes.

    Raises:
        EndOfStream: if the connection ends first.
    """
    done = 0
    while done < len(buffer):
        count = connection.recv_into(buffer[done:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise EndOfStream(done, len(buffer))
        done += count


class FrameReader:
    """Takes messages from a connection; reads small ones together in one system call.

    Args:
        connection: what nobody else reads.
    """

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._memory = memoryview(bytearray(_READ_AHEAD))
        #: The start and the end of the bytes that have been read and not been taken.
        self._start = self._end = 0

    def header(self) -> Header | None:
        """Waits for the next header; None where the connection has ended between messages.

        Raises:
            OSError: if the connection ends elsewhere.
        """
        try:
            self._fill(_HEADER.size)
        except EndOfStream as end:
            if end.received == 0:
                return None
            raise
        header = Header(*_HEADER.unpack_from(self._memory, self._start))
        self._start += _HEADER.size
        return header

    def take(self, nbytes: int) -> bytes:
        """Waits for the bytes of a small message."""
        self._fill(nbytes)
        self._start += nbytes
        return bytes(self._memory[self._start - nbytes : self._start])

    def take_into(self, buffer: memoryview) -> None:
        """Fills a buffer with a message's bytes; those yet to come are read straight into it."""
        there = min(self._end - self._start, len(buffer))
        buffer[:there] = self._memory[self._start : self._start + there]
        self._start += there
        receive_into(self._connection, buffer[there:])

    def _fill(self, nbytes: int) -> None:
        """Reads until at least `nbytes` bytes are there that have not been taken."""
        there = self._end - self._start
        if there >= nbytes:
            return
        self._memory[:there] = self._memory[self._start : self._end]
        self._start, self._end = 0, there
        while self._end < nbytes:
            count = self._connection.recv_into(self._memory[self._end :])
            if count == 0:
                raise EndOfStream(self._end, nbytes)
            self._end += count


class EndOfStream(ConnectionError):
    """The error of a connection that ended after `received` of the expected bytes."""

    def __init__(self, received: int, wanted: int):
        super().__init__(f"the connection ended after {received} of {wanted} bytes")
        self.received = received
