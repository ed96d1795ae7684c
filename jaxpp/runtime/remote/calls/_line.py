"""The RPC client, the driver's end of a connection to a worker, and the format of its messages.

A training loop calls steps and fetches their results over and over. These calls have a connection
of their own, because Ray takes about a millisecond of processor time for a call and its result.
Ray does all else: it starts workers, loads steps, and tells when a worker has died.
"""

import concurrent.futures
import contextlib
import enum
import io
import itertools
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from jaxpp.runtime.remote.calls._failure import Failure
from jaxpp.runtime.remote.calls._turns import Turn
from jaxpp.runtime.transport import Addresses, Bytes, Hello, connect, send_pieces

#: The number that stands for the driver where connections name ranks.
DRIVER = -1
#: Seconds between two checks of a worker that takes nothing in, or does not answer.
PATIENCE = 0.2

_HEAD = struct.Struct("<qqqq")
_READ_AHEAD = 1 << 16


class Method(enum.IntEnum):
    """The method that is called: `Process.run`, `Process.fetch` or `Process.ready`."""

    RUN = 0
    FETCH = 1
    READY = 2


class Said(NamedTuple):
    """A message: a call, or the answer to one.

    Args:
        what: the method of a call; of an answer whether it is a `Failure`.
        number: of the call, by which it is answered.
        turn: of a call of a step, its number among what the worker has to do in order.
        pieces: arguments or results, each as its bytes.
    """

    what: int
    number: int
    turn: int
    pieces: Sequence[Bytes]

    def pieces_to_send(self) -> list[Bytes]:
        """Gives the bytes of the message, in the pieces that go over a connection."""
        head = _HEAD.pack(self.what, self.number, self.turn, len(self.pieces))
        sizes = struct.pack(f"<{len(self.pieces)}q", *map(len, self.pieces))
        return [head + sizes, *filter(len, self.pieces)]


def listen(stream: io.BufferedReader) -> Said | None:
    """Waits for the next message; None where the connection has ended.

    Args:
        stream: of a connection, from `stream_of`.
    """
    with contextlib.suppress(OSError):
        head = stream.read(_HEAD.size)
        if len(head) == _HEAD.size:
            what, number, turn, count = _HEAD.unpack(head)
            sizes = struct.unpack(f"<{count}q", stream.read(8 * count))
            pieces = [np.empty(size, np.uint8).data for size in sizes]
            if all(stream.readinto(piece) == len(piece) for piece in pieces):
                return Said(what, number, turn, pieces)
    return None


def stream_of(connection: socket.socket) -> io.BufferedReader:
    """Makes a stream that reads from a connection, and reads ahead."""
    return cast(io.BufferedReader, connection.makefile("rb", _READ_AHEAD))


def answer(found: Sequence[Bytes] | Failure | None, number: int) -> Said:
    """Makes the answer to a call from the method's result."""
    if isinstance(found, Failure):
        return Said(True, number, 0, [pickle.dumps(found)])
    return Said(False, number, 0, found or [])


class Line:
    """An RPC client: calls methods of a worker, and takes the answers in any order.

    Args:
        worker: the worker, as the other arguments know it.
        epoch: how often the mesh has been restarted.
        rank: the worker's rank.
        addresses: where it listens for the driver.
        secret: what both ends know.
        check: called now and then while the worker takes nothing in; raises if it never will.
        ended: called, on a thread of the line, when the other end is gone.

    Raises:
        TransportError: there is no way to the worker.
    """

    def __init__(
        self,
        worker: int,
        epoch: int,
        rank: int,
        addresses: Addresses,
        secret: bytes,
        check: Callable[[], None],
        ended: Callable[[int], None],
    ):
        self._worker, self._check, self._ended = worker, check, ended
        self._next_turn = Turn(epoch, 0)
        self._numbers = itertools.count()
        self._calls: dict[int, Callable[[Any], None]] = {}
        self._lock = threading.Lock()
        self._closed = False
        hello = Hello(epoch, DRIVER, rank)
        self._connection = connect(hello, addresses, secret)
        self._thread = threading.Thread(target=self._listen, name=f"line-{worker}", daemon=True)
        self._thread.start()

    def in_turn(self, call: Callable[[Turn], Any]) -> Any:
        """Makes a call with the next sequence number; a call that raises does not use it up."""
        found = call(self._next_turn)
        self._next_turn = self._next_turn._replace(number=self._next_turn.number + 1)
        return found

    def run(self, packed: Sequence[Bytes], done: Callable[[Failure | None], None]) -> None:
        """Calls a step, in sequence; `done` gets the failure or None, on a thread of the client."""
        self.in_turn(
            lambda turn: self._call(
                Method.RUN, turn.number, packed, lambda found: done(found if found else None)
            )
        )

    def ask(self, method: Method, numbers: Sequence[int]) -> concurrent.futures.Future:
        """Asks for the bytes of arrays, or to hear when the arrays are there.

        Returns:
            What will hold them, or a `Failure`; nothing ever where the worker is gone.
        """
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._call(method, 0, [np.array(numbers, np.int64).tobytes()], future.set_result)
        return future

    def _call(
        self, method: Method, turn: int, pieces: Sequence[Bytes], done: Callable[[Any], None]
    ) -> None:
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = done
            said = Said(method, number, turn, pieces).pieces_to_send()
            with contextlib.suppress(OSError):  # the listening thread notices the end
                send_pieces(self._connection, said, self._wait)

    def _wait(self) -> None:
        """Waits until the connection takes more bytes; checks meanwhile that the worker is well."""
        writable = select.poll()
        writable.register(self._connection, select.POLLOUT)
        while not writable.poll(1000 * PATIENCE):
            self._check()

    def _listen(self) -> None:
        with stream_of(self._connection) as stream:
            while (said := listen(stream)) is not None:
                found = pickle.loads(said.pieces[0]) if said.what else said.pieces
                self._calls.pop(said.number)(found)
        if not self._closed:
            self._ended(self._worker)

    def close(self) -> None:
        """Ends the connection; calls without an answer get none."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        self._connection.close()
