"""The connection of the driver and a worker: calls arrive whole and in order, nothing hangs."""

import dataclasses
import io
import queue
import signal
import socket
import struct
import threading
import time
import types

import numpy as np
import pytest

from jaxpp.runtime.remote.calls import Client, Failure, Kind, Lane, uninterrupted, unpack
from jaxpp.runtime.remote.worker._output import Output
from jaxpp.runtime.remote.worker._server import Server
from jaxpp.runtime.transport import TransportError, _connections
from tests.helpers import wait_until

SECRET = b"secret"


class Process:
    """Takes down what is called, and gives what it was made to give."""

    rank = 0

    def __init__(self):
        self.ran = queue.SimpleQueue()
        self.began, self.went_on = threading.Event(), threading.Event()
        self.went_on.set()
        self.failure, self.epochs, self.aborts = None, [], []

    def run(self, *pieces):
        self.began.set()
        self.went_on.wait(10)
        self.ran.put([bytes(piece) for piece in pieces])
        if pieces and bytes(pieces[0]) == b"fail":
            self.failure = Failure.of(KeyError("here"), 0, 3, "F0.1")
        return self.failure

    def fetch(self, numbers):
        return [np.full(n, n % 256, np.uint8) for n in numbers]

    def refuse(self, value):
        raise KeyError(value)

    def abort(self, reason):
        self.aborts.append(reason)

    def reset(self, epoch):
        self.epochs.append(epoch)
        self.failure = None


@pytest.fixture
def process():
    return Process()


@pytest.fixture
def server(process):
    server = Server(process, SECRET, None)
    yield server
    process.went_on.set()
    server.close()


@pytest.fixture
def connect(server):
    """Connects to the server; closes the connections in the end."""
    clients = []

    def connect(
        epoch=0, ended=lambda why: None, told=lambda text: None, secret=SECRET, source=-1, unix=True
    ):
        hello = _connections.Hello(epoch, source, 0)
        addresses = server.addresses if unix else dataclasses.replace(server.addresses, unix=None)
        clients.append(Client(hello, addresses, secret, told, ended))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def call(client, lane, method, *args):
    future = client.call(lane, method, *args)
    client.flush()
    return future


def result(future, kind=Kind.RETURNED):
    found, pieces = future.result(10)
    assert found == kind
    return unpack(pieces) if pieces else None


def delay_reading(server, lane, until):
    """Lets the server read no more once it has read a call of a lane."""
    own = server._channel._lanes[lane]
    submit = lambda *call: (until.wait(20), own.submit(*call))  # noqa: E731
    server._channel._lanes[lane] = types.SimpleNamespace(submit=submit, shutdown=own.shutdown)


def ran(process):
    return process.ran.get(timeout=10)


@pytest.mark.parametrize("sizes", [(3,), (0,), (5, 0, 2), (10, 1 << 24, 3), tuple(range(3000))])
def test_arguments_arrive_whole(connect, process, sizes):
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(size) for size in sizes]
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
    assert result(call(connect(), Lane.ORDERED, "run", *arrays)) is None
    assert ran(process) == pieces


def test_steps_run_in_order_and_none_after_a_failure(connect, process):
    client = connect()
    futures = [
        call(client, Lane.ORDERED, "run", b"fail" if n == 2 else str(n).encode()) for n in range(5)
    ]
    assert [f.result(10)[0] for f in futures] == [Kind.RETURNED] * 2 + [Kind.FAILED] * 3
    assert "here" in result(futures[4], Kind.FAILED).exception
    assert [ran(process)[0] for _ in range(3)] == [b"0", b"1", b"fail"] and process.ran.empty()


def test_arrays_are_fetched_while_a_step_runs(connect, process):
    client = connect()
    process.went_on.clear()
    step = call(client, Lane.ORDERED, "run", b"slow")
    found = result(call(client, Lane.FETCH, "fetch", [7, 0, 200]))
    assert [list(array) for array in found] == [[7] * 7, [], [200] * 200]
    assert found[0].flags.writeable and not step.done()
    process.went_on.set()
    assert result(step) is None


def test_a_driver_does_not_wait_until_a_batch_is_read_by_a_step(connect, process):
    client = connect()
    process.went_on.clear()
    steps = [call(client, Lane.ORDERED, "run", np.zeros(1 << 24, np.uint8)) for _ in range(4)]
    assert not any(step.done() for step in steps)


