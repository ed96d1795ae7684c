"""Copies, writes and reads the shares of arrays, in the process that holds them, by TensorStore.

An array of a checkpoint is one Zarr array, as Orbax has it. Each process writes the chunks that it
holds into a database of its own (TensorStore's OCDBT), and Orbax merges the databases. No chunk
goes over the border of a share, so that no two processes write one. Every chunk carries a CRC-32C,
so that a changed byte is an error.

Functions whose first argument is the rank's process are run there by `mesh.apply_everywhere`.
"""

import dataclasses
import errno
import functools
import math
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxpp import _compat
from jaxpp.runtime.arrays import ArrayType, Box, box_of, joined, sharding_in

#: The bytes of a chunk; a chunk is the least part of an array that can be read.
CHUNK_BYTES = 4 << 20
#: Bytes up to which a chunk lies in the nodes of the database, and needs no read of its own.
INLINE_BYTES = 8192
#: The start of the names of the databases that Orbax merges.
DATABASE = "ocdbt.process_"

#: A share of an array on the host: the array's name, the offset, and the elements.
Share = tuple[str, tuple[int, ...], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """The way an array lies in a checkpoint: its type, and the shape of its chunks."""

    type: ArrayType
    chunk: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """An array of a checkpoint, or some of its rows, that is wanted.

    Args:
        name: the array's in the checkpoint.
        path: the leaf's in the pytree, for errors.
        type: the whole array's.
        rows: the rows that are wanted, as their start and stop; None for all.
    """

    name: str
    path: str
    type: ArrayType
    rows: tuple[int, int] | None = None

    @property
    def part(self) -> ArrayType:
        """The type of what is wanted."""
        if self.rows is None:
            return self.type
        start, stop = self.rows
        return dataclasses.replace(self.type, shape=(stop - start, *self.type.shape[1:]))


@dataclasses.dataclass(frozen=True, slots=True)
class Database:
    """The arrays of a checkpoint.

    Args:
        directory: the checkpoint's: a path, or a URL of a bucket.
        zarr3: whether they are in version 3 of Zarr's format.
        ocdbt: whether they are in one database.
    """

    directory: str
    zarr3: bool = True
    ocdbt: bool = True


# ---- in a process of a rank ---------------------------------------------------------------------


def snapshot(
    process: Any, number: int, items: Sequence[tuple[str, int, int]], copy: bool
) -> list[tuple[str, Box]]:
    """Copies or views arrays of a rank on the host; this stays until its number is dropped.

    Args:
        process: the rank's.
        number: the copies go by this number among the rank's arrays.
        items: the name of each array in the checkpoint, its number, and its first row there.
        copy: whether to copy them where a view would do.

    Returns:
        The names and boxes of the copies.
    """
    arrays = process.wait_for([own for _, own, _ in items])
    own = [(name, a, row) for (name, _, row), a in zip(items, arrays, strict=True)]
    shares = to_shares(own, copy)
    process.arrays[number] = shares
    return boxes_of(shares)


def write(process: Any, number: int, directory: str, arrays: Mapping[str, Stored]) -> None:
    """Writes what `snapshot` has copied."""
    (shares,) = process.wait_for([number])
    writer = f"rank{process.rank}process{jax.process_index()}"  # of those of the rank
    write_shares(directory, writer, arrays, shares)


def read(process: Any, database: Database, items: Sequence[tuple[int, Source, Any, bool]]) -> None:
    """Reads arrays onto the devices of a rank.

    Args:
        process: the rank's.
        database: where they are.
        items: for each array its number, its source, its split and memory kind in the rank, and
            whether it is weakly typed.
    """
    wanted = [(s, sharding_in(process.home, *split), weak) for _, s, split, weak in items]
    arrays = read_arrays(database, wanted)
    process.arrays.update((i[0], array) for i, array in zip(items, arrays, strict=True))


# ---- writing ------------------------------------------------------------------------------------


def to_shares(arrays: Iterable[tuple[str, Any, int]], copy: bool) -> list[Share]:
    """Copies or views the shares of arrays that this process holds, each once, on the host.

    A view of an array of JAX keeps its memory from being donated.

    Args:
        arrays: the name of each array, its value, and its first row in the array of that name.
        copy: whether to copy what is on the host, which may change then.
    """
    parts: list[tuple[str, tuple[int, ...], Any]] = []

    def note(name: str, data: Any, index: Sequence[slice], row: int) -> None:
        starts = [own.start or 0 for own in index] + [0] * np.ndim(data)
        starts[:1] = [starts[0] + row] if starts else []
        parts.append((name, tuple(starts[: np.ndim(data)]), data))

    for name, array, row in arrays:
        if not isinstance(array, jax.Array):
            note(name, array, (), row)
            continue
        key = not isinstance(array.dtype, np.dtype)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                data: Any = jax.random.key_data(shard.data) if key else shard.data
                data.copy_to_host_async()
                note(name, data, shard.index, row)
    # What is on another kind of device is copied to the host in any case.
    on_host = np.array if copy else np.asarray
    return [
        (name, offset, on_host(data) if _is_on_host(data) else np.asarray(data))
        for name, offset, data in parts
    ]


def _is_on_host(array: Any) -> bool:
    return not isinstance(array, jax.Array) or any(d.platform == "cpu" for d in array.devices())


def boxes_of(shares: Iterable[Share]) -> list[tuple[str, Box]]:
    """Returns the names and boxes of shares."""
    return [
        (name, tuple((o, o + n) for o, n in zip(offset, data.shape, strict=True)))
        for name, offset, data in shares
    ]


def chunk_shape(kind: ArrayType, boxes: Iterable[Box]) -> tuple[int, ...]:
    """Chooses the shape of an array's chunks: no chunk goes over the border of a box.

    It cuts the array along its first axes until a chunk has about `CHUNK_BYTES`.

    Example:
        >>> chunk_shape(ArrayType((6, 4), "float32"), [((0, 2), (0, 4)), ((2, 6), (0, 4))])
        (2, 4)
    """
    shape = kind.host_shape
    borders = [{b for box in boxes for b in box[d]} - {n} for d, n in enumerate(shape)]
    chunk = [math.gcd(*own) or n or 1 for own, n in zip(borders, shape, strict=True)]
    itemsize = max(1, kind.host_dtype.itemsize)
    for axis, size in enumerate(chunk):
        rest = math.prod(chunk[axis + 1 :]) * itemsize
        parts = max(1, size * rest // CHUNK_BYTES)
        chunk[axis] = size // next(n for n in range(min(parts, size), 0, -1) if size % n == 0)
        if rest <= CHUNK_BYTES:
            break
    return tuple(chunk)


def write_shares(
    directory: str, writer: str, arrays: Mapping[str, Stored], shares: Sequence[Share]
) -> None:
    """Writes shares into the database of a writer, durably.

    Raises:
        FileNotFoundError: this host does not have the directory.
        OSError: the operating system refuses, as on a full disk.
    """
    import tensorstore  # here, because its import takes long

    _check_shared(directory)
    kvstore: dict[str, Any] = {
        "driver": "ocdbt",
        "base": _base(f"{directory}/{DATABASE}{writer}"),
        "config": {
            "max_inline_value_bytes": INLINE_BYTES,
            "manifest_kind": "single",
            "compression": None,
        },
        "assume_config": True,
    }
    # All files are made durable together at the end, which is faster than one by one.
    context = tensorstore.Context({"file_io_sync": False, "cache_pool": {"total_bytes_limit": 0}})
    transaction = tensorstore.Transaction()
    options = {"create": True, "open": True, "context": context, "transaction": transaction}
    try:
        opened = {
            name: tensorstore.open(_spec(kvstore, name, arrays[name]), **options)
            for name in dict.fromkeys(name for name, _, _ in shares)
        }
        written = [
            opened[name]
            .result()[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))]
            .write(_to_stored(data), can_reference_source_data_indefinitely=True)
            for name, offset, data in shares
            if data.size
        ]
        for future in (*opened.values(), *written):
            future.result()
        transaction.commit_async().result()
    except ValueError as error:
        raise (_os_error(error, directory) or error) from error
    if kvstore["base"]["driver"] == "file":
        _sync_tree(kvstore["base"]["path"])


