"""`StackedStep`: cuts the arguments of a step into parts, and stacks the parts of its results.

A parameter that is stacked over layers is distributed by `place`: each rank holds the rows of its
stages. To the training loop it stays one leaf.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp._program import Bundle, Cut, cuts_of
from jaxpp._specs import Spec, type_of
from jaxpp.jaxprs import check_arrays, check_there
from jaxpp.runtime.arrays._homes import resplit
from jaxpp.runtime.arrays._stacked import Bounds, StackedArray, StackedSharding


def check_arguments(bundle: Bundle, args: Sequence[Any]) -> None:
    """Checks that no flat argument has been deleted, and that no donated one is passed twice.

    Raises:
        ValueError: one was donated to an earlier call, or is passed twice and donated once.
    """
    each = zip(bundle.arguments, args, strict=True)
    check_arrays((own.name, own.donated, arg) for own, arg in each)


class StackedStep:
    """A step over the parts that ranks read, as its caller knows it: over whole arrays."""

    def __init__(self, step: Any, bundle: Bundle):
        self.step = step
        self.bundle = bundle
        self._in_cuts, self._out_cuts = cuts_of(bundle.arguments), cuts_of(bundle.results)
        self._cuts = any((*self._in_cuts, *self._out_cuts))

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Runs the step."""
        if not self._cuts and not any(type(arg) is StackedArray for arg in args):
            return self.step(args)
        flat = self.flat(args)
        results = self.step(flat)
        for arg, own in zip(args, _grouped(self.bundle.arguments, self._in_cuts), strict=True):
            # If the step has consumed all slices of an array, the whole array is gone, too.
            donated = all(part.donated for part in own)
            if donated and isinstance(arg, jax.Array) and not arg.is_deleted():
                arg.delete()
        return [
            own[0] if cut is None else StackedArray(own)
            for own, cut in zip(_grouped(results, self._out_cuts), self._out_cuts, strict=True)
        ]

    def flat(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments of the step over parts; raises if an array has been deleted."""
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


def _grouped(flat: Sequence[Any], cuts: Sequence[Cut]) -> Iterator[list[Any]]:
    rest = iter(flat)
    for cut in cuts:
        yield list(itertools.islice(rest, 1 if cut is None else len(cut) - 1))


def _whole(array: StackedArray) -> Any:
    here = array.is_fully_addressable or jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return jnp.asarray(array) if here else np.asarray(array)


def parts_of(array: Any, bounds: Bounds) -> list[Any]:
    """Finds the rows of an array from bound to bound: its own parts where they fit, else slices."""
    if isinstance(array, StackedArray):
        if array.bounds == bounds:
            return list(array.parts)
        if not set(array.bounds) <= set(bounds):
            return parts_of(_whole(array), bounds)
        found = []  # it is to be cut finer
        for part, (low, high) in zip(array.parts, itertools.pairwise(array.bounds), strict=True):
            own = tuple(b - low for b in bounds if low <= b <= high)
            found += parts_of(part, own) if len(own) > 2 else [part]
        return found
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        return [array[a:b] for a, b in itertools.pairwise(bounds)]
    if not array.is_fully_addressable:
        return _remote_slices(array, list(itertools.pairwise(bounds)))
    return [jax.lax.slice_in_dim(array, a, b) for a, b in itertools.pairwise(bounds)]


def _remote_slices(array: Any, intervals: Sequence[tuple[int, int]]) -> list[Any]:
    """Slices a `RemoteArray` on the first rank that holds it; the slices' rows are not split."""
    mesh, rank, shape = array.mesh, array.ranks[0], array.shape
    spec = ((), *array.spec[1:]) if array.spec else ()
    types = [type_of(array.aval, (b - a, *shape[1:])) for a, b in intervals]
    parts = [mesh.new_array(own, (rank,), spec) for own in types]
    items = [(part.id, a, b) for part, (a, b) in zip(parts, intervals, strict=True)]
    mesh.apply_everywhere(slice_on_rank, {rank: (array.id, items, spec)})()
    return parts


def slice_on_rank(
    process: Any, number: int, items: Sequence[tuple[int, int, int]], spec: Spec = ()
) -> None:
    """Makes arrays from rows of an array that a rank holds, split as `spec` says."""
    array = resplit(process.arrays[number], process.home, spec)
    process.keep(
        (new, resplit(jax.lax.slice_in_dim(array, a, b), process.home, spec)) for new, a, b in items
    )
