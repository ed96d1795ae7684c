"""`load_state`: reads a checkpoint onto any devices or ranks."""

import dataclasses
import math
import os
from collections import defaultdict
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Sharding

from jaxpp._compat import memory_kind
from jaxpp._specs import Spec, axis_sizes, spec_of, type_of
from jaxpp.runtime.arrays import StackedArray, StackedSharding
from jaxpp.runtime.checkpoint import _directory, _manifest, _ranks
from jaxpp.runtime.checkpoint._manifest import ArrayLeaf, NumberLeaf
from jaxpp.runtime.checkpoint._save import absolute, ranks_at_work
from jaxpp.runtime.remote import RemoteArray, RemoteSharding


def load_state(path: str | os.PathLike[str], like: Any, shardings: Any = None) -> Any:
    """Loads a checkpoint that `save_state` or a `Checkpointer` has written.

    The checkpoint may have been written by other ranks, on another mesh and under another schedule.
    Each rank reads its own share; only arrays of this process go through this process.

    Args:
        path: the checkpoint's directory.
        like: a pytree like the one that was saved, of arrays or `jax.ShapeDtypeStruct`s. An array
            of the checkpoint goes where that of `like` is: to the same devices in the same
            sharding, to the same ranks, to NumPy; for a `ShapeDtypeStruct` to its sharding or the
            default device. The arrays of `like` may have been donated.
        shardings: where arrays go instead: a prefix of the pytree of JAX shardings, or of those of
            a remote mesh, such as `step.lower(...).compile().input_shardings`; None leaves it to
            `like`.

    Returns:
        A pytree like `like` with the values of the checkpoint.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ValueError: if that is not a checkpoint, is half-written, damaged, of a newer format, or of
            another tree than `like`.
        OSError: if it cannot be read.
        ImportError: if TensorStore is not installed; it is in the extra `checkpoint`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     jaxpp.save_state(f"{directory}/1", {"w": jnp.arange(3.0)})
        ...     jaxpp.load_state(f"{directory}/1", {"w": jax.ShapeDtypeStruct((3,), "float32")})
        {'w': Array([0., 1., 2.], dtype=float32)}
    """
    path = absolute(path)
    leaves, places = _manifest.leaves_of(like), _places(like, shardings)
    values: list[Any] = [value for _, value in leaves]
    local: dict[int, tuple[ArrayLeaf, _ranks.Place]] = {}
    remote: dict[int, tuple[ArrayLeaf, RemoteSharding]] = {}
    stacked: dict[int, list[int]] = {}

    def note(number: int, leaf: ArrayLeaf, place: Any) -> None:
        if isinstance(place, StackedSharding):
            stacked[number] = []
            for rows, own in zip(place.intervals, place.parts, strict=True):
                stacked[number].append(len(values))
                values.append(_rows_of(values[number], leaf, rows, place))
                note(len(values) - 1, _leaf_of_rows(leaf, *rows), own)
        elif isinstance(place, RemoteSharding):
            remote[number] = leaf, place
        else:
            weak_type = bool(getattr(values[number], "weak_type", False))
            local[number] = leaf, _ranks.Place(place, weak_type)

    with _directory.reading(path) as (manifest, data):
        _manifest.check_matches([leaf for leaf, _ in leaves], manifest.leaves, str(path))
        saved = {leaf.path: leaf for leaf in manifest.leaves}
        for number, ((leaf, value), place) in enumerate(zip(leaves, places, strict=True)):
            there = saved[leaf.path]
            if isinstance(there, NumberLeaf):
                values[number] = there.number()
            elif isinstance(there, ArrayLeaf):
                note(number, there, _place_of(value) if place is None else place)
        arrays, arguments, mesh = _remote_reads(remote, values, str(data), str(path))
        with ranks_at_work(mesh, _ranks.read, arguments):
            read = _ranks.read_arrays(str(data), str(path), list(local.values()))
    for number, array in [*arrays.items(), *zip(local, read, strict=True)]:
        scalar = number < len(leaves) and isinstance(leaves[number][1], np.generic)
        values[number] = array[()] if scalar and local[number][1].where is np else array
    for number, parts in stacked.items():
        values[number] = StackedArray([values[part] for part in parts])
    return jtu.tree_unflatten(jtu.tree_structure(like), values[: len(leaves)])


