"""The hub of a job: process 0 has a connection to each other one, and passes on what all hear."""

import concurrent.futures
import contextlib
import functools
import pickle
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jaxpp.runtime.launched._environment import Position
from jaxpp.runtime.transport import (
    Addresses,
    Door,
    NotOpened,
    PeerLost,
    TransportError,
    connect,
    host_identity,
)

#: Seconds between two attempts to reach process 0.
RETRY = 0.1
#: Connections in a row that may end before they are open; then another program has the port.
STRANGE = 3
#: Seconds after which a process that waits for others at the start says so.
NOTICE = 10.0
#: Seconds that the end of a connection waits for what is to be written.
FLUSH_TIMEOUT = 5.0
#: The way out where the port is taken.
_ANOTHER = (
    "give the job another MASTER_PORT, or JAX_COORDINATOR_ADDRESS; this port is the one behind it"
)


class Line:
    """A connection to another process: a thread reads messages, and another writes them.

    Args:
        connection: the connection.
        take: called with each message.
        lost: called once when the other end has gone without a word.
    """

    def __init__(
        self, connection: socket.socket, take: Callable[[Any], None], lost: Callable[[], None]
    ):
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
        self.address = connection.getsockname()[0]
        self._socket, self._take, self._lost = connection, take, lost
        self._ended = False
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="jaxpp-hub", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="jaxpp-hub", daemon=True).start()

    def send(self, what: Any) -> None:
        """Sends a message; does not wait.

        Raises:
            Exception: it cannot be pickled.
        """
        self._out.put(pickle.dumps(what))

    def close(self) -> None:
        """Says goodbye, and ends the connection once all has been written."""
        self._out.put(None)
        self._writer.join(FLUSH_TIMEOUT)
        self._ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        with contextlib.suppress(OSError), Connection(self._socket.dup().detach()) as out:
            while (what := self._out.get()) is not None:
                out.send_bytes(what)
            out.send(None)

    def _read(self) -> None:
        with self._socket, Connection(self._socket.dup().detach()) as words:
            with contextlib.suppress(Exception):  # of any sort, where it cannot be unpickled
                while (what := words.recv()) is not None:
                    self._take(what)
                self._ended = True
            if not self._ended:
                self._lost()


