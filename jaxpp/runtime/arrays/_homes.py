"""Homes: where the arrays of a rank are, on one device or split over a mesh of devices.

All axes of a home are automatic. Explicit axes matter only to tracing, and nothing is traced there.
A home may have the devices of several processes. Its processes have as many each; in the order of
its axes, the devices of one process follow those of another.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxpp import _compat
from jaxpp._program import PIPELINE_AXIS
from jaxpp._specs import Spec, partition_spec


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a mesh, one of them the pipeline axis, of size `num_ranks`."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    num_ranks: int
    #: The mesh of every rank, without its devices; None where there is no other axis.
    inside: AbstractMesh | None


def check_axes(
    kind: str,
    shape: Sequence[int],
    axis_names: Sequence[str],
    axis_types: Sequence[AxisType] | None = None,
) -> Axes:
    """Checks the axes of a mesh of some kind, which are given as to `jax.make_mesh`.

    Raises:
        ValueError: the names or types are not one for each axis, or the names are not different;
            none of them is `"mpmd"`; or a size is below 1.
    """
    if not isinstance(shape, Iterable):
        of = " For one of JAX's, pass mesh.devices.shape, its axis_names and its devices."
        raise ValueError(
            f"{kind} needs the size of each axis, as in {kind}((4, 2), ('mpmd', 'data')), got "
            f"{shape!r}.{of if isinstance(shape, Mesh) else ''}"
        )
    shape, names = tuple(int(n) for n in shape), tuple(axis_names)
    if len(shape) != len(names) or len(set(names)) < len(names):
        raise ValueError(
            f"{kind} needs a name of its own for each axis, got shape {shape} and names {names}."
        )
    if PIPELINE_AXIS not in names:
        raise ValueError(f"{kind} needs an axis named {PIPELINE_AXIS!r}, got {names}.")
    types: Any = (AxisType.Auto,) * len(names) if axis_types is None else axis_types
    types = tuple(types) if isinstance(types, Iterable) else ()
    if len(types) != len(names) or not all(isinstance(own, AxisType) for own in types):
        raise ValueError(
            f"{kind} needs a type for each of its axes {names}, a jax.sharding.AxisType, got "
            f"{axis_types}."
        )
    sizes = dict(zip(names, shape, strict=True))
    if any(n < 1 for n in shape):
        raise ValueError(f"{kind} needs axes of size 1 at least, got {sizes}.")
    kinds = dict(zip(names, types, strict=True))
    num_ranks, _ = sizes.pop(PIPELINE_AXIS), kinds.pop(PIPELINE_AXIS)
    inside = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=tuple(kinds.values()))
    return Axes(shape, names, num_ranks, inside if sizes else None)


#: A rank's device, or its mesh.
Home = jax.Device | Mesh


def home_over(devices: Sequence[Any], sizes: Mapping[str, int]) -> Home:
    """Returns the home of a rank that has a process of its own.

    A single device is the home itself, whatever the axes: arrays get there in the shortest time.
    """
    if len(devices) == 1:
        return devices[0]
    grid = np.array(devices, object).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes))


def default_device() -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the device that JAX computes on by default in this process."""
    config: Any = jax.config
    chosen = config.jax_default_device  # a device, the name of a platform, or None
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def devices_of(home: Home) -> tuple[Any, ...]:
    """Returns the devices of a home, in the order of its axes."""
    return tuple(home.devices.flat) if isinstance(home, Mesh) else (home,)


def sizes_of(home: Home) -> dict[str, int]:
    """Returns the size of each axis of a home; a single device has no axes."""
    return dict(home.shape) if isinstance(home, Mesh) else {}


@functools.cache
def sharding_in(home: Home, spec: Spec = (), kind: str | None = None) -> Sharding:
    """Returns the sharding of an array in a home: always the same object, known by identity.

    `kind` is the memory kind of the array; None for that of the devices themselves.
    """
    if isinstance(home, Mesh):
        return NamedSharding(home, partition_spec(spec), memory_kind=kind)
    return SingleDeviceSharding(home, memory_kind=kind)


@functools.cache
def sharding_across(homes: tuple[Home, ...], spec: Spec = (), kind: str | None = None) -> Sharding:
    """Returns the sharding of an array that several homes have, all with the same split.

    Homes with a device in common cannot be one mesh. There, an array that each device has whole is
    replicated over these devices. An array in shards is on the first home alone, and the other
    homes take it from there.
    """
    first = homes[0]
    if len(homes) == 1:
        return sharding_in(first, spec, kind)
    devices = [device for home in homes for device in devices_of(home)]
    if len(set(devices)) < len(devices):
        if not all(sharding_in(home, spec).is_fully_replicated for home in homes):
            return sharding_in(first, spec, kind)
        mesh = Mesh(list(dict.fromkeys(devices)), ("devices",))
        return NamedSharding(mesh, partition_spec(()), memory_kind=kind)
    rows = np.array([devices_of(home) for home in homes], object)
    if not isinstance(first, Mesh):
        return NamedSharding(Mesh(rows[:, 0], ("ranks",)), partition_spec(()), memory_kind=kind)
    grid = rows.reshape(len(homes), *first.devices.shape)
    mesh = Mesh(grid, ("ranks", *first.axis_names))
    return NamedSharding(mesh, partition_spec(spec), memory_kind=kind)


#: A part of an array: its start and its end along each dimension.
Box = tuple[tuple[int, int], ...]


def box_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Box:
    """Returns the box of a sharding's index, for an array of some shape.

    The index may have more dimensions: those of the integers that keys are made of.
    """
    assert index is not None  # it is None only for devices of other processes
    return tuple(own.indices(size)[:2] for own, size in zip(index, shape, strict=False))


@functools.lru_cache(4096)
def boxes_here(shape: tuple[int, ...], sharding: Sharding) -> dict[Box, list[Any]]:
    """Returns the boxes of an array that this process holds, in order, with the devices of each."""
    held: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        held.setdefault(box_of(index, shape), []).append(device)
    return held


@functools.lru_cache(16)
def spans(home: Home) -> bool:
    """Tells whether the devices of a home belong to several processes."""
    return isinstance(home, Mesh) and len({d.process_index for d in home.devices.flat}) > 1


def resplit(array: Any, home: Home, spec: Spec) -> Any:
    """Splits an array of the rank as a spec says; all processes of the rank have to call this."""
    if not isinstance(array, jax.Array) or not isinstance(home, Mesh):
        return array
    sharding = sharding_in(home, spec, _compat.memory_kind(array.aval))
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.device_put(array, sharding)
