"""`StackedArray`: an array whose rows are on several ranks, and steps that take and give such.

A parameter that is stacked over layers is distributed by `place`: each rank holds the rows of its
stages. To the training loop it stays one leaf.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpp._program import Bundle, Cut, cuts_of
from jaxpp._specs import Spec, type_of
from jaxpp.jaxprs import check_there
from jaxpp.runtime.arrays._handle import ArrayHandle, HandleSharding
from jaxpp.runtime.arrays._homes import on_device
from jaxpp.runtime.arrays._shares import resplit

#: The first row of each part of an array, and the number of all rows at the end: `(0, 2, 4)`.
Bounds = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StackedSharding(HandleSharding):
    """The place of an array whose rows are on several ranks.

    Args:
        bounds: where the parts begin along the first axis, and its size at the end.
        parts: where each part is: JAX's shardings, or those of a remote mesh.

    Example:
        >>> import jax, jaxpp
        >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        >>> jaxpp.runtime.StackedSharding((0, 2, 4), (one, one)).bounds
        (0, 2, 4)
    """

    bounds: Bounds
    parts: tuple[Any, ...]

    @property
    def device_set(self) -> set[Any]:
        """The devices of this process that hold a part."""
        return set().union(*(getattr(p, "device_set", ()) for p in self.parts))

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """The rows of each part."""
        return list(itertools.pairwise(self.bounds))

    @property
    def is_fully_addressable(self) -> bool:
        """Tells whether this process holds all parts."""
        return all(p.is_fully_addressable for p in self.parts)

    @property
    def array(self) -> str:
        """A description of an array that is there, for errors."""
        return f"StackedArray in rows {', '.join(f'{a}:{b}' for a, b in self.intervals)}"


class StackedArray(ArrayHandle):
    """An array in parts: each has some of the rows, on the devices or ranks that use them.

    A placed step returns it for a parameter that is stacked over layers, and for its optimizer
    state. It is a leaf of pytrees that filters such as `eqx.is_array` take for an array. It goes
    into the next call unchanged; `jaxpp.gather`, `jax.device_get` and `np.asarray` put the parts
    together. So do operators, indices and methods, where the parts are in this process.

    Args:
        parts: the parts, in order; they have the same shape but for the first axis.

    Example:
        >>> import jax.numpy as jnp, jaxpp
        >>> x = jaxpp.runtime.StackedArray([jnp.zeros((2, 3)), jnp.ones((1, 3))])
        >>> x.shape, x.bounds, jnp.asarray(x)[:, 0]
        ((3, 3), (0, 2, 3), Array([0., 0., 1.], dtype=float32))
    """

    #: Tells whether each device holds the whole array.
    is_fully_replicated = False  # pyright: ignore

    def __init__(self, parts: Sequence[jax.Array]):
        self._parts = tuple(parts)
        self._bounds = (0, *itertools.accumulate(p.shape[0] for p in self._parts))
        first: Any = self._parts[0]
        shape = (self._bounds[-1], *first.shape[1:])
        self._aval = type_of(first.aval, shape)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts, in order: arrays of this process, or `RemoteArray`s."""
        return self._parts

    @property
    def bounds(self) -> Bounds:
        """The start of each part along the first axis, and the size of that axis at the end."""
        return self._bounds

    @property
    def is_remote(self) -> bool:
        """Tells whether some parts are in other processes."""
        return any(not p.is_fully_addressable for p in self._parts)

    @property
    def sharding(self) -> Any:
        """The place of the array, as a `StackedSharding`."""
        return StackedSharding(self._bounds, tuple(p.sharding for p in self._parts))

    @property
    def is_fully_addressable(self) -> bool:
        """Tells whether this process holds the whole array."""
        return not self.is_remote

    def devices(self) -> set[Any]:
        """Returns the devices of this process that hold a part."""
        return self.sharding.device_set

    def is_deleted(self) -> bool:
        """Tells whether a part is gone: a call has consumed it, or `delete` has been called."""
        return any(p.is_deleted() for p in self._parts)

    @property
    def why_deleted(self) -> str:
        """The reason why a part is gone, as the end of a sentence; empty if not known."""
        return next((why for p in self._parts if (why := getattr(p, "why_deleted", ""))), "")

    def __repr__(self):
        rows = ", ".join(f"{a}:{b}" for a, b in itertools.pairwise(self._bounds))
        gone = "deleted, " if self.is_deleted() else ""
        kind = f"{self.dtype.name}[{','.join(map(str, self.shape))}]"
        return f"StackedArray({kind} {gone}in rows {rows})"

    __str__ = __repr__

    # ---- its value ------------------------------------------------------------------------------

    def copy_to_host_async(self) -> None:
        """Asks early for the value of each part; values on ranks then come in one fetch."""
        for part in self._parts:
            part.copy_to_host_async()

    def block_until_ready(self) -> "StackedArray":
        """Waits until the value is there; raises the error of the step that was to make it."""
        for part in self._parts:
            part.block_until_ready()
        return self

    def __array__(self, dtype: Any = None, context: Any = None, copy: Any = None) -> np.ndarray:
        self.copy_to_host_async()
        value = np.concatenate([np.asarray(p) for p in self._parts])
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        if self.is_remote:
            parts = [jnp.asarray(p) for p in self._parts]
        else:
            (device, *_) = self._parts[0].devices()
            parts = [jax.device_put(p, on_device(device, self._aval)) for p in self._parts]
        return jnp.concatenate(parts)

    def copy(self) -> "StackedArray":
        """Makes a copy, each part on its own devices; the parts must be in this process."""
        return StackedArray([jnp.copy(p) for p in self._parts])

    def delete(self) -> None:
        """Drops the array from all devices and ranks."""
        for part in self._parts:
            part.delete()

    def __reduce__(self):
        if self.is_remote:
            raise TypeError(
                f"{self!r} stays with its ranks and cannot be pickled; gather it with "
                f"jaxpp.gather, or save it with jaxpp.save_state."
            )
        return StackedArray, (self._parts,)


