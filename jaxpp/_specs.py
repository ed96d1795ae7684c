"""How an array is split over the axes inside a rank: plain data, one entry for each dimension."""

from typing import Any

from jax.sharding import AbstractMesh, PartitionSpec

#: For each dimension the axes that it is split over, the outermost first; `()` where it is whole.
Spec = tuple[tuple[str, ...], ...]


def spec_of(partition_spec: PartitionSpec | None, ndim: int) -> Spec:
    """A `PartitionSpec` as a spec of an array with `ndim` dimensions.

    Example:
        >>> spec_of(PartitionSpec("data", None, ("model", "expert")), 4)
        (('data',), (), ('model', 'expert'), ())
    """
    entries = tuple(partition_spec or ())
    entries += (None,) * (ndim - len(entries))
    return tuple(
        () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries[:ndim]
    )


def partition_spec(spec: Spec) -> PartitionSpec:
    """A spec as JAX writes it, without the dimensions at the end that are whole.

    Example:
        >>> partition_spec((("data",), (), ("model", "expert"), ()))
        P('data', None, ('model', 'expert'))
    """
    entries: list[Any] = [e[0] if len(e) == 1 else (e or None) for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def replicated(ndim: int) -> Spec:
    """The spec of an array that each device has whole."""
    return ((),) * ndim


def axes_of(spec: Spec) -> tuple[str, ...]:
    """All axes that an array is split over, in the order of its dimensions."""
    return tuple(axis for entry in spec for axis in entry)


def axis_sizes(mesh: AbstractMesh | None) -> dict[str, int]:
    """The size of each axis of a mesh; of none, where a rank is one device."""
    return {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
