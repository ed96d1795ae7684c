"""Where a rank's arrays are: one device, or a mesh of devices over which they are split."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxpp._specs import Spec, partition_spec

#: A rank's device, or its mesh.
Home = jax.Device | Mesh


def homes_of(devices: np.ndarray, inside: AbstractMesh | None) -> tuple[Home, ...]:
    """The home of each rank.

    All its axes are automatic: which ones the caller has made explicit matters to what is traced,
    and nothing is traced there.

    Args:
        devices: the devices, the ranks along the first axis, the axes of `inside` behind it.
        inside: the mesh of every rank without its devices; None where each is one device.
    """
    if inside is None:
        return tuple(devices)
    return tuple(Mesh(own, inside.axis_names) for own in devices)


def home_over(devices: Sequence[Any], sizes: Mapping[str, int]) -> Home:
    """The home of a rank that has a process of its own.

    One device is its home itself, whatever the axes: what goes there takes the shortest way.

    Args:
        devices: those of the rank, in the order of its axes.
        sizes: the axes inside the rank, and their sizes.

    Example:
        >>> home_over(jax.devices()[:1], {"data": 1, "model": 1}) == jax.devices()[0]
        True
    """
    if len(devices) == 1:
        return devices[0]
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return Mesh(grid.reshape(tuple(sizes.values())), tuple(sizes))


def devices_of(home: Home) -> tuple[Any, ...]:
    """The devices of a home, in the order of its axes."""
    return tuple(home.devices.flat) if isinstance(home, Mesh) else (home,)


def sizes_of(home: Home) -> dict[str, int]:
    """The size of each axis of a home; of none, where it is one device."""
    return dict(home.shape) if isinstance(home, Mesh) else {}


@functools.cache
def sharding_in(home: Home, spec: Spec = ()) -> Sharding:
    """How an array is put into a home; always the same object, so that it is known by identity."""
    if isinstance(home, Mesh):
        return NamedSharding(home, partition_spec(spec))
    return SingleDeviceSharding(home)


@functools.cache
def sharding_across(homes: tuple[Home, ...], spec: Spec = ()) -> Sharding:
    """How an array is put that several homes have, each in the same way.

    Homes of different shapes, or of which some have a device in common, are no mesh together: what
    each of their devices has whole is an array over these devices, and what is in shards is with
    the first home alone, from which the others take it.
    """
    first = homes[0]
    if len(homes) == 1:
        return sharding_in(first, spec)
    devices = [device for home in homes for device in devices_of(home)]
    if not alike(homes) or len(set(devices)) < len(devices):
        if not all(sharding_in(home, spec).is_fully_replicated for home in homes):
            return sharding_in(first, spec)
        return NamedSharding(Mesh(list(dict.fromkeys(devices)), ("devices",)), partition_spec(()))
    rows = np.array([devices_of(home) for home in homes], object)
    if not isinstance(first, Mesh):
        return NamedSharding(Mesh(rows[:, 0], ("ranks",)), partition_spec(()))
    grid = rows.reshape(len(homes), *first.devices.shape)
    mesh = Mesh(grid, ("ranks", *first.axis_names))
    return NamedSharding(mesh, partition_spec(spec))


def alike(homes: Sequence[Home]) -> bool:
    """Whether homes have the same shape."""
    return len({home.devices.shape if isinstance(home, Mesh) else () for home in homes}) == 1


#: A part of an array: where it begins and ends along each dimension.
Box = tuple[tuple[int, int], ...]


def box_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Box:
    """The box that a sharding's index is, of an array of some shape."""
    assert index is not None  # as it is of a device in other processes
    return tuple(own.indices(size)[:2] for own, size in zip(index, shape, strict=True))


def distinct(homes: Sequence[Home]) -> tuple[Home, ...]:
    """The homes, each once."""
    return tuple(dict.fromkeys(homes))
