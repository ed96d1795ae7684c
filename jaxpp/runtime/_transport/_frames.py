"""How a message goes over a stream: a header, and the bytes of its arrays one after the other.

Both sides know the types of a message, so the header has only what tells messages apart, and the
number of bytes that follow. Each array starts at a multiple of 64 bytes, so that the receiver can
use it where it has been read to.
"""

import dataclasses
import functools
import math
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpp._program import Message
from jaxpp.runtime._array_types import ArrayType

#: What JAX wants of memory that it uses as it is.
ALIGNMENT = 64
#: The most pieces that the system takes in one call (IOV_MAX on Linux).
_MOST_PIECES = 1024
_PADDING = bytes(ALIGNMENT)
_HEADER = struct.Struct("<qqqq")


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """Which message follows: of which program, call and tag, and how many bytes it has."""

    program: int
    call: int
    tag: int
    nbytes: int

    def pack(self) -> bytes:
        """The header as it goes over the wire."""
        return _HEADER.pack(self.program, self.call, self.tag, self.nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where the arrays of a message are in its bytes.

    `array_types` and `offsets` are those of the arrays, and `nbytes` the size of the message.
    """

    array_types: tuple[ArrayType, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, message: Message) -> "Layout":
        """The layout of a message."""
        return _layout(tuple(ArrayType.of(aval) for aval in message.avals))


@functools.lru_cache(4096)
def _layout(array_types: tuple[ArrayType, ...]) -> Layout:
    offsets, end = [], 0
    for array_type in array_types:
        offsets.append(end)
        end += math.ceil(array_type.nbytes / ALIGNMENT) * ALIGNMENT
    return Layout(array_types, tuple(offsets), end)


def send_frame(connection: socket.socket, header: Header, arrays: Sequence[np.ndarray]) -> None:
    """Sends a message: `arrays` are the bytes of each array.

    Raises:
        OSError: if the connection ends first.
    """
    pieces: list[Any] = [header.pack()]
    for array in arrays:
        if array.nbytes:
            pieces.append(array.data)
        if rest := -array.nbytes % ALIGNMENT:
            pieces.append(_PADDING[:rest])
    for start in range(0, len(pieces), _MOST_PIECES):
        _send_pieces(connection, pieces[start : start + _MOST_PIECES])


def _send_pieces(connection: socket.socket, pieces: list[Any]) -> None:
    while pieces:
        sent = connection.sendmsg(pieces)
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if sent:
            pieces[0] = memoryview(pieces[0])[sent:]


def receive_header(connection: socket.socket) -> Header | None:
    """Waits for the next header; None where the connection has ended between messages."""
    buffer = bytearray(_HEADER.size)
    try:
        receive_into(connection, memoryview(buffer))
    except EndOfStream as end:
        if end.received == 0:
            return None
        raise
    return Header(*_HEADER.unpack(buffer))


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


class EndOfStream(ConnectionError):
    """A connection that ended after `received` of the bytes that were to come."""

    def __init__(self, received: int, wanted: int):
        super().__init__(f"the connection ended after {received} of {wanted} bytes")
        self.received = received
