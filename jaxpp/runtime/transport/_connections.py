"""The connections of a process to the others of its mesh. Who waits reads."""

import collections
import contextlib
import dataclasses
import functools
import queue
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxpp.runtime.transport._errors import Aborted, NotComputed, PeerLost, TransportError
from jaxpp.runtime.transport._frames import Read, Reader
from jaxpp.runtime.transport._handshake import Addresses, Door, SocketKind, connect, start


@dataclasses.dataclass(eq=False, slots=True)
class Peer:
    """The connection to another process, whose first rank is `rank`."""

    rank: int
    reader: Reader
    #: Writes what cannot be written at once: the messages of `tasks`, until it gets None there.
    thread: threading.Thread | None = None
    tasks: "queue.SimpleQueue[Any]" = dataclasses.field(default_factory=queue.SimpleQueue)
    #: What has not been written, each with its `arrays` whose values it waits for.
    unsent: collections.deque[Any] = dataclasses.field(default_factory=collections.deque)
    #: Why the process cannot be reached any more, and whether all that came has been read.
    lost: str = ""
    ended: bool = False


class Connections:
    """The connections of a process in an epoch: from one reset of its mesh to the next.

    No thread reads. Who waits, for a message, for sends, or for values, reads meanwhile what comes
    from all processes. So two that send to each other cannot block each other: each of them comes
    to wait. A message that has been read is kept until it is received, so the schedule bounds the
    number of these. A thread of each connection writes what cannot be written at once.

    Of the `transport` its `memory` is called with each header that comes, `take` with each message,
    `write` with what was `put`, and `on_failure` with the error, on some thread, when a process is
    lost or after an abort. For `secret`, `address` and `kind` see `SocketTransport`.
    """

    def __init__(
        self, epoch: int, transport: Any, secret: bytes, address: str | None, kind: SocketKind
    ):
        self.epoch, self._transport, self._rank = epoch, transport, transport.rank
        self._connect = functools.partial(connect, epoch, self._rank, secret=secret, kind=kind)
        self.error: BaseException | None = None
        #: What has arrived, by program, call and tag: with its arrays, or with its bytes if it is
        #: small or its types unknown.
        self.mail: dict[tuple[int, ...], Read] = {}
        #: The connections, by the first rank of the process.
        self.peers: dict[int, Peer] = {}
        #: For each rank the first rank of its process; none before `connect`.
        self._firsts: dict[int, int] = {}
        self._changed = threading.Condition()
        #: Tells whether a thread reads. A byte on `_bell` wakes it.
        self._pumping = self._over = False
        self._bell, self._heard = socket.socketpair()
        self._bell.setblocking(False)
        self._by_descriptor: dict[int, Peer] = {}
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)
        self._door = Door(f"accept-{self._rank}", secret, address, self._add)
        #: Where others reach this process.
        self.addresses = self._door.addresses

    # ---- opening --------------------------------------------------------------------------------

    def connect(self, firsts: Mapping[int, int], peers: Mapping[int, Addresses]) -> None:
        """Connects to the processes before this one; those behind it connect to this one.

        `firsts` has for each rank the first rank of its process. This one listens until all are in.
        """
        for first in dict.fromkeys(firsts.values()):
            if first < self._rank and first not in self.peers:
                connection = self._connect(first, peers[first])
                if not self._add(self.epoch, first, connection):
                    connection.close()
        with self._changed:
            self._firsts = dict(firsts)
            self._close_door()

    def _add(self, epoch: int, rank: int, connection: socket.socket) -> bool:
        """Takes a connection in, unless it is of another epoch; tells whether it has."""
        with self._changed:
            if epoch != self.epoch or rank in self.peers or self._over:
                return False
            peer = Peer(rank, Reader(connection, functools.partial(self._transport.memory, rank)))
            self._by_descriptor[connection.fileno()] = self.peers[rank] = peer
            self._poll.register(connection, select.POLLIN)
            self._close_door()
            return True

    def _close_door(self) -> None:
        """Lets nobody in any more once all are; the caller holds the lock."""
        if self._firsts and {*self._firsts.values()} <= {self._rank, *self.peers}:
            self._door.close()

    # ---- reading, by who waits ------------------------------------------------------------------

    def wait(self, over: Callable[[], bool]) -> None:
        """Waits until it is over, or an error, and reads meanwhile; the only place that waits."""
        with self._changed:
            while self.error is None and not over():
                if self._pumping:  # another thread does, and tells this one of it
                    self._changed.wait()
                else:
                    self._read_once()

    def _read_once(self) -> None:
        """Waits for something to read, and reads it; the caller holds the lock, but for that."""
        self._pumping = True
        self._changed.release()
        try:
            for descriptor, _ in self._poll.poll(1000):
                self._read(descriptor)
        finally:
            self._changed.acquire()
            self._pumping = False
            self._changed.notify_all()

    def wake(self) -> None:
        """Wakes the thread that reads, which tells others."""
        with self._changed:
            if self._pumping:
                with contextlib.suppress(OSError):  # it has bytes enough
                    self._bell.send(b"!")

    def _read(self, descriptor: int) -> None:
        peer = self._by_descriptor.get(descriptor)
        if peer is None:
            with contextlib.suppress(OSError):  # it has ended
                self._heard.recv(4096)
            return
        try:
            for found in peer.reader.read():
                self._transport.take(self, peer, found)
        except (EOFError, OSError) as error:
            self._poll.unregister(descriptor)
            broke = f"it broke ({error})"
            self._lose(peer, "its other end was closed" if isinstance(error, EOFError) else broke)
            peer.ended = True
        except BaseException as error:
            self.abort(error)

    # ---- writing --------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """The number of messages that have not left."""
        return sum([len(peer.unsent) for peer in self.peers.values()])

    def reading(self, arrays: list[Any]) -> bool:
        """Tells whether the value of one of some arrays is still to be read for a message."""
        items = [item for peer in self.peers.values() for item in peer.unsent]
        return not {*map(id, arrays)}.isdisjoint(id(a) for item in items for a in item.arrays)

    def put(self, item: Any, peer: Peer) -> None:
        """Lets the thread of a connection write a message."""
        with self._changed:
            peer.unsent.append(item)
            if peer.thread is None:
                peer.thread = start(f"send-{self._rank}-{peer.rank}", self._write_all, peer)
        peer.tasks.put(item)

    def _write_all(self, peer: Peer) -> None:
        with peer.reader.connection:
            while (item := peer.tasks.get()) is not None:
                if not peer.lost and self.error is None:
                    self.attempt(peer, functools.partial(self._transport.write, item, peer))
                del item  # it would hold the values while the thread waits for the next one
                with self._changed:
                    peer.unsent.popleft()
                    self.wake()

    # ---- failure, and the end -------------------------------------------------------------------

    def attempt(self, peer: Peer, act: Callable[[], None]) -> None:
        """Writes to a process, or pulls from it; notes an error, which later calls raise."""
        try:
            act()
        except OSError as error:
            self._lose(peer, f"it broke ({error})")
        except PeerLost as error:
            self._lose(peer, error.reason)
        except BaseException as error:
            self.abort(error)

    def _peer(self, rank: int) -> Peer | None:
        return self.peers.get(self._firsts.get(rank, -1))

    def ended(self, rank: int) -> bool:
        """Tells whether no message comes from a rank any more."""
        peer = self._peer(rank)
        return peer is None or peer.ended

    def check(self) -> None:
        """Raises an error after an abort."""
        if self.error is not None:
            raise Aborted(
                f"The messages of rank {self._rank} were aborted: "
                f"{type(self.error).__name__}: {self.error}"
            ) from self.error

    def reach(self, rank: int) -> Peer:
        """Returns the connection to a rank; raises an error if there is none any more."""
        self.check()
        if (peer := self._peer(rank)) is None:
            known = sorted(r for r, first in self._firsts.items() if first in self.peers)
            raise TransportError(
                f"Rank {self._rank} has to reach rank {rank}, and is connected to ranks {known}; "
                f"connect all ranks before one sends."
            )
        if peer.lost:
            raise PeerLost(rank, peer.lost)
        return peer

    def _lose(self, peer: Peer, reason: str) -> None:
        """Notes that a process cannot be reached, and wakes all threads that wait for it."""
        with self._changed:
            if peer.lost or self.error is not None:
                return
            peer.lost = reason
            self.wake()
        with contextlib.suppress(OSError):  # what has come already can still be read
            peer.reader.connection.shutdown(socket.SHUT_RDWR)
        self._transport.on_failure(PeerLost(peer.rank, reason))

    def abort(self, error: BaseException) -> None:
        """Ends all waits: `check` raises `Aborted` from now on, with `error` as the cause."""
        with self._changed:
            if self.error is not None:
                return
            self.error = error.__cause__ if isinstance(error, NotComputed) else error
            self.mail.clear()
            self.wake()
        self._transport.on_failure(error)

    def end(self) -> list[threading.Thread]:
        """Ends all connections; returns their threads, which end once their work is over."""
        self._door.close()
        with self._changed:
            self.error = self.error or TransportError("it was reset or closed")
            self._over = True
            self.mail.clear()
            self.wake()
        peers = list(self.peers.values())
        for peer in peers:
            with contextlib.suppress(OSError):  # the other end may have closed it first
                peer.reader.connection.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._changed.wait_for(lambda: not self._pumping, 1)
        for peer in peers:
            if peer.thread is None:
                peer.reader.connection.close()
            else:
                peer.tasks.put(None)  # the thread closes it
        self._bell.close()
        self._heard.close()
        return [peer.thread for peer in peers if peer.thread is not None]
