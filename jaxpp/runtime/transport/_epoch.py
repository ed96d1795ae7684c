"""One epoch of a transport: its channels to other ranks, and the messages that have arrived."""

import collections
import contextlib
import dataclasses
import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpp._program import Message
from jaxpp.runtime.arrays import is_ready
from jaxpp.runtime.transport._buffers import BufferPool
from jaxpp.runtime.transport._errors import Aborted, NotComputed, PeerLost, TransportError
from jaxpp.runtime.transport._frames import (
    SMALL,
    Bytes,
    Header,
    Unpacker,
    padded,
    send_frame,
)
from jaxpp.runtime.transport._link import Link
from jaxpp.runtime.transport._pull import Puller

#: A message by its program, call and tag.
Key = tuple[int, int, int]
#: Seconds for which the thread of a link leaves it to a thread that waits for messages.
PAUSE = 0.01
#: The memory of this host; no message has more bytes.
MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Arrived(NamedTuple):
    """A message that has come in: its arrays, or its bytes if it is small or its types unknown.

    `start_ns` and `end_ns` are when its first byte was seen, and when it was ready.
    """

    source: int
    nbytes: int
    arrays: list[Any] | None
    buffer: Any
    start_ns: int
    end_ns: int


class Outgoing(NamedTuple):
    """A message that waits for its values, and for earlier messages."""

    header: Header
    arrays: list[Any]
    message: Message
    unpack: Unpacker | Puller


@dataclasses.dataclass(slots=True)
class Channel:
    """The way to another rank.

    Args:
        queue: what its thread has to send, once it has one; `"connect"` only opens a connection,
            and None ends the thread.
        unsent: the number of messages that the thread has not written.
        links: the connections that are open, of either end.
        lost: the reason why the rank cannot be reached any more; empty while it can.
    """

    queue: "queue.SimpleQueue[Outgoing | str | None] | None" = None
    unsent: int = 0
    links: list[Link] = dataclasses.field(default_factory=list)
    lost: str = ""


