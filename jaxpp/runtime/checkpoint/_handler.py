"""The part of Orbax that knows of ranks: a type handler, and the handler of pytrees that has it.

Orbax does the tree, names, atomic publication, saves in the background, what to keep and where.
The type handler takes arrays to and from the processes that hold them.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding
from orbax.checkpoint import future

from jaxpp import _compat
from jaxpp._specs import Spec, axis_sizes, partition_spec, spec_of, type_of
from jaxpp.runtime.arrays import StackedArray, StackedSharding
from jaxpp.runtime.checkpoint import _shares
from jaxpp.runtime.checkpoint._shares import Database, Saved, Wanted, mismatch
from jaxpp.runtime.site import RemoteArray, RemoteSharding

_NUMBERS = (bool, int, float, complex)


class _Saving(ocp.type_handlers.TypeHandler):
    """Writes leaves in the processes that hold them; a handler of Orbax's says what they are.

    With `copy` they may be donated before they have been written.
    """

    _array_metadata_store = None  # Orbax asks for it
    _writer = ""

    def __init__(self, copy: bool):
        super().__init__()
        self._copy = copy
        #: The write of the last save.
        self.last: future.Future = future.NoopFuture()

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        """Copies arrays, and returns the write of the copies."""
        copied = concurrent.futures.Future()
        try:
            if any(arg.dtype is not None for arg in args or ()):
                raise ValueError(
                    "jaxpp saves arrays as they are; cast them before, not by SaveArgs."
                )
            copied.set_result(snapshot([info.name for info in infos], values, self._copy))
        except Exception as error:
            # The write raises it. If it were raised here, a thread of Orbax would wait for ten
            # minutes for the directory, which is not made then, and the process for the thread.
            copied.set_exception(error)

        async def commit() -> None:
            write = copied.result()
            await infos[0].await_path_creation()  # of the checkpoint, which has all
            await asyncio.to_thread(write, infos[0].parent_dir, self._writer)

        name = f"jaxpp-{self._writer}"
        self.last = future.CommitFutureAwaitingContractedSignals(commit(), name=name)
        for mesh in meshes_of(values):  # whose end waits for the write
            mesh.saves.add(self.last)
        return [self.last]


class _Arrays(_Saving, ocp.type_handlers.NumpyHandler):
    """Arrays. Orbax, which could not know their devices, reads them as those of NumPy."""

    _writer = "driver"


class _Numbers(_Saving, ocp.type_handlers.ScalarHandler):
    """Numbers."""

    _writer = "scalar"


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Saves, as `_Saving` does, and restores pytrees whose arrays may be on ranks."""

    def __init__(self, copy: bool = True):
        arrays, numbers = self._saving = _Arrays(copy), _Numbers(copy)
        string = ocp.type_handlers.get_type_handler(str)
        registry = ocp.type_handlers.create_type_handler_registry(
            *((kind, arrays) for kind in (jax.Array, np.ndarray)),
            *((kind, numbers) for kind in (np.generic, *_NUMBERS)),
            (str, string),
        )
        super().__init__(use_ocdbt=True, use_zarr3=True, type_handler_registry=registry)

    def wait(self) -> None:
        """Waits for the writes of the last save, which may go on beside one that has failed."""
        for handler in self._saving:
            with contextlib.suppress(Exception):
                handler.last.result()

    def restore(self, directory: Any, *_: Any, args: Any = None, **__: Any) -> Any:
        """Reads the arrays to where those of `args.item` are, or where `args.restore_args` says."""
        check_format(directory)
        args = StateRestore() if args is None else args
        if args.item is None:
            return super().restore(directory, args=args)
        return load(directory, args.item, args.restore_args or wanted_of(args.item))


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class StateSave(ocp.args.PyTreeSave):
    """The arguments by which Orbax saves a pytree with `StateHandler`."""


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class StateRestore(ocp.args.PyTreeRestore):
    """The arguments by which Orbax restores a pytree with `StateHandler`."""


# ---- saving -------------------------------------------------------------------------------------


