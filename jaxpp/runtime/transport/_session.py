"""One epoch of a transport: its connections, and the messages that have arrived over them."""

import collections
import contextlib
import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpp._program import Message
from jaxpp.runtime.arrays import to_host
from jaxpp.runtime.transport._buffers import BufferPool
from jaxpp.runtime.transport._errors import Aborted, NotComputed, PeerLost, TransportError
from jaxpp.runtime.transport._frames import (
    SMALL,
    Bytes,
    FrameReader,
    Header,
    ShareUnpacker,
    Unpacker,
    padded,
    send_frame,
)

#: A message by its program, call and tag.
Key = tuple[int, int, int]


@dataclasses.dataclass(slots=True)
class Traffic:
    """Counts of the messages and bytes that went to a rank, and that came from it."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


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


class Session:
    """The work of a transport from one reset to the next; its threads know nothing else.

    Each connection has a thread that reads messages, whether or not somebody waits for them. Else
    two ranks that send to each other could both wait to be read. Each rank that gets messages has a
    thread here that waits for their values and writes them.

    Args:
        rank: this rank.
        epoch: which session of this rank it is.
        pool: the memory it is received into.
        expected: what makes the arrays of messages, by program and tag.
        open_to: opens a connection to a rank.
        on_failure: called when a rank is lost, or the session aborts.
        observe_sent: called with a call, a message, and when it was sent.
        to_host: gives the bytes of an array, as they are sent.
    """

    def __init__(
        self,
        rank: int,
        epoch: int,
        pool: BufferPool,
        expected: dict[tuple[int, int], Unpacker | ShareUnpacker],
        open_to: Callable[[int, int], socket.socket],
        on_failure: Callable[[BaseException], None],
        observe_sent: Callable[[int, Message, int, int], None],
        to_host: Callable[[Any], np.ndarray] = to_host,
    ):
        self.rank, self.epoch = rank, epoch
        self.traffic: dict[int, Traffic] = collections.defaultdict(Traffic)
        self.threads: set[threading.Thread] = set()
        self._pool, self._expected = pool, expected
        self._open_to, self._on_failure, self._observe_sent = open_to, on_failure, observe_sent
        self._to_host = to_host
        self._lock = threading.Lock()
        #: Signals that a message that somebody waits for has arrived, or never will.
        self._arrival = threading.Condition(self._lock)
        #: Signals that a message has left, or the values of its arrays have been read.
        self._departure = threading.Condition(self._lock)
        self._wanted: set[Key] = set()
        self._mail: dict[Key, Arrived] = {}
        self._unsent = 0
        #: The number of unread uses of each array, by the array's id.
        self._unread: collections.Counter[int] = collections.Counter()
        self._senders: dict[int, _Sender] = {}
        self._links: dict[int, list[socket.socket]] = {}
        self._lost: dict[int, str] = {}
        self._error: BaseException | None = None
        self._ended = False

    # ---- sending --------------------------------------------------------------------------------

    def send(self, header: Header, arrays: list[Any], message: Message) -> None:
        """Starts to send a message; writes a small one at once if it is ready."""
        rank = message.target
        if header.nbytes <= SMALL and self._can_write(rank) and all(map(_is_ready, arrays)):
            self._attempt(rank, self._send_now, rank, Outgoing(header, arrays, message))
            return
        with self._lock:
            self._check(rank)
            sender = self._sender(rank)
            sender.unsent += 1
            self._unsent += 1
            self._unread.update(map(id, arrays))
        sender.queue.put(Outgoing(header, arrays, message))

    def _can_write(self, rank: int) -> bool:
        """Tells whether nothing is being written to a rank, nor will be before the next send."""
        sender = self._senders.get(rank)
        return (
            sender is not None
            and not sender.unsent
            and rank in self._links
            and self._error is None
            and rank not in self._lost
        )

    def _sender(self, rank: int) -> "_Sender":
        """Gives the sender to a rank; starts its thread if need be. The caller holds the lock."""
        if rank not in self._senders:
            sender = self._senders[rank] = _Sender()
            self._start(f"send-{self.rank}-{rank}", self._send_all, rank, sender)
        return self._senders[rank]

    def _start(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self.threads.add(thread)
        thread.start()

    def _send_all(self, rank: int, sender: "_Sender") -> None:
        """Sends the messages of a queue, on a thread of its own."""
        while (item := sender.queue.get()) is not None:
            if isinstance(item, Outgoing):
                self._attempt(rank, self._send_queued, rank, item)
                with self._lock:
                    sender.unsent -= 1
                    self._unsent -= 1
                    self._departure.notify_all()
            else:
                self._attempt(rank, self._link, rank)
            del item  # it would hold the values while the thread waits for the next item

    def _attempt(self, rank: int, write: Callable[..., Any], *args: Any) -> None:
        """Writes to a rank; notes an error, which later sends and receives raise."""
        try:
            write(*args)
        except OSError as error:
            self.lose(rank, f"the connection broke ({error})")
        except PeerLost as error:
            self.lose(rank, error.reason)
        except BaseException as error:
            self.abort(error)

    def _send_now(self, rank: int, item: Outgoing) -> None:
        self._write(rank, item, self._values(rank, item))

    def _send_queued(self, rank: int, item: Outgoing) -> None:
        try:
            values = self._values(rank, item)
        finally:
            self._read(item.arrays)
        self._write(rank, item, values)

    def _values(self, rank: int, item: Outgoing) -> Sequence[Bytes]:
        """Waits for the values of a message; returns their bytes."""
        names = item.message.names
        try:
            values = [self._to_host(array).data for array in item.arrays]
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
        send_frame(link, item.header, values)
        self._observe_sent(item.header.call, item.message, start, time.monotonic_ns())
        traffic = self.traffic[rank]
        traffic.messages_sent += 1
        traffic.bytes_sent += item.header.nbytes

    def _read(self, arrays: list[Any]) -> None:
        """Notes that the values of arrays have been read."""
        with self._lock:
            for number in map(id, arrays):
                self._unread[number] -= 1
                if not self._unread[number]:
                    del self._unread[number]
            self._departure.notify_all()

    def wait_for_values(self, arrays: list[Any]) -> None:
        """Waits until the values of arrays have been read, or the session aborts."""
        if self._unread:
            with self._lock:
                self._departure.wait_for(
                    lambda: (
                        self._error is not None or not any(id(a) in self._unread for a in arrays)
                    )
                )

    def wait_for_sends(self, most: int) -> None:
        """Waits until at most `most` messages have not left yet, or the session aborts."""
        if self._unsent > most:
            with self._lock:
                self._departure.wait_for(lambda: self._unsent <= most or self._error is not None)

    # ---- receiving ------------------------------------------------------------------------------

    def receive(self, key: Key, source: int) -> Arrived:
        """Waits for a message; takes and returns it."""
        arrived = self._mail.pop(key, None)
        if arrived is None:
            with self._lock:
                self._wait_for(key, source)
                if key not in self._mail:
                    self._check(source)
                arrived = self._mail.pop(key)
        return arrived

    def _wait_for(self, key: Key, source: int) -> None:
        def over() -> bool:
            return key in self._mail or self._error is not None or source in self._lost

        self._wanted.add(key)
        try:
            # A rank that is silent for a moment may be gone; an attempt to connect tells.
            if not self._arrival.wait_for(over, None if source in self._links else 0.05):
                if source not in self._links:
                    self._sender(source).queue.put("connect")
                self._arrival.wait_for(over)
        finally:
            self._wanted.discard(key)

    def serve(self, rank: int, link: socket.socket) -> None:
        """Reads the messages of a connection, on the caller's thread, until it ends."""
        self.threads.add(threading.current_thread())
        if self._register(rank, link):
            self._drain(rank, link)

    def _drain(self, rank: int, link: socket.socket) -> None:
        reader = FrameReader(link)
        try:
            while (header := reader.header()) is not None:
                self._receive_one(rank, reader, header)
            self.lose(rank, "it closed the connection")
        except OSError as error:
            self.lose(rank, f"the connection broke ({error})")
        except BaseException as error:
            self.abort(error)

    def _receive_one(self, rank: int, reader: FrameReader, header: Header) -> None:
        start = time.monotonic_ns()
        unpack = self._expected.get((header.program, header.tag))
        if unpack is not None and unpack.layout.nbytes != header.nbytes:
            raise TransportError(
                f"Rank {rank} sent {header.nbytes} bytes to rank {self.rank} under tag "
                f"{header.tag}, where the program has {unpack.layout.nbytes}; the ranks run "
                f"different programs."
            )
        buffer, arrays = None, None
        if header.nbytes <= SMALL:
            buffer = reader.take(header.nbytes)
        else:
            buffer = self._pool.take(header.nbytes)
            reader.take_into(buffer.data)
            if unpack is not None:
                arrays, buffer = unpack(buffer), None
        arrived = Arrived(rank, header.nbytes, arrays, buffer, start, time.monotonic_ns())
        traffic = self.traffic[rank]
        traffic.messages_received += 1
        traffic.bytes_received += header.nbytes
        if self._error is None:
            key = header.program, header.call, header.tag
            self._mail[key] = arrived
            # A thread that waits notes its key before it looks into the mail. So either this thread
            # sees the key, or that thread sees the message.
            if key in self._wanted:
                with self._lock:
                    self._arrival.notify_all()

    # ---- connections ----------------------------------------------------------------------------

    def _link(self, rank: int) -> socket.socket | None:
        """Gives a connection to a rank, opens one if need be; None where it is too late."""
        with self._lock:
            if self._ended or self._error is not None or rank in self._lost:
                return None
            links = self._links.get(rank)
        if links:
            return links[0]
        link = self._open_to(rank, self.epoch)
        if not self._register(rank, link):
            link.close()
            return None
        self._start(f"receive-{self.rank}-{rank}", self._read_own, rank, link)
        return link

    def _register(self, rank: int, link: socket.socket) -> bool:
        """Notes a connection; False where the session has ended, which then will not close it."""
        with self._lock:
            if not self._ended:
                self._links.setdefault(rank, []).append(link)
            return not self._ended

    def _read_own(self, rank: int, link: socket.socket) -> None:
        with link:
            self._drain(rank, link)

    # ---- the end --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `Aborted` if the session was aborted."""
        if self._error is not None:
            raise Aborted(
                f"The messages of rank {self.rank} were aborted: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    def _check(self, rank: int) -> None:
        """Raises an error if messages can no longer go to a rank or come from it."""
        self.check()
        if rank in self._lost:
            raise PeerLost(rank, self._lost[rank])

    def lose(self, rank: int, reason: str) -> None:
        """Notes that a rank is gone, and wakes all threads that wait for it."""
        with self._lock:
            if self._ended or self._error is not None or rank in self._lost:
                return
            self._lost[rank] = reason
            self._arrival.notify_all()
            self._departure.notify_all()
        self._on_failure(PeerLost(rank, reason))

    def abort(self, error: BaseException) -> None:
        """Ends all waits: sends and receives raise, with `error` as their cause."""
        with self._lock:
            if self._ended or self._error is not None:
                return
            self._error = error.__cause__ if isinstance(error, NotComputed) else error
            self._mail.clear()
            self._arrival.notify_all()
            self._departure.notify_all()
        self._on_failure(error)

    def end(self) -> None:
        """Closes the connections; each thread ends once its current work is over."""
        with self._lock:
            self._error = self._error or TransportError("it was reset or closed")
            self._ended = True
            self._mail.clear()
            links = [link for links in self._links.values() for link in links]
            senders = list(self._senders.values())
            self._arrival.notify_all()
            self._departure.notify_all()
        for link in links:
            with contextlib.suppress(OSError):  # the other end may have closed it first
                link.shutdown(socket.SHUT_RDWR)
        for sender in senders:
            sender.queue.put(None)

    def join(self, timeout: float) -> None:
        """Waits for the threads, at most `timeout` seconds in all."""
        deadline = time.monotonic() + timeout
        for thread in list(self.threads):
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0))


def _is_ready(array: Any) -> bool:
    # On some versions of JAX, key arrays have no `is_ready`.
    return isinstance(array.dtype, np.dtype) and array.is_ready()


class _Sender:
    """The queue of messages to one rank; `"connect"` only opens the connection, None ends it."""

    def __init__(self):
        self.queue: queue.SimpleQueue[Outgoing | str | None] = queue.SimpleQueue()
        #: The number of messages that have not been written.
        self.unsent = 0
