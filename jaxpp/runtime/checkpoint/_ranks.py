"""Writes, snapshots and reads arrays, in the process that holds them.

Functions whose first argument is the rank's `Process` are run there by `mesh.apply_everywhere`. The
process that saves calls the others for its own arrays.
"""

import dataclasses
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxpp._compat import in_memory_of
from jaxpp.runtime.arrays import ArrayType, box_of, joined, sharding_in
from jaxpp.runtime.checkpoint import _store
from jaxpp.runtime.checkpoint._manifest import ArrayLeaf, Piece
from jaxpp.runtime.remote import Lost

#: The name under which the process that saves writes its own arrays.
DRIVER = "driver"

#: A box of a leaf on the host: the number of the leaf, the offset, and the bytes.
HostPiece = tuple[int, tuple[int, ...], np.ndarray]

#: Snapshots that have been taken in this process and not yet been written, by owner and rank. An
#: owner has one at a time, so that the next snapshot replaces one that a failure has left.
_snapshots: dict[tuple[str, int], list[HostPiece]] = {}


# ---- writing ------------------------------------------------------------------------------------


def write(
    process: Any, data: str, items: Sequence[tuple[int, int]], owner: str = ""
) -> list[tuple[int, Piece]]:
    """Writes arrays of a rank into the directory `data`; returns the pieces of the leaves.

    Args:
        process: the rank's.
        data: the directory of the checkpoint's data.
        items: pairs of the number of a leaf and the id of its array.
        owner: whose snapshot of the arrays is written, and forgotten; empty for the arrays.
    """
    if owner and (owner, process.rank) not in _snapshots:
        raise LookupError(f"Rank {process.rank} has been restarted, and has lost its snapshot.")
    number = process.process
    writer = f"rank-{process.rank}-{number}" if number else f"rank-{process.rank}"
    copied = _snapshots.pop((owner, process.rank)) if owner else None
    return write_pieces(
        data, writer, to_pieces(_arrays(process, items)) if copied is None else copied
    )


def snapshot(process: Any, owner: str, items: Sequence[tuple[int, int]]) -> None:
    """Copies arrays of a rank to the host, where the copies stay until written or dropped."""
    drop_snapshot(process, owner)
    _snapshots[owner, process.rank] = to_pieces(_arrays(process, items), copy=True)


def drop_snapshot(process: Any, owner: str) -> None:
    """Forgets a snapshot without writing it; does nothing where there is none."""
    _snapshots.pop((owner, process.rank), None)


def _arrays(process: Any, items: Sequence[tuple[int, int]]) -> list[tuple[int, Any]]:
    lost = [number for _, number in items if number not in process.arrays]
    if lost:
        if process.failure is not None:
            raise Lost("The step that was to make it has failed.")
        raise LookupError(f"Rank {process.rank} does not hold {len(lost)} of the arrays to save.")
    arrays = [process.arrays[number] for _, number in items]
    try:
        jax.block_until_ready(arrays)
    except Exception as error:  # a task has failed, which ends the step on all ranks
        process.fail(error)
        raise
    return [(leaf, array) for (leaf, _), array in zip(items, arrays, strict=True)]


def to_pieces(arrays: Iterable[tuple[int, Any]], copy: bool = False) -> list[HostPiece]:
    """Returns the boxes of arrays that are in this process, each once, on the host.

    Args:
        arrays: pairs of the number of a leaf and its value, of any dtype and sharding.
        copy: whether the boxes are to stay as they are when the arrays are donated.
    """
    boxes: list[tuple[int, tuple[int, ...], Any]] = []
    for leaf, array in arrays:
        if not isinstance(array, jax.Array):
            boxes.append((leaf, (0,) * np.ndim(array), array))
            continue
        key = not isinstance(array.dtype, np.dtype)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                box: Any = jax.random.key_data(shard.data) if key else shard.data
                offset = tuple(s.start or 0 for s in shard.index)
                boxes.append((leaf, offset + (0,) * (box.ndim - len(offset)), box))
                box.copy_to_host_async()
    return [(leaf, offset, _to_host(box, copy)) for leaf, offset, box in boxes]


def _to_host(array: Any, copy: bool) -> np.ndarray:
    on_host = not isinstance(array, jax.Array) or any(d.platform == "cpu" for d in array.devices())
    # An array of another kind of device has been copied to the host already.
    return np.array(array) if copy and on_host else np.asarray(array)


