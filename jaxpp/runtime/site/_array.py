"""`RemoteArray`: a result of a step, whose value stays on the ranks; and the records of all."""

import collections
import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp import _compat
from jaxpp._specs import Spec, partition_spec
from jaxpp.jaxprs import DONATED
from jaxpp.runtime.arrays import (
    ArrayHandle,
    ArrayType,
    HandleSharding,
    default_device,
    from_host,
    host_array,
    join_shares,
)
from jaxpp.runtime.site._interrupts import uninterrupted


@dataclasses.dataclass(frozen=True)
class RemoteSharding(HandleSharding):
    """The place of an array on a remote mesh: some ranks, each with all of it, whole or split.

    Args:
        mesh: the mesh.
        ranks: the ranks that hold it, in order; none for an argument that no rank reads.
        spec: how each of them has it split over the axes inside a rank.

    Example:
        >>> import jaxpp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = None  # a RemoteMpmdMesh
        >>> jaxpp.RemoteSharding(mesh, ranks=(0, 3))
        RemoteSharding(ranks=(0, 3))
        >>> jaxpp.RemoteSharding(mesh, ranks=(1,), spec=P("data"))
        RemoteSharding(ranks=(1,), spec=P('data',))
    """

    mesh: Any
    ranks: tuple[int, ...]
    spec: PartitionSpec = PartitionSpec()

    is_fully_addressable = False  # pyright: ignore

    def __repr__(self):
        split = f", spec={self.spec!r}" if self.spec else ""
        return f"RemoteSharding(ranks={self.ranks}{split})"

    @property
    def array(self) -> str:
        """A description of an array that is there, for errors."""
        return f"RemoteArray on rank {', '.join(map(str, self.ranks))}"


@dataclasses.dataclass(frozen=True)
class RemoteDevice:
    """A device of a rank that is in another process, with `jax.Device`'s names, and its host's."""

    rank: int
    platform: str
    device_kind: str
    host: str

    def __repr__(self):
        return f"RemoteDevice(rank={self.rank}, {self.platform} on {self.host})"


class RemoteArray(ArrayHandle):
    """An array that one or more ranks of a `RemoteMpmdMesh` hold.

    It is a leaf of pytrees that filters such as `eqx.is_array` take for an array. Its shape, dtype
    and ranks are known in this process. `jaxpp.gather`, `jax.device_get`, `np.asarray`, `float` and
    their like fetch its value; so does `print` of a scalar. Functions of JAX, methods and operators
    refuse it. It may be passed to any placed function of its mesh, and is gone once it has been
    donated. The ranks drop the array when the last reference to this handle goes. Of the `mesh`,
    each of its `ranks` has the whole array, split over the rank's devices as `spec` says, dimension
    by dimension.

    Example:
        >>> import jax.numpy as jnp, jaxpp
        >>> with jaxpp.RemoteMpmdMesh((1,)) as mesh:
        ...     doubled = jaxpp.place(lambda x: 2 * x, mesh)(jnp.arange(3))
        ...     print(doubled, doubled.sharding, jnp.asarray(doubled))
        RemoteArray(int32[3] on rank 0) RemoteSharding(ranks=(0,)) [0 2 4]
    """

    def __init__(
        self, arrays: Any, number: int, aval: Any, ranks: tuple[int, ...], spec: Spec = ()
    ):
        self._arrays, self._aval = arrays, aval
        #: The number by which the ranks know the array.
        self.id = number
        self.mesh, self.ranks, self.spec = arrays.mesh, ranks, spec
        #: The number of restarts of the mesh before the array was made.
        self.incarnation = arrays.incarnation
        #: Why the array is gone, and what is to be done about it, each as the end of a sentence;
        #: empty while it is there.
        self.why_deleted = self.way_out = ""
        arrays.note(self)

    is_fully_addressable = False  # pyright: ignore

    @property
    def sharding(self) -> Any:
        """The place of the array, as a `RemoteSharding`."""
        return RemoteSharding(self.mesh, self.ranks, partition_spec(self.spec))

    @property
    def is_fully_replicated(self) -> bool:
        """Tells whether each device of its ranks holds the whole array."""
        return not any(self.spec)

    def is_deleted(self) -> bool:
        """Tells whether a call has consumed the array, or `delete` has been called."""
        return bool(self.why_deleted)

    def __repr__(self):
        ranks = ", ".join(map(str, self.ranks))
        where = self._arrays.why_lost(self) or f"on rank {ranks}"
        where = f"deleted: {self.why_deleted}" if self.why_deleted else where
        return f"RemoteArray({self.dtype.name}[{','.join(map(str, self.shape))}] {where})"

    def __str__(self):
        if self.ndim or self.why_deleted or self._arrays.why_lost(self):
            return repr(self)
        key = jnp.issubdtype(self.dtype, jax.dtypes.extended)
        return str(jnp.asarray(self) if key else np.asarray(self)[()])

    def devices(self) -> set[Any]:
        """The devices of the workers that hold the array, as they are known here."""
        return {
            RemoteDevice(rank, hello.platform, hello.device, hello.host)
            for ranks, hello in self._arrays.group.hellos()
            for rank in set(ranks).intersection(self.ranks)
        }

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self)[()], spec) if self.ndim == 0 else repr(self)

    # ---- its value ------------------------------------------------------------------------------

    def want(self) -> None:
        """Notes that the value is wanted; the next fetch brings all wanted values together."""
        self._arrays.want(self)

    def copy_to_host_async(self) -> None:
        """Notes that the value is wanted, as a NumPy array."""
        self._refuse_keys()
        self.want()

    def _refuse_keys(self) -> None:
        if jnp.issubdtype(self.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{self!r} holds random keys, which NumPy has no type for, nor jax.device_get; use "
                f"jaxpp.gather, which gives keys of JAX."
            )

    def block_until_ready(self) -> "RemoteArray":
        """Waits until the value is there; raises the error of the step that was to make it."""
        self._arrays.wait_for(self)
        return self

    def __array__(self, dtype: Any = None, context: Any = None, copy: Any = None) -> np.ndarray:
        self._refuse_keys()
        value = self._arrays.fetch(self)
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        data, own = self._arrays.fetch(self), ArrayType.of(self)
        made = from_host(data.reshape(-1).view(np.uint8), own, default_device())
        return _compat.join_shards(self.aval, made.sharding, [made]) if self.weak_type else made

    # ---- its end --------------------------------------------------------------------------------

    def delete(self) -> None:
        """Lets its ranks drop the array."""
        if not self.why_deleted:
            self._arrays.release(self)
            self.why_deleted = "dropped by delete()"
            self.way_out = "call delete() after its last use"

    def consume(self, why: str) -> None:
        """Notes that a call has taken the array's memory."""
        self.why_deleted, self.way_out = why, DONATED
        self._arrays.forget(self)


