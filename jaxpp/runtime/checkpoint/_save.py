"""`save_state`: writes a tree as a checkpoint; each rank writes its own leaves."""

import contextlib
import dataclasses
import itertools
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpp import _compat
from jaxpp.runtime.arrays import StackedArray
from jaxpp.runtime.checkpoint import _directory, _manifest, _ranks
from jaxpp.runtime.checkpoint._manifest import ArrayLeaf, Leaf, Piece
from jaxpp.runtime.remote import RemoteArray


def save_state(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Saves a tree as a checkpoint, which is there whole or not at all.

    Each rank writes its own arrays; of several ranks that hold an array, the first writes it. No
    array of a rank goes through this process. Arrays of JAX and NumPy, whatever their dtype and
    sharding, and Python numbers are saved bitwise. Other leaves, such as activation functions, are
    not saved, but `load_state` compares them.

    Args:
        path: a directory, which is made; on a remote mesh on a file system that all hosts share.
        tree: a pytree of arrays of this process, arrays of one remote mesh, and numbers.
        overwrite: whether a checkpoint that is there may be replaced. It stays until the new one
            is whole.

    Raises:
        FileExistsError: if something is there already.
        OSError: if the directory cannot be written to, or the disk is full. What was written is
            removed.
        ValueError: if an array has been donated, or arrays belong to several meshes.
        TypeError: if an array has a dtype that is none of JAX's.
        ImportError: if TensorStore is not installed; it is in the extra `checkpoint`.

    Example:
        >>> import jax.numpy as jnp, jaxpp, tempfile
        >>> state = {"weights": jnp.ones((2, 3)), "step": 7}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     jaxpp.save_state(f"{directory}/7", state)
        ...     jaxpp.load_state(f"{directory}/7", state)["step"]
        7
    """
    plan = Plan.of(tree)
    with _directory.drafting(absolute(path), overwrite) as draft:
        draft.publish(plan.write(draft.data))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a save: the leaves of a tree, and the process that writes each of them.

    Args:
        leaves: the leaves, without their pieces.
        local: pairs of the number of a leaf and its value, for arrays of this process.
        mesh: the remote mesh of the others, if there are any.
        remote: for each rank that writes, pairs of the number of a leaf and the id of its array.
        held: the remote arrays, so that they stay.
        rows: where a leaf comes in parts, these have numbers of their own: for each the number of
            the leaf, and the first of its rows.
        owner: whose snapshot the ranks write; empty where they write the arrays themselves.
        copied: the snapshot of the arrays of this process.
    """

    leaves: tuple[Leaf, ...]
    local: tuple[tuple[int, Any], ...]
    mesh: Any
    remote: Mapping[int, list[tuple[int, int]]]
    held: tuple[RemoteArray, ...]
    rows: Mapping[int, tuple[int, int]]
    owner: str = ""
    copied: Sequence[_ranks.HostPiece] = ()

    @staticmethod
    def of(tree: Any) -> "Plan":
        """Plans to save a tree.

        Raises:
            ValueError: if an array cannot be saved.
            TypeError: the same.
        """
        found = _manifest.leaves_of(tree)
        local: list[tuple[int, Any]] = []
        remote: dict[int, list[tuple[int, int]]] = defaultdict(list)
        held: list[RemoteArray] = []
        rows: dict[int, tuple[int, int]] = {}

        def note(number: int, value: Any) -> None:
            if isinstance(value, StackedArray):
                for part, start in zip(value.parts, value.bounds, strict=False):
                    own = len(found) + len(rows)
                    rows[own] = number, start
                    note(own, part)
            elif isinstance(value, RemoteArray):
                value.mesh.check_array(value)
                remote[value.ranks[0]].append((number, value.id))
                held.append(value)
            else:
                local.append((number, value))

        for number, (leaf, value) in enumerate(found):
            if isinstance(leaf, ArrayLeaf):
                _check_value(leaf.path, value)
                note(number, value)
        meshes = {id(array.mesh): array.mesh for array in held}
        if len(meshes) > 1:
            raise ValueError(
                f"The tree has arrays of {len(meshes)} remote meshes; save the part of each by "
                f"itself."
            )
        mesh = next(iter(meshes.values()), None)
        leaves = tuple(leaf for leaf, _ in found)
        return Plan(leaves, tuple(local), mesh, dict(remote), tuple(held), rows)

    def snapshot(self, owner: str) -> "Plan":
        """Copies the arrays, each in the process that holds it; an owner has one copy at a time.

        The plan that it returns writes the copies, while the ranks go on.
        """
        arguments = {rank: (owner, items) for rank, items in self.remote.items()}
        with ranks_at_work(self.mesh, _ranks.snapshot, arguments):
            own = _ranks.to_pieces(self.local, copy=True)
        return dataclasses.replace(self, local=(), held=(), owner=owner, copied=own)

    def write(self, data: Path) -> tuple[Leaf, ...]:
        """Writes the arrays, or their copies; returns the leaves with their pieces."""
        arguments = {r: (str(data), items, self.owner) for r, items in self.remote.items()}
        ordered = not self.owner
        with ranks_at_work(self.mesh, _ranks.write, arguments, ordered=ordered) as of_ranks:
            own = self.copied or _ranks.to_pieces(self.local)
            of_driver = _ranks.write_pieces(str(data), _ranks.DRIVER, own)
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for number, piece in itertools.chain(of_driver, *itertools.chain(*of_ranks.values())):
            if number in self.rows:
                number, start = self.rows[number]
                offset = (piece.offset[0] + start, *piece.offset[1:])
                piece = dataclasses.replace(piece, offset=offset)
            pieces[number].append(piece)
        return tuple(
            dataclasses.replace(leaf, pieces=tuple(pieces[n])) if n in pieces else leaf
            for n, leaf in enumerate(self.leaves)
        )

    def drop(self) -> None:
        """Forgets the copies."""
        arguments = dict.fromkeys(self.remote, (self.owner,))
        with ranks_at_work(self.mesh, _ranks.drop_snapshot, arguments, ordered=False):
            pass


@contextlib.contextmanager
def ranks_at_work(
    mesh: Any, function: Any, arguments: Mapping[int, tuple[Any, ...]], *, ordered: bool = True
):
    """Runs a function of `_ranks` on ranks, beside the block; waits for all at the block's end.

    Args:
        mesh: the remote mesh.
        function: what runs there; its exception fails no rank.
        arguments: for each rank the arguments.
        ordered: whether they run between the steps called before and those called after.

    Yields:
        A dictionary that has, after the block, what each process of each rank gave.
    """
    of_ranks: dict[int, Any] = {}
    if not arguments:
        yield of_ranks
        return
    calls = mesh.apply_everywhere(function, arguments, ordered=ordered)
    try:
        yield of_ranks
    finally:
        calls.wait()  # what has failed is removed when nobody writes there any more
    of_ranks.update(calls.results())


def absolute(path: str | os.PathLike[str]) -> Path:
    """Makes a path absolute, so that every process on the host understands it."""
    return Path(os.path.abspath(path))


def _check_value(path: str, value: Any) -> None:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"The leaf {path} is a type without values, {value}; save the array itself."
        )
    if _compat.is_tracer(value):
        raise TypeError(
            f"The leaf {path} is being traced: save_state was called inside a JAX transformation. "
            f"Call it on the results of the jitted function."
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise ValueError(
            f"The leaf {path} was deleted, for instance since a step took it as a donated "
            f"argument; save what that step returned."
        )
