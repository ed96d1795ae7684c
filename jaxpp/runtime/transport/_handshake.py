"""How the processes of a mesh find each other, and how each proves to the other that it is one.

On one host connections are Unix sockets with an abstract name, which leave no file behind however
the process ends; between hosts they are TCP. Both ends prove that they know the secret of the mesh,
by the handshake of `multiprocessing.connection`: a keyed hash (HMAC, RFC 2104) of random bytes that
the other end has chosen. The secret itself is never sent.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Literal

from jaxpp.runtime.transport._errors import PeerLost, TransportError

Kind = Literal["auto", "unix", "tcp"]

#: Seconds within which the other end has to say the next word of a handshake.
HANDSHAKE_TIMEOUT = 5.0
#: Seconds that a read waits for the rest of a large message before it looks around.
READ_TIMEOUT = 0.05
#: The number of connections that may be without the other end's proof; one more ends the oldest.
MOST_HANDSHAKES = 256
#: The number of connections that the system accepts ahead.
_BACKLOG = 1024
#: The epoch and the first rank of the process that connects.
_HELLO = struct.Struct("<qq")
_WELCOME, _STALE = b"+", b"-"
_LOOPBACK = ("127.0.0.1", "::1")
_LINUX = sys.platform == "linux"


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a process.

    Args:
        host: what only processes with the same host and network have in common.
        unix: the name of its Unix socket; None where there are none.
        tcp: its TCP host and port.
    """

    host: str
    unix: bytes | None
    tcp: tuple[str, int]


def warn_of_open_ports(addresses: Iterable[Addresses]) -> None:
    """Logs, as a warning, the ports at which ranks listen for processes of other hosts, if any."""
    ports: dict[str, set[int]] = {}
    for each in addresses:
        if each.tcp[0] not in _LOOPBACK:
            ports.setdefault(each.tcp[0], set()).add(each.tcp[1])
    if ports:
        listed = "; ".join(f"{h} port {', '.join(map(str, sorted(p)))}" for h, p in ports.items())
        logging.getLogger("jaxpp").warning(
            f"Workers listen for processes of other hosts at {listed}. Only who knows the secret "
            f"of the mesh can connect, but what is sent is not encrypted: use a trusted network."
        )


def host_identity() -> str:
    """Names this host's current boot and its network (containers may have one each)."""
    if not _LINUX:
        return socket.gethostname()
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/net').st_ino}"


def reach(source: int, target: int, peer: Addresses, kind: Kind = "auto") -> socket.socket:
    """Opens a connection to a process, before any handshake.

    Args:
        source: the rank that connects, for errors.
        target: the rank that it connects to.
        peer: the addresses of that rank.
        kind: the sort of connection; by default a Unix socket on one host, else TCP.

    Raises:
        PeerLost: nobody is there.
        TransportError: it cannot be reached from this host.
    """
    local = peer.host == host_identity()
    if not local and peer.tcp[0] in _LOOPBACK:
        raise TransportError(
            f"Rank {target} is on another host than rank {source} and listens only for "
            f"processes of its own host; give its transport the address of its host."
        )
    unix = kind == "unix" or (kind == "auto" and local and peer.unix is not None)
    try:
        if not unix:
            return socket.create_connection(peer.tcp, HANDSHAKE_TIMEOUT)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(HANDSHAKE_TIMEOUT)
        try:
            connection.connect(peer.unix or b"")
        except BaseException:
            connection.close()
            raise
        return connection
    except OSError as error:
        where = "its Unix socket" if unix else f"{peer.tcp[0]} port {peer.tcp[1]}"
        raise PeerLost(target, f"{where} does not answer ({error})") from error


def connect(
    epoch: int, source: int, target: int, peer: Addresses, secret: bytes, kind: Kind = "auto"
) -> socket.socket:
    """Opens a connection to a process, which is known to be of the mesh when this returns.

    Args:
        epoch: that of the rank that connects.
        source: the rank that connects.
        target: the rank that it connects to.
        peer: the addresses of that rank.
        secret: some bytes that all ranks know.
        kind: the sort of connection; by default a Unix socket on one host, else TCP.

    Raises:
        PeerLost: nobody is there.
        TransportError: the other end does not know the secret, or is in another epoch.
    """
    connection = reach(source, target, peer, kind)
    try:
        with _words(connection) as words:
            answer_challenge(words, secret)
            deliver_challenge(words, secret)
            words.send_bytes(_HELLO.pack(epoch, source))
            answer = words.recv_bytes(1)
        if answer != _WELCOME:
            raise TransportError(
                f"Rank {target} is not in epoch {epoch}, in which rank {source} is; reset both to "
                f"the same epoch before they connect."
            )
        return prepared(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, AuthenticationError):
            raise TransportError(
                f"Rank {target} and rank {source} do not have the same secret."
            ) from error
        if isinstance(error, OSError | EOFError):
            raise PeerLost(
                target, f"it ended the connection before it was open ({error or 'closed'})"
            ) from error
        raise


