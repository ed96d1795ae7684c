"""The RPC server: the worker's end of its connection to the driver."""

import contextlib
import operator
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from jaxpp.runtime.remote.calls import (
    DRIVER,
    Failure,
    Kind,
    Lane,
    Message,
    Seal,
    listen,
    pack,
    pack_code,
    unpack,
)
from jaxpp.runtime.remote.worker._process import Process
from jaxpp.runtime.transport import Addresses, Hello, Listener, send_pieces, stream_of

#: The threads of each lane. A fetch waits for its arrays, and more fetches wait for a thread.
THREADS = {Lane.ORDERED: 1, Lane.FETCH: 4, Lane.FEED: 1, Lane.ASIDE: 2, Lane.CONTROL: 1}


class Server:
    """An RPC server: runs what the driver calls, methods of a process or of a part of it.

    A new connection of the driver begins a new epoch: what came over the old one ends, and the
    process is made fit for work again. Without the driver the process ends its work.

    Args:
        process: the process.
        secret: what both ends know.
        address: the address of this host at which the driver reaches it; None where it is on the
            same host.
    """

    def __init__(self, process: Process, secret: bytes, address: str | None):
        self._process, self._secret = process, secret
        self._connected = threading.Lock()
        self._channel: _Channel | None = None
        self._listener = Listener(process.rank, secret, address, self._admit, self._serve)

    @property
    def addresses(self) -> Addresses:
        """The addresses at which the driver reaches the server."""
        return self._listener.addresses

    def _admit(self, hello: Hello) -> bool:
        return hello.source == DRIVER

    def _serve(self, hello: Hello, connection: socket.socket) -> None:
        """Reads the driver's calls until the connection ends; other threads run them."""
        with self._connected:  # one connection after the other
            if self._channel is not None:
                self._process.abort("The mesh is restarted.")
                self._channel.end()
                self._process.reset(hello.epoch)
            seals = [
                Seal(self._secret, hello.epoch, who, connection)
                for who in (hello.source, hello.target)
            ]
            channel = self._channel = _Channel(self._process, connection, *seals)
        channel.read()
        with self._connected:
            if channel is self._channel:
                self._process.abort("The driver has closed its connection.")

    def tell(self, text: str) -> bool:
        """Sends the driver a text that was printed here; returns whether the driver is there."""
        channel = self._channel
        return channel is not None and channel.send(Message(Kind.TOLD, 0, [text.encode()]))

    def close(self) -> None:
        """Listens no more, and ends the connection."""
        self._listener.close()
        if self._channel is not None:
            self._channel.end()


class _Channel:
    """One connection of the driver, and the threads that run its calls."""

    def __init__(self, process: Process, connection: socket.socket, heard: Seal, seal: Seal):
        self._process, self._connection = process, connection
        self._heard, self._seal = heard, seal
        self._sending = threading.Lock()
        self._ended = False
        self._lanes = {
            lane: ThreadPoolExecutor(count, f"jaxpp-{lane.name.lower()}")
            for lane, count in THREADS.items()
        }

    def read(self) -> None:
        """Takes in the driver's calls at once, so that the driver need not wait."""
        with stream_of(self._connection) as stream:
            while (call := listen(stream, self._heard)) is not None:
                with contextlib.suppress(RuntimeError):  # the connection ends at this moment
                    self._lanes[Lane(call.what)].submit(self._run, Lane(call.what), call)
                del call  # it would keep a batch alive until the next call

    def _run(self, lane: Lane, call: Message) -> None:
        self.send(self._answer(lane, call))

    def _answer(self, lane: Lane, call: Message) -> Message:
        process = self._process
        try:
            if lane == Lane.ORDERED and process.failure is not None:
                found = process.failure
            else:
                method, args = unpack(call.pieces)
                found = operator.attrgetter(method)(process)(*args)
            if not isinstance(found, Failure):
                users = lane in (Lane.ORDERED, Lane.ASIDE) and found is not None
                return Message(
                    Kind.RETURNED, call.number, pack_code(found) if users else pack(found)
                )
            kind = Kind.FAILED
        except BaseException as error:  # noqa: B036  the driver has to know of every exception
            kind, found = Kind.RAISED, Failure.of(error, process.rank, -1, "")
        return Message(kind, call.number, pack(found))

    def send(self, message: Message) -> bool:
        """Sends a message to the driver; returns whether the driver is still there."""
        with self._sending, contextlib.suppress(OSError):
            send_pieces(self._connection, message.to_send(self._seal))
            return not self._ended
        return False

    def end(self) -> None:
        """Ends the connection, and waits for the call in order that runs; later ones never run."""
        self._ended = True
        with contextlib.suppress(OSError):  # the driver may have closed its end first
            self._connection.shutdown(socket.SHUT_RDWR)
        for lane, pool in self._lanes.items():
            pool.shutdown(wait=lane == Lane.ORDERED, cancel_futures=True)
