"""The messages on the connection of the driver and a worker: calls, answers, and what is told."""

import contextlib
import enum
import hmac
import io
import itertools
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpp.runtime.transport import MOST_BYTES, Bytes

#: The number that stands for the driver where connections name ranks.
DRIVER = -1

_HEAD = struct.Struct("<qqq")
#: A message has no more pieces; a larger number was altered on its way.
MOST_PIECES = 1 << 20


class Lane(enum.IntEnum):
    """The threads of a worker that run a call; calls of one lane begin in the order they came."""

    #: Steps, and all that has to keep one order with them.
    ORDERED = 0
    #: What waits for arrays.
    FETCH = 1
    #: The loading of batches.
    FEED = 2
    #: Functions beside the steps.
    ASIDE = 3
    #: Heartbeats and aborts.
    CONTROL = 4


class Kind(enum.IntEnum):
    """The kind of a message from a worker."""

    #: The call has returned; the message has its result.
    RETURNED = 0
    #: The call has raised, and the worker goes on; the message has a `Failure`.
    RAISED = 1
    #: The worker has failed; the message has its `Failure`.
    FAILED = 2
    #: No answer, but a text that was printed on the worker.
    TOLD = 3
    #: No message: the connection has ended, and the call gets no answer.
    LOST = 4


class Seal:
    """Codes for the messages of a connection in one direction, so that none is altered or replayed.

    Connections within a host need none. Calls contain Python code; so between hosts the sizes in a
    message, and then its pieces, are followed by a keyed hash (HMAC, RFC 2104, with SHA-256) of
    their bytes and of how many came before.

    Args:
        secret: what both ends know.
        epoch: of the connection; there is one in each.
        sender: who sends: the driver, or the number of a rank.
        connection: the connection.
    """

    def __init__(self, secret: bytes, epoch: int, sender: int, connection: socket.socket):
        self._key = hmac.digest(secret, struct.pack("<qq", epoch, sender), "sha256")
        self._numbers = itertools.count()
        #: The bytes of a code.
        self.size = 0 if connection.family == socket.AF_UNIX else 32

    def code(self, pieces: Sequence[Bytes]) -> bytes:
        """Makes the code of the bytes that come next."""
        if not self.size:
            return b""
        code = hmac.new(self._key, struct.pack("<q", next(self._numbers)), "sha256")
        for piece in pieces:
            code.update(piece)
        return code.digest()


class Message(NamedTuple):
    """A message.

    Args:
        what: the `Lane` of a call, or the `Kind` of a message from a worker.
        number: of the call, by which it is answered.
        pieces: what `pack` gave.
    """

    what: int
    number: int
    pieces: Sequence[Bytes]

    def to_send(self, seal: Seal) -> list[Bytes]:
        """Returns the bytes of the message, in the pieces that go over a connection."""
        head = _HEAD.pack(self.what, self.number, len(self.pieces))
        head += struct.pack(f"<{len(self.pieces)}q", *map(len, self.pieces))
        sent = head, seal.code([head]), *self.pieces, seal.code(self.pieces)
        return [piece for piece in sent if len(piece)]


def listen(stream: io.BufferedReader, seal: Seal) -> Message | None:
    """Waits for the next message; None where the connection has ended, or somebody altered it.

    Args:
        stream: of a connection, from `stream_of`.
        seal: the codes of its sender.
    """
    with contextlib.suppress(OSError, struct.error):
        head = stream.read(_HEAD.size)
        what, number, count = _HEAD.unpack(head)
        if not 0 <= count <= MOST_PIECES:
            return None
        head += stream.read(8 * count)
        sizes = struct.unpack_from(f"<{count}q", head, _HEAD.size)
        # The sizes are known to be the sender's, and possible, before memory is taken.
        known = hmac.compare_digest(stream.read(seal.size), seal.code([head]))
        if not known or min(sizes, default=0) < 0 or sum(sizes) > MOST_BYTES:
            return None
        pieces = [np.empty(size, np.uint8).data for size in sizes]
        whole = all(stream.readinto(piece) == len(piece) for piece in pieces)
        if whole and hmac.compare_digest(stream.read(seal.size), seal.code(pieces)):
            return Message(what, number, pieces)
    return None


def pack(value: Any) -> list[Bytes]:
    """Pickles a value; the memory of its arrays goes by itself, without a copy.

    Raises:
        Exception: the value cannot be pickled.
    """
    return _pack(pickle.dumps, value)


def pack_code(value: Any) -> list[Bytes]:
    """Pickles a value as `pack` does, and functions and classes by their code where need be."""
    import ray.cloudpickle  # Ray takes long to import

    cloudpickle: Any = ray.cloudpickle
    return _pack(cloudpickle.dumps, value)


def _pack(dumps: Any, value: Any) -> list[Bytes]:
    buffers: list[pickle.PickleBuffer] = []
    data = dumps(value, protocol=5, buffer_callback=buffers.append)
    return [data, *(buffer.raw() for buffer in buffers)]


def unpack(pieces: Sequence[Bytes]) -> Any:
    """Undoes `pack`; arrays use the memory of the pieces."""
    return pickle.loads(pieces[0], buffers=pieces[1:])
