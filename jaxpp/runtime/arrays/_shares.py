"""Addressable shards: the boxes of an array that one process of a rank holds, each once.

A rank may have several processes, each with the same number of devices. In the order of the rank's
axes, the devices of one process follow those of another. A process sends its share of an array as
the boxes that its devices hold, in their order. All boxes have one shape, since arrays are split
evenly.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpp._specs import Spec
from jaxpp.runtime.arrays import _types
from jaxpp.runtime.arrays._homes import Box, Home, box_of, sharding_in
from jaxpp.runtime.arrays._types import ArrayType


def boxes_of_process(
    shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int], process: int, processes: int
) -> tuple[Box, ...]:
    """Gives the boxes of an array that the devices of one process hold, each once.

    Args:
        shape: of the array.
        spec: how it is split over the axes inside the rank.
        sizes: these axes, and their sizes.
        process: the number of the process in its rank.
        processes: how many the rank has.

    Example:
        >>> sizes = {"data": 2, "model": 2}
        >>> boxes_of_process((4, 2), (("data",), ()), sizes, process=1, processes=2)
        (((2, 4), (0, 2)),)
        >>> boxes_of_process((4,), (("model",),), sizes, process=1, processes=2)
        (((0, 2),), ((2, 4),))
    """
    return _boxes(shape, spec, tuple(sizes.items()), process, processes)


@functools.lru_cache(4096)
def _boxes(
    shape: tuple[int, ...],
    spec: Spec,
    sizes: tuple[tuple[str, int], ...],
    process: int,
    processes: int,
) -> tuple[Box, ...]:
    numbers = dict(sizes)
    places = list(itertools.product(*(range(n) for _, n in sizes)))
    own = len(places) // processes
    boxes = []
    for place in places[process * own : (process + 1) * own]:
        at = dict(zip(numbers, place, strict=True))
        entries = (*spec, *((),) * (len(shape) - len(spec)))
        boxes.append(
            tuple(_interval(n, axes, at, numbers) for n, axes in zip(shape, entries, strict=True))
        )
    return tuple(dict.fromkeys(boxes))


def _interval(
    size: int, axes: Sequence[str], at: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[int, int]:
    """Gives a device's interval of a dimension that is split over some axes, outermost first."""
    number = 0
    for axis in axes:
        number = number * sizes[axis] + at[axis]
    part = size // math.prod(sizes[axis] for axis in axes)
    return number * part, (number + 1) * part


def join_shares(
    array_type: ArrayType, shares: Sequence[tuple[Sequence[Box], np.ndarray]]
) -> np.ndarray:
    """Makes the whole array, a copy on the host, from the boxes of some processes and their bytes.

    Example:
        >>> left = (((0, 1),),), np.array([7], np.uint8)
        >>> right = (((1, 2),),), np.array([8], np.uint8)
        >>> join_shares(ArrayType((2,), "uint8"), [left, right])
        array([7, 8], dtype=uint8)
    """
    whole = np.empty(array_type.host_shape, array_type.host_dtype)
    for boxes, data in shares:
        parts = _types.host_array(data, array_type.share(boxes))
        for box, part in zip(boxes, parts, strict=True):
            whole[tuple(slice(*interval) for interval in box)] = part
    return whole


# ---- in a process of the rank -------------------------------------------------------------------


@functools.lru_cache(16)
def spans(home: Home) -> bool:
    """Tells whether the devices of a home belong to several processes."""
    return isinstance(home, Mesh) and len({d.process_index for d in home.devices.flat}) > 1


def resplit(array: Any, home: Home, spec: Spec) -> Any:
    """Splits an array of the rank as a spec says; all processes of the rank have to call this."""
    sharding = sharding_in(home, spec)
    if not isinstance(array, jax.Array) or array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.device_put(array, sharding)


@functools.lru_cache(4096)
def boxes_here(shape: tuple[int, ...], home: Home, spec: Spec) -> tuple[Box, ...]:
    """Gives the boxes of an array that the devices of this process hold, each once."""
    held = sharding_in(home, spec).addressable_devices_indices_map(shape)
    return tuple(dict.fromkeys(box_of(index, shape) for index in held.values()))