def test_what_a_method_raises_is_told_and_the_next_call_runs(connect):
    client = connect()
    failure = result(call(client, Lane.ORDERED, "refuse", 5), Kind.RAISED)
    assert isinstance(failure.cause(), KeyError) and failure.cause().args == (5,)
    assert "no_method" in result(call(client, Lane.ORDERED, "no_method"), Kind.RAISED).exception
    assert result(call(client, Lane.ORDERED, "run", b"next")) is None


class Unreadable:
    """Can be pickled, and not be read again."""

    def __reduce__(self):
        return int, ("no number",)


def test_arguments_and_results_that_cannot_be_read_end_nothing(connect, process):
    client = connect()
    failure = result(call(client, Lane.ORDERED, "run", Unreadable()), Kind.RAISED)
    assert "no number" in failure.exception
    process.give = Unreadable
    with pytest.raises(ValueError, match="no number"):
        result(call(client, Lane.ASIDE, "give"))
    process.give = threading.Lock
    assert "lock" in result(call(client, Lane.ASIDE, "give"), Kind.RAISED).exception
    assert result(call(client, Lane.ORDERED, "run", b"next")) is None


def test_an_argument_that_cannot_be_pickled_is_never_sent(connect, process):
    client = connect()
    with pytest.raises(TypeError, match="pickle"):
        client.call(Lane.ORDERED, "run", threading.Lock())
    assert result(call(client, Lane.ORDERED, "run", b"next")) is None
    assert ran(process) == [b"next"] and process.ran.empty()


def test_functions_go_by_their_code(connect, process):
    process.apply = lambda function, value: function(value)
    assert result(call(connect(), Lane.ASIDE, "apply", lambda n: n + 1, 4)) == 5


def test_what_is_printed_on_a_worker_reaches_the_driver_line_by_line(connect, server):
    before = io.StringIO()
    output = Output(server.tell, before)
    print("nobody is there", file=output)
    told = queue.SimpleQueue()
    client = connect(told=told.put)
    result(call(client, Lane.ORDERED, "run"))
    print("one", 2, "\nthree", file=output)
    print("no end", end="", file=output)
    other = threading.Thread(target=print, args=("of another thread",), kwargs={"file": output})
    other.start()
    other.join()
    output.flush()
    output.writelines(["a", "b\n"])
    found = [told.get(timeout=10) for _ in range(5)]
    assert found == ["one 2 ", "three", "of another thread", "no end", "ab"] and told.empty()
    client.close()
    for _ in range(1000):  # the server notices the end soon
        print("gone", file=output)
        if before.getvalue().endswith("gone\n"):
            break
        time.sleep(0.01)
    assert before.getvalue().startswith("nobody is there\n") and "gone" in before.getvalue()


def test_a_client_that_can_take_no_more_says_why(connect, process, server):
    def fail(text):
        raise MemoryError("too large")

    why = queue.SimpleQueue()
    client = connect(told=fail, ended=why.put)
    result(call(client, Lane.ORDERED, "run"))
    process.went_on.clear()
    waiting = call(client, Lane.ORDERED, "run")
    server.tell("a line")
    assert "MemoryError: too large" in why.get(timeout=10)
    assert (
        waiting.result(10)[0] == call(client, Lane.FETCH, "fetch", [1]).result(10)[0] == Kind.LOST
    )


def test_an_altered_message_between_hosts_ends_the_connection(connect, process):
    client = connect(unix=False)
    assert result(call(client, Lane.ORDERED, "run", b"first")) is None
    client.call(Lane.ORDERED, "run", b"second")
    *message, code = client._outbox[0]
    for altered in (
        [*message, code[:-1] + bytes([code[-1] ^ 1])],
        [*message[:2], message[2].replace(b"second", b"other!"), code],
        [message[0][:24] + struct.pack("<q", 1 << 60), *message[1:], code],  # no memory is taken
        [message[0][:16] + struct.pack("<q", 1 << 40), *message[1:], code],
        message,  # and the code of a later one
    ):
        client = connect(len(process.epochs) + 1, unix=False)
        client._outbox.append(altered)
        client.flush()
        client._connection.shutdown(socket.SHUT_WR)
        assert client.call(Lane.ORDERED, "run").result(10)[0] == Kind.LOST
    assert ran(process) == [b"first"] and process.ran.empty()


@pytest.mark.parametrize("size", [1 << 60, -1])
def test_a_size_that_cannot_be_is_found_before_memory_is_taken(connect, process, size):
    client = connect()
    client.call(Lane.ORDERED, "run", b"first")
    head, *rest = client._outbox[0]
    client._outbox[0] = [head[:24] + struct.pack("<q", size), *rest]
    client.flush()
    assert client.call(Lane.ORDERED, "run").result(10)[0] == Kind.LOST
    assert wait_until(lambda: process.aborts == ["The driver has closed its connection."], 5)


