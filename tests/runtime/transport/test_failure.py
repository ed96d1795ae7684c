"""Nothing waits for ever: not for a rank that is gone, that is no rank, or that was aborted."""

import contextlib
import dataclasses
import multiprocessing.connection
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time

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
    _handshake,
)
from jaxpp.runtime.transport._frames import Header
from tests.helpers import assert_same, wait_until
from tests.runtime.transport.ranks import (
    SECRET,
    blocked,
    connected,
    join,
    message,
    renew,
    unconnected,
)

X = jnp.arange(1000)
BIG = jnp.ones(16 << 20)


def timed(wait):
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        wait()
    return caught.value, time.monotonic() - start


# ---- abort and restart --------------------------------------------------------------------------


def test_abort_wakes_a_receive(pair):
    waiting = blocked(pair[1].receive, message([X]))
    time.sleep(0.2)
    pair[1].abort(KeyError("the reason"))
    error, took = timed(waiting)
    assert isinstance(error, Aborted) and isinstance(error.__cause__, KeyError)
    assert "the reason" in str(error) and took < 0.5


def test_abort_wakes_who_reads_a_large_message(pair):
    """Though the rest of it does not come."""
    a, b = pair
    waiting = blocked(b.receive, message([BIG]))
    header = Header(0, 1, 0, 0, BIG.nbytes).pack()
    a.peers[1].reader.connection.sendall(header + bytes(1 << 20))
    time.sleep(0.2)
    b.abort(KeyError("the reason"))
    error, took = timed(waiting)
    assert isinstance(error, Aborted) and took < 0.5


def test_abort_wakes_who_waits_for_what_cannot_leave(pair):
    """Rank 1 reads nothing, as if its process was stopped."""
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
    assert time.monotonic() - start < 1


def test_after_abort_everything_raises(pair):
    """Also the receive of a message that has come already."""
    for tag in range(1, -1, -1):
        pair[0].send([X], message([X], tag))
    assert_same(pair[1].receive(message([X])), [X])
    assert len(pair[1].mail) == 1
    for transport in pair:
        transport.abort(ValueError("the reason"))
    for _ in range(2):
        with pytest.raises(Aborted):
            pair[0].send([X], message([X]))
        for tag in range(2):
            with pytest.raises(Aborted):
                pair[1].receive(message([X], tag))


def test_what_was_on_its_way_does_not_come_after_a_restart(pair):
    for n in range(1, 6):
        old = [X + n]
        pair[0].send(old, message(old))
        pair[0].send([BIG], message([BIG], 1))
        for transport in pair:
            transport.abort(ValueError("the reason"))
        renew(pair)
        a, b = pair
        a.send([X - n], message([X]))
        assert_same(b.receive(message([X])), [X - n])
        back = message([X], 1, 1, 0)
        b.send([X], back)
        assert_same(a.receive(back), [X])


def test_a_waiter_that_is_late_to_wake_does_not_wait_after_a_restart(pair):
    waits = [message([X], tag, 1 - rank, rank) for tag in range(9, 19) for rank in range(2)]
    waiting = [blocked(pair[each.target].receive, each) for each in waits]
    time.sleep(0.1)
    for transport in pair:
        transport.abort(ValueError("the reason"))
    renew(pair)
    for wait in waiting:
        with pytest.raises(Aborted):
            wait()


def test_a_second_connection_of_a_rank_is_refused():
    with unconnected() as (a, b), unconnected() as (_, other):
        b.connect({0: a.addresses})
        with pytest.raises(TransportError, match="Rank 0 has a connection from rank 1 already"):
            other.connect({0: a.addresses})
        join((a, b))
        a.send([X], message([X]))
        assert_same(blocked(b.receive, message([X]))(), [X])


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
    """Neither says that the other rank is gone, for both are there, and go on after a restart."""
    a, b = pair
    a.send([X], message([X]))
    assert_same(b.receive(message([X])), [X])
    waiting = [blocked(a.receive, message([X], 1, 1, 0)), blocked(b.receive, message([X], 2))]
    time.sleep(0.1)
    a.peers[1].reader.connection.shutdown(socket.SHUT_RDWR)
    for wait, other in zip(waiting, (1, 0), strict=True):
        error, took = timed(wait)
        assert isinstance(error, PeerLost) and error.rank == other and took < 0.5
        assert str(error).startswith(f"The connection to rank {other} is lost: ")
        assert "gone" not in str(error)
    renew(pair)
    pair[0].send([X], message([X]))
    assert_same(pair[1].receive(message([X])), [X])


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