def _sync_tree(directory: str) -> None:
    """Makes all files and names below a directory durable."""
    for folder, _, files in os.walk(directory):
        for name in (*files, ""):
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _spec(kvstore: Mapping[str, Any], name: str, stored: Stored) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {**kvstore, "path": name},
        "metadata": {
            "shape": stored.type.host_shape,
            "data_type": _stored_dtype(stored.type.host_dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": stored.chunk}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
            "attributes": {"type": str(stored.type)},
        },
        # Else zeros would be left out, and lost data would be read as zeros.
        "store_data_equal_to_fill_value": True,
    }


# ---- reading ------------------------------------------------------------------------------------


def read_arrays(database: Database, items: Sequence[tuple[Source, Any, bool]]) -> list[Any]:
    """Reads arrays to places in this process, and of each only what is to be there.

    Args:
        database: where the arrays are.
        items: for each its source, its place, and whether it is weakly typed. A place is a sharding
            or `np`, the host; an array in None, the default device, is not committed.

    Raises:
        ValueError: an array is of another type, or is damaged.
        OSError: the arrays cannot be read.
    """
    import tensorstore

    _check_shared(database.directory)
    # The nodes of the database are kept, and chunks are not.
    limits = {"cache_pool": 0, "cache_pool#ocdbt": 100 << 20}
    context = tensorstore.Context({k: {"total_bytes_limit": n} for k, n in limits.items()})

    def start_to_open(source: Source) -> Any:
        kvstore: dict[str, Any] = _base(database.directory)
        if database.ocdbt:
            kvstore = {"driver": "ocdbt", "base": kvstore, "cache_pool": "cache_pool#ocdbt"}
        spec = {
            "driver": "zarr3" if database.zarr3 else "zarr",
            "kvstore": {**kvstore, "path": kvstore.get("path", "") + source.name},
            "fill_missing_data_reads": False,
        }
        return tensorstore.open(spec, open=True, read=True, context=context)

    opening = [start_to_open(source) for source, _, _ in items]
    reading = []
    for (source, place, _), future in zip(items, opening, strict=True):
        store = _result(future, database, source)
        _check_type(store, source)
        start = source.rows[0] if source.rows else 0
        layout = _layout(source.part, place)
        boxes = {
            box: store[tuple(slice(a + start * (d == 0), b + start * (d == 0))
                             for d, (a, b) in enumerate(box))].read()
            for box in dict.fromkeys(layout.values())
        }  # fmt: skip
        reading.append((layout, boxes))
    hosts = [
        {
            box: _restored(_result(future, database, source), source.type.host_dtype)
            for box, future in boxes.items()
        }
        for (source, _, _), (_, boxes) in zip(items, reading, strict=True)
    ]
    return _assemble(items, [layout for layout, _ in reading], hosts)


