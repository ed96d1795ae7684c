"""The driver's line to a worker: what is said arrives whole and in order, and nothing hangs."""

import concurrent.futures
import queue
import threading
import time
import unittest.mock

import numpy as np
import pytest

from jaxpp.runtime.remote.calls._failure import Failure, Lost
from jaxpp.runtime.remote.calls._line import Line, Method
from jaxpp.runtime.remote.calls._turns import Turn, Turns
from jaxpp.runtime.remote.worker._service import Service
from jaxpp.runtime.transport import TransportError, _connections

SECRET = b"secret"
FAILED = Failure.of(KeyError("here"), 0, 3, "F0.1")


class Process:
    """Takes down what is called, and gives what it was made to give."""

    rank = 0

    def __init__(self, epoch=0):
        self.turns = Turns(epoch)
        self.ran = queue.SimpleQueue()
        self.results = {}
        self.go_on = threading.Event()
        self.go_on.set()

    def in_turn(self, turn, method, *args):
        try:
            with self.turns.take(turn):
                return method(*args)
        except Lost as error:
            return Failure.of(error, self.rank, -1, "")

    def run(self, *pieces):
        self.go_on.wait(10)
        self.ran.put([bytes(piece) for piece in pieces])
        return FAILED if bytes(pieces[0]) == b"fail" else None

    def fail(self, error):
        return Failure.of(error, self.rank, -1, "")

    def fetch(self, numbers):
        return self.results.get(tuple(numbers), FAILED)

    def ready(self, numbers):
        return None if numbers == [7] else FAILED


@pytest.fixture
def process():
    return Process()


@pytest.fixture
def service(process):
    service = Service(process, SECRET, None)
    yield service
    process.go_on.set()
    service.close()


@pytest.fixture
def open_line(service):
    """Opens a line to the service; the ends that lines have met are in `ended`."""
    lines = []

    def open_line(epoch=0, check=lambda: None, ended=lambda worker: None, **other):
        given = {"secret": SECRET, "addresses": service.addresses} | other
        where = given["addresses"], given["secret"]
        lines.append(Line(5, epoch, 0, *where, check, ended))
        return lines[-1]

    yield open_line
    for line in lines:
        line.close()


def outcome(line, *pieces):
    """What a call of a step ends with."""
    future = concurrent.futures.Future()
    line.run(pieces, future.set_result)
    return future


@pytest.mark.parametrize("sizes", [(3,), (0,), (5, 0, 2), (10, 1 << 24, 3), tuple(range(3000))])
def test_pieces_arrive_whole(open_line, process, sizes):
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(size) for size in sizes]
    assert outcome(open_line(), *pieces).result(10) is None
    assert process.ran.get(timeout=0) == pieces


def test_steps_run_in_order_and_are_answered(open_line, process):
    line = open_line()
    outcomes = [outcome(line, b"fail" if n == 2 else str(n).encode()) for n in range(5)]
    assert [o.result(10) for o in outcomes] == [None, None, FAILED, None, None]
    ran = [process.ran.get(timeout=0)[0] for _ in range(5)]
    assert ran == [b"0", b"1", b"fail", b"3", b"4"]


def test_arrays_are_fetched_while_a_step_runs(open_line, process):
    line = open_line()
    parts = [np.arange(size, dtype=np.uint8) for size in (7, 0, 200)]
    process.results[1, 2, 1 << 40] = parts
    process.go_on.clear()
    step = outcome(line, b"slow")
    found = line.ask(Method.FETCH, [1, 2, 1 << 40]).result(10)
    for part, expected in zip(found, parts, strict=True):
        np.testing.assert_array_equal(np.frombuffer(part, np.uint8), expected)
    assert line.ask(Method.FETCH, [3]).result(10) == FAILED
    assert line.ask(Method.READY, [7]).result(10) == []
    assert line.ask(Method.READY, [8]).result(10) == FAILED
    assert not step.done()
    process.go_on.set()
    assert step.result(10) is None


