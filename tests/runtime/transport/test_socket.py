"""Messages between ranks of one process: what is sent arrives, whatever the order or the type."""

import threading
import time
import unittest.mock
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.runtime.transport import Aborted, TransportError, _socket
from jaxpp.runtime.transport._frames import SMALL, Header
from tests.helpers import assert_same
from tests.runtime.transport.ranks import (
    blocked,
    connected,
    failing_array,
    message,
    renew,
)

EVERYTHING = {
    "float32": lambda: [jnp.arange(12.0).reshape(3, 4)],
    "several": lambda: [jnp.ones((3, 5), "bfloat16"), jnp.arange(7), jnp.float32(3)],
    "small": lambda: [jnp.arange(4).astype(t) for t in ("int4", "uint2", "bool", "float4_e2m1fn")],
    "float8": lambda: [jnp.arange(100.0).astype(t) for t in ("float8_e4m3fn", "float8_e5m2")],
    "complex": lambda: [jnp.array([1 + 2j, 3 - 1j])],
    "keys": lambda: [
        jax.random.split(jax.random.key(1, impl=i), 3) for i in ("rbg", "threefry2x32")
    ],
    "key": lambda: [jax.random.key(5)],
    "empty": lambda: [jnp.ones((0, 4)), jnp.ones(3), jnp.ones((2, 0))],
    "nothing but empty": lambda: [jnp.ones((0,), "int8")],
    "no arrays": lambda: [],
    "many": lambda: [jnp.asarray(np.full(n % 7, n)) for n in range(700)],
    "large": lambda: [jnp.arange(3 << 20), jnp.arange(5)],
}


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.parametrize("expected", [True, False])
def test_what_is_sent_arrives(pair, name, expected):
    arrays = EVERYTHING[name]()
    what = message(arrays)
    if expected:
        pair[1].expect([what])
    pair[0].send(arrays, what)
    found = pair[1].receive(what)
    assert_same(found, arrays)
    assert all(a.devices() == {jax.devices()[1]} for a in found)


def test_64_bits():
    with jax.enable_x64(True):
        arrays = [jnp.arange(3.0, dtype="float64"), jnp.array(1 << 40, "int64")]
    with connected() as (a, b):
        a.send(arrays, message(arrays))
        assert_same(b.receive(message(arrays)), arrays)


@pytest.mark.more
def test_in_any_order(pair):
    a, b = pair
    arrays = [jnp.asarray(np.full(n + 1, n)) for n in range(50)]
    messages = [message([x], tag) for tag, x in enumerate(arrays)]
    for x, m in zip(arrays, messages, strict=True):
        a.send([x], m)
    for tag in np.random.RandomState(0).permutation(50):
        assert_same(b.receive(messages[tag]), [arrays[tag]])


def test_calls_and_programs_are_kept_apart(pair):
    a, b = pair
    what = message([jnp.arange(3)], tag=7)
    labels = [(call, program) for call in (1, 2, 3) for program in (0, 1)]
    for call, program in labels:
        a.begin(call, program)
        a.send([jnp.full(3, 10 * call + program)], what)
    for call, program in reversed(labels):
        b.begin(call, program)
        (found,) = blocked(b.receive, what)()
        np.testing.assert_array_equal(found, 10 * call + program)


def test_two_programs_may_use_a_tag_for_other_types(pair):
    a, b = pair
    arrays = [[jnp.arange(3)], [jnp.ones((40, 2), "bfloat16")]]
    messages = [message(x, tag=7) for x in arrays]
    for program in (0, 1):
        b.expect([messages[program]], program)
        a.begin(1, program)
        a.send(arrays[program], messages[program])
    for program in (0, 1):
        b.begin(1, program)
        assert_same(b.receive(messages[program]), arrays[program])


def test_ranks_that_send_much_to_each_other(pair):
    arrays = [jnp.asarray(np.full(16 << 20, rank, "float32")) for rank in (0, 1)]
    there, back = message([arrays[0]], 0, 0, 1), message([arrays[1]], 1, 1, 0)
    for transport, what, own in zip(pair, (there, back), arrays, strict=True):
        transport.send([own], what)
    for transport, what, other in zip(pair, (back, there), arrays[::-1], strict=True):
        (found,) = blocked(transport.receive, what)(30)
        assert np.array_equal(found, other)


def play(pair, rounds):
    """Sends a small array to and fro."""
    x = jnp.arange(8)
    there, back = message([x], 0, 0, 1), message([x], 1, 1, 0)

    def answer():
        for _ in range(rounds):
            pair[1].send(pair[1].receive(there), back)

    waiting = blocked(answer)
    for _ in range(rounds):
        pair[0].send([x], there)
        assert_same(pair[0].receive(back), [x])
    waiting()


