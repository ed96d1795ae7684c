"""The home of a rank's arrays: one device, or a mesh of devices over which they are split."""

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
    """Returns the home of each rank.

    All axes of a home are automatic. Explicit axes matter only to tracing, and nothing is traced on
    a home.

    Args:
        devices: the devices, the ranks along the first axis, the axes of `inside` behind it.
        inside: the mesh of every rank without its devices; None where each is one device.
    """
    if inside is None:
        return tuple(devices)
    return tuple(Mesh(own, inside.axis_names) for own in devices)


def home_over(devices: Sequence[Any], sizes: Mapping[str, int]) -> Home:
    """Returns the home of a rank that has a process of its own.

    A single device is the home itself, whatever the axes: arrays get there in the shortest time.

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
def sharding_across(homes: tuple[Home, ...], spec: Spec = ()) -> Sharding:
    """Returns the sharding of an array that several homes have, all with the same split.

    Homes with a device in common cannot be one mesh. There, an array that each device has whole is
    replicated over these devices. An array in shards is on the first home alone, and the other
    homes take it from there.
    """
    first = homes[0]
    if len(homes) == 1:
        return sharding_in(first, spec)
    devices = [device for home in homes for device in devices_of(home)]
    if len(set(devices)) < len(devices):
        if not all(sharding_in(home, spec).is_fully_replicated for home in homes):
            return sharding_in(first, spec)
        return NamedSharding(Mesh(list(dict.fromkeys(devices)), ("devices",)), partition_spec(()))
    rows = np.array([devices_of(home) for home in homes], object)
    if not isinstance(first, Mesh):
        return NamedSharding(Mesh(rows[:, 0], ("ranks",)), partition_spec(()))
    grid = rows.reshape(len(homes), *first.devices.shape)
    mesh = Mesh(grid, ("ranks", *first.axis_names))
    return NamedSharding(mesh, partition_spec(spec))


#: A part of an array: its start and its end along each dimension.
Box = tuple[tuple[int, int], ...]


def box_of(index: Sequence[slice] | None, shape: Sequence[int]) -> Box:
    """Returns the box of a sharding's index, for an array of some shape."""
    assert index is not None  # it is None only for devices of other processes
    return tuple(own.indices(size)[:2] for own, size in zip(index, shape, strict=True))


def distinct(homes: Sequence[Home]) -> tuple[Home, ...]:
    """Returns the homes, each once, in their order."""
    return tuple(dict.fromkeys(homes))