# ---- the records of all --------------------------------------------------------------------------


class _Handle(weakref.ref):
    """A weak reference to a handle, with the id of its array and the ranks that hold it."""

    __slots__ = ("id", "ranks")
    id: int
    ranks: tuple[int, ...]


class Handles:
    """The ids of a mesh's arrays, those that ranks may drop, and those that are to be fetched."""

    def __init__(self, mesh: Any, group: Any):
        self.mesh, self.group = mesh, group
        #: The number of restarts of the mesh; arrays from before are lost.
        self.incarnation = 0
        self._next = 1
        #: The handles that are referred to, by id, and those that are not any more. The end of a
        #: handle runs no Python code, in which a Ctrl-C could come.
        self._live: dict[int, _Handle] = {}
        self._dead: collections.deque[Any] = collections.deque()
        self._wanted: dict[int, RemoteArray] = {}
        #: By id where an array that has been asked for arrives: call, worker, place in the answer.
        self._asked: dict[int, list[tuple[Any, int, int]]] = {}
        #: The calls that may not have read their arrays yet; while these are here, none is dropped.
        self._reading: list[tuple[Any, Sequence[RemoteArray]]] = []
        #: Held while arrays are asked for, or consumed.
        self.lock = threading.RLock()

    def new_ids(self, count: int) -> int:
        """Returns the first of `count` successive ids that have not been used."""
        with self.lock:
            first = self._next
            self._next += count
        return first

    # ---- their end ------------------------------------------------------------------------------

    def note(self, array: RemoteArray) -> None:
        """Notes a new handle, so that its ranks drop the array when its last reference goes."""
        handle = _Handle(array, self._dead.append)
        handle.id, handle.ranks = array.id, array.ranks
        self._live[array.id] = handle

    def forget(self, array: RemoteArray) -> None:
        """Notes that a call consumes an array."""
        self._live.pop(array.id, None)

    def release(self, array: RemoteArray) -> None:
        """Notes that nobody wants an array any more; its ranks are told with their next call."""
        if (handle := self._live.get(array.id)) is not None:
            self._dead.append(handle)

    def releases(self) -> list[tuple[int, ...]]:
        """Returns, once only, the ids of arrays that each rank may drop."""
        self._reading = [(call, own) for call, own in self._reading if not call.wait(0)]
        found: list[list[int]] = [[] for _ in range(self.mesh.num_ranks)]
        while self._dead:
            handle = self._dead.popleft()
            if self._live.pop(handle.id, None) is not None:
                self._wanted.pop(handle.id, None)
                self._asked.pop(handle.id, None)
                for rank in handle.ranks:
                    found[rank].append(handle.id)
        return [tuple(own) for own in found]

    def restart(self) -> None:
        """Notes that all arrays are lost."""
        with self.lock:
            self.incarnation += 1
            for records in (self._live, self._dead, self._wanted, self._asked, self._reading):
                records.clear()

    # ---- their values ---------------------------------------------------------------------------

    def check(self, array: RemoteArray) -> None:
        """Raises the error of the ranks, if one has failed, or that of `check_exists`."""
        self.check_exists(array)
        self.group.check()

    def check_exists(self, array: RemoteArray) -> None:
        """Checks that an array exists.

        Raises:
            ValueError: it was donated or deleted, or lost when the mesh was restarted or shut down.
        """
        name = f"This RemoteArray of {array.dtype.name}{list(array.shape)}"
        if array.is_deleted():
            raise ValueError(f"{name} was {array.why_deleted}; {array.way_out}.")
        if lost := self.why_lost(array):
            way_out = "load the last checkpoint"
            if self.group.stopped:
                way_out = (
                    "fetch what you keep (jaxpp.gather, float) or save it (jaxpp.save_state) "
                    "before mesh.shutdown(), or the end of `with`"
                )
            raise ValueError(f"{name} was {lost}; {way_out}.")

    def why_lost(self, array: RemoteArray) -> str:
        """Says why its ranks have lost an array, as the end of a sentence; else empty."""
        if self.group.stopped:
            return f"lost when its {type(self.mesh).__name__} was shut down"
        restarted = array.incarnation != self.incarnation
        return "lost when the mesh was restarted" if restarted else ""

    def want(self, array: RemoteArray) -> None:
        """Notes that an array is going to be fetched; the next fetch asks for all of these."""
        self.check(array)
        self._wanted[array.id] = array

    def readers(self, arrays: Sequence[RemoteArray]) -> list[Any]:
        """Returns the calls that have yet to read some of the arrays; the caller holds `lock`."""
        ids = {array.id for array in arrays}
        found = [call for call, own in self._reading if ids and any(a.id in ids for a in own)]
        return [call for call in found if not call.wait(0)]

    def wait_for(self, array: RemoteArray) -> None:
        """Waits until an array has been computed."""
        self.check(array)
        with self.lock, uninterrupted():
            self.check_exists(array)
            call, worker = self.group.wait(array.ranks[0], array.id)
            self._reading.append((call, [array]))
        call.value(worker)

    def fetch(self, array: RemoteArray) -> np.ndarray:
        """Fetches the value of an array; asks for all that are wanted, in one call a worker."""
        self.check(array)
        with self.lock, uninterrupted():
            self.check_exists(array)
            asked = self._asked.pop(array.id, None)
            if asked is None:
                wanted, self._wanted = self._wanted | {array.id: array}, {}
                self._ask([a for a in wanted.values() if a.id not in self._asked])
                asked = self._asked.pop(array.id)
        parts = [call.value(worker, place) for call, worker, place in asked]
        if self.mesh.processes_per_rank > 1:
            return join_shares(ArrayType.of(array), parts)
        return np.array(host_array(parts[0], ArrayType.of(array)))  # the memory is not ours

    def _ask(self, arrays: Sequence[RemoteArray]) -> None:
        """Asks the first ranks that hold some arrays for them."""
        arrays = [a for a in arrays if not a.is_deleted() and a.incarnation == self.incarnation]
        wanted: dict[tuple[int, bool], list[RemoteArray]] = collections.defaultdict(list)
        for array in arrays:
            split = self.mesh.processes_per_rank > 1 and any(array.spec)
            wanted[array.ranks[0], split].append(array)
        for (rank, split), own in wanted.items():
            for call, worker in self.group.fetch(rank, tuple(a.id for a in own), split):
                self._reading.append((call, own))
                for place, array in enumerate(own):
                    self._asked.setdefault(array.id, []).append((call, worker, place))