def _words(connection: socket.socket) -> Connection:
    """Returns the messages of a handshake on a connection, each with a limit of time."""
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        _set_timeout(connection, option, HANDSHAKE_TIMEOUT)
    return Connection(os.dup(connection.fileno()))


def _set_timeout(connection: socket.socket, option: int, seconds: float) -> None:
    # Unlike `settimeout` these options let a read of many bytes return what has come until then.
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, timeval)


def prepared(connection: socket.socket) -> socket.socket:
    """Prepares a connection: small messages go at once, and a lost host shows within 5 s."""
    _set_timeout(connection, socket.SO_RCVTIMEO, READ_TIMEOUT)
    _set_timeout(connection, socket.SO_SNDTIMEO, 0)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if _LINUX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000)
    return connection


class Door:
    """Lets the other processes of a mesh in, from `open` to `close`; the addresses stay the same.

    Each connection has a thread until it has proved to be a process of the mesh. So one that says
    nothing, or garbage, holds up nobody; where there are too many the oldest is ended. All of them
    end when the door is closed.

    Args:
        name: that of its threads.
        secret: some bytes that all processes of the mesh know.
        address: the address of this host at which other hosts reach it; None listens only for
            processes of this host.
        admits: called with the epoch and the rank of who has proved to be of the mesh; tells
            whether the rank may come in.
        enter: called with the epoch, the rank and the connection of who has come in.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        address: str | None,
        admits: Callable[[int, int], bool],
        enter: Callable[[int, int, socket.socket], None],
    ):
        self._name, self._secret = name, secret
        self._admits, self._enter = admits, enter
        self._host = address or "127.0.0.1"
        self._unix = b"\0jaxpp-" + secrets.token_hex(16).encode() if _LINUX else None
        self._port = 0
        #: Guards what follows.
        self._lock = threading.Lock()
        self._listening: list[socket.socket] = []
        self._thread: threading.Thread | None = None
        #: Connections without a proof, the oldest first.
        self._outside: dict[socket.socket, None] = {}
        self.open()
        self.addresses = Addresses(host_identity(), self._unix, (self._host, self._port))

    def open(self) -> None:
        """Listens, if it does not yet.

        Raises:
            OSError: the addresses are another's by now.
        """
        if self._listening:
            return
        self.join()
        with self._lock:
            family = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0][0]
            where = self._host, self._port
            listening = [socket.create_server(where, family=family, backlog=_BACKLOG)]
            self._port = listening[0].getsockname()[1]
            if self._unix is not None:
                listening.append(socket.socket(socket.AF_UNIX))
                listening[-1].bind(self._unix)
                listening[-1].listen(_BACKLOG)
            self._listening = listening
        accept = {"target": self._accept, "args": (listening,), "name": self._name}
        self._thread = threading.Thread(**accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listens no more, and ends all connections that have not come in; may be repeated."""
        with self._lock:
            listening, self._listening = self._listening, []
            for each in (*listening, *self._outside):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # this wakes the threads that wait for them

    def join(self) -> None:
        """Waits, after `close`, until the addresses are free."""
        if self._thread is not None:
            self._thread.join()

    def _accept(self, listening: list[socket.socket]) -> None:
        poll, sockets = select.poll(), {each.fileno(): each for each in listening}
        for number in sockets:
            poll.register(number, select.POLLIN)
        while self._listening is listening:
            for number, _ in poll.poll(1000):
                try:
                    connection, _ = sockets[number].accept()
                except OSError:
                    if self._listening is listening:  # this process has no more descriptors
                        self._make_room(len(self._outside) - 1)
                        time.sleep(0.01)
                else:
                    self._greet(connection)
        for each in listening:
            each.close()

    def _greet(self, connection: socket.socket) -> None:
        self._make_room(MOST_HANDSHAKES - 1)
        with self._lock:
            if not self._listening:
                connection.close()
                return
            self._outside[connection] = None
        let_in = {"target": self._let_in, "args": (connection,), "name": self._name}
        try:
            threading.Thread(**let_in, daemon=True).start()
        except RuntimeError:  # this process can have no more threads
            with self._lock:
                self._outside.pop(connection, None)
            connection.close()

    def _make_room(self, most: int) -> None:
        """Ends the oldest connections that have not come in, where there are more than `most`."""
        with self._lock:
            oldest = list(self._outside)[: max(len(self._outside) - most, 0)]
            for connection in oldest:
                del self._outside[connection]
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _let_in(self, connection: socket.socket) -> None:
        try:
            with _words(connection) as words:
                deliver_challenge(words, self._secret)
                answer_challenge(words, self._secret)
                epoch, rank = _HELLO.unpack(words.recv_bytes(_HELLO.size))
                admitted = self._admits(epoch, rank)
                words.send_bytes(_WELCOME if admitted else _STALE)
            prepared(connection)
        # What a stranger says makes many sorts of errors there, an AssertionError too.
        except Exception:
            admitted = False
        with self._lock:
            self._outside.pop(connection, None)
        if admitted:
            self._enter(epoch, rank, connection)  # pyright: ignore[reportPossiblyUnboundVariable]
        else:
            connection.close()