def test_who_waits_for_anything_reads_what_comes(pair):
    """A message too large for a connection leaves while the other rank waits for something else."""
    a, b = pair
    large = jnp.arange(4 << 20)
    there, back = message([large]), message([x := jnp.arange(3)], 1, 1, 0)
    a.send([large], there)
    leaves = blocked(a.flush)
    with pytest.raises(AssertionError, match="still waits"):
        leaves(0.1)
    waiting = blocked(b.receive, message([x], 2))
    leaves()
    b.send([x], back)
    a.send(a.receive(back), message([x], 2))
    assert_same(waiting(), [x])
    assert_same(b.receive(there), [large])


def test_two_threads_that_wait_both_get_what_they_wait_for(pair):
    a, b = pair
    x = jnp.arange(3)
    waiting = [blocked(b.receive, message([x], tag)) for tag in range(8)]
    for tag in reversed(range(8)):
        a.send([x + tag], message([x], tag))
        assert_same(waiting[tag](), [x + tag])


def test_more_small_messages_than_a_connection_holds_keep_their_order(pair):
    a, b = pair
    x = jnp.zeros(SMALL // 4, "int32")
    messages = [message([x], tag) for tag in range(400)]
    for each in messages:
        a.send([x + each.tag], each)  # none of them waits
    leaves = blocked(a.flush)
    for each in messages:
        assert_same(b.receive(each), [x + each.tag])
    leaves()


def test_a_send_does_not_wait_for_its_value(pair):
    x = jnp.ones((256, 256))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda _, a: a @ a * 1e-3, x))
    slow(x).block_until_ready()
    value = slow(x)
    pair[0].send([value], message([value]))
    assert not value.is_ready()
    assert_same(pair[1].receive(message([value])), [value])


def test_every_rank_to_every_other():
    with connected(6) as ranks:
        for source in ranks:
            for target in ranks:
                if source is not target:
                    x = jnp.array([source.rank, target.rank])
                    source.send([x], message([x], source.rank, source.rank, target.rank))
        for target in ranks:
            for source in ranks:
                if source is not target:
                    x = jnp.array([source.rank, target.rank])
                    what = message([x], source.rank, source.rank, target.rank)
                    assert_same(target.receive(what), [x])


def test_ranks_that_do_not_talk_have_no_threads_for_it():
    with connected(8) as ranks:
        before = {t.name for t in threading.enumerate()}
        for rank in range(7):
            x = jnp.zeros(SMALL)
            ranks[rank].send([x], message([x], 0, rank, rank + 1))
            ranks[rank + 1].receive(message([x], 0, rank, rank + 1))
        started = {t.name for t in threading.enumerate()} - before
        assert started == {f"send-{rank}-{rank + 1}" for rank in range(7)}


def test_what_is_sent_may_be_donated_afterwards(pair):
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    x = jnp.ones(1 << 16)
    pointer = x.unsafe_buffer_pointer()
    waiting = blocked(pair[1].receive, message([x]))
    pair[0].send([x], message([x]))
    pair[0].flush()
    doubled = double(x)
    assert x.is_deleted() and doubled.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(waiting()[0], 1)


@pytest.mark.more
def test_settle_waits_for_what_is_donated_next(pair):
    x = jnp.ones((256, 256))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, a: a @ a * 1e-3, x))
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    first, second = message([x], 0), message([x], 1)
    wanted = np.array(slow(x))
    double(jnp.ones((256, 256)))
    for _ in range(3):
        values = [slow(x), slow(x + 1)]
        for value, what in zip(values, (first, second), strict=True):
            pair[0].send([value], what)
        pair[0].settle([x])  # it is not sent
        pair[0].settle(values[:1])
        assert not values[1].is_ready()
        doubled = double(values[0])
        np.testing.assert_array_equal(blocked(pair[1].receive, first)()[0], wanted)
        blocked(pair[1].receive, second)()
        np.testing.assert_array_equal(doubled, 2 * wanted)


def test_nothing_holds_what_was_sent(pair):
    x = jnp.arange(1 << 10)
    what = message([x])
    gone = weakref.ref(x)
    pair[0].send([x], what)
    pair[1].receive(what)
    pair[0].flush()
    del x
    assert gone() is None


