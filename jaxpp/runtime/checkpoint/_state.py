"""`save_state`, `load_state`, and what `orbax.checkpoint.CheckpointManager` needs."""

import errno
import os
from typing import TYPE_CHECKING, Any

import jax

from jaxpp._messages import need

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


def save_args(tree: Any) -> "ocp.args.PyTreeSave":
    """Makes the arguments by which Orbax saves a pytree whose arrays may be on ranks.

    They are for the `save` of an `orbax.checkpoint.CheckpointManager`, which returns once each rank
    has copied its arrays. After that the arrays may be donated. What is saved is as with
    `save_state`.

    Args:
        tree: a pytree of arrays of this process, arrays of one remote mesh, and numbers.

    Raises:
        ValueError: an array has been donated.
        TypeError: an array has a dtype that is none of JAX's.
        ImportError: Orbax is not installed; it is in the extra `checkpoint`.

    Example:
        >>> import jax.numpy as jnp, jaxpp, orbax.checkpoint as ocp, tempfile
        >>> folder, state = tempfile.mkdtemp(), {"weights": jnp.zeros(3)}
        >>> options = ocp.CheckpointManagerOptions(max_to_keep=2)
        >>> with ocp.CheckpointManager(folder, options=options) as manager:
        ...     for step in range(5):
        ...         state = {"weights": state["weights"] + 1.0}
        ...         _ = manager.save(step, args=jaxpp.save_args(state))
        ...     manager.wait_until_finished()
        ...     steps = list(manager.all_steps())
        ...     steps, manager.restore(3, args=jaxpp.restore_args(state))
        ([3, 4], {'weights': Array([4., 4., 4.], dtype=float32)})
    """
    handler = _handler()
    return handler.StateSave(handler.checked(tree))


def restore_args(like: Any, shardings: Any = None) -> "ocp.args.PyTreeRestore":
    """Makes the arguments by which Orbax restores a pytree onto any devices or ranks.

    They are for the `restore` of an `orbax.checkpoint.CheckpointManager`.

    Args:
        like: as for `load_state`.
        shardings: as for `load_state`.

    Raises:
        ImportError: Orbax is not installed; it is in the extra `checkpoint`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, orbax.checkpoint as ocp, tempfile
        >>> like = {"w": jax.ShapeDtypeStruct((3,), "float32")}
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     _ = manager.save(1, args=jaxpp.save_args({"w": jnp.arange(3.0)}))
        ...     manager.wait_until_finished()
        ...     manager.restore(1, args=jaxpp.restore_args(like))
        {'w': Array([0., 1., 2.], dtype=float32)}
    """
    handler = _handler()
    return handler.StateRestore(like, handler.wanted_of(like, shardings))


def save_state(path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False) -> None:
    """Saves a tree as a checkpoint of Orbax, which is there whole or not at all.

    Each rank writes its own arrays; of several ranks that hold an array, the first writes it. No
    array of a rank goes through this process. Arrays of JAX and NumPy, whatever their dtype and
    sharding, Python numbers and strings are saved bitwise. Of other leaves, such as activation
    functions, the name is saved, and `load_state` compares it.

    Args:
        path: a directory, which is made, or a URL of a bucket, such as `gs://bucket/state`. On a
            remote mesh it is on a file system that all hosts share.
        tree: a pytree of arrays of this process, arrays of one remote mesh, and numbers.
        overwrite: whether a checkpoint that is there may be replaced. It stays until the new one
            is whole.

    Raises:
        FileExistsError: something is there already.
        OSError: the directory cannot be written to, or the disk is full. What was written is
            removed.
        ValueError: an array has been donated, or arrays belong to several meshes.
        TypeError: an array has a dtype that is none of JAX's.
        ImportError: Orbax is not installed; it is in the extra `checkpoint`.

    Example:
        >>> import jax.numpy as jnp, jaxpp, tempfile
        >>> state = {"weights": jnp.ones((2, 3)), "step": 7}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     jaxpp.save_state(f"{directory}/7", state)
        ...     jaxpp.load_state(f"{directory}/7", state)["step"]
        7
    """
    meshes = _handler().meshes_of(jax.tree.leaves(tree))
    if not meshes:
        _save(path, tree, overwrite)
    else:  # on a launched mesh, process 0 alone
        told = f"saves a state to {_absolute(path)}"
        meshes[0].lead(told, lambda: _save(path, tree, overwrite))


