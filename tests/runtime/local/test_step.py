"""What a step is given goes to where a rank reads it, from any devices: the same values."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpp.runtime.local._step import _source
from tests.helpers import assert_same

SHAPE = (12, 8)


def shardings(devices):
    """Over one device, two, and six of them."""
    two = Mesh(np.array(devices[:2]), ("data",))
    six = Mesh(np.array(devices).reshape(3, 2), ("data", "model"))
    specs = [P(), P(None, "model"), P("data", "model")]
    return [
        SingleDeviceSharding(devices[0]),
        NamedSharding(two, P("data")),
        *(NamedSharding(six, spec) for spec in specs),
    ]


def check(x, origin, target):
    """The part of a home is as asked, also of a second array of the same sharding."""
    source = _source(jax.device_put(x, origin), target)
    for value in (x, x[::-1] if x.ndim else x):
        part = source(jax.device_put(value, origin))
        assert part.sharding.is_equivalent_to(target, x.ndim)
        assert_same(part, value)


def test_values_and_shardings_are_as_asked():
    x = np.random.default_rng(0).normal(size=SHAPE).astype("f4")
    for origin, target in itertools.product(
        shardings(jax.devices()[:6]),
        [*shardings(jax.devices()[:6]), *shardings(jax.devices()[2:])],
    ):
        check(x, origin, target)


@pytest.mark.parametrize("make", [lambda: jax.random.split(jax.random.key(0), 12), jnp.zeros(12)])
def test_other_kinds_of_arrays(make):
    x: Any = make() if callable(make) else make
    four = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"))
    three = NamedSharding(Mesh(np.array(jax.devices()[4:7]), ("data",)), P("data"))
    check(x, four, three)


def test_scalars_and_empty_arrays():
    four = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P())
    for x in (jnp.float32(2), jnp.zeros((0, 3))):
        check(x, four, SingleDeviceSharding(jax.devices()[5]))


def test_what_a_device_has_is_not_copied():
    """A rank on some of the devices of an array reads their memory."""
    whole = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P())
    split = NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), P("a"))
    half = Mesh(np.array(jax.devices()[:4:2]), ("a",))
    for origin, target in (
        (whole, SingleDeviceSharding(jax.devices()[2])),
        (split, NamedSharding(half, P("a"))),
    ):
        x = jax.device_put(jnp.arange(64.0), origin)
        held = {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
        for shard in _source(x, target)(x).addressable_shards:
            assert shard.data.unsafe_buffer_pointer() == held[shard.device]