def write_pieces(data: str, writer: str, pieces: Sequence[HostPiece]) -> list[tuple[int, Piece]]:
    """Writes boxes into the database of `writer`; leaves out empty ones."""
    _check_shared(data, "which the saving process has made,")
    written: list[tuple[int, Piece]] = []
    hosts: dict[str, np.ndarray] = {}
    counts: Counter[int] = Counter()
    for leaf, offset, host in pieces:
        if host.nbytes:
            name = f"{leaf}.{counts[leaf]}"
            counts[leaf] += 1
            written.append((leaf, Piece(writer, name, offset, host.shape)))
            hosts[name] = host
    if hosts:
        _store.write(Path(data, writer), hosts)
    return written


def _check_shared(data: str, which: str) -> None:
    if not os.path.isdir(data):
        raise FileNotFoundError(
            f"{data}, {which} is not on host {socket.gethostname()}; use a file system that all "
            f"hosts share."
        )


# ---- reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place of an array in a process, and its weak type.

    A place is a sharding or `np`, the host. In None, the default device, it is not committed.
    """

    where: Any
    weak_type: bool = False


def read(
    process: Any, data: str, path: str, items: Sequence[tuple[int, ArrayLeaf, Any, bool]]
) -> None:
    """Reads some arrays onto the devices of a rank.

    Args:
        process: the rank's.
        data: the directory of the checkpoint's data.
        path: the checkpoint's, for errors.
        items: for each array its new id, its leaf, its split and memory kind, and whether it is
            weakly typed.
    """
    _check_shared(data, f"the data of {path},")
    arrays = read_arrays(
        data,
        path,
        [(leaf, Place(sharding_in(process.home, *split), weak)) for _, leaf, split, weak in items],
    )
    process.arrays.update((i[0], array) for i, array in zip(items, arrays, strict=True))


def read_arrays(data: str, path: str, items: Sequence[tuple[ArrayLeaf, Place]]) -> list[Any]:
    """Reads arrays to places in this process, and of each only what is to be there."""
    layouts = [_layout(leaf.type, place.where) for leaf, place in items]
    requests = [
        _store.Request(leaf, tuple(dict.fromkeys(layout.values())))
        for (leaf, _), layout in zip(items, layouts, strict=True)
    ]
    found = _store.read(Path(data), requests, path)
    return [
        _assemble(leaf.type, place, layout, dict(zip(request.boxes, hosts, strict=True)))
        for (leaf, place), request, layout, hosts in zip(
            items, requests, layouts, found, strict=True
        )
    ]


def _layout(kind: ArrayType, where: Any) -> dict[Any, _store.Box]:
    """Returns the box of the host array that each device of this process holds."""
    whole = _store.whole(kind.host_shape)
    if not isinstance(where, Sharding):
        return {None: whole}
    layout = {}
    for device, index in where.addressable_devices_indices_map(kind.shape).items():
        box = box_of(index, kind.shape)
        layout[device] = box + whole[len(box) :]
    return layout


def _assemble(
    kind: ArrayType,
    place: Place,
    layout: Mapping[Any, _store.Box],
    blocks: Mapping[_store.Box, np.ndarray],
) -> Any:
    if place.where is np:
        return np.require(blocks[layout[None]], requirements="W")
    if kind.host_dtype == jax.dtypes.float0:
        return next(iter(blocks.values()))  # no device has this dtype
    with jax.enable_x64(True):  # else 64-bit dtypes are narrowed
        memory = getattr(place.where, "memory_kind", None)
        parts: list[Any] = [
            jax.device_put(blocks[box], device and sharding_in(device, (), memory))
            for device, box in layout.items()
        ]
        if kind.key is not None:
            parts = [jax.random.wrap_key_data(part, impl=kind.key) for part in parts]
        array = parts[0]
        if place.where is not None:
            array = joined(kind.shape, place.where, parts)
    return _weaken(array) if place.weak_type else array


def _weaken(array: jax.Array) -> jax.Array:
    """Makes an array weakly typed, by a computation compiled for weak types: it takes any type."""
    aval = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding, weak_type=True)
    same = jax.jit(lambda x: in_memory_of(x, array.aval), out_shardings=array.sharding)
    return same.lower(aval).compile()(array)
