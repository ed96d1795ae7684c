"""The slices of arguments: what `in_axes` says of each array, and whether it fits."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxpp import _specs
from jaxpp.transforms._signature import with_keywords, without_keywords
from jaxpp.transforms.microbatch._reductions import CARRY


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of `in_axes`; `number` tells it apart, None where the user wrote none."""

    axis: int | str | None
    number: int | None = None


WHOLE = Entry(None)


def broadcast_axes(in_axes: Any, args: tuple) -> list[Entry]:
    """Returns the entry of `in_axes` for each leaf of the arguments."""
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    count = len(without_keywords(args))
    if isinstance(in_axes, tuple) and len(in_axes) != count:
        raise ValueError(
            f"microbatch: in_axes has {len(in_axes)} entries {in_axes}, but the function was "
            f"called with {count} arguments; give one entry for each."
        )
    numbers = itertools.count()
    in_axes = jtu.tree_map(lambda a: Entry(a, next(numbers)), in_axes, is_leaf=is_none)
    in_axes = with_keywords(in_axes, args, Entry(0))
    entries = broadcast(in_axes, args, "in_axes", lambda e: isinstance(e, Entry))
    for axis in [e.axis for e in entries]:
        if axis not in (None, CARRY) and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise ValueError(
                f"microbatch: in_axes holds {axis!r}; each of its leaves is an int, None or "
                f"{CARRY!r}."
            )
    return entries


def is_none(x: Any) -> bool:
    return x is None