def snapshot(names: Sequence[str], values: Sequence[Any], copy: bool) -> Callable[[Any, str], None]:
    """Copies arrays, or views them, between the steps called before and those called after.

    Each is copied to the host of the process that holds it. Returns what writes the copies to a
    directory, as those of a writer, and waits for that; it may be called once.
    """
    local: list[tuple[Saved, Any]] = []
    remote: dict[int, list[tuple[Saved, int]]] = defaultdict(list)
    keys: list[Saved] = []
    for name, value in zip(names, values, strict=True):
        kind = _shares.type_in_file(value)
        saved = Saved(name, kind, _shares.chunk_shape(kind, _share_shape(value)))
        keys += [saved] if kind.key else []
        stacked = isinstance(value, StackedArray)
        parts = zip(value.parts, value.bounds, strict=False) if stacked else [(value, 0)]
        for part, row in parts:
            rows = dataclasses.replace(saved, row=row)
            if isinstance(part, RemoteArray):
                part.mesh.check_array(part)
                remote[part.ranks[0]].append((rows, part.id))
            else:
                local.append((rows, part))
    mesh, held, calls = _one_mesh(meshes_of(values)), None, None
    if mesh is not None:
        # It stands for the copies of the ranks, which drop them when it goes.
        held = mesh.new_array(jax.ShapeDtypeStruct((), bool), tuple(sorted(remote)), ())
        arguments = {rank: (held.id, own, copy) for rank, own in remote.items()}
        calls = mesh.apply_everywhere(_shares.snapshot, arguments)
    # Where several processes save together, all have the same arrays beside those of ranks.
    shares = _shares.to_shares(local if jax.process_index() == 0 else [], copy)
    if calls:
        calls()

    def write(directory: Any, writer: str) -> None:
        calls = None
        try:
            if held is not None:
                arguments = dict.fromkeys(held.ranks, (held.id, str(directory)))
                calls = held.mesh.apply_everywhere(_shares.write, arguments, ordered=False)
            if shares:
                _shares.write_shares(str(directory), writer, shares)
            if jax.process_index() == 0:
                _tell_of_keys(directory, keys)
            if calls:
                calls()
        finally:  # also where somebody keeps the error, and with it this function
            shares.clear()
            if held is not None:
                held.delete()

    return write


def meshes_of(values: Sequence[Any]) -> list[Any]:
    """Returns the meshes of processes that hold some of the values, each once."""
    parts = [p for x in values for p in (x.parts if isinstance(x, StackedArray) else (x,))]
    return list(dict.fromkeys(part.mesh for part in parts if isinstance(part, RemoteArray)))


def _share_shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of which each share of an array is a multiple, at multiples of it."""
    if isinstance(value, StackedArray):
        shapes = zip(*map(_share_shape, value.parts), strict=True)
        first, *rest = (math.gcd(*sizes) for sizes in shapes)
        return math.gcd(first, *value.bounds), *rest
    if isinstance(value, RemoteArray):
        return _split(value.shape, value.mesh, partition_spec(value.spec))
    if isinstance(value, jax.Array):
        return value.sharding.shard_shape(value.shape)
    return np.shape(value)


def _tell_of_keys(directory: Any, keys: Sequence[Saved]) -> None:
    """Writes down which arrays are random keys, where Orbax looks for it."""
    told = [
        {"array_metadata": {
            "param_name": key.name, "write_shape": key.type.host_shape, "chunk_shape": key.chunk,
            "ext_metadata": {"random_key_impl": key.type.key},
        }}
        for key in keys
    ]  # fmt: skip
    if told:
        folder = directory / "array_metadatas"
        folder.mkdir(exist_ok=True)
        (folder / "process_0").write_text(json.dumps({"array_metadatas": told}))


def alone() -> Any:
    """Returns the options by which Orbax saves in this process, and waits for no other one."""
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix="jaxpp"
    )


def checked(tree: Any) -> Any:
    """Checks a tree that is to be saved; returns it with a name for each static leaf."""
    leaves = jtu.tree_leaves_with_path(tree)
    for path, leaf in leaves:
        _check(jtu.keystr(path), leaf)
    (twice, count), *_ = [*Counter(_name(path) for path, _ in leaves).most_common(1), ("", 0)]
    if count > 1:
        raise ValueError(
            f"Two leaves of the tree have the path {twice}, so that they cannot be told apart in a "
            f"checkpoint; give them keys with different names."
        )
    return jtu.tree_map(_storable, tree)


def _check(path: str, leaf: Any) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(f"The leaf {path} is a type without values, {leaf}; save the array itself.")
    if _compat.is_tracer(leaf):
        raise TypeError(
            f"The leaf {path} is being traced: it is saved inside a JAX transformation. Save the "
            f"results of the jitted function."
        )
    dtype = getattr(leaf, "dtype", None)
    numeric = not isinstance(dtype, np.dtype) or (
        dtype.kind in "biufc" or dtype.isbuiltin == 2 or dtype == jax.dtypes.float0
    )
    if not numeric or (type(leaf) is int and not -(2**63) <= leaf < 2**63):
        what = f"an array of dtype {dtype}" if dtype is not None else f"the number {leaf}"
        raise TypeError(
            f"The leaf {path} is {what}, which JAX has no dtype for; take it out of the tree, or "
            f"save it by other means."
        )
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        why = getattr(leaf, "why_deleted", "") or "deleted, for instance since a step took it"
        way_out = getattr(leaf, "way_out", "") or "save what that step returned"
        raise ValueError(f"The leaf {path} was {why}; {way_out}.")


def _name(path: Any) -> str:
    """Returns the name of a leaf in the checkpoint, as Orbax makes it."""
    return jtu.keystr(path, simple=True, separator=".")


def _storable(leaf: Any) -> Any:
    """Returns a leaf that holds numbers or text as it is, and the name of any other."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | str):
        return leaf
    if type(leaf) in _NUMBERS or leaf is ...:
        return leaf
    named = leaf if hasattr(leaf, "__qualname__") else type(leaf)  # not `repr`, with an address
    return f"{getattr(named, '__module__', None)}.{named.__qualname__}"


