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

from jaxpp import _specs, jaxprs
from jaxpp.transforms._signature import with_arrays, with_keywords, without_keywords
from jaxpp.transforms.microbatch._reductions import CARRY


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of `in_axes`; `number` tells it apart, None where the user wrote none."""

    axis: int | str | None
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class ArgumentLeaf:
    """A leaf of the arguments, its path such as `[0].weight`, and what `in_axes` says of it."""

    value: Any
    path: str
    entry: Entry

    @property
    def axis(self) -> int | str | None:
        """The axis to slice; None to pass the whole, or `"carry"`."""
        return self.entry.axis

    @property
    def is_sliced(self) -> bool:
        """True if each slice gets a part of it."""
        return isinstance(self.axis, int)

    def whole_unless_array(self) -> "ArgumentLeaf":
        """Returns the leaf itself if it is an array; another one is passed whole."""
        is_array = jaxprs.is_array(self.value)
        return self if is_array else dataclasses.replace(self, entry=Entry(None))

    def of_slice(self, count: int) -> Any:
        """Returns what a slice gets: the type of a part, or the whole."""
        if self.axis is None:
            return self.value

        def first(x):
            return stack_slices(x, self.axis, count)[0] if isinstance(self.axis, int) else x

        return _specs.types_of(first, self.value)  # NumPy's int64 is an int32 to JAX


def with_axes(in_axes: Any, args: tuple) -> list[ArgumentLeaf]:
    """Returns the leaves of the arguments, with their entries of `in_axes`.

    A number of Python that is carried is an array.
    """
    entries, leaves = broadcast_axes(in_axes, args), jtu.tree_flatten_with_path(args)[0]
    numbers: Any = [x for _, x in leaves]
    if any(e.axis == CARRY for e in entries):
        numbers = jtu.tree_leaves(with_arrays(args, ()))
    return [
        ArgumentLeaf(number if e.axis == CARRY else x, jtu.keystr(path), e)
        for e, (path, x), number in zip(entries, leaves, numbers, strict=True)
    ]


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


def check_sizes(args: tuple, arguments: Sequence[ArgumentLeaf], count: int, replicas: int) -> None:
    """Checks the arrays to slice, into `count` slices of all replicas."""
    sliced = [a for a in arguments if a.is_sliced]
    try:
        _check_sizes(sliced, count, replicas)
    except ValueError as error:
        if why := _sliced_model(args, sliced):
            raise ValueError(f"{why} ({str(error).removeprefix('microbatch: ')})") from None
        raise


def _sliced_model(args: tuple, sliced: Sequence[ArgumentLeaf]) -> str:
    """Explains an error by a model that `in_axes` slices; empty where it slices none."""
    given = without_keywords(args)
    sizes: dict[int, set[Any]] = {n: set() for n in range(len(given))}
    for a in sliced:
        n = int(a.path[1 : a.path.index("]")]) if a.path.startswith("[") else -1
        if n in sizes:
            x, axis = a.value, a.axis
            sizes[n].add(x.shape[axis] if -x.ndim <= axis < x.ndim else None)
    models = [n for n in sizes if sizes[n] and _holds_parameters(given[n], sizes[n])]
    if not models or len(models) == len([n for n in sizes if sizes[n]]) == len(given):
        return ""
    n = models[0]
    axes = tuple(None if k in models or not _has_arrays(given[k]) else 0 for k in range(len(given)))
    note = ""
    if n > 0 and not sizes[0]:
        note = " By default a function takes the model first, and then the batch: (None, 0)."
    return (
        f"microbatch: in_axes slices args[{n}], which holds the parameters of a model "
        f"({type(given[n]).__name__}), but each microbatch needs all of them. Give it None: "
        f"in_axes={axes}.{note}"
    )


def _holds_parameters(arg: Any, sizes: set[Any]) -> bool:
    """Tells whether a sliced argument looks like a model: a module, or arrays of unlike sizes."""
    nodes = jtu.tree_leaves(arg, is_leaf=lambda node: isinstance(node, eqx.Module))
    return any(isinstance(node, eqx.Module) for node in nodes) or len(sizes) > 2


def _has_arrays(arg: Any) -> bool:
    return any(hasattr(leaf, "ndim") and leaf.ndim for leaf in jtu.tree_leaves(arg))


def _check_sizes(sliced: Sequence[ArgumentLeaf], count: int, replicas: int) -> None:
    """Checks the sizes of the arrays to slice."""
    sizes = {}
    slices = f"{count} microbatches"
    if replicas > 1:
        slices = f"{count} slices ({count // replicas} microbatches on each of {replicas} replicas)"
    for a in sliced:
        leaf, axis = a.value, a.axis
        if not -leaf.ndim <= axis < leaf.ndim:
            way = ""
            if _is_key(leaf):
                way = (
                    f" It is one random key: give it None in in_axes, or one for each microbatch, "
                    f"jax.random.split(key, {count}), of which a slice is keys[0]."
                )
            elif not leaf.ndim:
                way = (
                    " Give it None in in_axes; if it is the number of a batch, place needs feed=, "
                    "the function that loads it."
                )
            raise ValueError(
                f"microbatch: args{a.path} has shape {leaf.shape} and no axis {axis} to slice.{way}"
            )
        sizes[a.path] = leaf.shape[axis]
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
        firsts = [f"args{p}: {n}" for p, n in sizes.items()]
        shown = [*firsts[:4], f"{len(firsts) - 4} more"] if len(firsts) > 5 else firsts
        raise ValueError(
            f"microbatch: the sliced arguments differ in their number of examples: "
            f"{', '.join(shown)}; give each as many, or one entry for each of the {slices}."
        )
    if count > 1:  # one microbatch takes either whole
        _check_entries(sliced, sizes, count, slices)


def _check_entries(sliced: Sequence[ArgumentLeaf], sizes: dict, count: int, slices: str) -> None:
    """Checks that no entry of `in_axes` covers examples and an array of as many as microbatches."""
    examples = {a.entry.number for a in sliced if sizes[a.path] != count}
    for a in sliced:
        shared = a.entry.number is None or a.entry.number in examples
        if examples and shared and sizes[a.path] == count and not _is_key(a.value):
            raise ValueError(
                f"microbatch: args{a.path} has {count} entries where others have "
                f"{max(sizes.values())} examples, and no axis of its own in in_axes: it may have "
                f"an entry for each of the {slices}, or be meant for all as it is. "
                f"Give it an entry of its own in in_axes: {a.axis} for the first, None for "
                f"the second."
            )


def _is_key(x: Any) -> bool:
    """Tells whether an array holds random keys, typed or raw."""
    raw = x.dtype == np.uint32 and x.ndim == 2 and x.shape[-1] in (2, 4)
    return raw or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def note_on_keys(error: Exception, arguments: Sequence[ArgumentLeaf]) -> bool:
    """Explains an error of a function whose slice of keys is an array of one; tells if it is so."""
    for a in arguments:
        if a.is_sliced and _is_key(a.value) and "key" in str(error):
            error.add_note(
                f"microbatch: args{a.path} holds random keys, and in_axes slices them: a "
                f"microbatch gets an array of its keys, also where that is one. Take it in the "
                f"function: key = keys[0]."
            )
            return True
    return False


def note_on_slices(error: Exception, arguments: Sequence[ArgumentLeaf], count: int) -> None:
    """Says what was sliced, where the function fails on a slice: it may be a parameter."""
    sliced = [a for a in arguments if a.is_sliced]
    shown = [f"args{a.path} {a.value.shape} by axis {a.axis}" for a in sliced[:4]]
    more = f" and {len(sliced) - 4} more" if len(sliced) > 4 else ""
    error.add_note(
        f"microbatch: the function was traced on one of {count} slices. in_axes slices "
        f"{', '.join(shown)}{more}. An argument that each microbatch reads whole, as parameters "
        f"are, has None in in_axes."
    )


def stack_slices(x, axis: int, count: int):
    """Stacks the slices of an array along a new first axis."""
    x = jnp.asarray(x)
    axis = axis % x.ndim
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    split = _specs.in_type(x)
    if split is not None:  # explicit axes: the examples of each slice are split as the array is
        split = _specs.partition_spec((*split[:axis], (), *split[axis:]))
    return jnp.moveaxis(jax.lax.reshape(x, shape, out_sharding=split), axis, 0)
