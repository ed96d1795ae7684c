"""`SocketTransport`: messages between the ranks of a process and others. Who waits reads."""

import collections
import contextlib
import dataclasses
import functools
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax

from jaxpp._program import Message
from jaxpp.runtime.arrays import Home, is_ready
from jaxpp.runtime.transport._buffers import BufferPool
from jaxpp.runtime.transport._errors import Aborted, NotComputed, PeerLost, TransportError
from jaxpp.runtime.transport._frames import (
    SMALL,
    Bytes,
    Header,
    Unpacker,
    padded,
    send_some,
    to_send,
)
from jaxpp.runtime.transport._handshake import Addresses, Door, Kind, connect
from jaxpp.runtime.transport._link import Link, Read
from jaxpp.runtime.transport._near import Near
from jaxpp.runtime.transport._pull import Puller, Pulls

#: The ways of arrays between ranks: over connections of some kind, or by JAX's transfers.
Transport = Literal["auto", "unix", "tcp", "jax"]
#: The memory of this host; no message has more bytes.
MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(eq=False, slots=True)
class _Outgoing:
    """A message to another process, and what makes its bytes.

    Once the values of its arrays have been read, it has none any more, but the pieces of its bytes
    that have not been written yet.
    """

    header: Header
    arrays: list[Any]
    message: Message
    unpack: Unpacker | Puller
    pieces: list[Bytes] | None = None
    start_ns: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class _Peer:
    """The connection to another process.

    Args:
        rank: the first rank of that process.
        link: the connection.
        thread: writes what cannot be written at once, from the first such message on.
        tasks: the messages that the thread has to write; None ends it.
        unsent: those that have not been written.
        lost: the reason why the process cannot be reached any more; empty while it can.
        ended: whether all that came from it has been read.
    """

    rank: int
    link: Link
    thread: threading.Thread | None = None
    tasks: "queue.SimpleQueue[_Outgoing | None]" = dataclasses.field(
        default_factory=queue.SimpleQueue
    )
    unsent: collections.deque[_Outgoing] = dataclasses.field(default_factory=collections.deque)
    lost: str = ""
    ended: bool = False