# ---- restoring ----------------------------------------------------------------------------------


def wanted_of(like: Any, shardings: Any = None) -> list[Wanted]:
    """Returns what is wanted for each leaf: where `shardings`, or else `like`, says."""
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
    leaves = jtu.tree_leaves_with_path(like)
    return [
        Wanted(_name(path), jtu.keystr(path), leaf, _place(leaf, place))
        for (path, leaf), place in zip(leaves, places, strict=True)
    ]


def _place(like: Any, place: Any) -> Any:
    if type(like) in _NUMBERS or (place is None and isinstance(like, np.ndarray | np.generic)):
        return np
    if place is None and getattr(like, "committed", True):
        return getattr(like, "sharding", None)
    return place


def load(directory: Any, like: Any, wanted: Sequence[Wanted]) -> Any:
    """Reads a pytree, each array in the process that it goes to.

    Orbax itself would compare and copy the tree several times, which takes longer than to read
    many small arrays.
    """
    index = json.loads((directory / "_METADATA").read_text())
    stored = {
        ".".join(str(key["key"]) for key in entry["key_metadata"]): entry["value_metadata"]
        for entry in index["tree_metadata"].values()
    }
    kinds = {n: own["value_type"] for n, own in stored.items() if not own["skip_deserialize"]}
    _check_names(wanted, kinds)
    texts = {}
    if any(kinds.get(target.name) == "string" for target in wanted):
        texts = json.loads((directory / "_strings.json").read_text())
    ocdbt = (directory / "manifest.ocdbt").exists()
    database = Database(str(directory), bool(index.get("use_zarr3")), ocdbt)
    arrays = iter(_read(database, [t for t in wanted if t.name not in texts and t.like is not ...]))
    leaves = [
        _kept(t, texts[t.name]) if t.name in texts else t.like if t.like is ... else next(arrays)
        for t in wanted
    ]
    return jtu.tree_unflatten(jtu.tree_structure(like), leaves)


def _check_names(wanted: Sequence[Wanted], kinds: Mapping[str, str]) -> None:
    """Checks that a checkpoint has the leaves of a tree, and text where that has it."""
    paths = {target.name: target.path for target in wanted}
    lacking = [path for name, path in paths.items() if name not in kinds]
    more = [name for name in kinds if name not in paths]
    if lacking or more:
        some, besides = (
            ", ".join(names[:5]) + ", ..." * (len(names) > 5) or "nothing"
            for names in (lacking, more)
        )
        raise ValueError(
            f"The checkpoint is of another tree than `like`: it lacks {some}, and has {besides} "
            f"besides. Pass a `like` built as the tree that was saved."
        )
    for target in wanted:
        stored = kinds[target.name]
        text = isinstance(_storable(target.like), str)
        if target.like is not ... and text != (stored == "string"):
            raise mismatch(target.path, f"of kind {stored}", repr(target.like))


def _kept(target: Wanted, found: str) -> Any:
    """Returns text that was read; for a static leaf that of `like`, if that has the same name."""
    like = target.like
    if isinstance(like, str) or like is ...:
        return like if like is ... else found
    if (name := _storable(like)) != found:
        raise mismatch(target.path, found, name)
    return like


