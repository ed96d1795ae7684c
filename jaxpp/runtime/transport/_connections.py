"""The connections of the driver to worker processes, which carry its calls."""

import asyncio
import contextlib
import dataclasses
import errno
import hmac
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from jaxpp.runtime.transport._errors import PeerLost, TransportError
from jaxpp.runtime.transport._handshake import (
    HANDSHAKE_TIMEOUT,
    Addresses,
    Kind,
    host_identity,
    reach,
)

#: The number of connections that may be without the other end's proof; one more closes the oldest.
_MOST_HANDSHAKES = 256
#: The number of connections that the system accepts ahead.
_BACKLOG = 1024
#: Name and version of the protocol.
_MAGIC = b"jaxpp  1"
_HELLO = struct.Struct("<8sqqq32s")
_WELCOME, _STALE = b"+", b"-"
_LINUX = sys.platform == "linux"


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a rank that connects: its epoch, its number, and the other rank's."""

    epoch: int
    source: int
    target: int


def connect(hello: Hello, peer: Addresses, secret: bytes, kind: Kind = "auto") -> socket.socket:
    """Opens a connection to a rank.

    Args:
        hello: who connects to whom.
        peer: where that rank is reached.
        secret: what all ranks know.
        kind: the sort of connection; by default a Unix socket on one host, else TCP.

    Raises:
        PeerLost: if nobody is there.
        TransportError: if the other end does not know the secret, or has left the epoch.
    """
    connection = reach(hello.source, hello.target, peer, kind)
    try:
        answer = _introduce(connection, hello, secret)
        if answer == _STALE:
            raise TransportError(
                f"Rank {hello.target} has left epoch {hello.epoch}, in which rank {hello.source} "
                f"still is; reset both to the same epoch."
            )
        return ready(connection)
    except TransportError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise PeerLost(
            hello.target,
            f"it ended the connection before it was open ({error}); either the process died, "
            f"or it has another secret",
        ) from error


def _introduce(connection: socket.socket, hello: Hello, secret: bytes) -> bytes:
    """Makes the handshake at the end that connects; returns the other end's answer."""
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT
    said = _HELLO.pack(_MAGIC, hello.epoch, hello.source, hello.target, secrets.token_bytes(32))
    connection.sendall(said)
    heard = _exactly(connection, 64, deadline)
    said += heard[:32]
    if not hmac.compare_digest(heard[32:], _proof(secret, b"accepts", said)):
        raise TransportError(f"What answers for rank {hello.target} does not know the secret.")
    connection.sendall(_proof(secret, b"connects", said))
    # The other end may still be on its way to this epoch.
    return _exactly(connection, 1, deadline + HANDSHAKE_TIMEOUT)


async def _answer(connection: socket.socket, rank: int, secret: bytes) -> Hello | None:
    """Makes the handshake at the end that accepts; None where the other end is not a rank."""
    loop = asyncio.get_running_loop()
    said = await _receive(connection, _HELLO.size)
    magic, epoch, source, target, _ = _HELLO.unpack(said)
    if magic != _MAGIC or target != rank:
        return None
    nonce = secrets.token_bytes(32)
    said += nonce
    await loop.sock_sendall(connection, nonce + _proof(secret, b"accepts", said))
    heard = await _receive(connection, 32)
    if not hmac.compare_digest(heard, _proof(secret, b"connects", said)):
        return None
    return Hello(epoch, source, target)


async def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        loop = asyncio.get_running_loop()
        piece = await loop.sock_recv(connection, count - len(received))
        if not piece:
            raise ConnectionError("the other end closed it")
        received += piece
    return received


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + said, "sha256")


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receives exactly `count` bytes, before a deadline."""
    received = b""
    while len(received) < count:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(count - len(received))
        if not piece:
            raise ConnectionError("the other end closed it")
        received += piece
    return received


def ready(connection: socket.socket) -> socket.socket:
    """Prepares a connection: small messages go at once, and a lost host shows within 5 s."""
    connection.settimeout(None)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if _LINUX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)
    return connection


class Listener:
    """Accepts connections from other ranks.

    One thread makes all handshakes at once. So connections that say nothing, or garbage, hold up
    nobody. Where there are too many of them the oldest is closed. Only
    a connection that has proved to be a rank's gets a thread.

    Args:
        rank: this rank.
        secret: what all ranks know.
        address: the address of this host at which other hosts reach it; None listens only for
            processes of this host.
        admit: called with who has connected; waits until this rank is in that epoch, and says
            whether it was not too late.
        serve: called with each connection that is open, on a thread of its own, until it ends.
    """

    def __init__(
        self,
        rank: int,
        secret: bytes,
        address: str | None,
        admit: Callable[[Hello], bool],
        serve: Callable[[Hello, socket.socket], None],
    ):
        self._rank, self._secret = rank, secret
        self._admit, self._serve = admit, serve
        #: The handshakes that are not done, the oldest first.
        self._handshakes: dict[asyncio.Task[None], None] = {}
        host = address or "127.0.0.1"
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        tcp = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._sockets = [tcp]
        unix = None
        if _LINUX:
            unix = b"\0jaxpp-" + secrets.token_hex(16).encode()
            self._sockets.append(socket.socket(socket.AF_UNIX))
            self._sockets[-1].bind(unix)
            self._sockets[-1].listen(_BACKLOG)
        self.addresses = Addresses(host_identity(), unix, (host, tcp.getsockname()[1]))
        self._loop = asyncio.new_event_loop()
        self._accepting = self._loop.create_task(self._accept_all())
        self._thread = threading.Thread(target=self._run, name=f"accept-{rank}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises an error if the listener accepts no connections any more."""
        if not self._thread.is_alive():
            raise TransportError(f"Rank {self._rank} does not accept connections any more.")

    def close(self) -> None:
        """Accepts no more connections, and closes those whose handshake is not done."""
        with contextlib.suppress(RuntimeError):  # its thread has ended
            self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop), contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._accepting)
        for listening in self._sockets:
            listening.close()

    async def _accept_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for listening in self._sockets:
                listening.setblocking(False)
                tasks.create_task(self._accept(listening, tasks))

    async def _accept(self, listening: socket.socket, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
            except OSError as error:  # the other end has closed it already
                if error.errno in (errno.EMFILE, errno.ENFILE):  # else it is tried again at once
                    self._close_oldest()
                    await asyncio.sleep(0.01)
                continue
            if len(self._handshakes) >= _MOST_HANDSHAKES:
                self._close_oldest()
            handshake = tasks.create_task(self._open(connection))
            self._handshakes[handshake] = None
            handshake.add_done_callback(lambda done: self._handshakes.pop(done, None))

    def _close_oldest(self) -> None:
        for oldest in list(self._handshakes)[:1]:
            del self._handshakes[oldest]
            oldest.cancel()

    async def _open(self, connection: socket.socket) -> None:
        """Makes a handshake; after it the connection gets a thread."""
        # The other end has closed it, or takes too long; or this process can have no more threads.
        with contextlib.suppress(OSError, RuntimeError), contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                hello = await _answer(connection, self._rank, self._secret)
            if hello is not None:
                name, args = f"receive-{self._rank}", (hello, connection)
                threading.Thread(target=self._welcome, args=args, name=name, daemon=True).start()
                undo.pop_all()

    def _welcome(self, hello: Hello, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(HANDSHAKE_TIMEOUT)
                admitted = self._admit(hello)
                connection.sendall(_WELCOME if admitted else _STALE)
                if not admitted:
                    return
                ready(connection)
            except OSError:
                return
            self._serve(hello, connection)
