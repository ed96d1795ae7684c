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
from jaxpp.runtime.arrays import ArrayType, Home, from_host, is_ready, plain, resplit, sharding_in
from jaxpp.runtime.transport._errors import TransportError
from jaxpp.runtime.transport._near import RUN_AHEAD

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