def test_a_driver_does_not_wait_until_a_batch_is_read_by_a_step(open_line, process):
    line = open_line()
    process.go_on.clear()
    outcomes = [outcome(line, bytes(1 << 24)) for _ in range(4)]
    assert not any(o.done() for o in outcomes)


def test_a_call_that_cannot_be_read_is_a_failure(open_line):
    line = open_line()
    assert "IndexError" in outcome(line).result(10).exception  # `run` looks at the first piece
    assert outcome(line, b"next").result(10) is None


# ---- order --------------------------------------------------------------------------------------


def test_what_comes_another_way_takes_its_turn(open_line, process):
    line = open_line()
    process.go_on.clear()
    outcome(line, b"before")
    turns = []
    line.in_turn(turns.append)
    last = outcome(line, b"after")
    other = threading.Thread(target=process.in_turn, args=(turns[0], process.run, b"between"))
    time.sleep(0.1)  # so that what comes after is there first
    other.start()
    process.go_on.set()
    last.result(10)
    assert [process.ran.get(timeout=0)[0] for _ in range(3)] == [b"before", b"between", b"after"]


def test_a_call_that_cannot_be_made_takes_no_turn(open_line):
    line = open_line()

    def fail(turn):
        raise TypeError(f"cannot pickle {turn}")

    with pytest.raises(TypeError, match="cannot pickle"):
        line.in_turn(fail)
    assert outcome(line, b"next").result(10) is None


def test_stopped_turns_never_come():
    turns, waited = Turns(), queue.SimpleQueue()

    def wait():
        try:
            with turns.take(Turn(0, 1)):
                waited.put("came")
        except Lost as error:
            waited.put(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    turns.stop()
    assert isinstance(waited.get(timeout=10), Lost)
    waiting.join()


def test_an_epoch_begins_when_all_is_quiet(open_line, process):
    line = open_line()
    process.go_on.clear()
    running, left = outcome(line, b"runs"), outcome(line, b"is left")
    while process.ran.empty() and not process.turns._inside:
        time.sleep(0.01)
    begun = threading.Event()

    def begin():
        with process.turns.paused_for(2):
            begun.set()

    threading.Thread(target=begin).start()
    assert not begun.wait(0.2)
    process.go_on.set()
    assert begun.wait(10) and running.result(10) is None
    assert "before the ranks ended" in left.result(10).exception
    assert outcome(open_line(epoch=2), b"new").result(10) is None
    assert "before the ranks ended" in outcome(line, b"old").result(10).exception


# ---- the end ------------------------------------------------------------------------------------


def test_the_end_of_a_worker_is_told(open_line, service):
    ended = queue.SimpleQueue()
    line = open_line(ended=ended.put)
    assert outcome(line, b"a step").result(10) is None
    service.close()
    assert ended.get(timeout=10) == 5
    line.ask(Method.READY, [7])  # is never answered, and raises nothing


def test_the_driver_closes_a_line_without_a_word(open_line):
    ended = queue.SimpleQueue()
    line = open_line(ended=ended.put)
    line.close()
    assert ended.empty() and not line._thread.is_alive()


def test_a_worker_that_takes_nothing_in_is_looked_after(open_line, service):
    class Stopped(Exception):
        pass

    def check():
        raise Stopped

    reading = threading.Event()
    service._steps = unittest.mock.Mock(put=lambda request: reading.wait(20))
    line = open_line(check=check)
    with pytest.raises(Stopped):
        for _ in range(3):
            outcome(line, bytes(1 << 22))
    reading.set()


@pytest.mark.parametrize("what", ["secret", "nobody"])
def test_a_line_is_opened_by_who_knows_the_secret_to_who_is_there(open_line, service, what):
    if what == "nobody":
        service.close()
    with pytest.raises(TransportError):
        open_line(**({"secret": b"another"} if what == "secret" else {}))


def test_ranks_cannot_open_a_line(service):
    with pytest.raises(TransportError):
        _connections.connect(_connections.Hello(0, 1, 0), service.addresses, SECRET)
