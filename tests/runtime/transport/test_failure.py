"""Nothing waits for ever: not for a rank that is gone, that is no rank, or that was aborted."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jaxpp.runtime.transport import (
    Aborted,
    PeerLost,
    SocketTransport,
    TransportError,
    _connections,
    _epoch,
)
from tests.helpers import assert_same, wait_until
from tests.runtime.transport.ranks import SECRET, blocked, connected, message

X = jnp.arange(1000)
BIG = jnp.ones(16 << 20)


def timed(wait):
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        wait()
    return caught.value, time.monotonic() - start


# ---- abort and reset ----------------------------------------------------------------------------


def test_abort_wakes_a_receive(pair):
    waiting = blocked(pair[1].receive, message([X]))
    time.sleep(0.2)
    pair[1].abort(KeyError("the reason"))
    error, took = timed(waiting)
    assert isinstance(error, Aborted) and isinstance(error.__cause__, KeyError)
    assert "the reason" in str(error) and took < 0.5


def test_abort_wakes_a_thread_that_reads(pair, monkeypatch):
    monkeypatch.setattr(_epoch, "PAUSE", 1.0)
    a, b = pair
    waiting = blocked(b.receive, message([X]))
    time.sleep(0.1)
    a.send([X], message([X]))
    waiting()  # from now on the thread of the connection leaves it to the one that waits
    waiting = blocked(b.receive, message([X], 1))
    link = b._epoch._channels[0].links[0]
    assert wait_until(lambda: link.visits and link.turn.locked(), 1)
    b.abort(KeyError("the reason"))
    error, took = timed(waiting)
    assert isinstance(error, Aborted) and took < 0.5


def stop_reading(transport):
    """Keeps the threads of a rank from reading, as if its process was stopped; gives the end."""
    go_on = threading.Event()
    take = transport._pool.take
    transport._pool.take = lambda nbytes: (go_on.wait(10), take(nbytes))[1]
    return go_on.set


def test_abort_wakes_who_waits_for_what_cannot_leave(pair):
    go_on = stop_reading(pair[1])
    for tag in range(4):
        pair[0].send([BIG], message([BIG], tag))
    waiting = [
        blocked(pair[0].flush),
        blocked(pair[0].receive, message([X], 9, 1, 0)),
    ]
    for wait in waiting:
        with pytest.raises(AssertionError):
            wait(0.1)
    pair[0].abort(KeyError("the reason"))
    for wait in waiting:
        error, took = timed(wait)
        assert isinstance(error, Aborted) and took < 0.5
    start = time.monotonic()
    pair[0].close()
    took = time.monotonic() - start
    go_on()
    assert took < 1


def test_after_abort_everything_raises_until_reset(pair):
    pair[0].send([X], message([X]))
    assert_same(pair[1].receive(message([X])), [X])
    for transport in pair:
        transport.abort(ValueError("the reason"))
    for _ in range(2):
        with pytest.raises(Aborted):
            pair[0].send([X], message([X]))
        with pytest.raises(Aborted):
            pair[1].receive(message([X]))


def test_reset_drops_what_was_on_its_way(pair):
    a, b = pair
    for epoch in range(1, 6):
        old = [X + epoch]
        a.send(old, message(old))
        a.send([BIG], message([BIG], 1))
        for transport in pair:
            transport.abort(ValueError("the reason"))
        for transport in pair:
            transport.reset(epoch)
        a.send([X - epoch], message([X]))
        assert_same(b.receive(message([X])), [X - epoch])
        back = message([X], 1, 1, 0)
        b.send([X], back)
        assert_same(a.receive(back), [X])


def test_a_rank_that_is_reset_first_waits_for_the_other(pair):
    a, b = pair
    a.reset(1)
    a.send([X], message([X]))
    time.sleep(0.3)
    b.reset(1)
    assert_same(blocked(b.receive, message([X]))(), [X])


def test_a_rank_that_was_left_behind(pair):
    a, b = pair
    b.reset(2)
    a.reset(1)
    a.send([X], message([X]))
    with pytest.raises(Aborted, match="has left epoch 1"):
        blocked(a.receive, message([X], 1, 1, 0))()
    with pytest.raises(ValueError, match="epoch 2 needs a later one, got 2"):
        b.reset(2)


# ---- a rank that is gone ------------------------------------------------------------------------


def test_a_rank_that_closed(pair):
    a, b = pair
    failures = []
    b.on_failure = failures.append
    a.send([X], message([X]))
    a.send([X], message([X], 1))
    b.receive(message([X]))
    waiting = blocked(b.receive, message([X], 2))
    time.sleep(0.1)
    a.close()
    error, took = timed(waiting)
    assert isinstance(error, PeerLost) and error.rank == 0 and took < 0.5
    # What had arrived is still there.
    assert_same(b.receive(message([X], 1)), [X])
    with pytest.raises(PeerLost):
        b.send([X], message([X], 0, 1, 0))
    assert [type(f) for f in failures] == [PeerLost]


def test_a_connection_that_is_cut_is_what_both_ends_name(pair):
    """Neither says that the other rank is gone, for both are there, and go on after a reset."""
    a, b = pair
    a.send([X], message([X]))
    assert_same(b.receive(message([X])), [X])
    waiting = [blocked(a.receive, message([X], 1, 1, 0)), blocked(b.receive, message([X], 2))]
    time.sleep(0.1)
    a._epoch._channels[1].links[0].connection.shutdown(socket.SHUT_RDWR)
    for wait, other in zip(waiting, (1, 0), strict=True):
        error, took = timed(wait)
        assert isinstance(error, PeerLost) and error.rank == other and took < 0.5
        assert str(error).startswith(f"The connection to rank {other} is lost: ")
        assert "gone" not in str(error)
    for transport in pair:
        transport.reset(1)
    a.send([X], message([X]))
    assert_same(b.receive(message([X])), [X])


def test_other_ranks_are_not_lost_with_one():
    with connected(3) as (a, b, c):
        for source, target in ((a, b), (b, a), (a, c), (c, b)):
            what = message([X], source.rank, source.rank, target.rank)
            source.send([X], what)
            target.receive(what)
        c.close()
        for source, target in ((a, b), (b, a)):
            what = message([X], source.rank, source.rank, target.rank)
            source.send([X], what)
            assert_same(target.receive(what), [X])


def test_a_rank_that_is_gone_before_it_was_heard_of(pair):
    pair[0].close()
    error, took = timed(blocked(pair[1].receive, message([X])))
    assert isinstance(error, PeerLost) and error.rank == 0 and took < 0.5


PEER = """
import sys, pickle, time
import jax, jax.numpy as jnp
from jaxpp.runtime.transport import SocketTransport
from tests.runtime.transport.ranks import SECRET, message
transport = SocketTransport(1, jax.devices()[0], SECRET, kind=sys.argv[1])
sys.stdout.buffer.write(pickle.dumps(transport.addresses).hex().encode() + b"\\n")
sys.stdout.flush()
transport.connect({0: pickle.loads(bytes.fromhex(sys.stdin.readline()))})
transport.begin(1)
x = jnp.arange(1000)
transport.send(transport.receive(message([x])), message([x], 0, 1, 0))
time.sleep(60)
"""


@pytest.fixture(params=["auto", "tcp"], ids=["unix", "tcp"])
def other_process(request):
    """A rank of this process, and one in a process of its own, which have exchanged a message."""
    import pickle

    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    transport = SocketTransport(0, jax.devices()[0], SECRET, kind=request.param)
    try:
        transport.connect({1: pickle.loads(bytes.fromhex(peer.stdout.readline().decode()))})
        peer.stdin.write(pickle.dumps(transport.addresses).hex().encode() + b"\n")
        peer.stdin.flush()
        transport.begin(1)
        transport.send([X], message([X]))
        assert_same(blocked(transport.receive, message([X], 0, 1, 0))(), [X])
        yield transport, peer
    finally:
        peer.kill()
        peer.communicate()
        transport.close()


def test_a_process_that_is_killed(other_process):
    transport, peer = other_process
    peer.send_signal(signal.SIGSTOP)
    for tag in range(4):
        transport.send([BIG], message([BIG], tag))
    sending = blocked(transport.flush)
    receiving = blocked(transport.receive, message([X], 1, 1, 0))
    with pytest.raises(AssertionError):
        sending(0.3)
    peer.kill()
    error, took = timed(receiving)
    assert isinstance(error, PeerLost) and error.rank == 1 and took < 0.5
    sending(1)
    with pytest.raises(PeerLost):
        transport.send([X], message([X]))


# ---- who is no rank -----------------------------------------------------------------------------


def opened(transport, kind):
    if kind == "tcp":
        return socket.create_connection(transport.addresses.tcp)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(transport.addresses.unix)
    return connection


def strangers(transport, kind, count=200):
    """Connections of which a third says nothing, a third garbage, and the rest half a handshake."""
    hello = _connections._HELLO.pack(_connections._MAGIC, 0, 0, transport.rank, bytes(32))
    found = [opened(transport, kind) for _ in range(count)]
    for n, connection in enumerate(found):
        said = (b"", np.random.RandomState(n).bytes(40 + n), hello)[n % 3]
        with contextlib.suppress(OSError):  # it has been closed already
            connection.sendall(said)
    return found


def is_closed(connection):
    connection.settimeout(2)
    with contextlib.suppress(ConnectionResetError):
        while found := connection.recv(1000):
            assert len(found) <= 64  # what an accepting end proves
    return True


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_200_strangers_disturb_nobody(kind):
    """They get no thread, ranks connect beside them, and reset and close do not wait for them."""
    with connected(2, "auto" if kind == "unix" else "tcp") as (a, b):
        threads = threading.active_count()
        with contextlib.ExitStack() as stack:
            outside = [stack.enter_context(c) for c in strangers(b, kind)]
            start = time.monotonic()
            a.send([X], message([X]))
            assert_same(blocked(b.receive, message([X]))(), [X])
            assert time.monotonic() - start < 1
            assert threading.active_count() <= threads + 3  # a sends; both receive
            start = time.monotonic()
            for transport in (a, b):
                transport.abort(ValueError("the reason"))
            for transport in (a, b):
                transport.reset(1)
            a.send([X + 1], message([X]))
            assert_same(blocked(b.receive, message([X]))(), [X + 1])
            assert time.monotonic() - start < 1
            start = time.monotonic()
            b.close()
            assert time.monotonic() - start < 1
            assert all(is_closed(connection) for connection in outside)


def test_strangers_that_come_again_and_again_keep_no_rank_out():
    """However many are open, the oldest gives way."""
    most = _connections._MOST_HANDSHAKES
    with connected(2) as (a, b), contextlib.ExitStack() as stack:
        outside = [stack.enter_context(opened(b, "unix")) for _ in range(most + 50)]
        a.send([X], message([X]))
        assert_same(blocked(b.receive, message([X]))(), [X])
        assert all(is_closed(connection) for connection in outside[:50])
        outside[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            outside[-1].recv(1)


def test_a_process_without_descriptors_accepts_again_when_it_has_some(monkeypatch):
    with connected(2) as (a, b), contextlib.ExitStack() as stack:
        outside = [stack.enter_context(opened(b, "tcp")) for _ in range(3)]
        time.sleep(0.1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = stack.enter_context(socket.socket())
        used = max(int(n) for n in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        free = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    free.append(os.dup(0))
            waiting.connect(b.addresses.tcp)
            assert is_closed(outside[0])  # it made room
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in free:
                os.close(number)
        a.send([X], message([X]))
        assert_same(blocked(b.receive, message([X]))(), [X])


def test_a_rank_that_gets_no_thread_is_refused_and_the_next_is_accepted(monkeypatch):
    with connected(2) as (a, b):
        with monkeypatch.context() as without_threads:
            start = unittest.mock.Mock(side_effect=RuntimeError("can't start new thread"))
            without_threads.setattr(threading.Thread, "start", start)
            with pytest.raises(PeerLost, match="ended the connection before it was open"):
                _connections.connect(_connections.Hello(0, 0, 1), b.addresses, SECRET)
        a.send([X], message([X]))
        assert_same(blocked(b.receive, message([X]))(), [X])


def test_silent_connections_are_closed(monkeypatch):
    monkeypatch.setattr(_connections, "HANDSHAKE_TIMEOUT", 0.2)
    with connected(2) as (_, b):
        with opened(b, "tcp") as silent:
            silent.settimeout(2)
            assert silent.recv(1) == b""


@pytest.mark.parametrize("kind", ["auto", "tcp"])
def test_a_wrong_secret_is_refused(kind):
    with connected(2, kind) as (a, b):
        wrong = SocketTransport(0, jax.devices()[0], b"another secret", kind=kind)
        try:
            wrong.connect({1: b.addresses})
            wrong.begin(1)
            wrong.send([X], message([X]))
            with pytest.raises(TransportError, match="secret"):
                blocked(wrong.receive, message([X], 1, 1, 0))()
        finally:
            wrong.close()
        a.send([X + 1], message([X]))
        assert_same(b.receive(message([X])), [X + 1])


def test_who_knows_no_secret_cannot_pose_as_one_who_does():
    """What the accepting end proves is of no use to prove oneself to it."""
    with connected(2) as (_, b):
        hello = _connections._HELLO.pack(_connections._MAGIC, 0, 0, 1, bytes(32))
        with opened(b, "unix") as connection:
            connection.sendall(hello)
            connection.sendall(connection.recv(64)[32:])
            connection.settimeout(2)
            assert connection.recv(1) == b""


def test_the_secret_and_the_names_do_not_show():
    with connected(2, "auto") as (a, _):
        assert SECRET not in repr(a.addresses).encode()
        assert a.addresses.tcp[0] == "127.0.0.1"
        listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
        assert {c.laddr.ip for c in listening} <= {"127.0.0.1"}


def test_a_rank_of_another_host_needs_an_address():
    import dataclasses

    with connected(2) as (a, b):
        elsewhere = dataclasses.replace(b.addresses, host="elsewhere")
        a.connect({1: elsewhere})
        a.send([X], message([X]))
        with pytest.raises(Aborted, match="listens only for processes of its own host"):
            blocked(a.receive, message([X], 1, 1, 0))()


def test_ports_for_other_hosts_are_told_and_those_of_this_host_are_not(caplog):
    own = _connections.Addresses("here", b"name", ("127.0.0.1", 7))
    others = [_connections.Addresses("there", None, ("10.77.0.1", port)) for port in (12, 11)]
    _connections.warn_of_open_ports([own])
    assert not caplog.records
    _connections.warn_of_open_ports([own, *others])
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jaxpp", "WARNING")
    assert "of other hosts at 10.77.0.1 port 11, 12." in record.getMessage()


# ---- the end ------------------------------------------------------------------------------------


def test_close_ends_what_waits(pair):
    waiting = blocked(pair[1].receive, message([X]))
    time.sleep(0.1)
    pair[1].close()
    error, took = timed(waiting)
    assert isinstance(error, Aborted) and took < 0.5
    pair[1].close()


def test_many_ranks_leave_nothing():
    before = psutil.Process().num_fds()
    for _ in range(5):
        with connected(4) as ranks:
            for source in ranks:
                target = ranks[(source.rank + 1) % 4]
                what = message([X], source.rank, source.rank, target.rank)
                source.send([X], what)
                target.receive(what)
    assert psutil.Process().num_fds() <= before
    names = open("/proc/net/unix").read()
    assert not any(t.addresses.unix[1:].decode() in names for t in ranks)