def _save(path: str | os.PathLike[str], tree: Any, overwrite: bool) -> None:
    """Saves a tree, in the process that leads."""
    args, place, handler = save_args(tree), _absolute(path), _handler()
    new, old = _beside(place)
    _clean(place)
    there = place.exists()
    if there and not (overwrite and (place / _IS_ORBAX).exists()):
        raise FileExistsError(errno.EEXIST, _WHY[overwrite], str(place))
    # `save` waits until all is written, so that nothing is donated meanwhile.
    state_handler = handler.StateHandler(copy=False)
    try:
        options = {"multiprocessing_options": handler.alone()}
        with handler.ocp.Checkpointer(state_handler, **options) as checkpointer:
            # Orbax itself would remove the old one first.
            checkpointer.save(new if there else place, args=args)
    except BaseException:
        state_handler.wait()
        _clean(place)
        raise
    if there:
        place.rename(old)
        new.rename(place)
        old.rmtree()


def load_state(path: str | os.PathLike[str], like: Any, shardings: Any = None) -> Any:
    """Loads a checkpoint that `save_state`, `save_args` with Orbax, or Orbax alone has saved.

    The checkpoint may have been written by other ranks, on another mesh and under another schedule.
    Each rank reads its own share; only arrays of this process go through this process.

    Args:
        path: the checkpoint's directory, or its URL in a bucket.
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
        FileNotFoundError: there is no checkpoint at `path`.
        ValueError: the checkpoint is damaged, of another tree than `like`, or of the format that
            jaxpp had before it took Orbax's.
        OSError: it cannot be read.
        ImportError: Orbax is not installed; it is in the extra `checkpoint`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp, tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     jaxpp.save_state(f"{directory}/1", {"w": jnp.arange(3.0)})
        ...     jaxpp.load_state(f"{directory}/1", {"w": jax.ShapeDtypeStruct((3,), "float32")})
        {'w': Array([0., 1., 2.], dtype=float32)}
    """
    handler, place = _handler(), _absolute(path)
    handler.check_format(place)
    there = [p for p in (place, _beside(place)[1]) if (p / _IS_ORBAX).exists()]
    if not there:
        raise FileNotFoundError(errno.ENOENT, "There is no checkpoint", str(place))
    return handler.load(there[0], like, handler.wanted_of(like, shardings))


#: The file by which a directory is known as a checkpoint of Orbax.
_IS_ORBAX = "_METADATA"
#: Why a save is refused, by whether it may overwrite.
_WHY = {
    False: "Something is there already; pass overwrite=True to replace a checkpoint",
    True: "Something that is not a checkpoint of Orbax is there; save elsewhere",
}


def _beside(path: Any) -> tuple[Any, Any]:
    """Returns where the new checkpoint and the old one are while one replaces the other."""
    return tuple(path.parent / f"{path.name}.jaxpp-{which}" for which in ("new", "old"))


def _clean(path: Any) -> None:
    """Removes what a save has left that failed or was killed."""
    new, old = _beside(path)
    if old.exists() and not path.exists():
        old.rename(path)
    names = (f"{place.name}.orbax-checkpoint-tmp*" for place in (path, new))
    for rest in (new, old, *(rest for name in names for rest in path.parent.glob(name))):
        if rest.exists():
            rest.rmtree()


def _handler() -> Any:
    """Imports what knows of Orbax; this takes long, so `import jaxpp` does not do it."""
    need("checkpoint", "A checkpoint", "orbax", "tensorstore")
    from jaxpp.runtime.checkpoint import _handler

    return _handler


def _absolute(path: str | os.PathLike[str]) -> Any:
    """Makes a path absolute, so that every process on the host understands it."""
    from etils import epath  # which Orbax's paths are of

    return epath.Path(path) if "://" in str(path) else epath.Path(os.path.abspath(path))
