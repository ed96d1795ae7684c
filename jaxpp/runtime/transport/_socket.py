"""`SocketTransport`: messages between ranks over stream sockets."""

import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax

from jaxpp._program import Message
from jaxpp.runtime.arrays import Home
from jaxpp.runtime.transport import _connections
from jaxpp.runtime.transport._buffers import BufferPool
from jaxpp.runtime.transport._connections import Addresses, Hello, Kind
from jaxpp.runtime.transport._epoch import Epoch
from jaxpp.runtime.transport._errors import TransportError
from jaxpp.runtime.transport._frames import Header, Unpacker
from jaxpp.runtime.transport._pull import Puller, Pulls

#: The ways of arrays between ranks: over connections of some kind, or by JAX's transfers.
Transport = Literal["auto", "unix", "tcp", "jax"]


class SocketTransport:
    """Sends and receives arrays over sockets: Unix sockets on one host, TCP between hosts.

    A send returns at once. Threads wait for the values and write them; other threads read messages
    and make their arrays. Two ranks connect when one first has a message for the other. A message
    that has been read is kept until it is received, so the schedule bounds the number of these.

    Args:
        rank: this rank.
        home: where what arrives goes, split there as the message says. It comes as the bytes of
            the whole array, once; where the rank has several processes, each has a transport of its
            own, whose peers are those of the same number in other ranks, and sends its share.
        secret: some bytes that the ranks have in common and nobody else has.
        address: the address of this host at which other hosts reach it; by default only processes
            of this host can connect.
        kind: the sort of connections that this rank opens; `"auto"` takes Unix sockets where
            it can.
        pulls: this process's part in JAX's transfers; with it the receiver pulls the arrays of each
            large message that is registered, and only what says so goes over the connection.
        run_ahead: how many messages may be unsent when the next is received, so that dispatch
            does not run ahead of the device, and take memory, without bound.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpp._program import Message
        >>> a, b = [SocketTransport(rank, jax.devices()[0], b"secret") for rank in range(2)]
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
        rank: int,
        home: Home,
        secret: bytes,
        *,
        address: str | None = None,
        kind: Kind = "auto",
        pulls: Pulls | None = None,
        run_ahead: int = 2,
    ):
        self.rank = rank
        self.kind: Kind = kind
        #: Records the times of messages, where it is not None: see `trace.Recorder`.
        self.recorder: Any = None
        #: Called, on some thread, with the error when a rank is lost or the transport aborts.
        self.on_failure: Callable[[BaseException], None] | None = None
        self._home, self._secret, self._pulls = home, secret, pulls
        self._run_ahead = run_ahead
        self._pool = BufferPool()
        self._peers: dict[int, Addresses] = {}
        #: What makes the arrays of messages, by their program and tag.
        self._unpackers: dict[tuple[int, int], Unpacker | Puller] = {}
        self._late: set[tuple[int, int]] = set()
        self._call, self._program = 0, 0
        self._closed = False
        self._begins = threading.Condition()
        self._epoch = self._new_epoch(0)
        self._listener = _connections.Listener(rank, secret, address, self._admit, self._serve)

    def _new_epoch(self, number: int) -> Epoch:
        return Epoch(
            self.rank,
            number,
            self._pool,
            self._unpackers,
            self._open_to,
            self._tell,
            self._observe_sent,
        )

    # ---- addresses ------------------------------------------------------------------------------

    @property
    def addresses(self) -> Addresses:
        """The addresses at which other ranks reach this one."""
        return self._listener.addresses

    def connect(self, peers: Mapping[int, Addresses]) -> None:
        """Notes the addresses of the other ranks; connections are opened when they are needed."""
        self._peers = dict(peers)

    def _open_to(self, rank: int, epoch: int) -> socket.socket:
        if rank not in self._peers:
            raise TransportError(
                f"Rank {self.rank} has to reach rank {rank}, and knows only of ranks "
                f"{sorted(self._peers)}; call connect with the addresses of all."
            )
        hello = Hello(epoch, self.rank, rank)
        return _connections.connect(hello, self._peers[rank], self._secret, self.kind)

    def _admit(self, hello: Hello) -> bool:
        """Waits until this rank is in a peer's epoch; False where it has left that epoch."""
        with self._begins:
            self._begins.wait_for(
                lambda: self._closed or self._epoch.number >= hello.epoch,
                _connections.HANDSHAKE_TIMEOUT,
            )
            return not self._closed and self._epoch.number == hello.epoch

    def _serve(self, hello: Hello, connection: socket.socket) -> None:
        epoch = self._epoch
        if epoch.number == hello.epoch:
            epoch.serve(hello.source, connection)

    # ---- messages -------------------------------------------------------------------------------

    def expect(
        self, messages: Iterable[Message], program: int = 0, late: Iterable[int] = ()
    ) -> None:
        """Registers the messages that this rank sends and receives in a program.

        Arrays of large registered messages are made as they come in. Those of other messages are
        made on the thread that receives them. What is sent under a `late` tag is copied first: a
        computation may take its memory before it has left.
        """
        self._late |= {(program, tag) for tag in late}
        for message in messages:
            unpack = Unpacker.of(message, self._home)
            if self._pulls is not None and unpack.at_once:
                unpack = Puller(message, self._home, self._pulls)
            self._unpackers[program, message.tag] = unpack

    def forget(self, program: int) -> None:
        """Forgets the messages of a program."""
        for key in [k for k in self._unpackers if k[0] == program]:
            del self._unpackers[key]
        self._late = {key for key in self._late if key[0] != program}

    def _unpacker(self, message: Message) -> Unpacker | Puller:
        known = self._unpackers.get((self._program, message.tag))
        return known or Unpacker.of(message, self._home)

    def begin(self, call: int, program: int = 0) -> None:
        """Sets the call and the program of the next messages."""
        self._call, self._program = call, program

    def send(self, arrays: list[Any], message: Message) -> None:
        """Starts to send arrays to a rank; does not wait.

        Raises:
            PeerLost: if that rank is gone.
            Aborted: if the transport was aborted, or an earlier value could not be computed.
        """
        unpack = self._unpacker(message)
        if (self._program, message.tag) in self._late:
            arrays = jax.device_put(arrays, may_alias=False)
        header = Header(self._program, self._call, message.tag, unpack.nbytes)
        self._epoch.send(header, unpack.prepared(arrays), message, unpack)

    def receive(self, message: Message) -> list[Any]:
        """Waits for a message; returns its arrays.

        Raises:
            PeerLost: if the rank that sends it is gone.
            Aborted: if the transport was aborted, or a value to send could not be computed.
            TransportError: if what arrived is something else.
        """
        epoch, call = self._epoch, self._call
        epoch.wait_for_sends(self._run_ahead)
        key = self._program, call, message.tag
        unpack = self._unpacker(message)
        # What pulls waits in JAX, where nothing wakes it; so a thread of the epoch does.
        reads = self.recorder is None and self._pulls is None
        arrived = epoch.receive(key, message.source, reads=reads)
        nbytes = unpack.nbytes
        if (arrived.source, arrived.nbytes) != (message.source, nbytes):
            raise TransportError(
                f"Rank {self.rank} waits for {nbytes} bytes from rank {message.source} under tag "
                f"{message.tag}, and {arrived.nbytes} came from rank {arrived.source}; the ranks "
                f"run different programs."
            )
        if self.recorder is not None:
            self.recorder.received(call, message, arrived.start_ns, arrived.end_ns)
        return unpack(arrived.buffer) if arrived.arrays is None else arrived.arrays

    def settle(self, arrays: list[Any]) -> None:
        """Waits until the sends have read the values of some arrays.

        Once its value has been read, an array may be donated: the bytes being written stay
        unchanged. If it is donated before, its send fails.
        """
        self._epoch.wait_for_values(arrays)

    def flush(self) -> None:
        """Waits until all messages have left.

        Raises:
            Aborted: if the transport was aborted, or a value to send could not be computed.
        """
        self._epoch.wait_for_sends(0)
        self._epoch.check()

    def _observe_sent(self, call: int, message: Message, start_ns: int, end_ns: int) -> None:
        if self.recorder is not None:
            self.recorder.sent(call, message, start_ns, end_ns)

    # ---- failure, and the end -------------------------------------------------------------------

    def _tell(self, error: BaseException) -> None:
        if self.on_failure is not None:
            self.on_failure(error)

    def abort(self, error: BaseException) -> None:
        """Ends all waits here: sends and receives raise `Aborted`, with `error` as the cause.

        Other ranks are not told. All sends and receives raise until the next reset.
        """
        self._epoch.abort(error)

    def reset(self, epoch: int, peers: Mapping[int, Addresses] | None = None) -> None:
        """Starts afresh after a failure, with new connections; drops messages on their way.

        Abort all ranks before the first one is reset. Else a rank would take the end of its
        connections for the loss of a rank.

        Args:
            epoch: a number that has not been used; the same on all ranks.
            peers: where the ranks are now, if that has changed.

        Raises:
            ValueError: the epoch has been used.
            TransportError: the transport accepts no connections any more.
        """
        if self._closed or epoch <= self._epoch.number:
            raise ValueError(
                f"A transport in epoch {self._epoch.number} needs a later one, got {epoch}."
            )
        self._listener.check()
        self._epoch.end()
        if peers is not None:
            self.connect(peers)
        with self._begins:
            self._epoch = self._new_epoch(epoch)
            self._begins.notify_all()

    def close(self) -> None:
        """Ends all connections and threads; waiting sends and receives raise `Aborted`."""
        if self._closed:
            return
        with self._begins:
            self._closed = True
            self._begins.notify_all()
        self._listener.close()
        self._epoch.end()
        self._epoch.join(timeout=5)
        self._pool.clear()
