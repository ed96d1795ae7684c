"""`DeviceTransport`: messages between ranks from device to device, by JAX's own transfers."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxpp._program import Message
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayType, Home, from_host, sharding_in
from jaxpp.runtime.transport._errors import Aborted, PeerLost, TransportError

#: A message by its call and tag.
Key = tuple[int, int]

#: Seconds between two checks, in a wait for a device, that the transport was not aborted.
POLL = 2e-4


@dataclasses.dataclass(frozen=True, slots=True)
class _Cargo:
    """The arrays of a message that are moved: all that have bytes, keys as integers."""

    types: tuple[ArrayType, ...]
    specs: tuple[Spec, ...]
    moved: tuple[int, ...]

    @classmethod
    def of(cls, message: Message) -> "_Cargo":
        types = tuple(ArrayType.of(a) for a in message.avals)
        specs = message.specs or ((),) * len(types)
        return cls(types, specs, tuple(n for n, t in enumerate(types) if t.nbytes))

    def pack(self, arrays: Sequence[Any]) -> list[Any]:
        return [
            arrays[n] if self.types[n].key is None else jax.random.key_data(arrays[n])
            for n in self.moved
        ]

    def unpack(self, arrived: Sequence[Any], home: Home) -> list[Any]:
        found = dict(zip(self.moved, arrived, strict=True))
        return [
            from_host(b"", t, home, spec) if n not in found else _as_type(found[n], t)
            for n, (t, spec) in enumerate(zip(self.types, self.specs, strict=True))
        ]


def _as_type(array: Any, array_type: ArrayType) -> Any:
    return array if array_type.key is None else jax.random.wrap_key_data(array, impl=array_type.key)


class DeviceTransport:
    """Sends and receives arrays by `jax.device_put` between the processes of the ranks.

    It is there to be tried: it has not been run between GPUs yet. There, by JAX's sources, NCCL
    moves arrays from device to device, on streams of its own; each rank needs GPUs of its own, all
    of one kind. On CPU, JAX moves them over a socket, slower than `SocketTransport`. Where ranks
    are meshes, each device sends its shard to its counterpart.

    JAX finds the two ends of a transfer by keys, which each process counts for itself: one for each
    array and device. So each rank makes the calls for all transfers, with arrays of the same number
    and on the same devices, also for those of others. A thread does it in the order that `expect`
    was given. It has to be the same for all ranks (`transfer_order`), whatever the order in which
    a program asks for transfers: a send may wait for earlier ones, and a receive may start early.

    A transfer that has begun occupies the device until its peer has begun it, too. A rank that
    compiled meanwhile might wait for its device, and its peer for the rank. So all ranks load a
    step, which compiles all that it computes, before one of them is called; a call compiles
    nothing.

    Only the thread and the device wait for other ranks in a way that nothing can interrupt. After
    an abort, or when a rank is lost, transfers may be stuck in JAX for good; then the processes
    have to be started anew.

    Args:
        rank: this rank.
        homes: that of each rank (`rank_homes`).
        run_ahead: how many messages may have been received that have not arrived on the device, and
            how many are started ahead of the program while nobody waits, so that neither
            dispatch nor transfers take memory without bound.

    References:
        https://docs.jax.dev/en/latest/multi_process.html, "Transferring data across processes".

    Example:
        >>> import jax
        >>> from jaxpp.runtime.transport import rank_homes
        >>> transport = DeviceTransport(0, rank_homes())
        >>> transport.begin(1)
        >>> transport.close()
    """

    #: Other ranks need no address of this one, since JAX knows it.
    addresses = None

    def __init__(self, rank: int, homes: Sequence[Home], *, run_ahead: int = 2):
        self.rank = rank
        #: Records transfers, where set.
        self.recorder: Any = None
        #: Called, on some thread, with the error when a transfer fails.
        self.on_failure: Callable[[BaseException], None] | None = None
        #: The home of this rank.
        self.home = homes[rank]
        self._homes = homes
        self._run_ahead = run_ahead
        self._programs: dict[int, tuple[Message, ...]] = {}
        #: Cargoes by the identity of their message, which `_programs` keeps.
        self._cargoes: dict[int, _Cargo] = {}
        self._call = 0
        self._recent: collections.deque[tuple[Any, Message]] = collections.deque()
        self._changed = threading.Condition()
        # All fields below are read and written under `_changed`.
        self._queue: collections.deque[tuple[int, Message]] = collections.deque()
        self._outgoing: dict[Key, list[Any]] = {}
        self._arriving: dict[Key, tuple[list[Any], int]] = {}
        self._awaited: Key | None = None
        self._error: BaseException | None = None
        self._aborted = threading.Event()
        self._thread = threading.Thread(
            target=self._transfer_all, name=f"transfers of rank {rank}", daemon=True
        )
        self._thread.start()

    def connect(self, peers: Mapping[int, Any]) -> None:
        """Does nothing: JAX knows the addresses of the other ranks."""

    # ---- messages -------------------------------------------------------------------------------

    def expect(self, messages: Iterable[Message], program: int = 0) -> None:
        """Registers the messages of all ranks of a program, in the order of `transfer_order`."""
        moved = self._programs[program] = tuple(m for m in messages if _Cargo.of(m).moved)
        self._cargoes.update((id(m), _Cargo.of(m)) for m in moved)

    def forget(self, program: int) -> None:
        """Forgets the messages of a program."""
        for message in self._programs.pop(program, ()):
            self._cargoes.pop(id(message), None)

    def _cargo(self, message: Message) -> _Cargo:
        return self._cargoes.get(id(message)) or _Cargo.of(message)

    def begin(self, call: int, program: int = 0, before: Iterable[Message] = ()) -> None:
        """Starts the transfers of a call.

        Args:
            call: its number.
            program: which program runs, by the number that `expect` was given.
            before: what is sent besides, ahead of the program's messages; of all ranks, in one
                order for all.
        """
        self._call = call
        first = [m for m in before if self._cargo(m).moved]
        transfers = (*first, *self._programs.get(program, ()))
        with self._changed:
            self._queue.extend((call, message) for message in transfers)
            self._changed.notify_all()

    def send(self, arrays: list[Any], message: Message) -> None:
        """Starts to send arrays to a rank; does not wait.

        Raises:
            Aborted: if the transport was aborted, or a transfer has failed.
        """
        cargo = self._cargo(message)
        packed = cargo.pack(arrays)
        with self._changed:
            self._check()
            if packed:
                self._outgoing[self._call, message.tag] = packed
                self._changed.notify_all()

    def receive(self, message: Message) -> list[Any]:
        """Waits until a message is on its way here; returns its arrays, which JAX waits for.

        Raises:
            PeerLost: if an earlier message did not arrive.
            Aborted: if the transport was aborted, or a transfer has failed.
        """
        cargo, key = self._cargo(message), (self._call, message.tag)
        if not cargo.moved:
            return cargo.unpack((), self.home)
        while len(self._recent) >= self._run_ahead:
            self._wait_for_device(*self._recent.popleft())
        with self._changed:
            self._awaited = key
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or key in self._arriving)
            self._awaited = None
            self._check()
            arrived, start = self._arriving.pop(key)
            self._changed.notify_all()
        self._recent.append((arrived[0], message))
        if self.recorder is not None:
            self.recorder.received(self._call, message, start, time.monotonic_ns())
        return cargo.unpack(arrived, self.home)

    def settle(self, arrays: Sequence[Any]) -> None:
        """Waits until JAX has all arrays to send, `arrays` too, so that they may be donated.

        Raises:
            Aborted: if the transport was aborted, or a transfer has failed.
        """
        del arrays
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._outgoing)
            self._check()

    def _wait_for_device(self, array: Any, message: Message) -> None:
        while not (array.is_deleted() or array.is_ready()):
            if self._aborted.wait(POLL):
                break
        with self._changed:
            self._check()
        try:
            if not array.is_deleted():
                array.block_until_ready()
        except Exception as error:
            raise PeerLost(message.source, f"its message did not arrive ({error})") from error

    def _check(self) -> None:
        if self._error is not None:
            raise Aborted(f"The transport of rank {self.rank} was aborted.") from self._error

    # ---- the thread that transfers --------------------------------------------------------------

    def _transfer_all(self) -> None:
        try:
            while (transfer := self._next()) is not None:
                self._transfer(*transfer)
        except BaseException as error:  # noqa: B036  nobody else sees errors of this thread
            self.abort(error)
            if self.on_failure is not None:
                self.on_failure(error)

    def _next(self) -> tuple[int, Message] | None:
        """Waits until the next transfer may start, and gives it; None after an abort."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or (self._queue and self._may_start()))
            return None if self._error else self._queue[0]

    def _may_start(self) -> bool:
        call, message = self._queue[0]
        if message.source == self.rank:
            return (call, message.tag) in self._outgoing
        if message.target == self.rank:
            few = len(self._arriving) < self._run_ahead
            # A waiting send or receive may be behind this transfer, and cannot overtake it.
            return few or self._awaited is not None or bool(self._outgoing)
        return True

    def _transfer(self, call: int, message: Message) -> None:
        key, start = (call, message.tag), time.monotonic_ns()
        with self._changed:
            arrays = self._outgoing.get(key)
        arrived = self._put(message, arrays)
        with self._changed:
            if self._error is not None:
                return
            self._queue.popleft()
            self._outgoing.pop(key, None)
            if message.target == self.rank:
                self._arriving[key] = arrived, start
            self._changed.notify_all()
        if message.source == self.rank and self.recorder is not None:
            self.recorder.sent(call, message, start, time.monotonic_ns())

    def _put(self, message: Message, arrays: list[Any] | None) -> list[Any]:
        """Makes the transfer, by a call that each rank has to make; only the source has arrays."""
        cargo, home = self._cargo(message), self._homes[message.source]
        shardings = [sharding_in(home, cargo.specs[n]) for n in cargo.moved]
        if message.source == self.rank:
            # JAX transfers between processes only arrays that are committed to their devices.
            arrays = jax.device_put(arrays, shardings)
        else:
            types = [cargo.types[n] for n in cargo.moved]
            arrays = list(map(_elsewhere, types, shardings))
        home = self._homes[message.target]
        return jax.device_put(arrays, [sharding_in(home, cargo.specs[n]) for n in cargo.moved])

    # ---- failure, and the end -------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """Ends all waits here: sends and receives raise `Aborted`, with `error` as the cause.

        Other ranks are not told. A transfer that JAX has begun is not ended, nor is the wait of
        this device for it.
        """
        with self._changed:
            if self._error is None:
                self._error = error
            self._queue.clear()
            self._outgoing.clear()
            self._arriving.clear()
            self._aborted.set()
            self._changed.notify_all()

    def reset(self, epoch: int, peers: Mapping[int, Any] | None = None) -> None:
        """Refuses to reset, which cannot be done.

        Raises:
            TransportError: always.
        """
        raise TransportError(
            "Transfers between devices cannot go on after a failure, for those that were begun may "
            "be stuck on the device; start the processes of the ranks anew."
        )

    def close(self) -> None:
        """Ends the thread; waiting sends and receives raise `Aborted`."""
        self.abort(TransportError(f"The transport of rank {self.rank} is closed."))
        self._thread.join(timeout=5)


def _elsewhere(array_type: ArrayType, sharding: Any) -> Any:
    """Makes an array on devices of another process, without any shard in this one."""
    shape, dtype = array_type.host_shape, array_type.host_dtype
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
