"""Messages whose arrays the receiver pulls from JAX's own server for transfers between processes.

On the connection between two ranks goes a ticket alone: where the sender's server is, and by which
number it has the arrays. Order, authentication and the end of a rank are those of the connection.
"""

import secrets
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.experimental import transfer

from jaxpp._program import Message
from jaxpp.runtime.arrays import (
    ArrayType,
    Home,
    box_of,
    boxes_here,
    devices_of,
    from_host,
    plain,
    resplit,
    sharding_in,
)
from jaxpp.runtime.transport._errors import PeerLost
from jaxpp.runtime.transport._handshake import HANDSHAKE_TIMEOUT

#: The bytes of a ticket.
TICKET = 128


class Pulls:
    """This process's part in JAX's transfers: its server, and its connections to other servers.

    What has been offered stays in memory until it is pulled, or the process ends: a server does not
    forget it. Anyone who reaches the server and guesses a number of 62 random bits may pull.

    Other hosts reach this one at its `address`; None is for this host alone.
    """

    def __init__(self, home: Home, address: str | None = None):
        device = next(d for d in devices_of(home) if d.process_index == jax.process_index())
        host = address or "127.0.0.1"
        at = f"[{host}]:0" if ":" in host else f"{host}:0"
        # Its `supports_pinned_allocator` fails on GPUs: CUDA does not register memory of a socket.
        self._server = transfer.start_transfer_server(device.client, at, [at])
        self._connections: dict[str, Any] = {}

    def offer(self, arrays: list[jax.Array]) -> bytes:
        """Offers arrays, none of them empty, which nobody donates; gives the ticket for them."""
        number = secrets.randbits(62)
        self._server.await_pull(number, arrays)
        return f"{self._server.address()} {number}".encode().ljust(TICKET)

    def pull(self, ticket: bytes, types: list[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Waits for the arrays of a ticket.

        Raises:
            OSError: their server does not answer.
            RuntimeError: it has gone, or refuses them.
        """
        where, number = ticket.decode().split()
        if (connection := self._connections.get(where)) is None:
            host, _, port = where.rpartition(":")
            # JAX would try for ever where nobody answers, or a firewall drops what is sent.
            socket.create_connection((host.strip("[]"), int(port)), HANDSHAKE_TIMEOUT).close()
            connection = self._connections[where] = self._server.connect(where)
        return jax.block_until_ready(connection.pull(int(number), types))


class Puller:
    """Offers the arrays of a message, and pulls them; it stands in the place of an `Unpacker`.

    Each box of an array, as the rank's devices hold it, goes once. Devices that hold the same box
    have it from the first of them.
    """

    at_once, nbytes = True, TICKET

    def __init__(self, message: Message, home: Home, pulls: Pulls):
        self._source, self._pulls, self._payload = message.source, pulls, Payload(message, home)
        self.prepared = self._payload.of
        #: For each array its boxes, and the devices of this process that hold them.
        self._held = [boxes_here(t.shape, t.sharding) for t in self._payload.types]
        self._wanted = [
            jax.ShapeDtypeStruct(
                tuple(stop - start for start, stop in box),
                type_.dtype,
                sharding=sharding_in(devices[0]),
            )
            for type_, held in zip(self._payload.types, self._held, strict=True)
            for box, devices in held.items()
        ]

    def values(self, arrays: list[Any]) -> list[bytes]:
        """Waits for prepared arrays; offers copies of them, and gives the ticket.

        The arrays themselves may be donated as soon as it returns.
        """
        own = []
        for array, held in zip(arrays, self._held, strict=True):
            shards = {box_of(s.index, array.shape): s for s in array.addressable_shards}
            own += [jax.device_put(shards[box].data, may_alias=False) for box in held]
        return [self._pulls.offer(jax.block_until_ready(own))]

    def __call__(self, ticket: bytes) -> list[Any]:
        """Pulls the arrays of a message; raises `PeerLost` if they do not come."""
        try:
            arrived = iter(self._pulls.pull(ticket, self._wanted))
            with jax.enable_x64(True):
                arrays = []
                for type_, held in zip(self._payload.types, self._held, strict=True):
                    shards = []
                    for devices in held.values():
                        first = next(arrived)
                        shards += [first, *(jax.device_put(first, d) for d in devices[1:])]
                    join = jax.make_array_from_single_device_arrays
                    arrays.append(join(type_.shape, type_.sharding, shards))
                return self._payload.whole(arrays)
        except (RuntimeError, ValueError, OSError) as error:
            raise PeerLost(self._source, f"arrays could not be pulled from it ({error})") from error


class Payload:
    """The arrays of a message, at home in a rank, but for empty ones; keys are integers."""

    def __init__(self, message: Message, home: Home):
        self._home = home
        types = [ArrayType.of(aval) for aval in message.avals]
        self._arrays = list(zip(types, message.specs or ((),) * len(types), strict=True))
        #: What moves, all of it in the memory of the devices.
        self.types = [
            jax.ShapeDtypeStruct(t.host_shape, t.host_dtype, sharding=sharding_in(home, spec))
            for t, spec in self._arrays
            if t.nbytes
        ]

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns what moves of the message's arrays, split as it is sent."""
        moved = [
            (resplit(plain(array), self._home, spec), type_.kind)
            for array, (type_, spec) in zip(arrays, self._arrays, strict=True)
            if type_.nbytes
        ]
        return [  # an array that is there already is the same object: it must not be donated yet
            array if kind is None else jax.device_put(array, type_.sharding)
            for (array, kind), type_ in zip(moved, self.types, strict=True)
        ]

    def whole(self, moved: Iterable[Any]) -> list[Any]:
        """Makes the message's arrays of what has moved."""
        rest = iter(moved)
        return [self._finished(next(rest) if own[0].nbytes else None, *own) for own in self._arrays]

    def _finished(self, array: Any, type_: ArrayType, spec: Any) -> Any:
        if array is None:
            return from_host(b"", type_, self._home, spec)
        if type_.kind is not None:
            array = jax.device_put(array, sharding_in(self._home, spec, type_.kind))
        return type_.of_plain(array)