def _result(future: Any, database: Database, source: Source) -> Any:
    try:
        return future.result()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if (of_system := _os_error(error, database.directory)) is not None:
            raise of_system from error
        why = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"The checkpoint {database.directory} is damaged at the leaf {source.path}: {why}. "
            f"Load another one."
        ) from error


def _check_type(store: Any, source: Source) -> None:
    """Checks that an array of a checkpoint has the type that is wanted.

    Raises:
        ValueError: it has another one.
    """
    wanted = dataclasses.replace(source.type, kind=None)
    stored = ArrayType(wanted.host_shape, _stored_dtype(wanted.host_dtype))
    there = str(ArrayType(tuple(store.shape), store.dtype.name))
    told = None
    if store.dtype.name in ("uint8", "uint32", "bool"):  # as which other types are stored, too
        metadata = store.spec(retain_context=False).to_json().get("metadata", {})
        told = metadata.get("attributes", {}).get("type")  # not in what others have saved
    if str(wanted) != told if told else str(stored) != there:
        raise ValueError(
            f"The leaf {source.path} is {told or there} in the checkpoint, and {wanted} in `like`. "
            f"Pass a `like` built as the tree that was saved."
        )


def _layout(kind: ArrayType, place: Any) -> dict[Any, Box]:
    """Returns the box of the host array that each device of this process holds."""
    whole = tuple((0, n) for n in kind.host_shape)
    if not isinstance(place, Sharding):
        return {None: whole}
    layout = {}
    for device, index in place.addressable_devices_indices_map(kind.shape).items():
        box = box_of(index, kind.shape)
        layout[device] = box + whole[len(box) :]
    return layout