# ---- steps --------------------------------------------------------------------------------------


class StackedStep:
    """A step that cuts its arguments into parts, runs a step over parts, and stacks its results."""

    def __init__(self, step: Any, bundle: Bundle, in_cuts: Sequence[Cut], out_cuts: Sequence[Cut]):
        self.step = step
        self.bundle = bundle
        self._in_cuts, self._out_cuts = in_cuts, out_cuts

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the step."""
        flat = self.flat(args)
        results = self.step(flat)
        numbers = _grouped(range(len(flat)), self._in_cuts)
        for arg, own in zip(args, numbers, strict=True):
            # If the step has consumed all slices of an array, the whole array is gone, too.
            donated = all(self.bundle.arguments[n].donated for n in own)
            if donated and isinstance(arg, jax.Array) and not arg.is_deleted():
                arg.delete()
        return [
            own[0] if cut is None else StackedArray(own)
            for own, cut in zip(_grouped(results, self._out_cuts), self._out_cuts, strict=True)
        ]

    def flat(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments of the step over parts.

        Raises:
            ValueError: an array has been deleted.
        """
        found: list[Any] = []
        records = _grouped(self.bundle.arguments, self._in_cuts)
        for arg, cut, own in zip(args, self._in_cuts, records, strict=True):
            stacked = isinstance(arg, StackedArray)
            if cut is not None or stacked:
                check_there(arg, own[0].name if cut is None else own[0].path)
            if cut is None:
                found.append(_whole(arg) if stacked else arg)
            else:
                found += parts_of(arg, cut)
        return found

    def inspect(self) -> Any:
        """Inspects the ranks."""
        return self.step.inspect()

    def describe(self) -> Any:
        """Describes what each rank holds, sends and reduces."""
        return self.step.describe()

    def input_shardings(self) -> list[Any]:
        """Returns the sharding of each argument that the step reads; stacked if in parts."""
        cuts = self._in_cuts
        return [
            own[0] if cut is None else StackedSharding(cut, tuple(own))
            for own, cut in zip(_grouped(self.step.input_shardings(), cuts), cuts, strict=True)
        ]


