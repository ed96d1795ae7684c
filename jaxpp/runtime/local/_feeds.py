"""Puts the arguments of a step into the ranks' slots, and takes its results out of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import _compat
from jaxpp._program import Argument, Result
from jaxpp.runtime.arrays import (
    Home,
    check_here,
    devices_of,
    distinct,
    reshard,
    sharding_across,
    sharding_in,
)
from jaxpp.runtime.executor import Executor

#: A rank's executor, its home, and a slot.
Place = tuple[Executor, Home, int]


class Feed:
    """Puts one argument into the slots of the ranks that read it; copies it only if it must."""

    def __init__(self, places: Sequence[Place], own: Argument):
        self._places = places
        self._name = own.name
        self._donated = own.donated
        self._split = own.spec, _compat.memory_kind(own.aval)
        self._sharding: Any = None
        self._known: list[_Source] = []

    def __call__(self, arg: Any) -> None:
        if not self._places:
            return
        if not isinstance(arg, jax.Array):
            # A copy: the caller may write to a NumPy array while the step runs.
            arg = jnp.array(arg)
        if arg.sharding is not self._sharding:
            check_here(arg, self._name)
            self._sharding = arg.sharding
            self._known = [
                _source(arg, sharding_in(home, *self._split)) for _, home, _ in self._places
            ]
        taken: set[Any] = set()
        for (executor, home, slot), source in zip(self._places, self._known, strict=True):
            value = source(arg)
            if len(self._places) > 1 and self._donated:
                if taken.intersection(devices_of(home)):  # ranks that share a device: a copy each
                    value = jnp.copy(value)
                taken.update(devices_of(home))
            executor.slots[slot] = value

    def sharding(self) -> Any:
        """Returns the sharding of an argument that needs no copy; None where nothing reads it."""
        homes = distinct([home for _, home, _ in self._places])
        return sharding_across(homes, *self._split) if homes else None


#: Gives a home's part of an array.
_Source = Callable[[Any], Any]


def _source(arg: jax.Array, wanted: jax.sharding.Sharding) -> _Source:
    """Makes the function that gives a home's part of arrays of one sharding, copied if need be."""
    if arg.sharding.is_equivalent_to(wanted, arg.ndim):
        return lambda x: x
    if arg.sharding.memory_kind != wanted.memory_kind:  # to JAX, unpinned memory is the device's
        return lambda x: jax.device_put(x, wanted)
    needed = wanted.addressable_devices_indices_map(arg.shape)
    held = {s.device: (i, s.index) for i, s in enumerate(arg.addressable_shards)}
    if any(d not in held or held[d][1] != index for d, index in needed.items()):
        if len(held) > 1:
            return lambda x: reshard([x], [wanted])[0]
        return lambda x: jax.device_put(x, wanted)
    shards = [held[device][0] for device in needed]
    if len(shards) == 1:
        return lambda x: x.addressable_shards[shards[0]].data

    def assemble(x: Any) -> Any:
        own = x.addressable_shards
        return jax.make_array_from_single_device_arrays(
            x.shape, wanted, [own[i].data for i in shards]
        )

    return assemble


class Fetch:
    """Makes one result from the arrays that the ranks have left in their slots."""

    def __init__(self, places: Sequence[Place], own: Result):
        spec = own.spec or ()
        by_home: dict[Home, tuple[Any, int]] = {}
        for executor, home, slot in places:
            by_home.setdefault(home, (executor, slot))
        self._places = places
        self._aval = own.aval
        self._sources = list(by_home.values())
        kind = _compat.memory_kind(own.aval)
        across = sharding_across(tuple(by_home), spec, kind)
        alone = sharding_in(next(iter(by_home)), spec, kind)
        self._sharding = None if across is alone else across

    def __call__(self) -> Any:
        values = [executor.slots[slot] for executor, slot in self._sources]
        for executor, _, slot in self._places:  # from here on the caller alone holds the result
            executor.slots[slot] = None
        if self._sharding is None:
            return values[0]
        shards = {s.device: s.data for value in values for s in value.addressable_shards}
        return _compat.join_shards(self._aval, self._sharding, list(shards.values()))
