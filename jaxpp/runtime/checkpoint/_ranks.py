"""Writes, snapshots and reads arrays, in the process that holds them.

Functions whose first argument is the rank's `Process` are run there by `mesh.apply_everywhere`. The
process that saves calls the others for its own arrays.
"""

import dataclasses
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpp._specs import Spec
from jaxpp.runtime.arrays import ArrayType, box_of, sharding_in
from jaxpp.runtime.checkpoint import _store
from jaxpp.runtime.checkpoint._manifest import ArrayLeaf, Piece
from jaxpp.runtime.remote.calls import Lost

#: The name under which the process that saves writes its own arrays.
DRIVER = "driver"

#: Boxes of one leaf on the host: the number of the leaf, the offset, and the bytes.
HostPiece = tuple[int, tuple[int, ...], np.ndarray]

#: Snapshots that have been taken in this process and not yet been written, by owner and rank. An
#: owner has one at a time, so that the next snapshot replaces one that a failure has left.
_snapshots: dict[tuple[str, int], list[HostPiece]] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The value or the exception of a function; such an exception does not fail the rank."""

    value: Any = None
    error: Exception | None = None


def attempt(process: Any, function: Callable[..., Any], *args: Any) -> Outcome:
    """Runs a function of this module on a process; catches its exception."""
    try:
        return Outcome(value=function(process, *args))
    except Lost:  # an earlier step has failed: the mesh's own error says more
        raise
    except Exception as error:
        error.add_note(f"On rank {process.rank}, host {socket.gethostname()}.")
        return Outcome(error=error)


def results(outcomes: Mapping[int, Sequence[Outcome]]) -> dict[int, list[Any]]:
    """Gives the values of all processes of all ranks.

    Raises:
        Exception: the first one's error, if there is one.
    """
    for outcome in itertools.chain(*outcomes.values()):
        if outcome.error is not None:
            raise outcome.error
    return {rank: [outcome.value for outcome in own] for rank, own in outcomes.items()}


# ---- writing ------------------------------------------------------------------------------------


def write(process: Any, data: str, items: Sequence[tuple[int, int]]) -> list[tuple[int, Piece]]:
    """Writes arrays of a rank.

    Args:
        process: the rank's.
        data: the directory of the checkpoint's data.
        items: pairs of the number of a leaf and the id of its array.

    Returns:
        The pieces of the leaves.
    """
    pieces = to_pieces(_arrays(process, items))
    return write_pieces(data, _writer(process), pieces)


def _writer(process: Any) -> str:
    """Names a process in a checkpoint: by its rank, and by its number if that is not 0."""
    number = process.number_in_rank
    return f"rank-{process.rank}-{number}" if number else f"rank-{process.rank}"


def snapshot(process: Any, owner: str, items: Sequence[tuple[int, int]]) -> None:
    """Copies arrays of a rank to the host, where the copies stay until written or dropped."""
    drop_snapshot(process, owner)
    _snapshots[owner, process.rank] = to_pieces(_arrays(process, items), copy=True)


def write_snapshot(process: Any, owner: str, data: str) -> list[tuple[int, Piece]]:
    """Writes a snapshot, and forgets it."""
    if (owner, process.rank) not in _snapshots:
        raise LookupError(f"Rank {process.rank} has been restarted, and has lost its snapshot.")
    return write_pieces(data, _writer(process), _snapshots.pop((owner, process.rank)))


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
    """Gives the boxes of arrays that are in this process, each once, on the host.

    Args:
        arrays: pairs of the number of a leaf and its value, of any dtype and sharding.
        copy: whether the boxes are to stay as they are when the arrays are donated.
    """
    shards: list[tuple[int, tuple[int, ...], Any]] = []
    for leaf, array in arrays:
        if not isinstance(array, jax.Array):
            shards.append((leaf, (0,) * np.ndim(array), array))
            continue
        key = not isinstance(array.dtype, np.dtype)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                data: Any = jax.random.key_data(shard.data) if key else shard.data
                offset = tuple(s.start or 0 for s in shard.index)
                shards.append((leaf, offset + (0,) * (data.ndim - len(offset)), data))
    for _, _, array in shards:
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    return [(leaf, offset, _to_host(array, copy)) for leaf, offset, array in shards]


def _to_host(array: Any, copy: bool) -> np.ndarray:
    on_host = not isinstance(array, jax.Array) or any(d.platform == "cpu" for d in array.devices())
    # An array of another kind of device has been copied to the host already.
    return np.array(array) if copy and on_host else np.asarray(array)


def write_pieces(data: str, writer: str, pieces: Sequence[HostPiece]) -> list[tuple[int, Piece]]:
    """Writes boxes into the database of `writer`; leaves out empty ones."""
    if not os.path.isdir(data):
        raise FileNotFoundError(
            f"{data}, which the saving process has made, is not on host {socket.gethostname()}; "
            f"save to a file system that all hosts share."
        )
    written: list[tuple[int, Piece]] = []
    hosts: dict[str, np.ndarray] = {}
    counts: dict[int, itertools.count[int]] = {}
    for leaf, offset, host in pieces:
        if host.nbytes:
            name = f"{leaf}.{next(counts.setdefault(leaf, itertools.count()))}"
            written.append((leaf, Piece(writer, name, offset, host.shape)))
            hosts[name] = host
    if hosts:
        _store.write(Path(data, writer), hosts)
    return written


# ---- reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """An array that a rank is to read: its new id, its leaf, its split, and its weak type."""

    number: int
    leaf: ArrayLeaf
    spec: Spec
    weak_type: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The place of an array in a process, and its weak type.

    Without a sharding the array goes to the default device, and is not committed to it.
    """

    sharding: Sharding | None
    weak_type: bool = False


