"""Messages that the receiver pulls by JAX's transfers: the same arrays, and the same errors."""

import contextlib
import dataclasses
import pickle
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxpp._specs import partition_spec
from jaxpp.runtime.transport import Aborted, PeerLost, Pulls, SocketTransport
from jaxpp.runtime.transport._errors import NotComputed
from jaxpp.runtime.transport._pull import TICKET
from tests.helpers import assert_same, wait_until
from tests.runtime.transport.ranks import SECRET, blocked, failing_array, message

LARGE = 1 << 18
#: How each array of a large message is split over a mesh of two axes.
SPECS = (((), ("data",)), (("model",),), (("data",), ("model",)), (("data",),), (), ())


@pytest.fixture
def nothing_is_left():
    """In place of the one of all tests: JAX does not end a server before the process."""


@contextlib.contextmanager
def pulling(homes):
    """Two ranks of this process that pull large messages from each other."""
    ranks = [SocketTransport({n: home}, SECRET, pulls=Pulls(home)) for n, home in enumerate(homes)]
    try:
        for transport in ranks:
            transport.connect({n: other.addresses for n, other in enumerate(ranks)})
            transport.begin(1)
        yield ranks
    finally:
        for transport in ranks:
            transport.close()


def large_message():
    """Arrays of many types, which together are a large message."""
    with jax.enable_x64(True):
        wide = jnp.arange(16.0, dtype="float64")
    return [
        jnp.arange(LARGE, dtype="float32").reshape(4, -1),
        jax.random.split(jax.random.key(3, impl="rbg"), 4),
        jnp.arange(16).reshape(4, 4).astype("int4"),
        wide,
        jnp.ones((0, 4), "bfloat16"),
        np.zeros((3,), jax.dtypes.float0),
    ]


def test_a_large_message_is_pulled_and_its_arrays_may_be_donated():
    arrays = large_message()
    what = message(arrays)
    with pulling(jax.devices()[:2]) as (a, b):
        for transport in (a, b):
            transport.expect([what])
        a.send(arrays, what)
        a.settle(arrays)
        arrays[0].delete()  # as a computation does that takes its memory
        found = b.receive(what)
        assert b._unpackers[0][what.tag].nbytes == TICKET, "the connection has the ticket alone"
        expected = large_message()
        assert_same(found, expected)
        assert all(x.devices() == {jax.devices()[1]} for x in found[:5])
        small = message([jnp.ones(3)], 1)  # a small one goes over the connection
        a.expect([small])
        b.expect([small])
        a.send([jnp.ones(3)], small)
        assert_same(b.receive(small), [jnp.ones(3)])


def test_meshes_pull_each_box_once(monkeypatch):
    homes = [
        Mesh(np.array(jax.devices()[n : n + 4]).reshape(2, 2), ("data", "model")) for n in (0, 4)
    ]
    arrays, pulled = large_message(), []
    monkeypatch.setattr(
        Pulls,
        "pull",
        lambda self, *args, own=Pulls.pull: pulled.append(args[1]) or own(self, *args),
    )
    what = dataclasses.replace(message(arrays), specs=SPECS)
    with pulling(homes) as (a, b):
        for transport in (a, b):
            transport.expect([what])
        placed = [
            jax.device_put(x, NamedSharding(homes[0], partition_spec(spec)))
            if isinstance(x, jax.Array)
            else x
            for x, spec in zip(arrays, SPECS, strict=True)
        ]
        a.send(placed, what)
        found = b.receive(what)
        assert_same(found, arrays)
        for x, spec in zip(found[:5], SPECS, strict=False):
            assert x.sharding.is_equivalent_to(
                NamedSharding(homes[1], partition_spec(spec)), x.ndim
            )
    # Two boxes, two rows of keys, four boxes, two (float64 is split over "data" alone).
    assert len(pulled) == 1 and len(pulled[0]) == 2 + 2 + 4 + 2


def test_a_value_that_cannot_be_computed_is_an_error_of_its_task():
    with pulling(jax.devices()[:2]) as (a, b), failing_array() as bad:
        what = message([bad, jnp.ones(LARGE)])
        seen = []
        a.on_failure = seen.append
        for transport in (a, b):
            transport.expect([what])
        waiting = blocked(b.receive, what)
        a.send([bad, jnp.ones(LARGE)], what)
        with pytest.raises(Aborted, match="no such luck"):
            blocked(a.flush)()
        assert isinstance(seen[0], NotComputed) and seen[0].task == "x0"
        b.abort(RuntimeError("over"))
        with pytest.raises(Aborted):
            waiting()