def test_a_value_that_could_not_be_computed(pair):
    what = message([jnp.ones((256, 256))])
    waiting = blocked(pair[0].receive, message([jnp.ones(1)], 1, 1, 0))
    with failing_array() as value, pytest.raises(Aborted, match="no such luck") as caught:
        pair[0].send([value], what)
        waiting()
    assert caught.value.__cause__ is not None
    assert "rank 0 was to send to rank 1: x0" in "".join(caught.value.__cause__.__notes__)
    with pytest.raises(Aborted):
        pair[0].flush()
    with pytest.raises(Aborted):
        pair[0].send([jnp.ones(1)], message([jnp.ones(1)]))


@pytest.mark.parametrize("expected", [True, False])
def test_ranks_that_run_different_programs(pair, expected):
    sent, wanted = [jnp.arange(3)], message([jnp.arange(300)])
    if expected:
        pair[1].expect([wanted])
    pair[0].send(sent, message(sent))
    with pytest.raises(TransportError, match="64 .*different programs"):
        blocked(pair[1].receive, wanted)()


@pytest.mark.parametrize("nbytes", [-64, 1 << 60])
def test_a_size_that_no_host_holds_is_refused_before_memory_is_taken(pair, nbytes):
    a, b = pair
    a.peers[1].reader.connection.sendall(Header(0, 1, 0, 0, nbytes).pack())
    with pytest.raises(TransportError, match=f"announced a message of {nbytes} bytes"):
        blocked(b.receive, message([jnp.arange(3)]))()


def test_arrays_that_are_not_what_the_message_says(pair):
    pair[0].send([jnp.arange(300)], message([jnp.arange(3)]))
    with pytest.raises(Aborted, match="64 bytes.*1216"):
        blocked(pair[0].flush)()


def test_a_message_from_another_rank_than_it_says():
    with connected(3) as ranks:
        x = jnp.arange(3)
        ranks[2].send([x], message([x], 0, 2, 1))
        with pytest.raises(TransportError, match="from rank 2"):
            blocked(ranks[1].receive, message([x], 0, 0, 1))()


def test_a_rank_that_nobody_named():
    with connected(2) as (a, _):
        x = jnp.arange(3)
        with pytest.raises(TransportError, match=r"is connected to ranks \[1\]"):
            a.send([x], message([x], 0, 0, 5))


@pytest.mark.more
def test_a_receive_bounds_how_far_dispatch_runs_ahead(monkeypatch):
    x = jnp.ones((256, 256))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, a: a @ a * 1e-3, x))
    slow(x).block_until_ready()
    for run_ahead, waits in ((1, True), (9, False)):
        monkeypatch.setattr(_socket, "RUN_AHEAD", run_ahead)
        with connected(2) as (a, b):
            back = message([x], 9, 1, 0)
            b.send([x], back)
            waiting, values = blocked(b.receive, message([x], 3)), []
            for tag in range(4):
                values.append(x := slow(x))
                a.send([x], message([x], tag))
            a.receive(back)
            assert values[2].is_ready() == waits
            waiting()


def test_a_recorder_hears_of_both_ends(pair):
    class Recorder:
        def __init__(self):
            self.lines = []

        def sent(self, call, message, start_ns, end_ns):
            self.lines.append(("sent", call, message, start_ns, end_ns))

        def received(self, call, message, start_ns, end_ns):
            self.lines.append(("received", call, message, start_ns, end_ns))

    before = time.monotonic_ns()
    what = message([x := jnp.arange(1000)])
    for transport in pair:
        transport.recorder = Recorder()
        transport.begin(42)
    pair[0].send([x], what)
    pair[1].receive(what)
    pair[0].flush()
    after = time.monotonic_ns()
    for transport, kind in zip(pair, ("sent", "received"), strict=True):
        ((name, call, found, start, end),) = transport.recorder.lines
        assert (name, call) == (kind, 42) and found is what
        assert before < start < end < after


def test_a_recorder_hears_when_a_message_came(pair):
    """Not when a thread that waits for it has read it: it may have been busy before."""
    a, b = pair
    b.recorder = found = unittest.mock.Mock()
    b.begin(1)
    x = jnp.arange(3)
    a.send([x], message([x], 8))
    time.sleep(0.5)
    before = time.monotonic_ns()
    b.receive(message([x], 8))
    *_, end = found.received.call_args.args
    assert end < before - 4e8
    b.recorder = None  # the thread that listened ends with the next message
    a.send([x], message([x], 9))
    b.receive(message([x], 9))


def test_a_mesh_that_is_traced_can_be_restarted(pair):
    for call in range(1, 4):
        for transport in pair:
            transport.recorder = unittest.mock.Mock()
            transport.begin(call)
        x = jnp.arange(3)
        pair[0].send([x], message([x]))
        assert_same(pair[1].receive(message([x])), [x])
        for transport in pair:
            transport.abort(ValueError("the reason"))
        renew(pair)