def test_a_message_is_not_taken_twice(connect, process):
    client = connect(unix=False)
    client.call(Lane.ORDERED, "run", b"first")
    twice = [list(client._outbox[0]) for _ in range(2)]
    client._outbox.clear()
    client._outbox.extend(twice)
    client.flush()
    assert client.call(Lane.ORDERED, "run").result(10)[0] == Kind.LOST
    assert ran(process) == [b"first"] and process.ran.empty()


# ---- interrupts ---------------------------------------------------------------------------------


def test_an_interrupt_waits_for_the_end_of_a_block():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted(), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append("whole")
    assert done == ["whole"]
    with pytest.raises(KeyboardInterrupt):  # the handler is back
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_goes_to_the_handler_of_before():
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert not came
        assert came == [1]
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_an_interrupt_leaves_unsent_is_sent_with_the_next_call(connect, process, server):
    """A message whose first part is sent must not be lost: all later ones would be misread."""
    client, big = connect(), np.arange(1 << 24, dtype=np.uint32)
    result(call(client, Lane.FETCH, "fetch", []))
    reading = threading.Event()
    delay_reading(server, Lane.FETCH, reading)
    client.call(Lane.FETCH, "fetch", [])
    first = client.call(Lane.ORDERED, "run", big)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        client.flush()
    assert 0 < sum(map(len, client._outbox[0])) < big.nbytes  # a part has been sent
    last = client.call(Lane.ORDERED, "run", b"next")
    reading.set()
    client.flush()
    assert result(first) is None and result(last) is None
    assert [ran(process), ran(process)] == [[big.tobytes()], [b"next"]]


# ---- epochs, and the end ------------------------------------------------------------------------


def test_a_new_connection_begins_an_epoch_when_all_is_quiet(connect, process):
    old = connect()
    process.went_on.clear()
    call(old, Lane.ORDERED, "run", b"runs")
    call(old, Lane.ORDERED, "run", b"is left")
    process.began.wait(10)
    first = call(connect(2), Lane.ORDERED, "run", b"new")
    time.sleep(0.2)
    assert not first.done() and process.epochs == []
    process.went_on.set()
    assert result(first) is None
    assert process.epochs == [2] and process.aborts == ["The mesh is restarted."]
    assert [ran(process), ran(process)] == [[b"runs"], [b"new"]] and process.ran.empty()
    assert call(old, Lane.ORDERED, "run", b"old").result(10)[0] == Kind.LOST


def test_the_end_of_a_worker_is_told_and_calls_are_lost(connect, process, server):
    ended = threading.Event()
    client = connect(ended=lambda why: ended.set())
    process.went_on.clear()
    waiting = call(client, Lane.FETCH, "run", b"waits")
    process.began.wait(10)
    closing = threading.Thread(target=server.close)
    closing.start()
    assert ended.wait(10)
    assert waiting.result(10)[0] == Kind.LOST
    assert call(client, Lane.FETCH, "fetch", [7]).result(10)[0] == Kind.LOST
    process.went_on.set()
    closing.join()


def test_a_worker_without_its_driver_ends_its_work(connect, process):
    client = connect()
    result(call(client, Lane.ORDERED, "run"))
    client.close()
    for _ in range(100):
        if process.aborts:
            break
        time.sleep(0.05)
    assert process.aborts == ["The driver has closed its connection."]


def test_the_driver_closes_a_connection_without_a_word(connect):
    ended = threading.Event()
    client = connect(ended=lambda why: ended.set())
    client.close()
    assert not ended.is_set() and not client._thread.is_alive()


def test_a_flush_need_not_wait_and_ends_with_the_connection(connect, process, server):
    client, big = connect(), np.zeros(1 << 22, np.uint8)
    reading = threading.Event()
    result(call(client, Lane.FETCH, "fetch", []))
    delay_reading(server, Lane.ORDERED, reading)
    for _ in range(4):
        client.call(Lane.ORDERED, "run", big)
    client.flush(wait=False)
    assert client._outbox
    flushing = threading.Thread(target=client.flush)
    flushing.start()
    time.sleep(0.1)
    assert flushing.is_alive()
    client.close()
    flushing.join(5)
    assert not flushing.is_alive()
    reading.set()


@pytest.mark.parametrize("what", ["secret", "nobody", "rank"])
def test_only_the_driver_that_knows_the_secret_connects(connect, server, what):
    if what == "nobody":
        server.close()
    given = {"secret": {"secret": b"another"}, "rank": {"source": 1}}.get(what, {})
    with pytest.raises(TransportError):
        connect(**given)