def _assemble(
    items: Sequence[tuple[Source, Any, bool]],
    layouts: Sequence[Mapping[Any, Box]],
    hosts: Sequence[Mapping[Box, np.ndarray]],
) -> list[Any]:
    """Puts boxes on the devices of their places, all in one call, and joins them to arrays."""
    moving: list[tuple[np.ndarray, Any]] = []
    for (source, place, _), layout, own in zip(items, layouts, hosts, strict=True):
        if not _stays_on_host(source, place):
            memory = getattr(place, "memory_kind", None)
            moving += [(own[b], d and sharding_in(d, (), memory)) for d, b in layout.items()]
    with jax.enable_x64(True):  # else 64-bit dtypes are narrowed
        moved = iter(jax.device_put([host for host, _ in moving], [to for _, to in moving]))
    return [
        np.require(next(iter(own.values())), requirements="W")
        if _stays_on_host(source, place)
        else _joined(source.part, place, weak, [next(moved) for _ in layout])
        for (source, place, weak), layout, own in zip(items, layouts, hosts, strict=True)
    ]


def _stays_on_host(source: Source, place: Any) -> bool:
    return place is np or source.type.host_dtype == jax.dtypes.float0  # which no device has


def _joined(kind: ArrayType, place: Any, weak: bool, parts: list[Any]) -> Any:
    if kind.key is not None:
        parts = [jax.random.wrap_key_data(part, impl=kind.key) for part in parts]
    array = parts[0] if place is None else joined(kind.shape, place, parts)
    if not weak:
        return array
    aval = jax.ShapeDtypeStruct(kind.shape, array.dtype, weak_type=True, sharding=array.sharding)
    return _compat.join_shards(aval, array.sharding, parts, committed=array.committed)


# ---- as TensorStore has it ----------------------------------------------------------------------


def _base(directory: str) -> dict[str, Any]:
    import tensorstore

    if "://" in directory:
        return tensorstore.KvStore.Spec(f"{directory}/").to_json()
    return {"driver": "file", "path": f"{directory}/"}


def _check_shared(directory: str) -> None:
    if "://" not in directory and not os.path.isdir(directory):
        raise FileNotFoundError(
            f"The checkpoint {directory} is not on host {socket.gethostname()}; use a file system "
            f"that all hosts share."
        )


@functools.cache
def _stored_dtype(dtype: np.dtype) -> str:
    """Returns the name of the dtype in the file.

    TensorStore lacks some dtypes of one byte, such as uint4; these are stored as `uint8`.
    """
    import tensorstore

    if dtype == jax.dtypes.float0:
        return "bool"
    try:
        tensorstore.dtype(dtype.name)
    except (TypeError, ValueError):
        return "uint8"
    return dtype.name


def _to_stored(data: np.ndarray) -> np.ndarray:
    if data.dtype == jax.dtypes.float0:
        return np.zeros(data.shape, bool)
    return data if _stored_dtype(data.dtype) == data.dtype.name else data.view(np.uint8)


def _restored(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype == jax.dtypes.float0:
        return np.zeros(data.shape, dtype)
    return data if data.dtype == dtype else data.view(dtype)


def _os_error(error: Exception, directory: str) -> OSError | None:
    """Returns the error of the operating system that TensorStore reports, or None."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found is None or int(found[1]) == errno.ENOENT:
        return None
    return OSError(int(found[1]), os.strerror(int(found[1])), directory)