class Hub:
    """Joins the processes of a job: meetings, to which each brings a value, and news for all.

    Args:
        place: of this process.
        hear: called with the sender's number and its news, on some thread.
        lost: called with the number of a process that has gone without a word.
    """

    def __init__(
        self, place: Position, hear: Callable[[int, Any], None], lost: Callable[[int], None]
    ):
        self._place, self._hear, self._lost = place, hear, lost
        self._lines: dict[int, Line] = {}
        #: Those that have read that they are welcome, so that process 0 may write to them.
        self._in: set[int] = set()
        self._changed = threading.Condition()
        self._brought: dict[Any, dict[int, bytes]] = {}
        self._meetings: dict[Any, concurrent.futures.Future[dict[int, Any]]] = {}

    def join(self, secret: bytes, timeout: float) -> str:
        """Joins the processes; returns an address of this one that the others reach.

        Args:
            secret: what proves to process 0 that another is of the job, and the other way round.
            timeout: seconds that all processes have to come.

        Raises:
            RuntimeError: some have not come in time; those that have can be told of it. Or another
                program has the port, or they do not have the same secret.
        """
        if self._place.count == 1:
            return "127.0.0.1"
        # Whom another number of processes was told knows another secret.
        known = b"%d:%s" % (self._place.count, secret)
        (self._let_in if self._place.number == 0 else self._go_in)(known, timeout)
        return next(iter(self._lines.values())).address

    @property
    def _where(self) -> str:
        return f"{self._place.host} port {self._place.port}"

    def _let_in(self, secret: bytes, timeout: float) -> None:
        at = "127.0.0.1" if _is_loopback(self._place.host) else "0.0.0.0"
        try:
            door = Door("hub", secret, at, self._enter, port=self._place.port)
        except OSError as error:
            raise RuntimeError(
                f"LaunchedMpmdMesh: process 0 cannot listen at port {self._place.port} ({error}): "
                f"{_ANOTHER}."
            ) from error
        others = range(1, self._place.count)
        away = "" if _is_own(self._place.host) else ", which is no address of this host"

        def late() -> str:
            with self._changed:
                self._changed.wait_for(lambda: len(self._in) == len(others), RETRY)
                if not (missing := [n for n in others if n not in self._in]):
                    return ""
            return (
                f"of {self._place.count} processes, {missing} have not come to process 0 at "
                f"{self._where}{away}"
            )

        try:
            _wait(late, timeout)
        finally:
            door.close()

    def _enter(self, number: int, connection: socket.socket) -> bool:
        with self._changed:
            if number in self._lines:
                return False
            self._add(number, connection)
            return True

    def _go_in(self, secret: bytes, timeout: float) -> None:
        place, strange = self._place, 0
        near = host_identity() if _is_loopback(place.host) else ""
        there = Addresses(near, None, (place.host, place.port))

        def knock() -> str:
            nonlocal strange
            try:
                self._add(0, connect(place.number, 0, there, secret, "tcp"))
                return ""
            except PeerLost as error:
                strange = strange + 1 if isinstance(error, NotOpened) else 0
                if strange == STRANGE:
                    raise
                time.sleep(RETRY)
                return (
                    f"process {place.number} of {place.count} has not found process 0 at "
                    f"{self._where}: {error.reason}"
                )

        try:
            _wait(knock, timeout)
        except TransportError as error:
            raise RuntimeError(
                f"LaunchedMpmdMesh: process {place.number} is not let in by what listens at "
                f"{self._where}: either that is process 0, which has another secret or not "
                f"{place.count} processes, or has let in another process {place.number}; or it is "
                f"another program or job, and process 0 cannot listen, which it says then: "
                f"{_ANOTHER}."
            ) from error
        self._lines[0].send(("in", place.number, None))

    def _add(self, number: int, connection: socket.socket) -> None:
        take = functools.partial(self._take, number)
        self._lines[number] = Line(connection, take, lambda: self._lost(number))

    # ---- news -----------------------------------------------------------------------------------

    def tell(self, news: Any, source: int | None = None) -> None:
        """Tells all other processes; does not wait. Process 0 passes on the news of a `source`."""
        source = self._place.number if source is None else source
        for number, line in list(self._lines.items()):
            if number != source:
                line.send(("news", source, news))

    # ---- meetings -------------------------------------------------------------------------------

    def meeting(self, key: Any) -> "concurrent.futures.Future[dict[int, Any]]":
        """Returns what will have the values that all processes bring under a key."""
        with self._changed:
            return self._meetings.setdefault(key, concurrent.futures.Future())

    def bring(self, key: Any, value: Any) -> None:
        """Brings this process's value; does not wait.

        Raises:
            TypeError: it cannot be pickled.
        """
        try:
            packed = pickle.dumps(value)
        except Exception as error:  # of any sort, too
            raise TypeError(
                f"what goes to the other processes cannot be pickled ({error}); its class, such as "
                f"that of a batch, has to be defined outside of functions"
            ) from error
        if self._place.number == 0:
            self._collect(0, key, packed)
        else:
            self._lines[0].send(("bring", self._place.number, (key, packed)))

    def _collect(self, number: int, key: Any, value: bytes) -> None:
        with self._changed:
            found = self._brought.setdefault(key, {})
            found[number] = value
            if len(found) < self._place.count:
                return
            del self._brought[key]
        for line in self._lines.values():
            line.send(("all", 0, (key, found)))
        self._met(key, found)

    def _met(self, key: Any, found: dict[int, bytes]) -> None:
        meeting = self.meeting(key)
        with self._changed:
            del self._meetings[key]
        meeting.set_result({number: _unpacked(value) for number, value in found.items()})

    def _take(self, number: int, what: Any) -> None:
        kind, source, content = what
        if kind == "bring":
            self._collect(number, *content)
        elif kind == "all":
            self._met(*content)
        elif kind == "in":
            with self._changed:
                self._in.add(number)
                self._changed.notify_all()
        else:
            self._hear(source, content)

    def close(self) -> None:
        """Leaves; the others hear that it was meant."""
        for line in self._lines.values():
            line.close()


def _unpacked(value: bytes) -> Any:
    """Returns a value that a process has brought, or the error where it is nothing here."""
    try:
        return pickle.loads(value)
    except Exception as error:
        return error


def _wait(attempt: Callable[[], str], timeout: float) -> None:
    """Waits until an attempt succeeds; says once what it waits for.

    Args:
        attempt: takes a moment; returns why it has not succeeded, or nothing where it has.
        timeout: the seconds.

    Raises:
        RuntimeError: it has not succeeded.
    """
    start, said = time.monotonic(), False
    while why := attempt():
        passed = time.monotonic() - start
        if passed >= timeout:
            raise RuntimeError(
                f"LaunchedMpmdMesh: {why}, within {timeout:g} s. Look whether the launcher has "
                f"started all processes, at what they say, and whether the hosts reach each other, "
                f"or give a longer start_timeout."
            )
        if passed >= NOTICE and not said:
            say(f"jaxpp: {why}; waits up to {timeout:g} s.")
            said = True


def say(text: str) -> None:
    """Prints a line for the user, if somebody can read it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(OSError):
        return socket.getaddrinfo(host, 0)[0][4][0] in ("127.0.0.1", "::1")
    return False


def _is_own(host: str) -> bool:
    """Tells whether a name is that of an address of this host, as far as that can be found."""
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as tried:
            tried.bind(address)
            return True
    return False
