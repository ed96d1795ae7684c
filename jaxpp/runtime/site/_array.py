"""`RemoteArray`: a result of a step on a remote mesh; its value stays on the ranks."""

import dataclasses
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
)


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
    """A device of a rank that is in another process.

    Args:
        rank: the rank.
        platform: the platform, such as `"cpu"` or `"gpu"`.
        device_kind: the name of its kind, such as `"NVIDIA H100"`.
        host: the name of its host.
    """

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
        self,
        arrays: Any,
        number: int,
        aval: Any,
        ranks: tuple[int, ...],
        spec: Spec = (),
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

    def __reduce__(self):
        raise TypeError(
            f"{self!r} stays with its rank and cannot be pickled; gather it with jaxpp.gather, or "
            f"save it with jaxpp.save_state."
        )
