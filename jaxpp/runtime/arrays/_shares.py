"""Addressable shards: the boxes of an array that one process of a rank holds, each once.

A rank may have several processes, each with the same number of devices. In the order of the rank's
axes, the devices of one process follow those of another. A process sends its share of an array as
the boxes that its devices hold, in their order. All boxes have one shape, since arrays are split
evenly.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpp import _compat
from jaxpp._specs import Spec
from jaxpp.runtime.arrays import _types
from jaxpp.runtime.arrays._homes import Box, Home, box_of, sharding_in
from jaxpp.runtime.arrays._types import ArrayType


def join_shares(
    array_type: ArrayType, shares: Sequence[tuple[Sequence[Box], np.ndarray]]
) -> np.ndarray:
    """Makes the whole array, a copy on the host, from what `own_share` gives in its processes.

    Example:
        >>> left = (((0, 1),),), np.array([7], np.uint8)
        >>> right = (((1, 2),),), np.array([8], np.uint8)
        >>> join_shares(ArrayType((2,), "uint8"), [left, right])
        array([7, 8], dtype=uint8)
    """
    whole = np.empty(array_type.host_shape, array_type.host_dtype)
    for boxes, data in shares:
        parts = _types.host_array(data, array_type.share(boxes)) if boxes else ()
        for box, part in zip(boxes, parts, strict=True):
            whole[tuple(slice(*interval) for interval in box)] = part
    return whole


# ---- in a process of the rank -------------------------------------------------------------------


@functools.lru_cache(16)
def spans(home: Home) -> bool:
    """Tells whether the devices of a home belong to several processes."""
    return isinstance(home, Mesh) and len({d.process_index for d in home.devices.flat}) > 1


def own_share(array: Any) -> tuple[Sequence[Box], np.ndarray]:
    """Returns the boxes of an array that no earlier device of the rank holds, and their bytes."""
    if not isinstance(array, jax.Array):  # of dtype float0
        return (), np.empty(0, np.uint8)
    own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    boxes = [box_of(shard.index[: array.ndim], array.shape) for shard in own]
    nothing = np.empty(0, np.uint8)
    return boxes, np.concatenate([nothing, *(_types.to_host(shard.data) for shard in own)])


def resplit(array: Any, home: Home, spec: Spec) -> Any:
    """Splits an array of the rank as a spec says; all processes of the rank have to call this."""
    if not isinstance(array, jax.Array):
        return array
    sharding = sharding_in(home, spec, _compat.memory_kind(array.aval))
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.device_put(array, sharding)


@functools.lru_cache(4096)
def boxes_here(shape: tuple[int, ...], home: Home, spec: Spec) -> tuple[Box, ...]:
    """Returns the boxes of an array that the devices of this process hold, each once."""
    held = sharding_in(home, spec).addressable_devices_indices_map(shape)
    return tuple(dict.fromkeys(box_of(index, shape) for index in held.values()))
