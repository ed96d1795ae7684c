"""Arrays go between any two meshes: the same values, and no element to a device twice."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpp.runtime.arrays._reshard import plan, reshard

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


def source(sharding):
    return jax.device_put(np.random.default_rng(0).normal(size=SHAPE).astype("f4"), sharding)


def cases():
    return itertools.product(shardings(jax.devices()[:6]), shardings(jax.devices()[2:]))


def test_values_and_shardings_are_as_asked():
    pairs = list(cases())
    arrays = [source(s) for s, _ in pairs]
    moved = reshard(arrays, [t for _, t in pairs])
    for x, y, (_, target) in zip(arrays, moved, pairs, strict=True):
        assert y.sharding == target
        np.testing.assert_array_equal(x, y)


def test_a_device_gets_each_element_of_its_shard_once():
    for origin, target in cases():
        indices = target.addressable_devices_indices_map(SHAPE)
        held = origin.addressable_devices_indices_map(SHAPE)
        numbers = np.arange(np.prod(SHAPE)).reshape(SHAPE)
        for shard in plan(SHAPE, origin, target):
            pieces = []
            for piece in shard.pieces:
                own = numbers[held[piece.device]]
                box = piece.box or [(0, n) for n in own.shape]
                pieces += own[tuple(slice(a, b) for a, b in box)].ravel().tolist()
            assert sorted(pieces) == sorted(numbers[indices[shard.device]].ravel().tolist())


def test_copies_are_taken_from_different_devices():
    whole = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P())
    target = NamedSharding(Mesh(np.array(jax.devices()[4:8]), ("data",)), P("data"))
    assert len({s.pieces[0].device for s in plan(SHAPE, whole, target)}) == 4


@pytest.mark.parametrize("make", [lambda: jax.random.split(jax.random.key(0), 12), jnp.zeros(12)])
def test_other_kinds_of_arrays(make):
    x: Any = make() if callable(make) else make
    four = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"))
    three = NamedSharding(Mesh(np.array(jax.devices()[4:7]), ("data",)), P("data"))
    (moved,) = reshard([jax.device_put(x, four)], [three])
    assert moved.sharding == three and moved.dtype == x.dtype
    assert jnp.array_equal(jax.device_put(moved, x.sharding), x)


def test_scalars_and_empty_arrays():
    four = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P())
    for x in (jnp.float32(2), jnp.zeros((0, 3))):
        (moved,) = reshard([jax.device_put(x, four)], [SingleDeviceSharding(jax.devices()[5])])
        assert moved.shape == x.shape and moved.devices() == {jax.devices()[5]}
