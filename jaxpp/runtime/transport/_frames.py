"""Messages on a stream: each is a header, and the bytes of its arrays one after the other.

Both sides know the types of a message. So the header has only the numbers that tell messages apart,
and the number of bytes that follow. Each array starts at a multiple of 64 bytes, so that the
receiver can use it in the memory that it was read into.
"""

import functools
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpp._program import Message
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import (
    ArrayMaker,
    ArrayType,
    Home,
    boxes_here,
    devices_of,
    from_host,
    resplit,
    sharding_in,
    spans,
    to_host,
)

#: The alignment of memory that JAX uses without a copy.
ALIGNMENT = 64
#: The most pieces that the system takes in one call (IOV_MAX on Linux).
_MOST_PIECES = 1024
_PADDING = bytes(ALIGNMENT)
_HEADER = struct.Struct("<qqqqq")
HEADER_SIZE = _HEADER.size
#: Bytes up to which a message is small. The caller of `send` writes it in one piece if it can do so
#: at once; it is read together with its header, and the caller of `receive` makes its arrays.
#: Another thread, or memory of its own, would take longer than a copy.
SMALL = 1 << 15
#: The bytes that are read ahead of the messages they belong to.
READ_AHEAD = 2 * SMALL

Bytes = bytes | memoryview


class Header(NamedTuple):
    """The header of a message; `nbytes` follow."""

    program: int
    call: int
    tag: int
    source: int
    nbytes: int

    def pack(self) -> bytes:
        """Returns the bytes of the header."""
        return _HEADER.pack(*self)

    @property
    def key(self) -> tuple[int, int, int]:
        """The program, the call and the tag, which no other message has."""
        return self[:3]


class Unpacker:
    """Makes the arrays of messages of the same types from their bytes, for a home.

    Where a rank has several processes, those of the same number in their ranks send each other
    their shares.
    """

    def __init__(self, types: Sequence[ArrayType], specs: Sequence[Spec], home: Home):
        self._home, self._specs = home, tuple(specs) or ((),) * len(types)
        self._shared, makes, sent = spans(home), [], list(types)
        self._device_memory = devices_of(home)[0].platform != "cpu"
        for n, (type_, spec) in enumerate(zip(types, self._specs, strict=True)):
            boxes = None
            if self._shared:
                boxes = tuple(boxes_here(type_.shape, sharding_in(home, spec)))
                sent[n] = type_.share(boxes)
            makes.append(
                functools.partial(from_host, array_type=type_, home=home, spec=spec, boxes=boxes)
            )
        self._makes = makes
        starts = [0, *itertools.accumulate(padded(t.nbytes) for t in sent)]
        #: The number of bytes of a message.
        self.nbytes = starts.pop()
        #: True if the thread that reads a message makes its arrays.
        self.at_once = self.nbytes > SMALL
        self._places = [slice(at, at + t.nbytes) for at, t in zip(starts, sent, strict=True)]
        small = not self._shared and self.nbytes <= SMALL
        self._copier = ArrayMaker(types, starts, home, specs) if small else None

    @staticmethod
    def of(message: Message, home: Home) -> "Unpacker":
        """Returns the unpacker of a message for a home."""
        return _unpacker(tuple(map(ArrayType.of, message.avals)), message.specs, home)

    def prepared(self, arrays: list[Any]) -> list[Any]:
        """Returns arrays as they are sent: with shares, split by the specs; starts their copies."""
        if self._shared:
            arrays = [resplit(a, self._home, s) for a, s in zip(arrays, self._specs, strict=True)]
        if self._device_memory:  # the copy to the host follows the task, before anyone asks for it
            for array in arrays:
                if isinstance(array, jax.Array) and isinstance(array.dtype, np.dtype):  # no keys
                    array.copy_to_host_async()
        return arrays

    def values(self, arrays: list[Any]) -> list[Bytes]:
        """Waits for prepared arrays; gives the bytes of each."""
        return [to_host(array).data for array in arrays]

    def __call__(self, buffer: Any) -> list[Any]:
        """Makes the arrays of a message; those of a large one read the buffer, and keep it."""
        if self._copier is not None:
            return self._copier(buffer)
        return [make(buffer[at]) for make, at in zip(self._makes, self._places, strict=True)]


_unpacker = functools.lru_cache(4096)(Unpacker)


def padded(nbytes: int) -> int:
    """Returns the bytes that an array takes in a message, for its own number of bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def to_send(header: Header, arrays: Sequence[Bytes]) -> list[Bytes]:
    """Returns the bytes of a message in pieces, a small one in one, of those of its arrays."""
    pieces: list[Bytes] = [header.pack()]
    for array in arrays:
        pieces += [array, _PADDING[: -len(array) % ALIGNMENT]]
    return [b"".join(pieces)] if header.nbytes <= SMALL else [piece for piece in pieces if piece]


def send_some(
    connection: socket.socket, pieces: list[Bytes], flags: int = socket.MSG_DONTWAIT
) -> None:
    """Sends as many bytes as the connection takes at once, and removes them from `pieces`.

    Raises a `BlockingIOError` if it takes none now, another `OSError` if it has ended.
    """
    sent = connection.sendmsg(pieces[:_MOST_PIECES], [], flags)
    while pieces and sent >= len(pieces[0]):
        sent -= len(pieces.pop(0))
    if sent:
        pieces[0] = memoryview(pieces[0])[sent:]


class Read(NamedTuple):
    """A message that has been read: its bytes or arrays, when it was begun, and when ready."""

    header: Header
    data: Any
    start_ns: int
    end_ns: int


class Reader:
    """A connection to another process, from which one thread at a time reads.

    It reads small messages together, in one system call, and large ones into memory of their own.
    A thread may stop within a message; the next one goes on there. `begin` is called with each
    header; it checks it, and gives the memory for a large message.
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
            header = Header(*_HEADER.unpack_from(self._ahead, self._at))
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