def test_a_rank_that_is_gone_before_it_was_heard_of():
    with unconnected() as pair:
        pair[0].close()
        error, took = timed(blocked(join, pair))
    assert isinstance(error, PeerLost) and error.rank == 0 and took < 0.5


def test_what_came_before_the_end_is_received_though_a_send_has_failed(pair):
    a, b = pair
    for tag in range(3):
        a.send([X], message([X], tag))
    a.close()
    back = message([BIG], 9, 1, 0)
    with contextlib.suppress(PeerLost):
        b.send([BIG], back)
        b.flush()
    for tag in range(3):
        assert_same(blocked(b.receive, message([X], tag))(), [X])
    with pytest.raises(PeerLost):
        blocked(b.receive, message([X], 3))()


PEER = """
import sys, pickle, time
import jax, jax.numpy as jnp
from jaxpp.runtime.transport import SocketTransport
from tests.runtime.transport.ranks import SECRET, message
transport = SocketTransport({1: jax.devices()[0]}, SECRET, kind=sys.argv[1])
sys.stdout.buffer.write(pickle.dumps(transport.addresses).hex().encode() + b"\\n")
sys.stdout.flush()
transport.connect({0: pickle.loads(bytes.fromhex(sys.stdin.readline()))})
print("connected", flush=True)
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
    transport = SocketTransport({0: jax.devices()[0]}, SECRET, kind=request.param)
    try:
        transport.connect({1: pickle.loads(bytes.fromhex(peer.stdout.readline().decode()))})
        peer.stdin.write(pickle.dumps(transport.addresses).hex().encode() + b"\n")
        peer.stdin.flush()
        assert peer.stdout.readline() == b"connected\n"
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


@contextlib.contextmanager
def strangers(transport, kind, count=200):
    """Connections of which a third says nothing, a third garbage, the rest what looks right."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(opened(transport, kind)) for _ in range(count)]
        for n, connection in enumerate(found):
            answer = struct.pack("!i", 16) + bytes(16)
            said = (b"", np.random.RandomState(n).bytes(40 + n), answer)[n % 3]
            with contextlib.suppress(OSError):  # it has been closed already
                connection.sendall(said)
        yield found


def is_closed(connection):
    connection.settimeout(2)
    with contextlib.suppress(ConnectionResetError):
        while found := connection.recv(1000):
            assert len(found) <= 256  # what a handshake says
    return True


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_200_strangers_disturb_nobody(kind, monkeypatch):
    """Ranks connect beside them; then nobody else can come, and they have to go."""
    monkeypatch.setattr(_handshake, "HANDSHAKE_TIMEOUT", 1.0)
    with unconnected(2, "auto" if kind == "unix" else "tcp") as (a, b):
        with strangers(a, kind) as outside:
            start = time.monotonic()
            join((a, b))
            a.send([X + 1], message([X]))
            assert_same(blocked(b.receive, message([X]))(), [X + 1])
            assert time.monotonic() - start < 1
            with pytest.raises(ConnectionRefusedError):
                opened(a, kind)
            assert all(is_closed(connection) for connection in outside)


def test_close_does_not_wait_for_strangers():
    with unconnected(1) as (a,), strangers(a, "unix"):
        start = time.monotonic()
        a.close()
        assert time.monotonic() - start < 1


def test_silent_connections_are_closed(monkeypatch):
    monkeypatch.setattr(_handshake, "HANDSHAKE_TIMEOUT", 0.2)
    with unconnected(1) as (a,), opened(a, "tcp") as silent:
        assert is_closed(silent)


@pytest.mark.parametrize("kind", ["auto", "tcp"])
def test_a_wrong_secret_is_refused(kind):
    """Of who connects, and of who is connected to."""
    with unconnected(2, kind) as (a, b), unconnected(2, kind, b"another secret") as wrong:
        for ranks in ((a, wrong[1]), (wrong[0], b)):
            with pytest.raises(TransportError, match="do not have the same secret"):
                join(ranks)
        join((a, b))
        a.send([X + 1], message([X]))
        assert_same(b.receive(message([X])), [X + 1])


def test_who_knows_no_secret_cannot_pose_as_one_who_does():
    """A rank proves nothing to who has not: so nobody can let it answer its own question."""
    with unconnected(1) as (a,):
        with opened(a, "unix") as connection:
            words = multiprocessing.connection.Connection(os.dup(connection.fileno()))
            with words:
                question = words.recv_bytes(256)
                words.send_bytes(question)
                answers = []
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        answers.append(words.recv_bytes(256))
            assert answers in ([], [b"#FAILURE#"])


