"""`gather`: plain arrays on one device, which are the caller's own."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp

DEVICES = jax.devices()


def over(devices, spec):
    return NamedSharding(jax.sharding.Mesh(devices, ("x",)), spec)


def tree():
    """Arrays of many types, on one device, on several, split and in parts."""
    rows = jnp.arange(12.0).reshape(4, 3)
    return {
        "one": jax.device_put(jnp.arange(3, dtype="int8"), DEVICES[0]),
        "other": jax.device_put(jnp.float32(2), DEVICES[2]),
        "copies": jax.device_put(rows.astype("bfloat16"), over(DEVICES[:2], P())),
        "split": jax.device_put(rows, over(DEVICES[:2], P("x"))),
        "stack": jaxpp.StackedArray([jax.device_put(rows[:3], DEVICES[1]), rows[3:]]),
        "key": jax.device_put(jax.random.key(3), DEVICES[1]),
        "weak": jnp.asarray(2.0) * 1,
    }


@pytest.mark.parametrize("device", [None, DEVICES[1]], ids=["default", "given"])
def test_all_arrays_are_plain_and_on_the_device(device):
    given = tree()
    got = jaxpp.gather(given, device)
    assert {d for x in jax.tree.leaves(got) for d in x.devices()} == {device or DEVICES[0]}
    assert not any(isinstance(x, jaxpp.StackedArray) for x in got.values())
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, given)
    given["key"], got["key"] = map(jax.random.key_data, (given["key"], got["key"]))
    chex.assert_trees_all_equal(got, jax.device_get(given), strict=True)


@pytest.mark.parametrize("device", DEVICES[:3])
def test_a_step_may_consume_the_tree_afterwards(device):
    given, want = tree(), jax.device_get(tree())
    got = jaxpp.gather(given, device)
    for x in jax.tree.leaves(given):
        x.delete()
    assert not any(x.is_deleted() for x in jax.tree.leaves(got))
    got["key"], want["key"] = map(jax.random.key_data, (got["key"], want["key"]))
    chex.assert_trees_all_equal(got, want, strict=True)


def test_other_leaves_stay_as_they_are():
    mlp = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    assert jaxpp.gather(mlp).activation is mlp.activation
    given = {"host": np.arange(3.0), "n": 3, "rate": 0.5, "name": "x"}
    got = jaxpp.gather(given)
    assert all(got[name] is value for name, value in given.items())


def test_under_a_trace_it_is_the_identity():
    got = jax.jit(lambda x: jaxpp.gather({"x": x}, DEVICES[1]))(jnp.arange(3))
    chex.assert_trees_all_equal(got, {"x": jnp.arange(3)})


@pytest.mark.parametrize("default", [DEVICES[2], "cpu"], ids=["device", "platform"])
def test_the_default_device_is_that_of_jax(default):
    with jax.default_device(default):
        (device,) = jaxpp.gather(tree()["stack"]).devices()
        assert {device} == jnp.zeros(()).devices()
