"""Pieces of arrays as files, by TensorStore.

Each writer writes one database, with a Zarr array for each piece. It is in TensorStore's OCDBT
format, which puts all arrays into a few files and needs no service next to it. Every chunk carries
a CRC-32C, as do the nodes of the database, so that a changed byte is an error.

Orbax (0.12.8) builds on the same formats, and would not give what this format does:
- Each rank writes and reads its own arrays, though `jax.distributed` does not join the processes.
- Any cut, mesh and number of ranks reads what another one wrote, a `StackedArray` by its rows, too.
- All that JAX has comes back bit for bit: Orbax refuses uint4, empty arrays and NumPy scalars.
- A changed bit is an error: of 20 checkpoints of Orbax with one, 20 loaded, with wrong numbers.
- 400 arrays of 4 KiB take a fourteenth of the time.
Where none of this matters, save plain arrays with Orbax, as `docs/worker_processes.md` shows.
"""

import dataclasses
import errno
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpp._extras import need
from jaxpp.runtime.checkpoint import _directory, _manifest
from jaxpp.runtime.checkpoint._manifest import ArrayLeaf, Piece

#: The most bytes of a chunk; a chunk is the least part of an array that can be read.
CHUNK_BYTES = 4 << 20
#: Bytes up to which a value lies in the nodes of the database, and needs no read of its own.
INLINE_BYTES = 4096

#: A box of an array: its start and its end along each axis.
Box = tuple[tuple[int, int], ...]


def check_installed() -> None:
    """Checks that TensorStore is there, without importing it, which takes long."""
    need("checkpoint", "A checkpoint", "tensorstore")


def write(directory: Path, pieces: Mapping[str, np.ndarray]) -> None:
    """Writes pieces, by their names, into a new database; they are durable when it returns.

    Args:
        directory: the database; the directory above it is there.
        pieces: none of them empty.

    Raises:
        OSError: if the operating system refuses, as on a full disk.
        ImportError: if TensorStore is not installed; it is in the extra `checkpoint`.
    """
    check_installed()
    import tensorstore  # here, because its import takes longer than those of all other files

    # All files are made durable together at the end, which is faster than one by one.
    context = tensorstore.Context({"file_io_sync": False, "cache_pool": {"total_bytes_limit": 0}})
    transaction = tensorstore.Transaction()
    directory.mkdir(exist_ok=True)
    try:
        opened = [
            tensorstore.open(
                _spec(directory, name, host), create=True, context=context, transaction=transaction
            )
            for name, host in pieces.items()
        ]
        written = [
            future.result().write(_stored(host), can_reference_source_data_indefinitely=True)
            for future, host in zip(opened, pieces.values(), strict=True)
        ]
        for future in written:
            future.result()
        transaction.commit_async().result()
    except ValueError as error:
        raise (_os_error(error, directory) or error) from error
    _directory.sync_tree(directory)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request for boxes of an array."""

    leaf: ArrayLeaf
    boxes: tuple[Box, ...]


def read(directory: Path, requests: Sequence[Request], path: str) -> list[list[np.ndarray]]:
    """Reads boxes of arrays, all at once; gives for each request its boxes.

    Args:
        directory: the data of the checkpoint.
        requests: which boxes of which arrays.
        path: the checkpoint's, for errors.

    Raises:
        ValueError: if the data are damaged.
        OSError: if they cannot be read.
        ImportError: if TensorStore is not installed; it is in the extra `checkpoint`.
    """
    check_installed()
    import tensorstore

    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})

    def start_to_open(piece: Piece) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": _database(directory / piece.writer, piece.name),
            "fill_missing_data_reads": False,
        }
        return tensorstore.open(spec, open=True, read=True, context=context)

    needed = {
        piece: request.leaf
        for request in requests
        for piece in request.leaf.pieces
        if any(_common(piece, box) is not None for box in request.boxes)
    }
    try:
        opening = {piece: start_to_open(piece) for piece in needed}
        stores = {piece: future.result() for piece, future in opening.items()}
        for piece, store in stores.items():
            leaf = needed[piece]
            dtype, _ = _stored_dtype(leaf.type.host_dtype)
            if store.shape != piece.shape or store.dtype.name != dtype:
                raise ValueError(f"{leaf.path} is stored as {store.dtype.name}{store.shape}")
        reading = [
            [_start_to_read(request.leaf, box, stores) for box in request.boxes]
            for request in requests
        ]
        return [[finish() for finish in boxes] for boxes in reading]
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise (
            _os_error(error, directory) or _manifest.damaged(path, _first_line(error))
        ) from error


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of a whole array."""
    return tuple((0, n) for n in shape)