def broadcast(prefix: Any, tree: Any, what: str, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Repeats each leaf of a prefix pytree for the leaves of `tree` below it."""
    result: list[Any] = []
    try:
        jtu.tree_map(
            lambda p, sub: result.extend([p] * len(jtu.tree_leaves(sub))),
            prefix,
            tree,
            is_leaf=is_leaf,
        )
    except ValueError as error:
        raise ValueError(
            f"microbatch: {what} is not a prefix of the pytree it stands for: {error}"
        ) from None
    return result


def check_sizes(args: tuple, leaves, entries: Sequence[Entry], paths, count: int, replicas: int):
    """Checks the arrays to slice.

    Args:
        args: the arguments.
        leaves: the leaves of the arguments, with their `entries` and `paths`.
        entries: the entries of `in_axes`.
        paths: the paths.
        count: the number of slices, of all replicas.
        replicas: the number of replicas.
    """
    try:
        _check_sizes(leaves, entries, paths, count, replicas)
    except ValueError as error:
        if why := _sliced_model(args, leaves, entries, paths):
            raise ValueError(f"{why} ({str(error).removeprefix('microbatch: ')})") from None
        raise


def _sliced_model(args: tuple, leaves, entries: Sequence[Entry], paths) -> str:
    """Explains an error by a model that `in_axes` slices; empty where it slices none."""
    own = without_keywords(args)
    positions = [int(path[1 : path.index("]")]) if path.startswith("[") else -1 for path in paths]
    sizes: dict[int, set[Any]] = {n: set() for n in range(len(own))}
    for leaf, entry, n in zip(leaves, entries, positions, strict=True):
        if n in sizes and isinstance(entry.axis, int):
            sizes[n].add(leaf.shape[entry.axis] if -leaf.ndim <= entry.axis < leaf.ndim else None)
    models = [n for n in sizes if sizes[n] and _holds_parameters(own[n], sizes[n])]
    if not models or len(models) == len([n for n in sizes if sizes[n]]) == len(own):
        return ""
    n = models[0]
    axes = tuple(None if k in models or not _has_arrays(own[k]) else 0 for k in range(len(own)))
    note = ""
    if n > 0 and not sizes[0]:
        note = " By default a function takes the model first, and then the batch: (None, 0)."
    return (
        f"microbatch: in_axes slices args[{n}], which holds the parameters of a model "
        f"({type(own[n]).__name__}), but each microbatch needs all of them. Give it None: "
        f"in_axes={axes}.{note}"
    )


def _holds_parameters(arg: Any, sizes: set[Any]) -> bool:
    """Tells whether a sliced argument looks like a model: a module, or arrays of unlike sizes."""
    nodes = jtu.tree_leaves(arg, is_leaf=lambda node: isinstance(node, eqx.Module))
    return any(isinstance(node, eqx.Module) for node in nodes) or len(sizes) > 2


def _has_arrays(arg: Any) -> bool:
    return any(hasattr(leaf, "ndim") and leaf.ndim for leaf in jtu.tree_leaves(arg))


def _check_sizes(leaves, entries: Sequence[Entry], paths, count: int, replicas: int) -> None:
    """Checks the sizes of the arrays to slice."""
    sizes = {}
    slices = f"{count} microbatches"
    if replicas > 1:
        slices = f"{count} slices ({count // replicas} microbatches on each of {replicas} replicas)"
    for leaf, entry, path in zip(leaves, entries, paths, strict=True):
        axis = entry.axis
        if not isinstance(axis, int):
            continue
        if not -leaf.ndim <= axis < leaf.ndim:
            own = ""
            if _is_key(leaf):
                own = (
                    f" It is one random key: give it None in in_axes, or one for each microbatch, "
                    f"jax.random.split(key, {count}), of which a slice is keys[0]."
                )
            raise ValueError(
                f"microbatch: args{path} has shape {leaf.shape} and no axis {axis} to slice.{own}"
            )
        sizes[path] = leaf.shape[axis]
    if not sizes:
        raise ValueError(
            "microbatch: in_axes names no array to slice; give an axis for one argument."
        )
    for path, size in sizes.items():
        if size % count:
            below = size // count * count
            near = f"{below} or {below + count}" if below else f"{count}"
            examples = f"{size} example{'s' * (size > 1)}"
            raise ValueError(
                f"microbatch: args{path} has {examples}, which {slices} do not divide; use "
                f"{near} examples, or another number of microbatches."
            )
    # An array with an entry for each microbatch (random keys, numbers) has M, whatever the batch.
    if len(set(sizes.values()) - {count}) > 1:
        raise ValueError(
            f"microbatch: the sliced arguments differ in their number of examples: "
            f"{', '.join(f'args{p}: {n}' for p, n in sizes.items())}; give each as many, or one "
            f"entry for each of the {slices}."
        )
    if count > 1:  # one microbatch takes either whole
        _check_entries(leaves, entries, paths, sizes, count, slices)


def _check_entries(
    leaves, entries: Sequence[Entry], paths, sizes: dict, count: int, slices: str
) -> None:
    """Checks that no entry of `in_axes` covers examples and an array of as many as microbatches."""
    sliced = [(x, e, p) for x, e, p in zip(leaves, entries, paths, strict=True) if p in sizes]
    examples = {e.number for _, e, p in sliced if sizes[p] != count}
    for leaf, entry, path in sliced:
        shared = entry.number is None or entry.number in examples
        if examples and shared and sizes[path] == count and not _is_key(leaf):
            raise ValueError(
                f"microbatch: args{path} has {count} entries where others have "
                f"{max(sizes.values())} examples, and no axis of its own in in_axes: it may have "
                f"an entry for each of the {slices}, or be meant for all as it is. "
                f"Give it an entry of its own in in_axes: {entry.axis} for the first, None for "
                f"the second."
            )


def _is_key(x: Any) -> bool:
    """Tells whether an array holds random keys, typed or raw."""
    raw = x.dtype == np.uint32 and x.ndim == 2 and x.shape[-1] in (2, 4)
    return raw or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def note_on_keys(error: Exception, leaves, entries: Sequence[Entry], paths) -> bool:
    """Explains an error of a function whose slice of random keys is an array of one key.

    Returns:
        Whether it was such an error.
    """
    for leaf, entry, path in zip(leaves, entries, paths, strict=True):
        if isinstance(entry.axis, int) and _is_key(leaf) and "key" in str(error):
            error.add_note(
                f"microbatch: args{path} holds random keys, and in_axes slices them: a microbatch "
                f"gets an array of its keys, also where that is one. Take it in the function: "
                f"key = keys[0]."
            )
            return True
    return False


def note_on_slices(error: Exception, leaves, entries: Sequence[Entry], paths, count: int) -> None:
    """Says what was sliced, where the function fails on a slice: it may be a parameter."""
    pairs = zip(leaves, entries, paths, strict=True)
    sliced = [(f"args{p}", x, e.axis) for x, e, p in pairs if isinstance(e.axis, int)]
    shown = [f"{p} {x.shape} by axis {axis}" for p, x, axis in sliced[:4]]
    more = f" and {len(sliced) - 4} more" if len(sliced) > 4 else ""
    error.add_note(
        f"microbatch: the function was traced on one of {count} slices. in_axes slices "
        f"{', '.join(shown)}{more}. An argument that each microbatch reads whole, as parameters "
        f"are, has None in in_axes."
    )


def slice_type(x, axis: int | str, count: int) -> jax.ShapeDtypeStruct:
    def first(x):
        return stack_slices(x, axis, count)[0] if isinstance(axis, int) else x

    return _specs.types_of(first, x)  # NumPy's int64 is an int32 to JAX


def stack_slices(x, axis: int, count: int):
    """Stacks the slices of an array along a new first axis."""
    x = jnp.asarray(x)
    axis = axis % x.ndim
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    split = _specs.in_type(x)
    if split is not None:  # explicit axes: the examples of each slice are split as the array is
        split = _specs.partition_spec((*split[:axis], (), *split[axis:]))
    return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)