def _read(database: Database, wanted: Sequence[Wanted]) -> list[Any]:
    """Reads arrays, each in the process that it goes to."""
    parts = [own for whole in wanted for own in _parts_of(whole)]
    mesh = _one_mesh([own.place.mesh for own in parts if isinstance(own.place, RemoteSharding)])
    local: list[Wanted] = []
    remote: dict[int, list[tuple[int, Wanted]]] = defaultdict(list)
    arrays: list[RemoteArray | None] = []  # None for one of this process
    for own in parts:
        if not isinstance(own.place, RemoteSharding):
            local.append(own)
            arrays.append(None)
            continue
        aval = type_of(getattr(own.like, "aval", own.like))
        part, spec = type_of(aval, own.part.shape), _spec_of(own)
        # Where the step does not read it on any rank, any rank may keep it.
        array = mesh.new_array(part, own.place.ranks or (0,), spec)
        arrays.append(array)
        place = spec, _compat.memory_kind(aval)
        there = dataclasses.replace(own, like=aval.update(sharding=None), place=place)
        for rank in array.ranks:
            remote[rank].append((array.id, there))
    arguments = {rank: (database, own) for rank, own in remote.items()}
    calls = mesh.apply_everywhere(_shares.read, arguments) if mesh else None
    try:
        read = iter(_shares.read_arrays(database, local))
    finally:
        if calls:
            calls()
    rest = iter([next(read) if array is None else array for array in arrays])
    return [
        StackedArray(list(itertools.islice(rest, len(own.place.parts))))
        if isinstance(own.place, StackedSharding)
        else _number(next(rest), own.like)
        for own in wanted
    ]


def _parts_of(whole: Wanted) -> list[Wanted]:
    """Returns what is to be read for a leaf: the array, or its rows that go to each place."""
    place = whole.place
    if not isinstance(place, StackedSharding):
        return [whole]
    if whole.type.shape[:1] != (place.bounds[-1],):
        raise ValueError(
            f"The leaf {whole.path} is {whole.type}, but its sharding is of an array with "
            f"{place.bounds[-1]} rows; give it a sharding of its own."
        )
    each = zip(place.intervals, place.parts, strict=True)
    return [dataclasses.replace(whole, rows=rows, place=own) for rows, own in each]


def _number(array: Any, like: Any) -> Any:
    """Makes a number of an array without axes, where `like` is one."""
    if type(like) in _NUMBERS:
        return type(like)(array.item())
    return array[()] if isinstance(like, np.generic) and isinstance(array, np.ndarray) else array


def _one_mesh(meshes: Sequence[Any]) -> Any:
    """Returns the one remote mesh of arrays; None where there is none."""
    if len(different := {id(mesh) for mesh in meshes}) > 1:
        raise ValueError(
            f"The tree has arrays of {len(different)} remote meshes; save or load the part of each "
            f"by itself."
        )
    return meshes[0] if meshes else None


def _spec_of(wanted: Wanted) -> Spec:
    """Returns the split of an array in the ranks that it goes to, if it can be split so."""
    place, shape = wanted.place, wanted.part.shape
    try:
        _split(shape, place.mesh, place.spec)
    except ValueError as error:
        raise ValueError(
            f"The leaf {wanted.path} is {wanted.part}, which cannot be split as {place.spec} over "
            f"the axes {axis_sizes(place.mesh.inside)} inside a rank; give it a sharding of its "
            f"own."
        ) from error
    return spec_of(place.spec, len(shape))


def _split(shape: tuple[int, ...], mesh: Any, spec: PartitionSpec) -> tuple[int, ...]:
    """Returns the shape of an array's shards in a rank; raises a `ValueError` where it has none."""
    return NamedSharding(mesh.inside or AbstractMesh((), ()), spec).shard_shape(shape)


def check_format(directory: Any) -> None:
    """Refuses a directory with a checkpoint of jaxpp's former format."""
    manifest = directory / "manifest.json"
    if manifest.exists() and '"jaxpp-state"' in manifest.read_text()[:100]:
        raise ValueError(
            f"{directory} is a checkpoint in the format that jaxpp had before it took Orbax's. "
            f"Load it with jaxpp at commit 852d4a3 (jaxpp.load_state), and save what that gives "
            f"with Orbax (jaxpp.gather, orbax.checkpoint.StandardCheckpointer)."
        )