def _start_to_read(leaf: ArrayLeaf, box: Box, stores: Mapping[Piece, Any]):
    """Starts to read a box; returns the function that waits for it."""
    dtype = leaf.type.host_dtype
    shape = tuple(stop - start for start, stop in box)
    if math.prod(shape) * dtype.itemsize == 0:
        return lambda: np.zeros(shape, dtype)
    parts = []
    for piece in leaf.pieces:
        common = _common(piece, box)
        if common is not None:
            inside = tuple(
                slice(a - o, b - o) for (a, b), o in zip(common, piece.offset, strict=True)
            )
            target = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, box, strict=True))
            parts.append((target, stores[piece][inside].read()))

    def finish() -> np.ndarray:
        blocks = [(target, _restored(part.result(), dtype)) for target, part in parts]
        if sum(block.size for _, block in blocks) != math.prod(shape):
            raise ValueError(f"the pieces of {leaf.path} do not make up the array")
        if len(blocks) == 1:
            return blocks[0][1]
        host = np.empty(shape, dtype)
        for target, block in blocks:
            host[target] = block
        return host

    return finish


def _common(piece: Piece, box: Box) -> Box | None:
    """Returns the box that a piece and a box have in common; None where there is none."""
    common = tuple(
        (max(start, offset), min(stop, offset + n))
        for (start, stop), offset, n in zip(box, piece.offset, piece.shape, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


# ---- specifications -----------------------------------------------------------------------------


def _database(directory: Path, name: str) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{directory}{os.sep}"}
    return {"driver": "ocdbt", "base": base, "path": f"{name}/"}


def _spec(directory: Path, name: str, host: np.ndarray) -> dict[str, Any]:
    config = {"compression": None, "max_inline_value_bytes": INLINE_BYTES}
    dtype, _ = _stored_dtype(host.dtype)
    return {
        "driver": "zarr3",
        "kvstore": {**_database(directory, name), "config": config},
        "metadata": {
            "shape": list(host.shape),
            "data_type": dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": chunk_shape(host.shape, host.dtype.itemsize)},
            },
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        },
        # Else zeros would be left out, and lost data would be read as zeros.
        "store_data_equal_to_fill_value": True,
    }


def chunk_shape(shape: Sequence[int], itemsize: int) -> list[int]:
    """Cuts an array along its first axes until a chunk has at most `CHUNK_BYTES`."""
    chunk = list(shape)
    for axis in range(len(chunk)):
        rest = math.prod(chunk[axis + 1 :]) * itemsize
        chunk[axis] = max(1, min(chunk[axis], CHUNK_BYTES // rest))
        if rest <= CHUNK_BYTES:
            break
    return chunk


def _stored_dtype(dtype: np.dtype) -> tuple[str, bool]:
    """Returns the name of the dtype in the file, and tells whether it is the array's own dtype.

    TensorStore lacks some dtypes of one byte, such as uint4; these are stored as `uint8`.
    """
    import tensorstore

    try:
        tensorstore.dtype(dtype.name)
    except (TypeError, ValueError):
        return "uint8", False
    return dtype.name, True


def _stored(host: np.ndarray) -> np.ndarray:
    return host if _stored_dtype(host.dtype)[1] else host.view(np.uint8)


def _restored(stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return stored if stored.dtype == dtype else stored.view(dtype)


# ---- errors -------------------------------------------------------------------------------------


def _os_error(error: Exception, directory: Path) -> OSError | None:
    """Returns the error of the operating system that TensorStore reports, or None."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found is None or int(found[1]) == errno.ENOENT:
        return None
    return OSError(int(found[1]), os.strerror(int(found[1])), str(directory))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
