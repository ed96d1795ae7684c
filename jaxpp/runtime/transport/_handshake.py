"""Lets the processes of a mesh find each other, and prove to each other that they are of the mesh.

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
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Literal

from jaxpp.runtime.transport._errors import NotOpened, PeerLost, TransportError

SocketKind = Literal["auto", "unix", "tcp"]

#: Seconds within which the other end has to say the next word of a handshake.
HANDSHAKE_TIMEOUT = 5.0
#: Seconds that a read waits for the rest of a large message before it looks around.
READ_TIMEOUT = 0.05
#: The number of connections that the system accepts ahead.
_BACKLOG = 1024
#: The first rank of the process that connects.
_HELLO = struct.Struct("<q")
_WELCOME, _UNWANTED = b"+", b"-"
_LOOPBACK = ("127.0.0.1", "::1")
_LINUX = sys.platform == "linux"
#: Options of TCP by which a lost host shows within 5 s.
_ALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000}


@dataclasses.dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a process: its Unix socket, if there are such, and its TCP host and port.

    `host` is what only processes with the same host and network have in common.
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


def host_identity(namespace: str = "net") -> str:
    """Names this host's current boot and its network, or another namespace (of a container)."""
    if not _LINUX:
        return socket.gethostname()
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}-{os.stat(f'/proc/self/ns/{namespace}').st_ino}"


def connect(
    source: int, target: int, peer: Addresses, secret: bytes, kind: SocketKind = "auto"
) -> socket.socket:
    """Opens a connection of a rank to another, which is known to be of the mesh when this returns.

    By default it is a Unix socket on one host, else TCP.

    Raises:
        PeerLost: nobody is there.
        TransportError: the other end does not know the secret, has a connection from that rank, or
            cannot be reached from this host.
    """
    local = peer.host == host_identity()
    if not local and peer.tcp[0] in _LOOPBACK:
        raise TransportError(
            f"Rank {target} is on another host than rank {source} and listens only for "
            f"processes of its own host; give its transport the address of its host."
        )
    unix = kind == "unix" or (kind == "auto" and local and peer.unix is not None)
    where = "its Unix socket" if unix else f"{peer.tcp[0]} port {peer.tcp[1]}"
    with contextlib.ExitStack() as failed:
        try:
            family = socket.AF_UNIX if unix else _family(peer.tcp[0])  # its name may not be known
            connection = failed.enter_context(socket.socket(family))
            connection.settimeout(HANDSHAKE_TIMEOUT)
            connection.connect((peer.unix or b"") if unix else peer.tcp)
        except OSError as error:
            raise PeerLost(target, f"{where} does not answer ({error})") from error
        try:
            with _words(connection) as words:
                answer_challenge(words, secret)
                deliver_challenge(words, secret)
                words.send_bytes(_HELLO.pack(source))
                admitted = words.recv_bytes(1) == _WELCOME
        except AuthenticationError as error:
            raise TransportError(
                f"Rank {target} and rank {source} do not have the same secret."
            ) from error
        except (OSError, EOFError, AssertionError) as error:  # the last of what is no handshake
            reason = f"it did not open the connection ({error or 'closed'})"
            raise NotOpened(target, reason) from error
        if not admitted:
            raise TransportError(
                f"Rank {target} has a connection from rank {source} already, or has been closed."
            )
        _prepare(connection)
        failed.pop_all()
        return connection


def start(name: str, run: Callable[..., None], *args: Any) -> threading.Thread:
    """Starts a thread, for which the end of the process does not wait."""
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    thread.start()
    return thread


def _family(host: str) -> int:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]


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


def _prepare(connection: socket.socket) -> None:
    """Prepares a connection: small messages go at once, and a lost host shows within 5 s."""
    _set_timeout(connection, socket.SO_RCVTIMEO, READ_TIMEOUT)
    _set_timeout(connection, socket.SO_SNDTIMEO, 0)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, number in _ALIVE.items() if _LINUX else ():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), number)


class Door:
    """Lets the other processes of a mesh in, at addresses of its own, until it is closed.

    Each connection has a thread until it has proved to be a process of the mesh, or has said
    nothing for too long. So one that says nothing, or garbage, holds up nobody.

    Args:
        name: that of its threads.
        secret: some bytes that all processes of the mesh know.
        address: the address of this host for other hosts; None listens for this host alone.
        enter: takes in a rank and its connection, and tells whether it has.
        port: the TCP port; by default any that is free.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        address: str | None,
        enter: Callable[[int, socket.socket], bool],
        port: int = 0,
    ):
        self._name, self._secret, self._enter, self._open = name, secret, enter, True
        host, unix = address or "127.0.0.1", None
        tcp = socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
        self._listening = [tcp]
        if _LINUX:
            unix = b"\0jaxpp-" + secrets.token_hex(16).encode()
            self._listening.append(socket.socket(socket.AF_UNIX))
            self._listening[-1].bind(unix)
            self._listening[-1].listen(_BACKLOG)
        self.addresses = Addresses(host_identity(), unix, (host, tcp.getsockname()[1]))
        for each in self._listening:
            each.settimeout(1)  # not all systems wake who waits where it is shut down
            start(name, self._accept, each)

    def close(self) -> None:
        """Listens no more, and lets nobody in; may be repeated."""
        self._open = False
        for each in self._listening:
            with contextlib.suppress(OSError):  # it has been closed
                each.shutdown(socket.SHUT_RDWR)  # this wakes the thread that waits for it

    def _accept(self, listening: socket.socket) -> None:
        with listening:
            while self._open:
                try:
                    start(self._name, self._let_in, listening.accept()[0])
                except (OSError, RuntimeError):  # no descriptor or no thread is left now
                    time.sleep(0.01)

    def _let_in(self, connection: socket.socket) -> None:
        admitted = False
        # The words of a stranger make many sorts of errors there, an AssertionError too.
        with contextlib.suppress(Exception), _words(connection) as words:
            deliver_challenge(words, self._secret)
            answer_challenge(words, self._secret)
            (rank,) = _HELLO.unpack(words.recv_bytes(_HELLO.size))
            _prepare(connection)
            # Its process sends nothing before it is welcome; nor does this one, before all are.
            admitted = self._open and self._enter(rank, connection)
            words.send_bytes(_WELCOME if admitted else _UNWANTED)
        if not admitted:
            connection.close()
