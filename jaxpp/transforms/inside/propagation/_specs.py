"""Merges specs, fits them to types, and finds those of reshaped arrays."""

import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from jaxpp._dimensions import shape_of
from jaxpp._specs import Spec, spec_of

#: A spec, or `None` for a value that may be split in any way: it is made of nothing that is split
#: (zeros, positions, random bits), and is split as the values that it is combined with.
MaybeSpec = Spec | None
Sizes = Mapping[str, int]


def merge(specs: Sequence[MaybeSpec]) -> MaybeSpec:
    """Merges several specs of a value: a dimension is split if one of them splits it.

    Where they disagree, the first wins.

    Example:
        >>> merge([None, (("data",), ()), ((), ("data",)), ((), ("model",))])
        (('data',), ('model',))
    """
    known = [s for s in specs if s is not None]
    if not known:
        return None
    return overlay(len(known[0]), ((i, e) for s in known for i, e in enumerate(s)))


def overlay(ndim: int, entries: Iterable[tuple[int, tuple[str, ...]]]) -> Spec:
    """Makes a spec of (dimension, axes) pairs, the most important first, each axis at most once."""
    spec: list[tuple[str, ...]] = [()] * ndim
    used: set[str] = set()
    for dim, axes in entries:
        have = spec[dim]
        if axes[: len(have)] != have:
            continue
        for axis in axes[len(have) :]:
            if axis in used:
                break
            used.add(axis)
            spec[dim] += (axis,)
    return tuple(spec)


def of_type(spec: MaybeSpec, var, sizes: Sizes) -> MaybeSpec:
    """Reduces a spec to what a variable's type allows.

    It keeps each axis once, and only where the axis divides the dimension.
    """
    shape = shape_of(var)
    if not shape:
        return ()
    if spec is None:
        return None
    fitting = []
    for n, axes in zip(shape, spec, strict=True):
        for axis in axes:
            if n % sizes[axis] == 0:
                n //= sizes[axis]
            else:
                axes = axes[: axes.index(axis)]
                break
        fitting.append(axes)
    return overlay(len(shape), enumerate(fitting))


def pinned(spec: MaybeSpec, sharding, var) -> MaybeSpec:
    """Returns the spec that a sharding names; `spec` where it names none, or leaves one open."""
    named = getattr(sharding, "spec", None)
    if named is None:
        return spec
    open_ = {d for d, e in enumerate(named) if e is PartitionSpec.UNCONSTRAINED}
    entries = PartitionSpec(*(None if d in open_ else e for d, e in enumerate(named)))
    ndim = len(shape_of(var))
    given = [(d, e) for d, e in enumerate(spec or ()) if d in open_]
    return overlay(ndim, [*enumerate(spec_of(entries, ndim)), *given])


def reshaped(spec: Spec, old: Sequence[int], new: Sequence[int], sizes: Sizes) -> Spec:
    """Finds the spec of a reshaped array for which nothing moves; drops axes that would move it.

    An axis of size s gives the element at index i of the flattened array to the device of
    coordinate `i // weight % s`. The weight follows from the axis's place in its dimension. The
    axis splits the new dimension in which the next place has the same weight.

    Example:
        >>> reshaped((("data",), ("model",), ()), (4, 6, 5), (4, 30), {"data": 2, "model": 2})
        (('data',), ('model',))
        >>> reshaped((("data",), ("model",), ()), (4, 6, 5), (24, 5), {"data": 2, "model": 2})
        (('data',), ())
    """
    places = []  # (weight times size, axis), from the outermost
    for d, axes in enumerate(spec):
        span = math.prod(old[d:])
        for axis in axes:
            places.append((span, axis))
            span //= sizes[axis]
    result: list[tuple[str, ...]] = [()] * len(new)
    spans = [math.prod(new[d:]) for d in range(len(new))]
    rests = list(new)
    for span, axis in places:
        for d in range(len(new)):
            if spans[d] == span and rests[d] % sizes[axis] == 0:
                result[d] += (axis,)
                spans[d] //= sizes[axis]
                rests[d] //= sizes[axis]
                break
    return tuple(result)
