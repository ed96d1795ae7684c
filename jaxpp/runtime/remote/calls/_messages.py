"""The messages on the connection of the driver and a worker: calls, answers, and what is told."""

import contextlib
import enum
import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpp.runtime.transport import Bytes

#: The number that stands for the driver where connections name ranks.
DRIVER = -1

_HEAD = struct.Struct("<qqq")


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
    #: No answer, but something that the worker tells.
    TOLD = 3
    #: No message: the connection has ended, and the call gets no answer.
    LOST = 4


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

    def to_send(self) -> list[Bytes]:
        """Gives the bytes of the message, in the pieces that go over a connection."""
        head = _HEAD.pack(self.what, self.number, len(self.pieces))
        sizes = struct.pack(f"<{len(self.pieces)}q", *map(len, self.pieces))
        return [head + sizes, *filter(len, self.pieces)]


def listen(stream: io.BufferedReader) -> Message | None:
    """Waits for the next message; None where the connection has ended.

    Args:
        stream: of a connection, from `stream_of`.
    """
    with contextlib.suppress(OSError):
        head = stream.read(_HEAD.size)
        if len(head) == _HEAD.size:
            what, number, count = _HEAD.unpack(head)
            sizes = struct.unpack(f"<{count}q", stream.read(8 * count))
            pieces = [np.empty(size, np.uint8).data for size in sizes]
            if all(stream.readinto(piece) == len(piece) for piece in pieces):
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