class Epoch:
    """The work of a transport from one reset to the next; its threads know nothing else.

    Each connection has a thread that reads messages, whether or not somebody waits for them. Else
    two ranks that send to each other could both wait to be read. A thread that waits for a message
    reads small ones itself, and the connection's thread leaves them to it: two threads that take
    turns at one core cost more than the message. Each rank that gets messages has a thread here
    that waits for their values and writes them.

    Args:
        rank: this rank.
        number: counts the epochs of the ranks.
        pool: the memory it is received into.
        expected: what makes the arrays of messages, by program and tag.
        open_to: opens a connection to a rank.
        on_failure: called when a rank is lost, or the epoch aborts.
        observe_sent: called with a call, a message, and when it was sent.
    """

    def __init__(
        self,
        rank: int,
        number: int,
        pool: BufferPool,
        expected: Mapping[tuple[int, int], Unpacker | Puller],
        open_to: Callable[[int, int], socket.socket],
        on_failure: Callable[[BaseException], None],
        observe_sent: Callable[[int, Message, int, int], None],
    ):
        self.rank, self.number = rank, number
        self.threads: set[threading.Thread] = set()
        self._pool, self._expected = pool, expected
        self._open_to, self._on_failure, self._observe_sent = open_to, on_failure, observe_sent
        self._lock = threading.Lock()
        #: Signals that a message that somebody waits for has arrived, or never will.
        self._arrival = threading.Condition(self._lock)
        #: Signals that a message has left, or the values of its arrays have been read.
        self._departure = threading.Condition(self._lock)
        self._channels: dict[int, Channel] = {}
        #: The messages that threads wait for, and whether these would read the next one themselves.
        self._wanted: dict[Key, bool] = {}
        self._mail: dict[Key, Arrived] = {}
        self._unsent = 0
        #: The number of unread uses of each array, by the array's id.
        self._unread: collections.Counter[int] = collections.Counter()
        self._error: BaseException | None = None
        self._ended = False

    def _channel(self, rank: int) -> Channel:
        return self._channels.get(rank) or self._channels.setdefault(rank, Channel())

    # ---- sending --------------------------------------------------------------------------------

    def send(
        self, header: Header, arrays: list[Any], message: Message, unpack: Unpacker | Puller
    ) -> None:
        """Starts to send a message; writes a small one at once if it is ready."""
        rank = message.target
        channel, item = self._channel(rank), Outgoing(header, arrays, message, unpack)
        if not unpack.at_once and self._can_write(channel) and all(map(is_ready, arrays)):
            self._attempt(rank, lambda: self._write(rank, item, self._values(item)))
            return
        with self._lock:
            self._check(rank)
            channel.unsent += 1
            self._unsent += 1
            self._unread.update(map(id, arrays))
            self._put(rank, item)

    def _can_write(self, channel: Channel) -> bool:
        """Tells whether nothing is being written to a rank, nor will be before the next send."""
        started = channel.queue is not None and bool(channel.links)
        return started and not channel.unsent and not channel.lost and self._error is None

    def _put(self, rank: int, item: Outgoing | str) -> None:
        """Gives the thread of a channel something to do; the caller holds the lock."""
        channel = self._channel(rank)
        if channel.queue is None:
            channel.queue = queue.SimpleQueue()
            self._start(f"send-{self.rank}-{rank}", self._send_all, rank, channel.queue)
        channel.queue.put(item)

    def _start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self.threads.add(thread)
        thread.start()

    def _send_all(self, rank: int, items: "queue.SimpleQueue[Outgoing | str | None]") -> None:
        """Sends the messages of a queue, on a thread of its own."""
        while (item := items.get()) is not None:
            if isinstance(item, Outgoing):
                self._attempt(rank, lambda item=item: self._send_queued(rank, item))
                with self._lock:
                    self._channel(rank).unsent -= 1
                    self._unsent -= 1
                    self._departure.notify_all()
            else:
                self._attempt(rank, lambda: self._link(rank))
            del item  # it would hold the values while the thread waits for the next item

    def _attempt(self, rank: int, act: Callable[[], Any]) -> None:
        """Writes to a rank, or reads; notes an error, which later sends and receives raise."""
        try:
            act()
        except EOFError:
            self.lose(rank, "its other end was closed")
        except OSError as error:
            self.lose(rank, f"it broke ({error})")
        except PeerLost as error:
            self.lose(rank, error.reason)
        except BaseException as error:
            self.abort(error)

    def _send_queued(self, rank: int, item: Outgoing) -> None:
        try:
            values = self._values(item)
        finally:
            with self._lock:
                for number in map(id, item.arrays):
                    self._unread[number] -= 1
                    if not self._unread[number]:
                        del self._unread[number]
                self._departure.notify_all()
        self._write(rank, item, values)

    def _values(self, item: Outgoing) -> Sequence[Bytes]:
        """Waits for the values of a message; returns their bytes."""
        rank, names = item.message.target, item.message.names
        try:
            values = item.unpack.values(item.arrays)
        except Exception as error:
            error.add_note(
                f"in what rank {self.rank} was to send to rank {rank}: {', '.join(names)}"
            )
            raise NotComputed(names[0]) from error
        if (found := sum(map(padded, map(len, values)))) != item.header.nbytes:
            raise TransportError(
                f"Rank {self.rank} was to send {item.header.nbytes} bytes to rank {rank} under tag "
                f"{item.header.tag}, and the arrays have {found}; this is a bug of the program."
            )
        return values

    def _write(self, rank: int, item: Outgoing, values: Sequence[Bytes]) -> None:
        link = self._link(rank)
        if link is None:
            return
        start = time.monotonic_ns()
        send_frame(link.connection, item.header, values)
        self._observe_sent(item.header.call, item.message, start, time.monotonic_ns())

    def wait_for_values(self, arrays: list[Any]) -> None:
        """Waits until the values of arrays have been read, or the epoch aborts."""
        if self._unread:
            with self._lock:
                self._departure.wait_for(
                    lambda: (
                        self._error is not None or not any(id(a) in self._unread for a in arrays)
                    )
                )

    def wait_for_sends(self, most: int) -> None:
        """Waits until at most `most` messages have not left yet, or the epoch aborts."""
        if self._unsent > most:
            with self._lock:
                self._departure.wait_for(lambda: self._unsent <= most or self._error is not None)

    # ---- receiving ------------------------------------------------------------------------------

    def receive(self, key: Key, source: int, reads: bool = True) -> Arrived:
        """Waits for a message; takes and returns it.

        Args:
            key: of the message.
            source: the rank that sends it.
            reads: whether the caller may read it itself. Then its times do not tell when it came.
        """
        channel = self._channel(source)

        def over() -> bool:
            return key in self._mail or self._error is not None or bool(channel.lost)

        while (arrived := self._mail.pop(key, None)) is None:
            self._check(source)
            if reads:
                self._read_until(over, source, channel)
            with self._lock:
                if not over():
                    self._wanted[key] = reads
                    try:
                        self._wait_until(over, source, channel)
                    finally:
                        self._wanted.pop(key, None)
        return arrived

    def _read_until(self, over: Callable[[], bool], source: int, channel: Channel) -> None:
        """Reads what a rank sends until it is over, if no other thread does."""

        def left() -> bool:
            return len(channel.links) > 1 or over()

        def read() -> None:
            self._read(source, link, left)

        if len(channel.links) == 1 and (link := channel.links[0]).turn.acquire(blocking=False):
            try:
                while not left():
                    link.visits += 1
                    self._attempt(source, read)
            finally:
                link.turn.release()

    def _wait_until(self, over: Callable[[], bool], source: int, channel: Channel) -> None:
        """Waits until it is over, while other threads read; the caller holds the lock."""
        # A rank that is silent for a moment may be gone; an attempt to connect tells.
        if not self._arrival.wait_for(over, None if channel.links else 0.05):
            if not channel.links:
                self._put(source, "connect")
            self._arrival.wait_for(over)

    def serve(self, rank: int, connection: socket.socket) -> None:
        """Reads the messages of a connection, on the caller's thread, until it ends."""
        self.threads.add(threading.current_thread())
        link = self._register(rank, connection)
        if link is not None:
            self._drain(rank, link)

    def _drain(self, rank: int, link: Link) -> None:
        with link.connection:
            self._attempt(rank, lambda: self._read_all(rank, link))

    def _read_all(self, rank: int, link: Link) -> None:
        """Reads all messages of a link but those that a thread which waits for them reads."""
        links = self._channel(rank).links
        while True:
            visits = link.visits
            while link.visits == visits and link.turn.acquire(blocking=False):
                try:
                    if self._read(rank, link) and len(links) == 1:
                        break
                finally:
                    link.turn.release()
            time.sleep(PAUSE)

    def _read(self, rank: int, link: Link, over: Callable[[], bool] | None = None) -> bool:
        """Reads a message into the mail; tells whether a thread waits that would read the next."""
        found = link.read(over)
        if found is None:
            return False
        header, data, start = found
        key, arrays = (header.program, header.call, header.tag), None
        unpack = self._expected.get((key[0], key[2]))
        if unpack is not None and unpack.at_once:
            arrays, data = unpack(data), None
        arrived = Arrived(rank, header.nbytes, arrays, data, start, time.monotonic_ns())
        if self._error is None:
            self._mail[key] = arrived
            # A thread that waits notes its key before it looks into the mail. So either this thread
            # sees the key, or that thread sees the message.
            if (reads := self._wanted.get(key)) is not None:
                with self._lock:
                    self._arrival.notify_all()
                return reads and header.nbytes <= SMALL
        return False

    def _begin(self, rank: int, header: Header) -> Any:
        """Checks the header of a message from a rank; gives the memory for a large one."""
        if not 0 <= header.nbytes <= MOST_BYTES:
            raise TransportError(
                f"Rank {rank} announced a message of {header.nbytes} bytes to rank {self.rank}, "
                f"which this host cannot hold; what came is no message of a rank."
            )
        unpack = self._expected.get((header.program, header.tag))
        if unpack is not None and unpack.nbytes != header.nbytes:
            raise TransportError(
                f"Rank {rank} sent {header.nbytes} bytes to rank {self.rank} under tag "
                f"{header.tag}, where the program has {unpack.nbytes}; the ranks run different "
                f"programs."
            )
        return self._pool.take(header.nbytes) if header.nbytes > SMALL else None

    # ---- connections ----------------------------------------------------------------------------

    def _link(self, rank: int) -> Link | None:
        """Returns a connection to a rank, opens one if need be; None where it is too late."""
        channel = self._channel(rank)
        with self._lock:
            if self._ended or self._error is not None or channel.lost:
                return None
            if channel.links:
                return channel.links[0]
        connection = self._open_to(rank, self.number)
        link = self._register(rank, connection)
        if link is None:
            connection.close()
            return None
        self._start(f"receive-{self.rank}-{rank}", self._drain, rank, link)
        return link

    def _register(self, rank: int, connection: socket.socket) -> Link | None:
        """Notes a connection; None where the epoch has ended, which then will not close it."""
        link = Link(connection, functools.partial(self._begin, rank))
        with self._lock:
            if self._ended:
                return None
            self._channel(rank).links.append(link)
            return link

    # ---- the end --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `Aborted` if the epoch was aborted."""
        if self._error is not None:
            raise Aborted(
                f"The messages of rank {self.rank} were aborted: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    def _check(self, rank: int) -> None:
        """Raises an error if messages can no longer go to a rank or come from it."""
        self.check()
        if lost := self._channel(rank).lost:
            raise PeerLost(rank, lost)

    def lose(self, rank: int, reason: str) -> None:
        """Notes that a rank cannot be reached, and wakes all threads that wait for it."""
        channel = self._channel(rank)
        with self._lock:
            if self._ended or self._error is not None or channel.lost:
                return
            channel.lost = reason
            self._wake()
        self._on_failure(PeerLost(rank, reason))

    def abort(self, error: BaseException) -> None:
        """Ends all waits: sends and receives raise, with `error` as their cause."""
        with self._lock:
            if self._ended or self._error is not None:
                return
            self._error = error.__cause__ if isinstance(error, NotComputed) else error
            self._mail.clear()
            self._wake()
        self._on_failure(error)

    def end(self) -> None:
        """Closes the connections; each thread ends once its current work is over."""
        with self._lock:
            self._error = self._error or TransportError("it was reset or closed")
            self._ended = True
            self._mail.clear()
            channels = list(self._channels.values())
            self._wake()
        for channel in channels:
            for link in channel.links:
                with contextlib.suppress(OSError):  # the other end may have closed it first
                    link.connection.shutdown(socket.SHUT_RDWR)
            if channel.queue is not None:
                channel.queue.put(None)

    def _wake(self) -> None:
        self._arrival.notify_all()
        self._departure.notify_all()

    def join(self, timeout: float) -> None:
        """Waits for the threads, at most `timeout` seconds in all."""
        deadline = time.monotonic() + timeout
        for thread in list(self.threads):
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))
