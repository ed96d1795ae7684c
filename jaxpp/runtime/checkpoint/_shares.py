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
from jaxpp.runtime.arrays import ArrayType, Box, boxes_here, from_boxes, sharding_in, shards_of

#: The bytes of a chunk; a chunk is the least part of an array that can be read.
CHUNK_BYTES = 4 << 20
#: Bytes up to which a chunk lies in the nodes of the database, and needs no read of its own.
INLINE_BYTES = 8192
#: The bytes of a file of a database: several are written and made durable side by side.
FILE_BYTES = 16 << 20
#: The start of the names of the databases that Orbax merges.
DATABASE = "ocdbt.process_"


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """An array of a checkpoint, or its rows from `row` on, as it is saved; `type` is the whole."""

    name: str
    type: ArrayType
    chunk: tuple[int, ...]
    row: int = 0


#: A part of an array on the host: whose it is, its offset there, and its elements.
Piece = tuple[Saved, tuple[int, ...], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A leaf of a checkpoint that is wanted, or some rows of an array."""

    name: str
    #: The path in the pytree, for errors.
    path: str
    #: An array, a type or a static leaf that it is to be like; in a message to a rank, a type.
    like: Any
    #: A sharding; None for the default device, to which it is not committed; `np`, the host. In a
    #: message to a rank, its split there and its memory kind.
    place: Any = np
    #: The start and the stop of the rows; None for all.
    rows: tuple[int, int] | None = None

    @functools.cached_property
    def type(self) -> ArrayType:
        """The type of the whole array."""
        return type_in_file(self.like)

    @functools.cached_property
    def part(self) -> ArrayType:
        """The type of what is wanted."""
        if self.rows is None:
            return self.type
        start, stop = self.rows
        return dataclasses.replace(self.type, shape=(stop - start, *self.type.shape[1:]))


@dataclasses.dataclass(frozen=True, slots=True)
class Database:
    """The arrays of a checkpoint in a directory, or at the URL of a bucket."""

    directory: str
    #: True if they are in version 3 of Zarr's format, and in one database.
    zarr3: bool = True
    ocdbt: bool = True


def type_in_file(value: Any) -> ArrayType:
    """Returns the type of an array or a number; not in which memory it is, which readers choose."""
    array = value if hasattr(value, "dtype") else np.asarray(value)
    return dataclasses.replace(ArrayType.of(array), kind=None)


# ---- in a process of a rank ---------------------------------------------------------------------


def snapshot(process: Any, number: int, items: Sequence[tuple[Saved, int]], copy: bool) -> None:
    """Copies or views arrays of a rank, by `to_shares`; these go by a number of their own there."""
    saved, numbers = zip(*items, strict=True)
    process.arrays[number] = to_shares(zip(saved, process.wait_for(numbers), strict=True), copy)


def write(process: Any, number: int, directory: str) -> None:
    """Writes what `snapshot` has copied."""
    (shares,) = process.wait_for([number])
    write_shares(directory, f"rank{process.rank}process{jax.process_index()}", shares)


def read(process: Any, database: Database, items: Sequence[tuple[int, Wanted]]) -> None:
    """Reads arrays onto the devices of a rank; each gets its number."""
    here = [
        dataclasses.replace(own, place=sharding_in(process.home, *own.place)) for _, own in items
    ]
    arrays = read_arrays(database, here)
    process.keep((n, array) for (n, _), array in zip(items, arrays, strict=True))


# ---- writing ------------------------------------------------------------------------------------


def to_shares(arrays: Iterable[tuple[Saved, Any]], copy: bool) -> list[Piece]:
    """Copies the shares of arrays that this process holds to the host, each once.

    Without `copy`, it views those that are there. A view of an array of JAX keeps its memory from
    being donated.
    """
    parts: list[tuple[Saved, Box, Any]] = []
    for saved, array in arrays:
        shards = shards_of(array) if isinstance(array, jax.Array) else [((), array)]
        parts += [(saved, box, data) for box, data in shards]

    def share(saved: Saved, box: Box, data: Any) -> Piece:
        # An array on another kind of device is copied to the host in any case.
        views = not isinstance(data, jax.Array) or any(d.platform == "cpu" for d in data.devices())
        host = np.array(data) if copy and views else np.asarray(data)
        offset = [start for start, _ in box] + [0] * (host.ndim - len(box))
        return saved, tuple(n + saved.row * (d == 0) for d, n in enumerate(offset)), host

    return [share(*part) for part in parts]


def chunk_shape(kind: ArrayType, share: Sequence[int]) -> tuple[int, ...]:
    """Chooses the shape of an array's chunks: no chunk goes over the border of a share.

    It cuts a share along its first axes until a chunk has about `CHUNK_BYTES`. Each share is a
    multiple of the shape `share`, at multiples of it.

    Example:
        >>> chunk_shape(ArrayType((6, 4), "float32"), (2, 4))
        (2, 4)
    """
    chunk = [max(n, 1) for n in (*share, *kind.host_shape[len(share) :])]
    itemsize = max(1, kind.host_dtype.itemsize)
    for axis, size in enumerate(chunk):
        rest = math.prod(chunk[axis + 1 :]) * itemsize
        parts = max(1, size * rest // CHUNK_BYTES)
        chunk[axis] = size // next(n for n in range(min(parts, size), 0, -1) if size % n == 0)
        if rest <= CHUNK_BYTES:
            break
    return tuple(chunk)


def write_shares(directory: str, writer: str, shares: Sequence[Piece]) -> None:
    """Writes shares into the database of a writer, durably; an `OSError` where that fails."""
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
        "target_data_file_size": FILE_BYTES,
    }
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    transaction = tensorstore.Transaction()
    options = {"create": True, "open": True, "context": context, "transaction": transaction}
    try:
        opened = {
            name: tensorstore.open(_spec(kvstore, saved), **options)
            for name, saved in {saved.name: saved for saved, _, _ in shares}.items()
        }
        written = [
            opened[saved.name]
            .result()[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))]
            .write(_to_stored(data), can_reference_source_data_indefinitely=True)
            for saved, offset, data in shares
            if data.size
        ]
        for future in (*opened.values(), *written):
            future.result()
        transaction.commit_async().result()
    except ValueError as error:
        raise (_os_error(error, directory) or error) from error


def _spec(kvstore: Mapping[str, Any], saved: Saved) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {**kvstore, "path": saved.name},
        "metadata": {
            "shape": saved.type.host_shape,
            "data_type": _stored_dtype(saved.type.host_dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": saved.chunk}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
            "attributes": {"type": str(saved.type)},
        },
        # Else zeros would be left out, and lost data would be read as zeros.
        "store_data_equal_to_fill_value": True,
    }


# ---- reading ------------------------------------------------------------------------------------


def read_arrays(database: Database, wanted: Sequence[Wanted]) -> list[Any]:
    """Reads arrays to places in this process, and of each only what is to be there."""
    import tensorstore

    _check_shared(database.directory)
    # The nodes of the database are kept, and chunks are not.
    limits = {"cache_pool": 0, "cache_pool#ocdbt": 100 << 20}
    context = tensorstore.Context({k: {"total_bytes_limit": n} for k, n in limits.items()})
    kvstore: dict[str, Any] = _base(database.directory)
    if database.ocdbt:
        kvstore = {"driver": "ocdbt", "base": kvstore, "cache_pool": "cache_pool#ocdbt"}

    def start_to_open(name: str) -> Any:
        spec = {
            "driver": "zarr3" if database.zarr3 else "zarr",
            "kvstore": {**kvstore, "path": kvstore.get("path", "") + name},
            "fill_missing_data_reads": False,
        }
        return tensorstore.open(spec, open=True, read=True, context=context)

    opening = [start_to_open(own.name) for own in wanted]
    reading = []
    for own, future in zip(wanted, opening, strict=True):
        store = _result(future, database, own)
        _check_type(store, own)
        store = store[slice(*own.rows)].translate_to[0] if own.rows else store
        here, shape = isinstance(own.place, Sharding), own.part.shape
        boxes = boxes_here(shape, own.place) if here else (tuple((0, n) for n in shape),)
        slices = {box: [slice(*interval) for interval in box] for box in boxes}
        reading.append({box: store[(*index, ...)].read() for box, index in slices.items()})
    arrays = []
    for own, boxes in zip(wanted, reading, strict=True):
        dtype = own.type.host_dtype
        hosts = {box: _restored(_result(f, database, own), dtype) for box, f in boxes.items()}
        arrays.append(_placed(own, hosts))
    return arrays


def _placed(wanted: Wanted, hosts: Mapping[Any, np.ndarray]) -> Any:
    """Puts what was read of an array where it is wanted."""
    if wanted.place is np or wanted.type.host_dtype == jax.dtypes.float0:  # which no device has
        return np.require(next(iter(hosts.values())), requirements="W")
    array: Any = from_boxes(hosts.__getitem__, wanted.part, wanted.place)
    if not getattr(wanted.like, "weak_type", False):
        return array
    place = array.sharding
    aval = jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=True, sharding=place)
    shards = [shard.data for shard in array.addressable_shards]
    return _compat.join_shards(aval, place, shards, committed=array.committed)


def _result(future: Any, database: Database, wanted: Wanted) -> Any:
    try:
        return future.result()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        if (of_system := _os_error(error, database.directory)) is not None:
            raise of_system from error
        why = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"The checkpoint {database.directory} is damaged at the leaf {wanted.path}: {why}. "
            f"Load another one."
        ) from error


def _check_type(store: Any, wanted: Wanted) -> None:
    """Checks that an array of a checkpoint has the type that is wanted."""
    kind = wanted.type
    stored = ArrayType(kind.host_shape, _stored_dtype(kind.host_dtype))
    there = str(ArrayType(tuple(store.shape), store.dtype.name))
    told = None
    if store.dtype.name in ("uint8", "uint32", "bool"):  # as which other types are stored, too
        metadata = store.spec(retain_context=False).to_json().get("metadata", {})
        told = metadata.get("attributes", {}).get("type")  # not in what others have saved
    if str(kind) != told if told else str(stored) != there:
        raise mismatch(wanted.path, told or there, str(kind))


def mismatch(path: str, there: str, here: str) -> ValueError:
    """Makes the error for a leaf that is one thing in the checkpoint, and another in `like`."""
    return ValueError(
        f"The leaf {path} is {there} in the checkpoint, and {here} in `like`. Pass a `like` built "
        f"as the tree that was saved."
    )


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