def with_stacked(step: Any, bundle: Bundle) -> Any:
    """Wraps a step over parts in a `StackedStep`; returns a step over whole arrays unchanged."""
    cuts = cuts_of(bundle.arguments), cuts_of(bundle.results)
    return StackedStep(step, bundle, *cuts) if any(map(any, cuts)) else step


def put_together(step: Any, args: Sequence[Any]) -> list[Any] | None:
    """Runs a step over whole arrays where some arguments are in parts; None where none is."""
    if not any(type(arg) is StackedArray for arg in args):
        return None
    bundle: Bundle = step.bundle
    whole = (None,) * len(bundle.arguments), (None,) * len(bundle.results)
    return StackedStep(step, bundle, *whole)(args)


def _grouped(flat: Sequence[Any], cuts: Sequence[Cut]) -> Iterator[list[Any]]:
    rest = iter(flat)
    for cut in cuts:
        yield list(itertools.islice(rest, 1 if cut is None else len(cut) - 1))


def _whole(array: StackedArray) -> Any:
    keys = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return jnp.asarray(array) if keys or not array.is_remote else np.asarray(array)


def parts_of(array: Any, bounds: Bounds) -> list[Any]:
    """Finds the rows of an array from bound to bound: its own parts where they fit, else slices."""
    if not isinstance(array, StackedArray):
        array = array if isinstance(array, jax.Array) else np.asarray(array)
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return _remote_slices(array, list(itertools.pairwise(bounds)))
        return [_slice(array, a, b) for a, b in itertools.pairwise(bounds)]
    if array.bounds == bounds:
        return list(array.parts)
    if set(array.bounds) <= set(bounds):  # cut finer
        found = []
        for part, (low, high) in zip(array.parts, itertools.pairwise(array.bounds), strict=True):
            own = tuple(b - low for b in bounds if low <= b <= high)
            found += parts_of(part, own) if len(own) > 2 else [part]
        return found
    return parts_of(_whole(array), bounds)


def _slice(array: Any, start: int, stop: int) -> Any:
    if isinstance(array, np.ndarray):
        return array[start:stop]
    return jax.lax.slice_in_dim(array, start, stop)


def _remote_slices(array: Any, intervals: Sequence[tuple[int, int]]) -> list[Any]:
    """Slices a `RemoteArray` on the first rank that holds it; the slices' rows are not split."""
    mesh, rank = array.mesh, array.ranks[0]
    aval = array.aval
    spec = ((), *array.spec[1:]) if array.spec else ()
    parts = [
        mesh.new_array(
            type_of(aval, (b - a, *aval.shape[1:])),
            (rank,),
            spec,
        )
        for a, b in intervals
    ]
    items = [(part.id, a, b) for part, (a, b) in zip(parts, intervals, strict=True)]
    mesh.apply_everywhere(slice_on_rank, {rank: (array.id, items, spec)}).results()
    return parts


def slice_on_rank(
    process: Any, number: int, items: Sequence[tuple[int, int, int]], spec: Spec = ()
) -> None:
    """Makes arrays from rows of an array that a rank holds, split as `spec` says."""
    array = process.arrays[number]
    if isinstance(process.home, Mesh):
        array = resplit(array, process.home, spec)
    slices = [(new, jax.lax.slice_in_dim(array, a, b)) for new, a, b in items]
    if isinstance(process.home, Mesh):
        slices = [(new, resplit(part, process.home, spec)) for new, part in slices]
    process.arrays.update(slices)
