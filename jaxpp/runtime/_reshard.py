"""Moves arrays between meshes of different shapes: each device gets its shard, once.

`jax.device_put` does so where each shard that is wanted is there as it is; where one is not, the
array goes through the memory of the host, which waits for it. Here a shard is put together from
pieces of those that overlap it, on the devices, and nothing waits.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from jaxpp.runtime._homes import Box, box_of


class Piece(NamedTuple):
    """A part of a shard: the device that has it, and where it is in the shard; None: all of it."""

    device: Any
    box: Box | None


class Shard(NamedTuple):
    """A wanted shard: its device, its pieces in order, and how many along each dimension."""

    device: Any
    pieces: tuple[Piece, ...]
    counts: tuple[int, ...]


def reshard(arrays: Sequence[jax.Array], targets: Sequence[Sharding]) -> list[jax.Array]:
    """Arrays on other devices, which need not be as many.

    Args:
        arrays: arrays of this process.
        targets: for each, where it goes, and how it is split there.

    Example:
        >>> import jax.numpy as jnp
        >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> reshard([jnp.arange(4)], [one])
        [Array([0, 1, 2, 3], dtype=int32)]
    """
    plans = [plan(x.shape, x.sharding, t) for x, t in zip(arrays, targets, strict=True)]
    pieces, devices = [], []
    for x, shards in zip(arrays, plans, strict=True):
        held = {shard.device: shard.data for shard in x.addressable_shards}
        for shard in shards:
            pieces += [_cut(held[piece.device], piece.box) for piece in shard.pieces]
            devices += [shard.device] * len(shard.pieces)
    moved = iter(jax.device_put(pieces, devices))
    return [
        jax.make_array_from_single_device_arrays(
            x.shape,
            target,
            [_joined([next(moved) for _ in s.pieces], s.counts) for s in shards],
        )
        for x, target, shards in zip(arrays, targets, plans, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def plan(shape: tuple[int, ...], source: Sharding, target: Sharding) -> tuple[Shard, ...]:
    """What each device of the target gets, and from where.

    Of what several devices have, the devices of the target take turns to ask.
    """
    holders: dict[Box, list[Any]] = {}
    for device, index in source.addressable_devices_indices_map(shape).items():
        holders.setdefault(box_of(index, shape), []).append(device)
    wanted = target.addressable_devices_indices_map(shape).items()
    return tuple(
        _shard(device, box_of(index, shape), holders, number)
        for number, (device, index) in enumerate(wanted)
    )


def _shard(device: Any, wanted: Box, holders: Mapping[Box, Sequence[Any]], number: int) -> Shard:
    pieces: dict[Box, Piece] = {}
    for box, devices in holders.items():
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted, strict=True))
        # Of a dimension without elements, all have the whole.
        if all(a < b or (a, b) == w for (a, b), w in zip(common, wanted, strict=True)):
            within = tuple((a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))
            part = Piece(devices[number % len(devices)], None if common == box else within)
            pieces[common] = part
    ordered = sorted(pieces)
    starts = [{box[n][0] for box in ordered} for n in range(len(wanted))]
    return Shard(device, tuple(pieces[box] for box in ordered), tuple(map(len, starts)))


def _cut(x: jax.Array, box: Box | None) -> jax.Array:
    return x if box is None else jax.lax.slice(x, [a for a, _ in box], [b for _, b in box])


def _joined(pieces: list[jax.Array], counts: Sequence[int]) -> jax.Array:
    """Joins the pieces of a box, neighbours along the last dimension first."""
    for dimension, count in reversed(list(enumerate(counts))):
        if count > 1:
            pieces = [
                jax.lax.concatenate(pieces[n : n + count], dimension)
                for n in range(0, len(pieces), count)
            ]
    (whole,) = pieces
    return whole
