"""Specs: how an array is split over the axes inside a rank, an entry for each dimension."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp import _compat

#: For each dimension the axes that it is split over, the outermost first; `()` for a whole one.
Spec = tuple[tuple[str, ...], ...]


def spec_of(partition_spec: PartitionSpec | None, ndim: int) -> Spec:
    """Makes a spec of a `PartitionSpec`, for an array with `ndim` dimensions.

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
    """Makes a `PartitionSpec` of a spec, without the dimensions at the end that are whole.

    Example:
        >>> partition_spec((("data",), (), ("model", "expert"), ()))
        P('data', None, ('model', 'expert'))
    """
    entries: list[Any] = [e[0] if len(e) == 1 else (e or None) for e in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def replicated(ndim: int) -> Spec:
    """Returns the spec of an array that each device has whole."""
    return ((),) * ndim


def axes_of(spec: Spec) -> tuple[str, ...]:
    """Returns all axes that an array is split over, in the order of its dimensions."""
    return tuple(axis for entry in spec for axis in entry)


def axis_sizes(mesh: AbstractMesh | None) -> dict[str, int]:
    """Returns the size of each axis of a mesh; None, where a rank is one device, has no axes."""
    return {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def explicit_axes(mesh: AbstractMesh | Mesh) -> tuple[str, ...]:
    """Returns the explicit axes of a mesh: the types of arrays say how these split them."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def in_type(x: Any) -> Spec | None:
    """Reads off an array's type how it is split; None where types say nothing."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not explicit_axes(sharding.mesh):
        return None
    return spec_of(sharding.spec, x.ndim)


#: Says in a type that an array is in the memory of the host, and nothing of its devices.
_IN_HOST = NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=_compat.PINNED_HOST)


def type_of(aval: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """Returns a type without its devices: shape, dtype, weak type and memory kind.

    Args:
        aval: the type.
        shape: another shape for it.

    Example:
        >>> in_host = jax.device_put(jnp.ones(3), jax.memory.Space.Host)
        >>> jax.make_jaxpr(lambda x: x + 1)(type_of(in_host.aval, (2,))).out_avals
        [ShapedArray(float32<host>[2])]
    """
    return jax.ShapeDtypeStruct(
        aval.shape if shape is None else shape,
        aval.dtype,
        weak_type=bool(getattr(aval, "weak_type", False)),
        sharding=_IN_HOST if _compat.memory_kind(aval) else None,
    )


def types_of(fun: Callable, *args: Any) -> Any:
    """Does as `jax.eval_shape`, with types that say how arrays are split over explicit axes."""
    jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    typed = [
        type_of(a).update(sharding=a.sharding.with_memory_kind(_compat.memory_kind(a)))
        if explicit_axes(a.sharding.mesh)
        else type_of(a)
        for a in jaxpr.out_avals
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), typed)


def filled(x: Any, value: Any, dtype: Any = None) -> jax.Array:
    """Makes an array of one value, shaped like another, split and in memory as its type says.

    Args:
        x: an array, or a `jax.ShapeDtypeStruct`.
        value: the value.
        dtype: its dtype; by default that of `x`, and then it is weak as that is.
    """
    dtype = x.dtype if dtype is None else dtype
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding) and explicit_axes(sharding.mesh):
        sharding = NamedSharding(sharding.mesh, sharding.spec)
        made = jax.lax.full(x.shape, value, dtype, sharding=sharding)
    else:
        is_number = value or isinstance(value, float)  # zero may be -0
        made = jnp.full(x.shape, value, dtype) if is_number else jnp.zeros(x.shape, dtype)
    return as_weak_as(x, _compat.in_memory_of(made, x))


def as_weak_as(x: Any, made: jax.Array) -> jax.Array:
    """Makes an array weakly typed if it has the dtype of `x`, and `x` is weakly typed.

    Example:
        >>> as_weak_as(jnp.full(2, 0.1), jnp.zeros(2, jnp.float32)).weak_type
        True
    """
    is_weak = getattr(x, "weak_type", False) and x.dtype == made.dtype
    return _compat.weakly_typed(made) if is_weak else made


def only(spec: Spec, axes: Collection[str]) -> Spec:
    """Drops from a spec the axes that are not among the given ones."""
    return tuple(tuple(a for a in entry if a in axes) for entry in spec)
