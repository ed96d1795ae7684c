"""`gather`: brings the arrays of a pytree to one device, from wherever a step has left them."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jaxpp import _compat
from jaxpp.jaxprs import without_mesh
from jaxpp.runtime.arrays._handle import ArrayHandle
from jaxpp.runtime.arrays._homes import default_device, on_device
from jaxpp.runtime.arrays._stacked import StackedArray

Tree = TypeVar("Tree")


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

    def plain(x: Any) -> Any:
        if isinstance(x, StackedArray):
            return jnp.concatenate([plain(part) for part in x.parts])
        if isinstance(x, ArrayHandle):
            x = jnp.asarray(x)
            return jax.device_put(x, on_device(target, x.aval))
        if not isinstance(x, jax.Array) or _compat.is_tracer(x):
            return x
        moved = jax.device_put(x, on_device(target, x.aval))
        return jnp.copy(moved) if target in x.devices() else moved  # not the memory of the tree

    for x in jtu.tree_leaves(tree):
        if isinstance(x, ArrayHandle) and not x.is_fully_addressable:
            x.copy_to_host_async()  # all values come in one fetch
    return jtu.tree_map(plain, tree)
