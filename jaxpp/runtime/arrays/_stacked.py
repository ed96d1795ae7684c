"""`StackedArray`: an array whose rows are on several ranks; `gather` makes plain arrays of such."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxpp import _compat
from jaxpp._specs import type_of
from jaxpp.jaxprs import without_mesh
from jaxpp.runtime.arrays._handle import ArrayHandle, HandleSharding
from jaxpp.runtime.arrays._homes import default_device, sharding_in

Tree = TypeVar("Tree")
#: The first row of each part of an array, and the number of all rows at the end: `(0, 2, 4)`.
Bounds = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StackedSharding(HandleSharding):
    """The place of an array whose rows are on several ranks.

    Args:
        bounds: where the parts begin along the first axis, and its size at the end.
        parts: where each part is: JAX's shardings, or those of a remote mesh.

    Example:
        >>> import jax, jaxpp
        >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> jaxpp.runtime.StackedSharding((0, 2, 4), (one, one)).bounds
        (0, 2, 4)
    """

    bounds: Bounds
    parts: tuple[Any, ...]

    @property
    def device_set(self) -> set[Any]:
        """The devices of this process that hold a part."""
        return set().union(*(getattr(p, "device_set", ()) for p in self.parts))

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """The rows of each part."""
        return list(itertools.pairwise(self.bounds))

    @property
    def is_fully_addressable(self) -> bool:
        """Tells whether this process holds all parts."""
        return all(p.is_fully_addressable for p in self.parts)

    @property
    def array(self) -> str:
        """A description of an array that is there, for errors."""
        return f"StackedArray in rows {_written(self.bounds)}"


def _written(bounds: Bounds) -> str:
    return ", ".join(f"{a}:{b}" for a, b in itertools.pairwise(bounds))


class StackedArray(ArrayHandle):
    """An array in parts: each has some of the rows, on the devices or ranks that use them.

    A placed step returns it for a parameter that is stacked over layers, and for its optimizer
    state. It is a leaf of pytrees that filters such as `eqx.is_array` take for an array. It goes
    into the next call unchanged; `jaxpp.gather`, `jax.device_get` and `np.asarray` put the parts
    together. So do operators, indices and methods, where the parts are in this process.

    Args:
        parts: the parts, in order; they have the same shape but for the first axis.

    Example:
        >>> import jax.numpy as jnp, jaxpp
        >>> x = jaxpp.runtime.StackedArray([jnp.zeros((2, 3)), jnp.ones((1, 3))])
        >>> x.shape, x.bounds, jnp.asarray(x)[:, 0]
        ((3, 3), (0, 2, 3), Array([0., 0., 1.], dtype=float32))
    """

    #: Tells whether each device holds the whole array.
    is_fully_replicated = False  # pyright: ignore

    def __init__(self, parts: Sequence[jax.Array]):
        #: The parts, in order: arrays of this process, or `RemoteArray`s.
        self.parts: tuple[Any, ...] = tuple(parts)
        #: The start of each part along the first axis, and the size of that axis at the end.
        self.bounds: Bounds = (0, *itertools.accumulate(p.shape[0] for p in self.parts))
        first = self.parts[0]
        self._aval = type_of(first.aval, (self.bounds[-1], *first.shape[1:]))

    @property
    def sharding(self) -> Any:
        """The place of the array, as a `StackedSharding`."""
        return StackedSharding(self.bounds, tuple(p.sharding for p in self.parts))

    @property
    def is_fully_addressable(self) -> bool:
        """Tells whether this process holds the whole array."""
        return all(p.is_fully_addressable for p in self.parts)

    def devices(self) -> set[Any]:
        """Returns the devices of this process that hold a part."""
        return self.sharding.device_set

    def is_deleted(self) -> bool:
        """Tells whether a part is gone: a call has consumed it, or `delete` has been called."""
        return any(p.is_deleted() for p in self.parts)

    @property
    def why_deleted(self) -> str:
        """The reason why a part is gone, as the end of a sentence; empty if not known."""
        return next((why for p in self.parts if (why := getattr(p, "why_deleted", ""))), "")

    @property
    def way_out(self) -> str:
        """The way out, as the end of a sentence; empty if none is known."""
        return next((p.way_out for p in self.parts if getattr(p, "why_deleted", "")), "")

    def __repr__(self):
        gone = "deleted, " if self.is_deleted() else ""
        kind = f"{self.dtype.name}[{','.join(map(str, self.shape))}]"
        return f"StackedArray({kind} {gone}in rows {_written(self.bounds)})"

    __str__ = __repr__

    # ---- its value ------------------------------------------------------------------------------

    def copy_to_host_async(self) -> None:
        """Asks early for the value of each part; values on ranks then come in one fetch."""
        for part in self.parts:
            part.copy_to_host_async()

    def block_until_ready(self) -> "StackedArray":
        """Waits until the value is there; raises the error of the step that was to make it."""
        for part in self.parts:
            part.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, context: Any = None, copy: Any = None) -> np.ndarray:
        self.copy_to_host_async()
        value = np.concatenate([np.asarray(p) for p in self.parts])
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        if not self.is_fully_addressable:
            return jnp.concatenate([jnp.asarray(p) for p in self.parts])
        (device, *_) = self.parts[0].devices()
        return jnp.concatenate([_move(p, device) for p in self.parts])

    def copy(self) -> "StackedArray":
        """Makes a copy, each part on its own devices; the parts must be in this process."""
        return StackedArray([jnp.copy(p) for p in self.parts])

    def delete(self) -> None:
        """Drops the array from all devices and ranks."""
        for part in self.parts:
            part.delete()

    def __reduce__(self):
        here = self.is_fully_addressable
        return (StackedArray, (self.parts,)) if here else super().__reduce__()


def _move(array: Any, device: Any) -> Any:
    """Moves an array to a device, in the memory that its type names."""
    kind = _compat.memory_kind(array.aval)
    return jax.device_put(array, device if kind is None else sharding_in(device, (), kind))


@without_mesh
def gather(tree: Tree, device: jax.Device | None = None) -> Tree:  # pyright: ignore
    """Copies the arrays of a pytree to one device, as plain arrays of JAX.

    A placed step leaves its results with its ranks, and JAX computes with arrays of one device
    only. Gather what `jax.jit`, `optax.tree.norm` or a checkpointer is to take. A step may consume
    the tree afterwards. An array in the memory of the host stays there.

    Args:
        tree: a pytree of arrays that are on any devices, or on the ranks of any mesh.
        device: where they go; by default the default device of this process.

    Returns:
        The tree, with the same values. Leaves that are not arrays of JAX, and tracers, stay as they
        are.

    Raises:
        ValueError: an array on ranks has been donated.
        RuntimeError: an array of this process has been donated.
        RankError: a rank has failed.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> step = jaxpp.place(lambda w: {"w": 2 * w}, jaxpp.MpmdMesh((1,)))
        >>> jaxpp.gather(step(jnp.arange(3)))
        {'w': Array([0, 2, 4], dtype=int32)}
    """
    target = default_device() if device is None else device

    def plain(x: Any) -> Any:  # never the memory of the tree
        if isinstance(x, StackedArray):
            return jnp.concatenate([plain(part) for part in x.parts])
        if not isinstance(x, jax.Array) or _compat.is_tracer(x):
            return x
        fetched = isinstance(x, ArrayHandle)
        moved = _move(jnp.asarray(x) if fetched else x, target)
        return jnp.copy(moved) if not fetched and target in x.devices() else moved

    for x in jtu.tree_leaves(tree):
        for part in x.parts if isinstance(x, StackedArray) else (x,):
            if isinstance(part, ArrayHandle) and not part.is_fully_addressable:
                part.want()  # all values come in one fetch
    return jtu.tree_map(plain, tree)
