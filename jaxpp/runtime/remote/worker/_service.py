"""The RPC server: the worker's end of its connection to the driver."""

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpp.runtime.remote.calls import DRIVER, Method, Said, Turn, answer, listen, stream_of
from jaxpp.runtime.remote.worker._process import Process
from jaxpp.runtime.transport import Addresses, Hello, Listener, send_pieces

#: The number of fetches that may wait for their arrays at once; later ones wait for a thread.
FETCHES = 4


class Service:
    """An RPC server: runs the methods of a process that the driver calls over a connection.

    One thread runs the steps, in sequence; others wait for the arrays that are fetched.

    Args:
        process: the process.
        secret: what both ends know.
        address: the address of this host at which the driver reaches it; None where it is on the
            same host.
    """

    def __init__(self, process: Process, secret: bytes, address: str | None):
        self._process = process
        self._connections: set[socket.socket] = set()
        self._steps: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._fetches: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for calls, count in ((self._steps, 1), (self._fetches, FETCHES)):
            for _ in range(count):
                threading.Thread(
                    target=_work, args=(calls,), name="jaxpp-line", daemon=True
                ).start()
        self._listener = Listener(process.rank, secret, address, self._admit, self._serve)

    @property
    def addresses(self) -> Addresses:
        """The addresses at which the driver reaches the server."""
        return self._listener.addresses

    def check(self) -> None:
        """Raises an error if the driver cannot connect any more."""
        self._listener.check()

    def _admit(self, hello: Hello) -> bool:
        return hello.source == DRIVER

    def _serve(self, hello: Hello, connection: socket.socket) -> None:
        """Takes in the driver's calls, so that it need not wait; other threads run them."""
        lock = threading.Lock()
        self._connections.add(connection)
        with stream_of(connection) as stream:
            while (said := listen(stream)) is not None:
                calls = self._steps if said.what == Method.RUN else self._fetches
                calls.put(_Request(self._process, hello.epoch, said, connection, lock))
                del calls, said  # they would keep a batch alive until the next call
        self._connections.discard(connection)

    def close(self) -> None:
        """Ends the connections, and listens no more."""
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # the driver may have closed its end first
                connection.shutdown(socket.SHUT_RDWR)


class _Request:
    """A call that waits for a thread to run it."""

    def __init__(
        self,
        process: Process,
        epoch: int,
        said: Said,
        connection: socket.socket,
        lock: threading.Lock,
    ):
        self._process, self._epoch, self._said = process, epoch, said
        self._connection, self._lock = connection, lock

    def __call__(self) -> None:
        try:
            found = self._do()
        except BaseException as error:  # noqa: B036  the driver has to know of every exception
            found = self._process.fail(error)
        with self._lock, contextlib.suppress(OSError):  # the driver may have closed its end
            send_pieces(self._connection, answer(found, self._said.number).pieces_to_send())

    def _do(self) -> Any:
        what, _, turn, pieces = self._said
        process = self._process
        if what == Method.RUN:
            return process.in_turn(Turn(self._epoch, turn), process.run, *pieces)
        numbers = np.frombuffer(pieces[0], np.int64).tolist()
        if what == Method.READY:
            return process.ready(numbers)
        found = process.fetch(numbers)
        return [part.data for part in found] if isinstance(found, list) else found


def _work(calls: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        calls.get()()
