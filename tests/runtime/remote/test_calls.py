"""What the driver calls in a worker: whole, in one order, on all workers or none."""

import importlib
import pathlib
import re
import signal
import threading
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import jaxpp
from jaxpp.runtime import launched, remote, site
from jaxpp.runtime.remote._worker import LANES, Worker
from jaxpp.runtime.site._call import StepCall
from jaxpp.runtime.site._carried import Packed
from jaxpp.runtime.site._failure import Failed
from jaxpp.runtime.site._interrupts import uninterrupted
from jaxpp.runtime.site._process import Process

# ---- values of the user -------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3,), (0,), (5, 0, 2), (10, 1 << 20, 3), tuple(range(100))])
def test_arrays_arrive_whole_in_memory_of_their_own(sizes):
    arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
    found = Packed.of(arrays).get()
    for array, own in zip(arrays, found, strict=True):
        assert own.flags.writeable and not np.shares_memory(array, own)
        np.testing.assert_array_equal(own, array, strict=True)


def test_functions_go_by_their_code():
    more = 3
    function, n = Packed.of((lambda n: n + more, 4)).get()
    assert function(n) == 7


def test_what_cannot_be_pickled_is_refused_before_a_worker_is_called(ray_session):
    with jaxpp.RemoteMpmdMesh((2,)) as mesh:
        with pytest.raises(TypeError, match="pickle"):
            mesh.apply(note, {0: (1,), 1: (threading.Lock(),)})
        assert mesh.apply(noted, {0: (), 1: ()}) == {0: [], 1: []}
        mesh.apply(note, {0: (1,), 1: (2,)})
        assert mesh.apply(noted, {0: (), 1: ()}) == {0: [1], 1: [2]}


def note(rank, value):
    vars(rank).setdefault("noted", []).append(value)


def noted(rank):
    return vars(rank).get("noted", [])


# ---- in a worker --------------------------------------------------------------------------------


@pytest.fixture
def process() -> Any:
    """A process of one rank, 3, which takes down what it runs instead."""
    process = Worker((3,))
    process._new_transport = lambda secret: mock.Mock(
        homes={3: jax.devices()[0]}, recorder=None, addresses=secret
    )
    process.have(process._new_transport(b"first"), lambda reference: reference)
    take_down(process)
    return process


def take_down(process: Any):
    rank = process.ranks[3]
    rank.send, rank.feed, rank.take_results = mock.Mock(), mock.Mock(), mock.Mock()
    process._steps[0] = mock.Mock(at=None), {}


def call(number):
    part: Any = f"part of call {number}"
    return StepCall(number, 0, number, (), {3: part})


def ran(process):
    """The numbers of the calls that have run."""
    results = process.ranks[3].take_results.call_args_list
    assert process._steps[0][0].run.call_count == len(results)
    return [call.args[1] for call in results]


def test_each_method_that_the_driver_calls_has_a_lane():
    lanes = {
        name: m.lane for name, m in {**vars(Process), **vars(Worker)}.items() if hasattr(m, "lane")
    }
    assert set(lanes.values()) == set(LANES) and LANES["steps"] == 1
    assert lanes["run"] == lanes["drop"] == lanes["reset"] == "steps"


def test_calls_run_in_their_turn(process):
    for turn in range(3):
        process.run(turn, call(turn))
    assert ran(process) == [0, 1, 2] and process.failure is None


@pytest.mark.parametrize("turns", [(1,), (0, 2), (0, 0), (0, 1, 0)])
def test_a_call_out_of_its_turn_fails_the_process_and_does_not_run(process, turns):
    for turn in turns:
        process.run(turn, call(turn))
    assert ran(process) == list(turns[:-1])
    due = len(turns) - 1
    assert f"call {turns[-1]} of the driver, of run, came when call {due} was due" in (
        process.failure.exception
    )
    with pytest.raises(Failed, match="was due"):
        process.live()


def test_nothing_runs_after_a_failure_until_the_reset(process):
    process.fail(KeyError("here"))
    process.run(0, call(0))
    with pytest.raises(Failed) as caught:
        process.apply({3: Packed.of((lambda rank: 1,))})
    assert caught.value.ends and "here" in caught.value.failure.exception
    assert process.fetch(3, (7,)) is None and process.fetch(3, (7, 8)) == [None, None]
    assert process.wait(3, (7,)) is None
    before = process.transport
    assert process.reset(1, b"second") == b"second"
    before.close.assert_called_once_with(timeout=0)
    take_down(process)
    process.run(2, call(1))
    assert ran(process) == [1] and process.failure is None


def test_the_first_failure_counts_and_wakes_all(process):
    threads = [
        threading.Thread(target=process.wait, args=(3, (7,))),
        threading.Thread(target=lambda: pytest.raises(Failed, process.live)),
    ]
    for thread in threads:
        thread.start()
    process.abort("rank 0 has failed")
    process.fail(KeyError("later"))
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert process.failure.is_echo and "rank 0 has failed" in process.failure.exception


def test_what_a_function_raises_is_told_and_the_process_goes_on(process):
    def refuse(rank, value):
        raise KeyError(rank.rank, value)

    with pytest.raises(Failed) as caught:
        process.apply({3: Packed.of((refuse, 5))})
    cause = caught.value.failure.cause()
    assert isinstance(cause, KeyError) and cause.args == (3, 5) and not caught.value.ends
    assert process.apply({3: Packed.of((lambda rank: rank.rank,))})[3].get() == 3
    with pytest.raises(Failed, match="lock"):
        process.apply({3: Packed.of((lambda rank: threading.Lock(),))})


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_function_is_described(process, kind):
    def stop(rank):
        raise kind("no such batch")

    with pytest.raises(Failed) as caught:
        process.apply({3: Packed.of((stop,))})
    assert caught.value.ends and isinstance(caught.value.failure.cause(), kind)
    assert "no such batch" in process.failure.exception


def test_an_array_is_waited_for_until_it_comes(process):
    found = []
    waits = threading.Thread(target=lambda: found.append(process.fetch(3, (7, 8))))
    waits.start()
    process.ranks[3].keep({7: jax.numpy.arange(3, dtype="uint8")})
    assert waits.is_alive() and not found
    process.ranks[3].keep({8: jax.numpy.arange(2, dtype="uint8")})
    waits.join(5)
    assert [own.tolist() for own in found[0]] == [[0, 1, 2], [0, 1]]


def test_a_process_names_its_ranks():
    names = {(0,): "rank 0", (0, 1): "ranks 0 and 1", (4, 5, 6): "ranks 4 and 5 and 6"}
    assert {ranks: repr(Worker(ranks)) for ranks in names} == names
    assert repr(Worker((2,), 1, 2)) == "rank 2, process 1"


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


# ---- the page -----------------------------------------------------------------------------------


def test_the_page_names_what_is_there():
    page = (pathlib.Path(jaxpp.__file__).parents[1] / "docs/how_a_call_runs.md").read_text()
    modules = [
        importlib.import_module(f"{room.__name__}.{path.stem}")
        for room in (remote, site, launched)
        for path in pathlib.Path(str(room.__file__)).parent.glob("_[a-z]*.py")
    ]
    known = {name: value for module in modules for name, value in vars(module).items()}
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", page)
    assert len(named) > 25
    assert not [f"{o}.{n}" for o, n in named if not hasattr(known.get(o), n)]
