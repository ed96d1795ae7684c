"""The manifest of a checkpoint: its leaves, their types, and the places of their bytes.

An array lies in the databases of the writers in pieces, each at an offset: several may hold parts.
"""

import dataclasses
import enum
import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from jaxpp.runtime.arrays import ArrayType

FILE_NAME = "manifest.json"
FORMAT = "jaxpp-state"
VERSION = 1

#: The Python numbers that are saved by value.
_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}
#: The kinds of NumPy dtypes that hold numbers; those of `ml_dtypes` count as "V" and are not void.
_NUMERIC_KINDS = "biufc"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of an array, on the host: the array `name` in the database of `writer`."""

    writer: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """A leaf that is an array. It does not record its devices: the reader chooses them."""

    path: str
    type: ArrayType
    pieces: tuple[Piece, ...] = ()

    def describe(self) -> str:
        """Describes the type in words."""
        dtype = f"{self.type.key} keys" if self.type.key else self.type.dtype
        return f"{dtype}[{','.join(map(str, self.type.shape))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class NumberLeaf:
    """A leaf that is a Python number, by its `repr`."""

    path: str
    type: str
    value: str

    def describe(self) -> str:
        """Describes the type in words."""
        return f"a Python {self.type}"

    def number(self) -> Any:
        """Returns the number."""
        return self.value == "True" if self.type == "bool" else _NUMBERS[self.type](self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class StaticLeaf:
    """A leaf that holds no numbers, such as an activation function: not saved, only compared."""

    path: str
    type: str

    def describe(self) -> str:
        """Describes the leaf in words."""
        return self.type


Leaf = ArrayLeaf | NumberLeaf | StaticLeaf


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint; `data` is the name of the directory with its arrays."""

    data: str
    leaves: tuple[Leaf, ...]


# ---- the leaves of a tree -----------------------------------------------------------------------


def leaves_of(tree: Any) -> list[tuple[Leaf, Any]]:
    """Describes the leaves of a tree, each next to its value.

    Raises:
        TypeError: if a leaf is an array without numbers.
        ValueError: if two leaves have one path.
    """
    found = [
        (_leaf_of(jtu.keystr(path), value), value)
        for path, value in jtu.tree_flatten_with_path(tree)[0]
    ]
    paths = [leaf.path for leaf, _ in found]
    if len(set(paths)) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise ValueError(
            f"Two leaves of the tree have the path {twice}, so that they cannot be told apart in a "
            f"checkpoint; give them keys with different names."
        )
    return found


def _leaf_of(path: str, value: Any) -> Leaf:
    for kind, number in _NUMBERS.items():
        if type(value) is number:
            return NumberLeaf(path, kind, repr(value))
    if isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        if isinstance(value.dtype, np.dtype) and not _is_numeric(value.dtype):
            raise TypeError(
                f"The leaf {path} is an array of dtype {value.dtype}, which is no dtype of JAX; "
                f"take it out of the tree, or save it by other means."
            )
        # Where it is loaded says in which memory: the checkpoint itself is the same for all.
        return ArrayLeaf(path, dataclasses.replace(ArrayType.of(value), kind=None))
    if isinstance(value, str | bytes | enum.Enum):
        return StaticLeaf(path, repr(value))
    # By its name, not its `repr`, which may have an address of this process.
    named = value if hasattr(value, "__qualname__") else type(value)
    return StaticLeaf(path, f"{getattr(named, '__module__', None)}.{named.__qualname__}")


def _is_numeric(dtype: np.dtype) -> bool:
    return dtype.kind in _NUMERIC_KINDS or dtype.isbuiltin == 2 or dtype == jax.dtypes.float0


def check_matches(leaves: Sequence[Leaf], saved: Sequence[Leaf], path: str, limit: int = 5) -> None:
    """Checks that a checkpoint holds the leaves that are asked for, and no others.

    Raises:
        ValueError: if it does not; names the first `limit` leaves of each difference.
    """
    asked, there = ({leaf.path: leaf for leaf in side} for side in (leaves, saved))
    missing = [p for p in asked if p not in there]
    unexpected = [p for p in there if p not in asked]
    other = [
        f"{p} ({there[p].describe()} there, {leaf.describe()} in `like`)"
        for p, leaf in asked.items()
        if p in there and (type(leaf), leaf.type) != (type(there[p]), there[p].type)
    ]
    differences = [
        f"{title}: {', '.join(found[:limit])}"
        + (f" and {len(found) - limit} more" if len(found) > limit else "")
        for title, found in (
            ("not in the checkpoint", missing),
            ("only in the checkpoint", unexpected),
            ("of another type", other),
        )
        if found
    ]
    if differences:
        raise ValueError(
            f"The checkpoint {path} is not of a tree like `like`; leaves {'; '.join(differences)}. "
            f"Pass a `like` built as the tree that was saved."
        )


# ---- as a file ----------------------------------------------------------------------------------


def encode(manifest: Manifest) -> bytes:
    """Writes the manifest as JSON, with a checksum of its body."""
    body = {"data": manifest.data, "leaves": [_leaf_to_json(leaf) for leaf in manifest.leaves]}
    document = {"format": FORMAT, "version": VERSION, "crc32": _checksum(body), "body": body}
    return json.dumps(document).encode()


def decode(content: bytes, path: str) -> Manifest:
    """Reads a manifest.

    Raises:
        ValueError: if it is damaged, of a newer version, or none of ours.
    """
    document: Any
    try:
        document = json.loads(content)
    except ValueError as error:
        raise damaged(path, f"its manifest is no JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of jaxpp: its {FILE_NAME} is another file's.")
    version = document.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"The checkpoint {path} is of format {version}, and this jaxpp reads formats up to "
            f"{VERSION}; read it with a newer jaxpp."
        )
    body = document.get("body", {})
    if version != VERSION or document.get("crc32") != _checksum(body):
        raise damaged(path, "the checksum of its manifest is another one")
    leaves = tuple(_leaf_from_json(leaf) for leaf in body["leaves"])
    arrays = [leaf for leaf in leaves if isinstance(leaf, ArrayLeaf)]
    folders = {body["data"], *(piece.writer for leaf in arrays for piece in leaf.pieces)}
    for name in folders:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise damaged(path, f"its manifest names {name!r}, which is no folder inside it")
    return Manifest(body["data"], leaves)


def damaged(path: str, why: str) -> ValueError:
    """Makes the error for a checkpoint whose bytes are not those that were written."""
    return ValueError(f"The checkpoint {path} is damaged: {why}. Load another one.")


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    match leaf:
        case ArrayLeaf():
            pieces = [dataclasses.asdict(piece) for piece in leaf.pieces]
            return {"path": leaf.path, **dataclasses.asdict(leaf.type), "pieces": pieces}
        case NumberLeaf():
            return {"path": leaf.path, "number": leaf.type, "value": leaf.value}
        case StaticLeaf():
            return {"path": leaf.path, "static": leaf.type}


def _leaf_from_json(leaf: dict[str, Any]) -> Leaf:
    path = leaf["path"]
    if "static" in leaf:
        return StaticLeaf(path, leaf["static"])
    if "number" in leaf:
        return NumberLeaf(path, leaf["number"], leaf["value"])
    pieces = tuple(
        Piece(p["writer"], p["name"], tuple(p["offset"]), tuple(p["shape"])) for p in leaf["pieces"]
    )
    return ArrayLeaf(path, ArrayType(tuple(leaf["shape"]), leaf["dtype"], leaf["key"]), pieces)