class SocketTransport:
    """Sends and receives the arrays of the ranks of a process.

    Arrays go between ranks of the process from device to device, by `Near`; between processes over
    sockets: Unix sockets on one host, TCP between hosts. Two processes have one connection.

    A send returns at once: a small message that is ready is written by the caller; a thread of the
    connection waits for the values of others and writes them. No thread reads. Who waits, for a
    message, for sends, or for values, reads meanwhile what comes from all processes. So two that
    send to each other cannot block each other: each of them comes to wait. A message that has been
    read is kept until it is received, so the schedule bounds the number of these.

    Args:
        homes: of each rank of this process its home: where what arrives goes, split there as the
            message says. From another process it comes as the bytes of the whole array, once; where
            a rank has several processes, each has a transport of its own, whose peers are those of
            the same number in other ranks, and sends its share.
        secret: some bytes that the ranks have in common and nobody else has.
        address: the address of this host at which other hosts reach it; by default only processes
            of this host can connect.
        kind: the sort of connections that this process opens; `"auto"` takes Unix sockets where
            it can.
        pulls: this process's part in JAX's transfers; with it the receiver pulls the arrays of each
            large message that is registered, and only what says so goes over the connection.
        run_ahead: how many messages may be unsent when the next is received, so that dispatch
            does not run ahead of the device, and take memory, without bound.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpp._program import Message
        >>> home = jax.devices()[0]
        >>> a, b = [SocketTransport({rank: home}, b"secret") for rank in range(2)]
        >>> for transport in (a, b):
        ...     transport.connect({0: a.addresses, 1: b.addresses})
        ...     transport.begin(1)
        >>> x = jnp.arange(3)
        >>> message = Message(0, 0, 1, ("x",), ("edge",), (x.aval,))
        >>> a.send([x], message)
        >>> b.receive(message)
        [Array([0, 1, 2], dtype=int32)]
        >>> a.close(), b.close()
        (None, None)
    """

    def __init__(
        self,
        homes: Mapping[int, Home],
        secret: bytes,
        *,
        address: str | None = None,
        kind: Kind = "auto",
        pulls: Pulls | None = None,
        run_ahead: int = 2,
    ):
        self.homes = dict(homes)
        #: The first rank of this process, which stands for all of them.
        self.rank = min(homes)
        self.kind: Kind = kind
        #: Records the times of messages, where it is not None: see `trace.Recorder`.
        self.recorder: Any = None
        #: Called, on some thread, with the error when a rank is lost or the transport aborts.
        self.on_failure: Callable[[BaseException], None] | None = None
        self._secret, self._address, self._pulls = secret, address, pulls
        #: The way of arrays between ranks of this process.
        self.near = Near(self.homes)
        self._run_ahead = run_ahead
        self._pool = BufferPool()
        #: What makes the arrays of messages, by their program and tag.
        self._unpackers: dict[tuple[int, int], Unpacker | Puller] = {}
        self._late: set[tuple[int, int]] = set()
        self._call, self._program = 0, 0
        #: The recorder for which a thread reads.
        self._told: Any = None
        #: Guards the state that threads share; signals what a thread may wait for.
        self._changed = threading.Condition()
        #: Tells whether a thread reads. A byte on `_bell` wakes it.
        self._pumping = self._closed = False
        self._bell, self._heard = socket.socketpair()
        self._bell.setblocking(False)
        self._begin_epoch(0)

    def _begin_epoch(self, number: int) -> None:
        self._number = number
        self._error: BaseException | None = None
        #: What has arrived, by program, call and tag: with its arrays, or with its bytes if it is
        #: small or its types unknown.
        self._mail: dict[tuple[int, ...], Read] = {}
        #: For each rank the first rank of its process; none before `connect`.
        self._firsts: dict[int, int] = {}
        #: The connections, by the first rank of the process.
        self._peers: dict[int, _Peer] = {}
        self.near.clear()
        self._by_descriptor: dict[int, _Peer] = {}
        self._poll = select.poll()
        self._poll.register(self._heard, select.POLLIN)
        self._door = Door(f"accept-{self.rank}", self._secret, self._address, self._add)

    # ---- connections ----------------------------------------------------------------------------

    @property
    def addresses(self) -> Addresses:
        """The addresses at which others reach this process; each reset makes new ones."""
        return self._door.addresses

    def connect(self, peers: Mapping[int, Addresses]) -> None:
        """Connects to the processes before this one; those behind it connect to this one.

        Once it has returned in all processes, they are connected. None listens any more then.

        Args:
            peers: the addresses of all ranks; those of one process are the same.

        Raises:
            PeerLost: a process is gone.
            TransportError: a process is in another epoch, or has another secret.
        """
        found: dict[Addresses, int] = {}
        firsts = {rank: found.setdefault(peers[rank], rank) for rank in sorted(peers)}
        firsts |= dict.fromkeys(self.homes, self.rank)
        for first in dict.fromkeys(firsts.values()):
            if first < self.rank and first not in self._peers:
                how = self._number, self.rank, first, peers[first], self._secret, self.kind
                if not self._add(self._number, first, connection := connect(*how)):
                    connection.close()
        with self._changed:
            self._firsts = firsts
            self._close_door()

    def _add(self, epoch: int, rank: int, connection: socket.socket) -> bool:
        """Takes a connection in, unless the epoch has ended; tells whether it has."""
        with self._changed:
            if epoch != self._number or rank in self._peers or self._closed:
                return False
            peer = _Peer(rank, Link(connection, functools.partial(self._memory, rank)))
            self._by_descriptor[connection.fileno()] = self._peers[rank] = peer
            self._poll.register(connection, select.POLLIN)
            self._close_door()
            return True

    def _close_door(self) -> None:
        """Lets nobody in any more once all are; the caller holds the lock."""
        if self._firsts and {*self._firsts.values()} <= {self.rank, *self._peers}:
            self._door.close()

    # ---- reading, by who waits ------------------------------------------------------------------

    def _pump(self, over: Callable[[], bool]) -> None:
        """Waits until it is over, and reads what comes meanwhile; the only place that waits."""
        with self._changed:
            number = self._number
            while number == self._number and not over():
                if self._pumping:  # another thread does, and tells this one of it
                    self._changed.wait()
                else:
                    self._read_once()
            if number != self._number:
                raise Aborted("The transport was reset.")

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

    def _wake(self) -> None:
        """Wakes the thread that reads, which tells others; the caller holds the lock."""
        if self._pumping:
            with contextlib.suppress(OSError):  # it has bytes enough
                self._bell.send(b"!")

    def _read(self, descriptor: int) -> None:
        peer = self._by_descriptor.get(descriptor)
        if peer is None:
            self._heard.recv(4096)
            return
        try:
            for found in peer.link.read():
                self._take(peer, found)
        except (EOFError, OSError) as error:
            self._poll.unregister(descriptor)
            peer.ended = True
            broke = f"it broke ({error})"
            self._lose(peer, "its other end was closed" if isinstance(error, EOFError) else broke)
        except BaseException as error:
            self.abort(error)

    def _memory(self, rank: int, header: Header) -> Any:
        """Checks the header of a message from a rank; gives the memory for a large one."""
        if not 0 <= header.nbytes <= MOST_BYTES:
            raise TransportError(
                f"Rank {rank} announced a message of {header.nbytes} bytes to rank {self.rank}, "
                f"which this host cannot hold; what came is no message of a rank."
            )
        unpack = self._unpackers.get((header.program, header.tag))
        if unpack is not None and unpack.nbytes != header.nbytes:
            raise TransportError(
                f"Rank {rank} sent {header.nbytes} bytes to rank {self.rank} under tag "
                f"{header.tag}, where the program has {unpack.nbytes}; the ranks run different "
                f"programs."
            )
        return self._pool.take(header.nbytes) if header.nbytes > SMALL else None

    def _take(self, peer: _Peer, found: Read) -> None:
        """Puts a message into the mail."""
        key = found.header[:3]
        unpack = self._unpackers.get((found.header.program, found.header.tag))
        if isinstance(unpack, Puller):  # it waits in JAX, where nothing wakes it
            name, args = f"pull-{self.rank}-{peer.rank}", (peer, self._mail, found, unpack)
            threading.Thread(target=self._pull, args=args, name=name, daemon=True).start()
        elif unpack is not None and unpack.at_once:
            self._mail[key] = _unpacked(found, unpack)
        else:
            self._mail[key] = found

    def _pull(
        self, peer: _Peer, mail: dict[tuple[int, ...], Read], found: Read, unpack: Puller
    ) -> None:
        def pull() -> None:
            mail[found.header[:3]] = _unpacked(found, unpack)

        self._attempt(peer, pull)
        with self._changed:
            self._wake()

    def _listen(self, recorder: Any) -> None:
        """Reads as long as there is a recorder, so that it hears when messages come."""
        with contextlib.suppress(Aborted):
            self._pump(lambda: self.recorder is not recorder or self._error is not None)

    # ---- messages -------------------------------------------------------------------------------

    def expect(
        self, messages: Iterable[Message], program: int = 0, late: Iterable[int] = ()
    ) -> None:
        """Registers the messages that these ranks send and receive in a program.

        Arrays of large registered messages are made as they come in. Those of other messages are
        made on the thread that receives them. What is sent under a `late` tag is copied first: a
        computation may take its memory before it has left.
        """
        self._late |= {(program, tag) for tag in late}
        for message in messages:
            if message.source in self.homes and message.target in self.homes:
                continue
            unpack = Unpacker.of(message, self._home(message))
            if self._pulls is not None and unpack.at_once:
                unpack = Puller(message, self._home(message), self._pulls)
            self._unpackers[program, message.tag] = unpack

    def forget(self, program: int) -> None:
        """Forgets the messages of a program."""
        for key in [k for k in self._unpackers if k[0] == program]:
            del self._unpackers[key]
        self._late = {key for key in self._late if key[0] != program}

    def _unpacker(self, message: Message) -> Unpacker | Puller:
        known = self._unpackers.get((self._program, message.tag))
        return known or Unpacker.of(message, self._home(message))

    def _home(self, message: Message) -> Home:
        """Returns the home of the rank of this process that sends or receives a message."""
        return self.homes[message.source if message.source in self.homes else message.target]

    def begin(self, call: int, program: int = 0) -> None:
        """Sets the call and the program of the next messages."""
        self._call, self._program = call, program
        self.near.clear()
        if self.recorder is not self._told:
            self._told = self.recorder
            if self._told is not None:
                name, args = f"listen-{self.rank}", (self._told,)
                threading.Thread(target=self._listen, args=args, name=name, daemon=True).start()

    def send(self, arrays: list[Any], message: Message) -> None:
        """Starts to send arrays to a rank; does not wait.

        Raises:
            PeerLost: if that rank is gone.
            Aborted: if the transport was aborted, or an earlier value could not be computed.
            TransportError: if that rank is not connected.
        """
        late = (self._program, message.tag) in self._late
        if message.target in self.homes:
            self._check()
            self.near.send(arrays, message, late=late)
            return
        peer, unpack = self._reached(message.target), self._unpacker(message)
        if late:
            arrays = jax.device_put(arrays, may_alias=False)
        header = Header(self._program, self._call, message.tag, message.source, unpack.nbytes)
        item = _Outgoing(header, unpack.prepared(arrays), message, unpack)
        if not unpack.at_once and not peer.unsent and all(map(is_ready, item.arrays)):
            self._attempt(peer, lambda: self._write(item, peer, socket.MSG_DONTWAIT))
            if not item.pieces:
                return
        with self._changed:
            peer.unsent.append(item)
            if peer.thread is None:
                name, args = f"send-{self.rank}-{peer.rank}", (peer,)
                peer.thread = threading.Thread(
                    target=self._write_all, args=args, name=name, daemon=True
                )
                peer.thread.start()
        peer.tasks.put(item)

    def copies_of(self, message: Message) -> tuple[Any, list[Any]] | None:
        """Returns what `Near.copies_of` does; None for a message to another process."""
        return self.near.copies_of(message) if message.target in self.homes else None

    def _write_all(self, peer: _Peer) -> None:
        """Writes what cannot be written at once, on a thread of its own."""
        with peer.link.connection:
            while (item := peer.tasks.get()) is not None:
                if not peer.lost and self._error is None and self._peers.get(peer.rank) is peer:
                    self._attempt(peer, functools.partial(self._write, item, peer))
                del item  # it would hold the values while the thread waits for the next one
                with self._changed:
                    peer.unsent.popleft()
                    self._wake()

    def _write(self, item: _Outgoing, peer: _Peer, flags: int = 0) -> None:
        """Writes a message; as much of it as the connection takes at once where `flags` say so."""
        if item.pieces is None:
            pieces = to_send(item.header, self._values(item))
            item.start_ns, item.pieces = time.monotonic_ns(), pieces
        try:
            while item.pieces:
                send_some(peer.link.connection, item.pieces, flags)
        except BlockingIOError:
            return
        if self.recorder is not None:
            self.recorder.sent(item.header.call, item.message, item.start_ns, time.monotonic_ns())

    def _attempt(self, peer: _Peer, act: Callable[[], None]) -> None:
        """Writes to a rank, or pulls from it; notes an error, which later calls raise."""
        try:
            act()
        except OSError as error:
            self._lose(peer, f"it broke ({error})")
        except PeerLost as error:
            self._lose(peer, error.reason)
        except BaseException as error:
            if self._peers.get(peer.rank) is peer:
                self.abort(error)

    def _values(self, item: _Outgoing) -> list[Bytes]:
        """Waits for the values of a message; returns their bytes."""
        rank, names = item.message.target, item.message.names
        try:
            values = item.unpack.values(item.arrays)
        except Exception as error:
            error.add_note(
                f"in what rank {self.rank} was to send to rank {rank}: {', '.join(names)}"
            )
            raise NotComputed(names[0]) from error
        finally:
            item.arrays = []
            # Also where nobody waits for it: on two cores 16 MiB took 2.3 times as long without.
            with self._changed:
                self._wake()
        if (found := sum(map(padded, map(len, values)))) != item.header.nbytes:
            raise TransportError(
                f"Rank {self.rank} was to send {item.header.nbytes} bytes to rank {rank} under tag "
                f"{item.header.tag}, and the arrays have {found}; this is a bug of the program."
            )
        return list(values)

    def receive(self, message: Message) -> list[Any]:
        """Waits for a message; returns its arrays.

        Raises:
            PeerLost: if the rank that sends it is gone.
            Aborted: if the transport was aborted, or a value to send could not be computed.
            TransportError: if what arrived is something else.
        """
        key, source = (self._program, self._call, message.tag), message.source
        if source in self.homes:
            self._check()
            return self.near.receive(message)
        if self._unsent > self._run_ahead:
            self._pump(lambda: self._unsent <= self._run_ahead or self._error is not None)
        if key not in self._mail:
            self._pump(lambda: key in self._mail or self._ended(source))
        if (found := self._mail.pop(key, None)) is None:
            self._reached(source)
            raise Aborted("The transport was reset.")
        header, data, start, end = found
        unpack = self._unpacker(message)
        if (header.source, header.nbytes) != (source, unpack.nbytes):
            raise TransportError(
                f"Rank {self.rank} waits for {unpack.nbytes} bytes from rank {source} under tag "
                f"{message.tag}, and {header.nbytes} came from rank {header.source}; the ranks "
                f"run different programs."
            )
        if self.recorder is not None:
            self.recorder.received(self._call, message, start, end)
        return data if isinstance(data, list) else unpack(data)

    @property
    def _unsent(self) -> int:
        return sum([len(peer.unsent) for peer in self._peers.values()])

    def settle(self, arrays: list[Any]) -> None:
        """Waits until the sends have read the values of some arrays.

        Once its value has been read, an array may be donated: the bytes being written stay
        unchanged. If it is donated before, its send fails.
        """
        if self._unsent:
            peers, numbers = self._peers.values(), set(map(id, arrays))
            self._pump(
                lambda: (
                    self._error is not None
                    or all(
                        id(array) not in numbers
                        for peer in peers
                        for item in peer.unsent
                        for array in item.arrays
                    )
                )
            )

    def flush(self) -> None:
        """Waits until all messages have left.

        Raises:
            Aborted: if the transport was aborted, or a value to send could not be computed.
        """
        self._pump(lambda: not self._unsent or self._error is not None)
        self._check()

    # ---- failure, and the end -------------------------------------------------------------------

    def _ended(self, rank: int) -> bool:
        """Tells whether no message comes from a rank any more."""
        peer = self._peers.get(self._firsts.get(rank, -1))
        return self._error is not None or peer is None or peer.ended

    def _check(self) -> None:
        """Raises an error if the transport was aborted."""
        if self._error is not None:
            raise Aborted(
                f"The messages of rank {self.rank} were aborted: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    def _reached(self, rank: int) -> _Peer:
        """Returns the connection to a rank; raises an error if there is none any more."""
        self._check()
        peer = self._peers.get(self._firsts.get(rank, -1))
        if peer is None:
            known = sorted(r for r, first in self._firsts.items() if first in self._peers)
            raise TransportError(
                f"Rank {self.rank} has to reach rank {rank}, and is connected to ranks {known}; "
                f"connect all ranks before one sends."
            )
        if peer.lost:
            raise PeerLost(rank, peer.lost)
        return peer

    def _lose(self, peer: _Peer, reason: str) -> None:
        """Notes that a process cannot be reached, and wakes all threads that wait for it."""
        with self._changed:
            known = self._peers.get(peer.rank) is peer
            if not known or peer.lost or self._error is not None:
                return
            peer.lost = reason
            self._wake()
        with contextlib.suppress(OSError):  # what has come already can still be read
            peer.link.connection.shutdown(socket.SHUT_RDWR)
        self._tell(PeerLost(peer.rank, reason))

    def abort(self, error: BaseException) -> None:
        """Ends all waits here: sends and receives raise `Aborted`, with `error` as the cause.

        Other ranks are not told. All sends and receives raise until the next reset.
        """
        with self._changed:
            if self._error is not None:
                return
            self._error = error.__cause__ if isinstance(error, NotComputed) else error
            self._mail.clear()
            self._wake()
        self._tell(error)

    def _tell(self, error: BaseException) -> None:
        if self.on_failure is not None:
            self.on_failure(error)

    def reset(self, epoch: int) -> None:
        """Starts afresh after a failure, without connections; drops messages on their way.

        Abort all ranks before the first one is reset. Else a rank would take the end of its
        connections for the loss of a rank. Reset all before the first one connects.

        Args:
            epoch: a number that has not been used; the same on all ranks.

        Raises:
            ValueError: the epoch has been used.
            OSError: this process cannot listen.
        """
        if self._closed or epoch <= self._number:
            raise ValueError(f"A transport in epoch {self._number} needs a later one, got {epoch}.")
        self._end()
        with self._changed:
            self._begin_epoch(epoch)
            self._told = None

    def _end(self) -> list[_Peer]:
        """Ends all connections; each thread ends once its current work is over."""
        self._door.close()
        with self._changed:
            self._error = self._error or TransportError("it was reset or closed")
            self._mail.clear()
            peers = list(self._peers.values())
            self._wake()
        for peer in peers:
            with contextlib.suppress(OSError):  # the other end may have closed it first
                peer.link.connection.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._changed.wait_for(lambda: not self._pumping, 1)
        for peer in peers:
            if peer.thread is None:
                peer.link.connection.close()
            else:
                peer.tasks.put(None)  # the thread closes it
        return peers

    def close(self) -> None:
        """Ends all connections and threads; waiting sends and receives raise `Aborted`."""
        if self._closed:
            return
        self._closed = True
        threads = [peer.thread for peer in self._end() if peer.thread is not None]
        deadline = time.monotonic() + 5
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
        self._bell.close()
        self._heard.close()
        self._pool.clear()


def _unpacked(found: Read, unpack: Unpacker | Puller) -> Read:
    """Makes the arrays of a message."""
    return found._replace(data=unpack(found.data), end_ns=time.monotonic_ns())
