"""A transfer moves arrays of every sort, and what is sent may be donated at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp._program import Message
from jaxpp.runtime.arrays import home_over
from jaxpp.runtime.launched import _puts


def put_of(arrays, homes, specs=()):
    names, avals = ("x",) * len(arrays), tuple(jax.typeof(x) for x in arrays)
    return _puts.Put(Message(0, 0, 1, names, ("edge",) * len(arrays), avals, specs), homes, (0, 1))


def test_arrays_of_all_sorts_arrive_as_they_were():
    source, target = jax.devices()[:2]
    host = jax.sharding.SingleDeviceSharding(source, memory_kind="pinned_host")
    arrays = [
        jnp.arange(6, dtype="bfloat16").reshape(2, 3),
        jnp.zeros((0, 4)),
        jax.random.key(7),
        jax.device_put(jnp.arange(3.0), host),
        jnp.array([True, False]),
    ]
    with jax.enable_x64(True):
        arrays.append(jnp.arange(3, dtype=jnp.int64) << 40)
    arrays = [a if a is arrays[3] else jax.device_put(a, source) for a in arrays]
    found = put_of(arrays, {0: source, 1: target}).issue(arrays)
    for one, other in zip(found, arrays, strict=True):
        assert one.devices() == {target} and one.dtype == other.dtype
        assert one.sharding.memory_kind == other.sharding.memory_kind
        if one.dtype == arrays[2].dtype:
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other, strict=True)


def test_shards_go_from_device_to_device():
    homes = {n: home_over(jax.devices()[2 * n : 2 * n + 2], {"data": 2}) for n in range(2)}
    x = jnp.arange(8.0).reshape(4, 2)
    (found,) = put_of([x], homes, (("data",),)).issue([x])
    assert found.devices() == set(jax.devices()[2:4]) and not found.is_fully_replicated
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("nbytes", [4, 1 << 20])
def test_what_is_sent_may_be_donated(nbytes):
    source, target = jax.devices()[:2]
    x = jax.device_put(jnp.full(nbytes // 4, 3.0), source)
    put = put_of([x], {0: source, 1: target})
    (leaving,) = put._copies([x])
    jax.jit(lambda a: a * 0, donate_argnums=0)(x).block_until_ready()
    assert x.is_deleted()
    np.testing.assert_array_equal(leaving, np.full(nbytes // 4, 3.0, np.float32))
