"""The connections of a process to the others of its mesh. Who waits reads."""

import collections
import contextlib
import dataclasses
import functools
import queue
import select
import socket
import threading
import time
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
    #: The messages that are not written yet, each with the `arrays` whose values it waits for.
    unsent: collections.deque[Any] = dataclasses.field(default_factory=collections.deque)
    #: Why the process cannot be reached any more, and whether all that came has been read.
    lost: str = ""
    ended: bool = False


class Connections:
    """The connections of a process to the others, from one start or restart to the next.

    No thread reads. Who waits, for a message, for sends, or for values, reads meanwhile what comes
    from all processes. So two that send to each other cannot block each other: each of them comes
    to wait. A message that has been read is kept until it is received, so the schedule bounds the
    number of these. A thread of each connection writes what cannot be written at once.

    The first `rank` of a process stands for all of them; `SocketTransport` describes the others. It
    has what to do with a header, with a message that has been read, and with what was `put`.
    """

    memory: Any
    take: Any
    write: Any

    def __init__(self, rank: int, secret: bytes, address: str | None, kind: SocketKind):
        self.rank, self._secret = rank, secret
        self._kind: SocketKind = kind
        #: Called, on some thread, with the error when a process is lost or after an abort.
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self._error: BaseException | None = None
        #: The messages that have arrived, by program, call and tag: with their arrays, or with
        #: their bytes if they are small or of unknown types.
        self.mail: dict[tuple[int, ...], Read] = {}
        #: The connections, by the first rank of the process.
        self.peers: dict[int, Peer] = {}
        #: For each rank the first rank of its process; none before `connect`.
        self._firsts: dict[int, int] = {}
        self._changed = threading.Condition()
        #: Tells whether a thread reads. A byte on `_bell` wakes it.
        self._pumping = self._closed = False
        self._bell, self._heard = socket.socketpair()
        self._bell.setblocking(False)
        self._by_descriptor: dict[int, Peer] = {}
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)
        self._door = Door(f"accept-{rank}", secret, address, self._add)
        #: The address at which others reach this process.
        self.addresses = self._door.addresses

    # ---- opening --------------------------------------------------------------------------------

    def connect(self, peers: Mapping[int, Addresses]) -> None:
        """Connects to the processes before this one; those behind it connect to this one.

        Once it has returned in all processes, they are connected, and none listens any more. The
        ranks of one process have the same addresses.

        Raises:
            PeerLost: a process is gone.
            TransportError: a process has another secret.
        """
        first_at: dict[Addresses, int] = {self.addresses: self.rank}
        firsts = {rank: first_at.setdefault(peers[rank], rank) for rank in sorted(peers)}
        for first in dict.fromkeys(firsts.values()):
            if first < self.rank and first not in self.peers:
                connection = connect(self.rank, first, peers[first], self._secret, self._kind)
                if not self._add(first, connection):
                    connection.close()
        with self._changed:
            self._firsts = firsts
            self._close_door()

    def _add(self, rank: int, connection: socket.socket) -> bool:
        """Takes a connection in, unless there is one; tells whether it has."""
        with self._changed:
            if rank in self.peers or self._closed:
                return False
            peer = Peer(rank, Reader(connection, functools.partial(self.memory, rank)))
            self._by_descriptor[connection.fileno()] = self.peers[rank] = peer
            self._poll.register(connection, select.POLLIN)
            self._close_door()
            return True

    def _close_door(self) -> None:
        """Lets nobody in any more once all are; the caller holds the lock."""
        if self._firsts and {*self._firsts.values()} <= {self.rank, *self.peers}:
            self._door.close()

    # ---- reading, by who waits ------------------------------------------------------------------

    def wait(self, over: Callable[[], bool]) -> None:
        """Waits until it is over, or an error, and reads meanwhile; the only place that waits."""
        with self._changed:
            while self._error is None and not over():
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
                self.take(peer, found)
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
                peer.thread = start(f"send-{self.rank}-{peer.rank}", self._write_all, peer)
        peer.tasks.put(item)

    def _write_all(self, peer: Peer) -> None:
        with peer.reader.connection:
            while (item := peer.tasks.get()) is not None:
                if not peer.lost and self._error is None:
                    self.attempt(peer, functools.partial(self.write, item, peer))
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
        if self._error is not None:
            raise Aborted(
                f"The messages of rank {self.rank} were aborted: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    def reach(self, rank: int) -> Peer:
        """Returns the connection to a rank; raises an error if there is none any more."""
        self.check()
        if (peer := self._peer(rank)) is None:
            known = sorted(r for r, first in self._firsts.items() if first in self.peers)
            raise TransportError(
                f"Rank {self.rank} has to reach rank {rank}, and is connected to ranks {known}; "
                f"connect all ranks before one sends."
            )
        if peer.lost:
            raise PeerLost(rank, peer.lost)
        return peer

    def _lose(self, peer: Peer, reason: str) -> None:
        """Notes that a process cannot be reached, and wakes all threads that wait for it."""
        with self._changed:
            if peer.lost or self._error is not None:
                return
            peer.lost = reason
            self.wake()
        with contextlib.suppress(OSError):  # what has come already can still be read
            peer.reader.connection.shutdown(socket.SHUT_RDWR)
        self.on_failure(PeerLost(peer.rank, reason))

    def abort(self, error: BaseException) -> None:
        """Ends all waits here: sends and receives raise `Aborted`, with `error` as the cause.

        Other processes are not told.
        """
        with self._changed:
            if self._error is not None:
                return
            self._error = error.__cause__ if isinstance(error, NotComputed) else error
            self.mail.clear()
            self.wake()
        self.on_failure(error)

    def close(self, timeout: float = 5.0) -> None:
        """Ends all connections; waiting sends and receives raise `Aborted`.

        Args:
            timeout: seconds to wait for the threads, which end once their work is over.
        """
        if self._closed:
            return
        self._door.close()
        with self._changed:
            self._error = self._error or TransportError("it was reset or closed")
            self._closed = True
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
        deadline = time.monotonic() + timeout
        for peer in peers:
            if peer.thread is not None and peer.thread is not threading.current_thread():
                peer.thread.join(max(deadline - time.monotonic(), 0))
