"""Moves arrays between meshes of different shapes: each device gets its shard, once.

`jax.device_put` does the same where each wanted shard exists already; else it moves the array
through the memory of the host, and waits. Here the devices put a shard together from pieces of
the shards that overlap it, and nothing waits.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from jaxpp import _compat
from jaxpp.runtime.arrays._homes import Box, box_of, joined, sharding_in


class Piece(NamedTuple):
    """A part of a held shard: the device that has it, and its box in that shard; None for all."""

    device: Any
    box: Box | None


class Shard(NamedTuple):
    """A wanted shard: its device, its pieces in order, and their number along each dimension."""

    device: Any
    pieces: tuple[Piece, ...]
    counts: tuple[int, ...]


def reshard(arrays: Sequence[jax.Array], targets: Sequence[Sharding]) -> list[jax.Array]:
    """Moves arrays to other devices, which may be more or fewer.

    Args:
        arrays: arrays of this process.
        targets: for each, where it goes, and how it is split there; its memory kind is the array's.

    Example:
        >>> import jax.numpy as jnp
        >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> reshard([jnp.arange(4)], [one])
        [Array([0, 1, 2, 3], dtype=int32)]
    """
    plans = [plan(x.shape, x.sharding, t) for x, t in zip(arrays, targets, strict=True)]
    pieces, devices = [], []
    for x, shards in zip(arrays, plans, strict=True):
        kind = _compat.memory_kind(x.aval)
        held = {shard.device: shard.data for shard in x.addressable_shards}
        for shard in shards:
            pieces += [_cut(held[piece.device], piece.box) for piece in shard.pieces]
            devices += [sharding_in(shard.device, (), kind)] * len(shard.pieces)
    moved = iter(jax.device_put(pieces, devices))
    return [
        joined(
            x.shape,
            target,
            [_joined([next(moved) for _ in s.pieces], s.counts) for s in shards],
        )
        for x, target, shards in zip(arrays, targets, plans, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def plan(shape: tuple[int, ...], source: Sharding, target: Sharding) -> tuple[Shard, ...]:
    """Plans the shard of each device of the target, and the devices that its pieces come from.

    Where several devices hold a piece, the devices of the target take it from each of them in turn.
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
        # A dimension without elements is whole in every box.
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
