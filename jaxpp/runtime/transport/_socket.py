"""`SocketTransport`: messages between the ranks of a process and others."""

import contextlib
import dataclasses
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxpp._program import Message
from jaxpp.runtime.arrays import Home, is_ready, spans
from jaxpp.runtime.transport._buffers import BufferPool
from jaxpp.runtime.transport._connections import Connections, Peer
from jaxpp.runtime.transport._errors import NotComputed, TransportError, lost_in_jax
from jaxpp.runtime.transport._frames import (
    SMALL,
    Bytes,
    Header,
    Read,
    Unpacker,
    padded,
    send_some,
    to_send,
)
from jaxpp.runtime.transport._handshake import SocketKind, start
from jaxpp.runtime.transport._near import RUN_AHEAD, Near
from jaxpp.runtime.transport._pull import Puller, Pulls

#: The memory of this host; no message has more bytes.
MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(eq=False, slots=True)
class Outgoing:
    """A message to another process: its arrays; then the pieces of its bytes yet to be written."""

    header: Header
    arrays: list[Any]
    message: Message
    unpack: Unpacker | Puller
    pieces: list[Bytes] | None = None
    start_ns: int = 0


class SocketTransport(Connections):
    """Sends and receives the arrays of the ranks of a process.

    Arrays go between ranks of the process from device to device, by `Near`; between processes over
    sockets: Unix sockets on one host, TCP between hosts. Two processes have one connection.

    A send returns at once: a small message that is ready is written by the caller; a thread of the
    connection waits for the values of others and writes them. Who waits reads: see `Connections`.

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
    """

    def __init__(
        self,
        homes: Mapping[int, Home],
        secret: bytes,
        *,
        address: str | None = None,
        kind: SocketKind = "auto",
        pulls: Pulls | None = None,
    ):
        super().__init__(min(homes), secret, address, kind)
        self.homes = dict(homes)
        #: Records the times of messages, where it is not None: see `trace.Recorder`.
        self.recorder: Any = None
        #: The way of arrays between ranks of this process.
        self.near = Near(self.homes)
        self._pulls, self._pool = pulls, BufferPool()
        #: For each program what makes the arrays of its messages, by their tags.
        self._unpackers: dict[int, dict[int, Unpacker | Puller]] = defaultdict(dict)
        self._late: dict[int, set[int]] = defaultdict(set)
        self.call, self._program = 0, 0
        #: The recorder for which a thread reads.
        self._told: Any = None

    # ---- what comes -----------------------------------------------------------------------------

    def memory(self, rank: int, header: Header) -> Any:
        """Checks the header of a message from a rank; gives the memory for a large one."""
        if not 0 <= header.nbytes <= MOST_BYTES:
            raise TransportError(
                f"Rank {rank} announced a message of {header.nbytes} bytes to rank {self.rank}, "
                f"which this host cannot hold; what came is no message of a rank."
            )
        return self._pool.take(header.nbytes) if header.nbytes > SMALL else None

    def take(self, peer: Peer, found: Read) -> None:
        """Puts a message into the mail; one of another size than the program has, as it came."""
        header = found.header
        unpack = self._unpackers.get(header.program, {}).get(header.tag)
        if unpack is None or not unpack.at_once or unpack.nbytes != header.nbytes:
            self.mail[header.key] = found
            return

        def unpacked() -> None:
            arrays = unpack(found.data)
            self.mail[header.key] = found._replace(data=arrays, end_ns=time.monotonic_ns())

        def pull() -> None:
            self.attempt(peer, unpacked)
            self.wake()

        if isinstance(unpack, Puller):  # it waits in JAX, where nothing wakes it
            start(f"pull-{self.rank}-{peer.rank}", pull)
        else:
            unpacked()

    # ---- messages -------------------------------------------------------------------------------

    def expect(
        self,
        messages: Iterable[Message],
        program: int = 0,
        late: Iterable[int] = (),
        transfers: Sequence[Message] = (),
    ) -> None:
        """Registers the messages that these ranks send and receive in a program.

        Arrays of large registered messages are made as they come in, all others on the thread that
        receives them. What is sent under a `late` tag is copied first: a computation may take its
        memory before it has left. Only `PutTransport` has `transfers`, which all processes order.
        """
        self._late[program].update(late)
        for message in messages:
            if message.source in self.homes and message.target in self.homes:
                continue
            unpack = Unpacker.of(message, self._home(message))
            if self._pulls is not None and unpack.at_once:
                unpack = Puller(message, self._home(message), self._pulls)
            self._unpackers[program][message.tag] = unpack

    def forget(self, program: int) -> None:
        """Forgets the messages of a program."""
        self._unpackers.pop(program, None)
        self._late.pop(program, None)

    def _unpacker(self, message: Message) -> Unpacker | Puller:
        known = self._unpackers.get(self._program, {}).get(message.tag)
        return known or Unpacker.of(message, self._home(message))

    def _home(self, message: Message) -> Home:
        """Returns the home of the rank of this process that sends or receives a message."""
        return self.homes[message.source if message.source in self.homes else message.target]

    def begin(self, call: int, program: int = 0) -> None:
        """Sets the call and the program of the next messages."""
        self.call, self._program = call, program
        self.near.clear()
        recorder, before, self._told = self.recorder, self._told, self.recorder
        if recorder is not None and recorder is not before:  # it hears when messages come
            start(f"listen-{self.rank}", self.wait, lambda: self.recorder is not recorder)

    def send(self, arrays: list[Any], message: Message) -> None:
        """Starts to send arrays to a rank; does not wait.

        Raises:
            PeerLost: if that rank is gone.
            Aborted: if the transport was aborted, or an earlier value could not be computed.
        """
        late = message.tag in self._late.get(self._program, ())
        if message.target in self.homes:
            self.check()
            self.near.send(arrays, message, late=late)
            return
        peer, unpack = self.reach(message.target), self._unpacker(message)
        if late:
            arrays = jax.device_put(arrays, may_alias=False)
        header = Header(self._program, self.call, message.tag, message.source, unpack.nbytes)
        item = Outgoing(header, unpack.prepared(arrays), message, unpack)
        if not unpack.at_once and not peer.unsent and all(map(is_ready, item.arrays)):
            self.attempt(peer, lambda: self.write(item, peer, socket.MSG_DONTWAIT))
            if not item.pieces:
                return
        self.put(item, peer)

    def note(self, sent: bool, call: int, message: Message, start: int, end: int = 0) -> None:
        """Tells a recorder when a message was sent, or received; until now, if no end is given."""
        if (recorder := self.recorder) is not None:
            note = recorder.sent if sent else recorder.received
            note(call, message, start, end or time.monotonic_ns())

    def copies_of(self, message: Message) -> tuple[Any, list[Any]] | None:
        """Returns what that of `Near` does; None for a message to another process."""
        return self.near.copies_of(message) if message.target in self.homes else None

    def write(self, item: Outgoing, peer: Peer, flags: int = 0) -> None:
        """Writes a message; as much of it as the connection takes at once where `flags` say so."""
        if item.pieces is None:
            pieces = to_send(item.header, self._values(item))
            item.start_ns, item.pieces = time.monotonic_ns(), pieces
        with contextlib.suppress(BlockingIOError):
            while item.pieces:
                send_some(peer.reader.connection, item.pieces, flags)
            self.note(True, item.header.call, item.message, item.start_ns)

    def _values(self, item: Outgoing) -> list[Bytes]:
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
            self.wake()
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
        source = message.source
        if source in self.homes:
            self.check()
            return self.near.receive(message)
        if self.unsent > RUN_AHEAD:  # or dispatch would take memory of the device without bound
            self.wait(lambda: self.unsent <= RUN_AHEAD)
        key = self._program, self.call, message.tag
        if key not in self.mail:
            self.wait(lambda: key in self.mail or self.ended(source))
        if (found := self.mail.pop(key, None)) is None:
            self.reach(source)  # raises the reason
        assert found is not None
        header, data, begun, end = found
        unpack = self._unpacker(message)
        if (header.source, header.nbytes) != (source, unpack.nbytes):
            raise TransportError(
                f"Rank {self.rank} waits for {unpack.nbytes} bytes from rank {source} under tag "
                f"{message.tag}, and {header.nbytes} came from rank {header.source}; the ranks "
                f"run different programs."
            )
        self.note(False, self.call, message, begun, end)
        return data if isinstance(data, list) else unpack(data)

    def settle(self, arrays: list[Any]) -> None:
        """Waits until the sends have read the values of some arrays.

        Once its value has been read, an array may be donated: the bytes being written stay
        unchanged. If it is donated before, its send fails.
        """
        if self.unsent:
            self.wait(lambda: not self.reading(arrays))

    def flush(self) -> None:
        """Waits until all messages have left; raises `Aborted` as `receive` does."""
        self.wait(lambda: not self.unsent)
        self.check()

    # ---- failure, and the end -------------------------------------------------------------------

    def is_echo(self, error: BaseException) -> bool:
        """Tells whether an error of a computation says that another process has failed."""
        return any(map(spans, self.homes.values())) and lost_in_jax(error)

    def close(self, timeout: float = 5.0) -> None:
        """Ends all connections and threads; waiting sends and receives raise `Aborted`."""
        super().close(timeout)
        self._pool.clear()
