"""Messages that `jax.device_put` moves from one process to another: on GPUs by NCCL.

JAX tells such transfers apart by counting them: the first one that a process issues is the first
one of every other process. So all processes issue all transfers, in one order.
"""

import collections
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp._program import Message
from jaxpp.runtime.arrays import Home, is_ready
from jaxpp.runtime.transport import RUN_AHEAD, Payload, SocketTransport, TransportError, lost_in_jax

#: Seconds between two looks at an array that has not come.
LOOK = 1e-4


class Puts:
    """This process's part in the transfers between the processes of a mesh.

    A send issues its transfer, and a receive too, unless it has been issued already: before its own
    turn each issues the transfers before it. What comes by these is kept until it is received. For
    a transfer between two other processes a process only counts it.

    Args:
        homes: those of all ranks, of other processes too.
        here: the ranks of this process.
        meet: waits, with the number of a program, until all processes have compiled it.
    """

    def __init__(
        self, homes: Mapping[int, Home], here: Collection[int], meet: Callable[[int], None]
    ):
        self._homes, self._here, self._meet = homes, here, meet
        #: The transfers of each program, in order.
        self._orders: dict[int, list[Put]] = {}
        #: The pairs of ranks between which something has gone.
        self._met: set[tuple[int, int]] = set()
        self._order: list[Put] = []
        self._places: dict[int, int] = {}
        self._next = 0
        self._mail: dict[int, list[Any]] = {}
        self._recent: collections.deque[Any] = collections.deque()

    def expect(self, transfers: Sequence[Message], program: int) -> None:
        """Registers the transfers of a program, in the order of all processes.

        Waits for all processes, so that none compiles while another waits for its transfers, and
        lets each two meet that send to each other for the first time.
        """
        self._orders[program] = [Put(message, self._homes, self._here) for message in transfers]
        self._meet(program)
        for link in dict.fromkeys((m.source, m.target) for m in transfers):
            if link not in self._met:
                self._met.add(link)
                types = (jax.ShapeDtypeStruct((1,), jnp.float32),)
                first = Put(Message(0, *link, ("",), ("",), types), self._homes, self._here)
                jax.block_until_ready(first.issue([jnp.zeros(1, jnp.float32)]))

    def forget(self, program: int) -> None:
        """Forgets the transfers of a program."""
        self._orders.pop(program, None)

    def begin(self, program: int) -> None:
        """Issues what is left of the program before, and begins another."""
        self.end()
        self._order, self._next = self._orders.get(program, []), 0
        self._places = {put.message.tag: n for n, put in enumerate(self._order)}
        self._mail.clear()
        self._recent.clear()

    def end(self) -> None:
        """Issues what is left of the program."""
        self._issue_before(len(self._order))

    def carries(self, message: Message) -> bool:
        """Tells whether a message of the program that runs is one of its transfers."""
        return message.tag in self._places

    def send(self, arrays: list[Any], message: Message) -> None:
        """Issues the transfer of some arrays, which may be donated from then on."""
        place = self._places[message.tag]
        self._issue_before(place)
        self._order[place].issue(arrays)
        self._next = place + 1

    def receive(self, message: Message, check: Callable[[], None]) -> list[Any]:
        """Returns the arrays of a message, which may be on their way.

        It waits for those that came `RUN_AHEAD` receives before, as `Near` does, and calls `check`
        meanwhile, which may raise.
        """
        self._issue_before(self._places[message.tag] + 1)
        arrays = self._mail.pop(message.tag)
        self._recent.extend(arrays[:1])
        if len(self._recent) > RUN_AHEAD and not (oldest := self._recent.popleft()).is_deleted():
            while not is_ready(oldest):
                check()
                time.sleep(LOOK)
        return arrays

    def _issue_before(self, place: int) -> None:
        """Issues the transfers before a place, none of which this process sends."""
        for put in itertools.islice(self._order, self._next, max(place, self._next)):
            message = put.message
            if message.source in self._here:
                raise TransportError(
                    f"The transfer of {message.names[0]} from rank {message.source} is due before "
                    f"it is sent; this is a bug of the order of transfers."
                )
            arrays = put.issue()
            if message.target in self._here:
                self._mail[message.tag] = arrays
        self._next = max(place, self._next)


class Put:
    """A transfer: the arrays of a message, from a home in one process to a home in another."""

    def __init__(self, message: Message, homes: Mapping[int, Home], here: Collection[int]):
        self.message = message
        self._leaving, self._arriving = (
            Payload(message, homes[rank]) for rank in (message.source, message.target)
        )
        self._from_here, self._to_here = message.source in here, message.target in here
        self._absent: list[Any] = []
        if not self._from_here:
            make = jax.make_array_from_single_device_arrays
            with jax.enable_x64(True):
                self._absent = [
                    make(t.shape, t.sharding, [], dtype=t.dtype) for t in self._leaving.types
                ]

    def issue(self, arrays: Sequence[Any] = ()) -> list[Any]:
        """Issues the transfer, of `arrays` where this process has the source.

        Returns the arrays where this process has the target.
        """
        with jax.enable_x64(True):
            moved = self._copies(arrays) if self._from_here else self._absent
            if moved:  # JAX would hang if there were none
                moved = jax.device_put(moved, [t.sharding for t in self._arriving.types])
            return self._arriving.whole(moved) if self._to_here else []

    def _copies(self, arrays: Sequence[Any]) -> list[Any]:
        """Copies arrays: JAX does not say when it has read those that it is given."""
        own = self._leaving.of(arrays)
        return jax.device_put(own, [t.sharding for t in self._leaving.types], may_alias=False)


class PutTransport(SocketTransport):
    """A `SocketTransport` where `puts` have the messages of programs between processes.

    All else, such as the arguments of a call that another process has, goes over the sockets.
    """

    def __init__(
        self, homes: Mapping[int, Home], secret: bytes, *, address: str | None = None, puts: Puts
    ):
        super().__init__(homes, secret, address=address)
        self._puts = puts

    def expect(
        self,
        messages: Iterable[Message],
        program: int = 0,
        late: Iterable[int] = (),
        transfers: Sequence[Message] = (),
    ) -> None:
        """Registers the messages of a program, and its transfers between all processes."""
        self._puts.expect(transfers, program)
        super().expect(messages, program, late)

    def forget(self, program: int) -> None:
        """Forgets the messages of a program."""
        super().forget(program)
        self._puts.forget(program)

    def begin(self, call: int, program: int = 0) -> None:
        """Sets the call and the program of the next messages."""
        super().begin(call, program)
        self._puts.begin(program)

    def send(self, arrays: list[Any], message: Message) -> None:
        """Starts to send arrays to a rank; does not wait."""
        if not self._puts.carries(message):
            return super().send(arrays, message)
        self.check()
        begun = time.monotonic_ns()
        self._puts.send(arrays, message)
        self.note(True, self.call, message, begun)

    def receive(self, message: Message) -> list[Any]:
        """Waits for a message; returns its arrays."""
        if not self._puts.carries(message):
            return super().receive(message)
        self.check()
        begun = time.monotonic_ns()
        arrays = self._puts.receive(message, self.check)
        if self.recorder is not None:
            jax.block_until_ready(arrays)
        self.note(False, self.call, message, begun)
        return arrays

    def is_echo(self, error: BaseException) -> bool:
        """Tells whether an error of a computation says that another process has failed."""
        return lost_in_jax(error)

    def close(self, timeout: float = 5.0) -> None:
        """Ends all connections and threads, once what is left of the transfers is issued."""
        if self._error is None:
            self._puts.end()
        super().close(timeout)
