"""Ranks of one process send each other arrays from device to device, as others do over sockets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.runtime.arrays import is_ready
from jaxpp.runtime.transport import RUN_AHEAD, Aborted, Near, SocketTransport
from tests.helpers import assert_same
from tests.runtime.transport.ranks import SECRET, message
from tests.runtime.transport.test_socket import EVERYTHING

pytestmark = pytest.mark.cases(4)


@pytest.fixture
def site():
    """A transport of two ranks, of a device each."""
    transport = SocketTransport(dict(enumerate(jax.devices()[:2])), SECRET)
    transport.connect({rank: transport.addresses for rank in range(2)})
    transport.begin(1)
    yield transport
    transport.close()


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_is_sent_arrives(site, name):
    arrays = EVERYTHING[name]()
    what = message(arrays)
    site.expect([what])
    site.send(arrays, what)
    found = site.receive(what)
    assert_same(found, arrays)
    assert all(a.devices() == {jax.devices()[1]} for a in found)


@pytest.mark.parametrize("dtype", ["int4", "uint2", "bfloat16", "float32"])
def test_meshes_split_what_arrives_as_the_message_says(dtype):
    grid = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    homes = {n: Mesh(grid[n], ("data", "model")) for n in range(2)}
    x = jnp.arange(16).reshape(4, 4).astype(dtype)
    specs = ((("data",), ("model",)), ((), ("data",)), ())
    arrays = [
        jax.device_put(x, NamedSharding(homes[0], PartitionSpec(*(s or None for s in spec))))
        for spec in specs
    ]
    what = dataclasses.replace(message(arrays), specs=specs)
    near = Near(homes)
    near.send(arrays, what)
    found = near.receive(what)
    assert_same(found, arrays)
    for array, spec in zip(found, specs, strict=True):
        wanted = NamedSharding(homes[1], PartitionSpec(*(s or None for s in spec)))
        assert array.sharding.is_equivalent_to(wanted, 2)


def test_what_is_in_the_memory_of_the_host_stays_there():
    home = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(home, memory_kind="pinned_host")
    x = jax.device_put(jnp.arange(8.0), host)
    near, what = Near(dict(enumerate(jax.devices()[:2]))), message([x])
    near.send([x], what)
    (found,) = near.receive(what)
    assert found.devices() == {jax.devices()[1]} and found.sharding.memory_kind == "pinned_host"
    assert_same([found], [x])


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_what_is_sent_may_be_donated_at_once_where_it_is_registered_so(shared):
    devices = jax.devices()[:1] * 2 if shared else jax.devices()[:2]
    site = SocketTransport(dict(enumerate(devices)), SECRET)
    try:
        what, double = (
            message([x := jnp.arange(1 << 16)]),
            jax.jit(lambda x: 2 * x, donate_argnums=0),
        )
        site.expect([what], late=[what.tag])
        site.begin(1)
        site.send([x], what)
        doubled = double(x)
        (found,) = site.receive(what)
        assert_same([found], [jnp.arange(1 << 16)])
        assert_same([doubled], [2 * jnp.arange(1 << 16)])
        assert x.is_deleted()
    finally:
        site.close()


def test_a_receive_bounds_how_far_dispatch_runs_ahead():
    x = jnp.ones((256, 256))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, a: a @ a * 1e-3, x))
    slow(x).block_until_ready()
    near = Near(dict(enumerate(jax.devices()[:2])))
    values = []
    for tag in range(4 * RUN_AHEAD):
        values.append(x := slow(x))
        near.send([x], what := message([x], tag))
        near.receive(what)
        if tag >= RUN_AHEAD:
            assert is_ready(values[tag - RUN_AHEAD])


def test_a_step_does_not_see_what_a_failed_one_has_left(site):
    x = jnp.arange(3)
    site.send([x], message([x]))
    site.begin(2)
    site.send([x + 1], message([x]))
    assert_same(site.receive(message([x])), [x + 1])


def test_after_an_abort_near_messages_raise_too(site):
    x = jnp.arange(3)
    site.send([x], message([x]))
    site.abort(ValueError("the reason"))
    with pytest.raises(Aborted, match="the reason"):
        site.receive(message([x]))
    with pytest.raises(Aborted, match="the reason"):
        site.send([x], message([x], 1))


def test_two_processes_have_one_connection():
    sites = [
        SocketTransport({r: jax.devices()[r] for r in ranks}, SECRET) for ranks in ((0, 2), (1, 3))
    ]
    try:
        addresses = {r: s.addresses for s in sites for r in s.homes}
        for each in sites:
            each.connect(addresses)
            each.begin(1)
        x = jnp.arange(3)
        for n, (source, target) in enumerate([(0, 1), (2, 1), (2, 3), (0, 3)]):
            what = message([x + n], n, source, target)
            sites[0].send([x + n], what)
            (found,) = sites[1].receive(what)
            assert_same([found], [x + n])
            assert found.devices() == {jax.devices()[target]}
        assert [len(each.peers) for each in sites] == [1, 1]
    finally:
        for each in sites:
            each.close()