PEER = f"""
import pickle, sys
import jax, jax.numpy as jnp
from jaxpp.runtime.transport import Pulls, SocketTransport
from tests.runtime.transport.ranks import message

home = jax.devices()[0]
transport = SocketTransport({{1: home}}, {SECRET!r}, pulls=Pulls(home))
print(pickle.dumps(transport.addresses).hex(), flush=True)
transport.connect({{0: pickle.loads(bytes.fromhex(sys.stdin.readline()))}})
print("connected", flush=True)
transport.begin(1)
values = [jnp.arange(int(n)) for n in sys.argv[1:]]
whats = [message([x], n, 1, 0) for n, x in enumerate(values)]
transport.expect(whats)
for x, what in zip(values, whats):
    sys.stdin.readline()
    transport.send([x], what)
sys.stdin.readline()
"""


@pytest.fixture
def peer():
    """Rank 1 in a process of its own, which sends a message whenever it gets a line."""
    sizes = LARGE, 32 << 20, LARGE
    command = [sys.executable, "-c", PEER, *map(str, sizes)]
    own = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    home = jax.devices()[0]
    transport = SocketTransport({0: home}, SECRET, pulls=Pulls(home))
    try:
        transport.connect({1: pickle.loads(bytes.fromhex(own.stdout.readline().decode()))})
        own.stdin.write(pickle.dumps(transport.addresses).hex().encode() + b"\n")
        own.stdin.flush()
        assert own.stdout.readline() == b"connected\n"
        transport.begin(1)
        shapes = [jax.ShapeDtypeStruct((n,), "int32") for n in sizes]
        whats = [message([shape], n, 1, 0) for n, shape in enumerate(shapes)]
        transport.expect(whats)

        def go():
            own.stdin.write(b"\n")
            own.stdin.flush()

        go()
        assert_same(blocked(transport.receive, whats[0])(30), [jnp.arange(LARGE)])
        yield transport, own, whats, go
    finally:
        own.kill()
        own.communicate()
        transport.close()


def test_a_process_is_killed_while_it_is_pulled_from(peer, monkeypatch):
    transport, own, whats, go = peer
    tickets = []

    def pull(self, ticket, types, before=Pulls.pull):
        tickets.append(ticket)
        own.send_signal(signal.SIGSTOP)  # with what it has sent so far
        return before(self, ticket, types)

    monkeypatch.setattr(Pulls, "pull", pull)
    receiving = blocked(transport.receive, whats[1])
    go()
    with pytest.raises(AssertionError, match="still waits"):
        receiving(1)
    start = time.monotonic()
    own.kill()
    with pytest.raises(PeerLost) as caught:
        receiving()
    assert caught.value.rank == 1 and len(tickets) == 1 and time.monotonic() - start < 2


def test_a_server_that_is_gone_before_the_first_pull_is_a_lost_peer(monkeypatch):
    arrays = [jnp.arange(LARGE)]
    what = message(arrays)
    with socket.socket() as unused, pulling(jax.devices()[:2]) as (a, b):
        unused.bind(("127.0.0.1", 0))  # nobody listens there; JAX would try for ever
        gone = f"127.0.0.1:{unused.getsockname()[1]} 5".encode().ljust(TICKET)
        monkeypatch.setattr(Pulls, "offer", lambda self, arrays: gone)
        for transport in (a, b):
            transport.expect([what])
        receiving = blocked(b.receive, what)
        a.send(arrays, what)
        with pytest.raises(PeerLost, match="could not be pulled from it .*refused") as caught:
            receiving()
    assert caught.value.rank == 0


def test_a_pull_is_abandoned_and_one_of_nothing_is(peer, monkeypatch):
    transport, own, whats, go = peer
    pull, tickets = Pulls.pull, []

    def of_nothing(self, ticket, types):
        tickets.append(ticket)
        where, _ = ticket.split()
        return pull(self, where + b" 5", types)  # a number that was never offered

    monkeypatch.setattr(Pulls, "pull", of_nothing)
    receiving = blocked(transport.receive, whats[1])
    go()
    assert wait_until(lambda: tickets, 30)
    with pytest.raises(AssertionError, match="still waits"):
        receiving(0.1)
    start = time.monotonic()
    transport.abort(KeyError("the reason"))
    with pytest.raises(Aborted, match="the reason"):
        receiving()
    assert len(tickets) == 1 and time.monotonic() - start < 0.5
    own.kill()  # so that the pull ends, and the thread that waits for it
    own.wait()
    start = time.monotonic()
    transport.close()
    assert time.monotonic() - start < 2