class Refused(multiprocessing.connection.Connection):
    """A connection of who knows no secret, and goes on as if what it says were right."""

    def send_bytes(self, buf, offset=0, size=None):
        with contextlib.suppress(OSError):
            super().send_bytes(buf, offset, size)

    def prove(self):
        """Answers the question of the other end."""
        self.recv_bytes(256)
        self.send_bytes(b"{sha256}" + bytes(32))
        self.recv_bytes(256)  # that it is wrong

    def ask(self):
        """Asks, and takes any answer."""
        self.send_bytes(b"#CHALLENGE#{sha256}" + bytes(20))
        self.recv_bytes(256)
        self.send_bytes(b"#WELCOME#")


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_who_is_refused_and_goes_on_is_not_let_in(kind):
    with unconnected(1) as (a,):
        with opened(a, kind) as connection, Refused(os.dup(connection.fileno())) as words:
            with contextlib.suppress(EOFError, OSError):
                words.prove()
                words.ask()
                words.send_bytes(struct.pack("<q", 1))
                assert words.recv_bytes(256) != b"+"
            assert not a.peers


def test_nobody_connects_to_who_proves_nothing():
    with unconnected() as (a, b), socket.create_server(("127.0.0.1", 0)) as listening:
        there = dataclasses.replace(a.addresses, unix=None, tcp=listening.getsockname())
        connecting = blocked(b.connect, {0: there})
        with listening.accept()[0] as connection, Refused(os.dup(connection.fileno())) as words:
            with contextlib.suppress(EOFError, OSError):
                words.ask()
                words.prove()
                words.recv_bytes(256)
                words.send_bytes(b"+")
            with pytest.raises(TransportError, match="do not have the same secret"):
                connecting()
        assert not b.peers


def test_the_secret_and_the_names_do_not_show():
    with unconnected(1) as (a,):
        assert SECRET not in repr(a.addresses).encode()
        assert a.addresses.tcp[0] == "127.0.0.1"
        listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
        assert {c.laddr.ip for c in listening} <= {"127.0.0.1"}


def test_a_rank_of_another_host_needs_an_address():
    with unconnected() as (a, b):
        with pytest.raises(TransportError, match="listens only for processes of its own host"):
            b.connect({0: dataclasses.replace(a.addresses, host="elsewhere")})


def test_ports_for_other_hosts_are_told_and_those_of_this_host_are_not(caplog):
    own = _handshake.Addresses("here", b"name", ("127.0.0.1", 7))
    others = [_handshake.Addresses("there", None, ("10.77.0.1", port)) for port in (12, 11)]
    _handshake.warn_of_open_ports([own])
    assert not caplog.records
    _handshake.warn_of_open_ports([own, *others])
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("jaxpp", "WARNING")
    assert "of other hosts at 10.77.0.1 port 11, 12." in record.getMessage()


# ---- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_who_was_out_of_descriptors_lets_others_in_later(kind):
    came = []
    door = _handshake.Door("test", SECRET, None, lambda *who: bool(came.append(who[0])) or True)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family) as client, socket.socket(family) as probe:
        lowest = probe.fileno() + 1
        with contextlib.ExitStack() as taken:
            taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            for _ in range(lowest - len(os.listdir("/proc/self/fd")) + 1):
                taken.enter_context(open(os.devnull))  # all below the new limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(0)
            client.connect(getattr(door.addresses, kind))
            time.sleep(0.2)  # the door tries, and fails, meanwhile
        words = multiprocessing.connection.Connection(os.dup(client.fileno()))
        with words:
            assert words.poll(5), "nobody lets others in any more"
            multiprocessing.connection.answer_challenge(words, SECRET)
            multiprocessing.connection.deliver_challenge(words, SECRET)
            words.send_bytes(struct.pack("<q", 3))
            assert words.recv_bytes(1) == b"+" and came == [3]
    door.close()


def test_a_rank_that_gets_no_thread_says_so_and_the_others_hear_of_it(pair, monkeypatch):
    """What cannot be written at once needs a thread."""

    def start(*_):
        raise RuntimeError("can't start new thread")

    waiting = blocked(pair[1].receive, message([BIG]))
    monkeypatch.setattr(_connections, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        pair[0].send([BIG], message([BIG]))
    pair[0].abort(caught.value)  # as its process does with every error of a step
    with pytest.raises(Aborted, match="can't start new thread"):
        pair[0].send([X], message([X]))
    pair[0].settle([BIG])  # and nothing waits for what cannot leave
    pair[0].close()
    error, _ = timed(waiting)
    assert isinstance(error, PeerLost) and error.rank == 0


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
    assert wait_until(lambda: psutil.Process().num_fds() <= before, 2)
    names = open("/proc/net/unix").read()
    assert not any(t.addresses.unix[1:].decode() in names for t in ranks)