def _rows_of(
    like: Any, leaf: ArrayLeaf, rows: tuple[int, int], place: StackedSharding
) -> jax.ShapeDtypeStruct:
    """Makes the type of some rows of an array."""
    if like.shape[:1] != (place.bounds[-1],):
        raise ValueError(
            f"load_state: the leaf {leaf.path} is {leaf.describe()}, but its sharding is of an "
            f"array with {place.bounds[-1]} rows; give it a sharding of its own."
        )
    shape = (rows[1] - rows[0], *like.shape[1:])
    return type_of(getattr(like, "aval", like), shape)


def _leaf_of_rows(leaf: ArrayLeaf, start: int, stop: int) -> ArrayLeaf:
    """Makes a leaf of some rows of an array of the checkpoint."""
    kind = dataclasses.replace(leaf.type, shape=(stop - start, *leaf.type.shape[1:]))
    pieces = tuple(
        dataclasses.replace(p, offset=(p.offset[0] - start, *p.offset[1:])) for p in leaf.pieces
    )
    return ArrayLeaf(leaf.path, kind, pieces)


def _places(like: Any, shardings: Any) -> list[Any]:
    """Returns for each leaf its place by `shardings`, or None."""
    places: list[Any] = []

    def note(place: Any, part: Any) -> None:
        if not isinstance(place, Sharding | RemoteSharding | StackedSharding | None):
            raise TypeError(
                f"load_state needs shardings that are jax.sharding.Sharding or of a remote mesh, "
                f"got {place!r}."
            )
        places.extend([place] * len(jtu.tree_leaves(part)))

    try:
        jtu.tree_map(note, shardings, like, is_leaf=lambda node: node is None)
    except ValueError as error:
        error.add_note("load_state needs `shardings` to be a prefix of the pytree `like`.")
        raise
    return places


def _place_of(value: Any) -> Any:
    """Returns the place of a leaf of `like`: a sharding, NumPy, or None for the default device."""
    if isinstance(value, np.ndarray | np.generic):
        return np
    if isinstance(value, jax.Array) and not value.committed:
        return None
    return value.sharding


def _remote_reads(
    remote: dict[int, tuple[ArrayLeaf, RemoteSharding]], values: list[Any], data: str, path: str
) -> tuple[dict[int, RemoteArray], dict[int, tuple[Any, ...]], Any]:
    """Makes handles for the arrays that ranks are to read, and the read of each rank."""
    meshes = {id(place.mesh): place.mesh for _, place in remote.values()}
    if len(meshes) > 1:
        raise ValueError("load_state puts arrays on one remote mesh, got shardings of several.")
    mesh: Any = next(iter(meshes.values()), None)
    arrays: dict[int, RemoteArray] = {}
    items: dict[int, list[tuple[int, ArrayLeaf, Any, bool]]] = defaultdict(list)
    for number, (leaf, place) in remote.items():
        like = values[number]
        aval = type_of(getattr(like, "aval", like))
        ranks = place.ranks or (0,)  # the step does not read it on any rank: any rank may keep it
        spec = _spec_of(leaf, place)
        arrays[number] = array = mesh.new_array(aval, ranks, spec)
        for rank in ranks:
            items[rank].append((array.id, leaf, (spec, memory_kind(aval)), aval.weak_type))
    return arrays, {rank: (data, path, found) for rank, found in items.items()}, mesh


def _spec_of(leaf: ArrayLeaf, place: RemoteSharding) -> Spec:
    """Returns the split of an array of the checkpoint in the ranks that hold it.

    Raises:
        ValueError: it cannot be split so.
    """
    spec = spec_of(place.spec, len(leaf.type.shape))
    sizes = axis_sizes(place.mesh.inside)
    parts = [math.prod(sizes.get(axis, 0) for axis in entry) for entry in spec]
    if any(p == 0 or n % p for n, p in zip(leaf.type.shape, parts, strict=True)):
        raise ValueError(
            f"load_state: the leaf {leaf.path} is {leaf.describe()}, which cannot be split as "
            f"{place.spec} over the axes {sizes} inside a rank; give it a sharding of its own."
        )
    return spec