def read(process: Any, data: str, path: str, items: Sequence[Item]) -> None:
    """Reads some arrays onto the devices of a rank.

    Args:
        process: the rank's.
        data: the directory of the checkpoint's data.
        path: the checkpoint's, for errors.
        items: the arrays.
    """
    if not os.path.isdir(data):
        raise FileNotFoundError(
            f"{data} is not on host {socket.gethostname()}; load from a file system that all hosts "
            f"share."
        )
    places = [Place(sharding_in(process.home, i.spec), i.weak_type) for i in items]
    leaves = [item.leaf for item in items]
    arrays = read_arrays(data, path, list(zip(leaves, places, strict=True)))
    with process.lock:
        for item, array in zip(items, arrays, strict=True):
            process.arrays[item.number] = array
        process.lock.notify_all()


def read_arrays(data: str, path: str, items: Sequence[tuple[ArrayLeaf, Place]]) -> list[jax.Array]:
    """Reads arrays onto devices of this process; reads only the shares of these devices."""
    layouts = [_layout(leaf.type, place.sharding) for leaf, place in items]
    requests = [
        _store.Request(leaf, tuple(dict.fromkeys(layout.values())))
        for (leaf, _), layout in zip(items, layouts, strict=True)
    ]
    found = _store.read(Path(data), requests, path)
    arrays = []
    for (leaf, place), request, layout, hosts in zip(items, requests, layouts, found, strict=True):
        blocks = dict(zip(request.boxes, hosts, strict=True))
        array = _assemble(leaf.type, place.sharding, layout, blocks)
        arrays.append(_weaken(array) if place.weak_type else array)
    return arrays


def read_hosts(data: str, path: str, leaves: Sequence[ArrayLeaf]) -> list[np.ndarray]:
    """Reads arrays as NumPy arrays; the caller may write to them."""
    requests = [_store.Request(leaf, (_store.whole(leaf.type.host_shape),)) for leaf in leaves]
    return [
        np.require(hosts[0], requirements="W") for hosts in _store.read(Path(data), requests, path)
    ]


def _layout(array_type: ArrayType, sharding: Sharding | None) -> dict[Any, _store.Box]:
    """Gives the box of the host array that each device of this process holds."""
    whole = _store.whole(array_type.host_shape)
    if sharding is None:
        return {None: whole}
    layout = {}
    for device, index in sharding.addressable_devices_indices_map(array_type.shape).items():
        box = box_of(index, array_type.shape)
        layout[device] = box + whole[len(box) :]
    return layout


def _assemble(
    array_type: ArrayType,
    sharding: Sharding | None,
    layout: Mapping[Any, _store.Box],
    blocks: Mapping[_store.Box, np.ndarray],
) -> Any:
    if array_type.host_dtype == jax.dtypes.float0:
        return next(iter(blocks.values()))  # no device has this dtype
    parts = []
    with jax.enable_x64(True):  # else 64-bit dtypes are narrowed
        for device, box in layout.items():
            part = jax.device_put(blocks[box], device)
            parts.append(
                part
                if array_type.key is None
                else jax.random.wrap_key_data(part, impl=array_type.key)
            )
        if sharding is None or isinstance(sharding, SingleDeviceSharding):
            return parts[0]
        return jax.make_array_from_single_device_arrays(array_type.shape, sharding, parts)


def _weaken(array: jax.Array) -> jax.Array:
    """Makes an array weakly typed, by a computation compiled for weak types: it takes any type."""
    aval = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding, weak_type=True)
    same = jax.jit(lambda x: x, out_shardings=array.sharding)
    return same.lower(aval).compile()(array)
