"""Clocks of several hosts become one."""

import collections
import functools
import types
from time import monotonic_ns
from typing import Any

import jax
import pytest

from jaxpp._program import Receive, Run, Send
from jaxpp.runtime.remote._worker import Worker
from jaxpp.runtime.trace import _clock, _tracing
from jaxpp.runtime.trace._clock import Reading, to_driver
from jaxpp.runtime.trace._recorder import Records
from jaxpp.runtime.transport import SocketTransport
from tests.helpers import mesh_of
from tests.runtime.trace import steps


class Delayed:
    """Processes whose clock is behind, and reached over a line with delays in nanoseconds."""

    def __init__(self, monkeypatch, behind, delays):
        self.now = 10**9
        self.behind, self.delays = behind, iter(delays)
        own = types.SimpleNamespace(monotonic_ns=lambda: self.now)
        monkeypatch.setattr(_clock, "time", own)

    def apply(self, function, args, ordered=True):
        assert function is _clock.read_clock and not ordered
        there, back = next(self.delays)
        self.now += there
        reading = Reading("another host", self.now - self.behind, 0)
        self.now += back
        return {0: reading}


@pytest.mark.parametrize("behind", [0, 10**12, -(10**12)])
def test_the_offset_is_within_half_of_the_shortest_round_trip(monkeypatch, behind):
    delays = [(900, 100_000), (300_000, 50), *[(40_000, 70_000)] * 6, (2000, 5000), (10**6, 10)]
    processes = Delayed(monkeypatch, behind, delays)
    _, offset = _clock.measure_offset(processes, 0)
    assert abs(offset - behind) == (5000 - 2000) // 2


def test_processes_of_a_host_have_one_clock():
    class Here:
        def apply(self, function, args, ordered=True):
            return {0: function(None)}

    before = monotonic_ns()
    there, offset = _clock.measure_offset(Here(), 0)
    assert offset == 0 and before <= there <= monotonic_ns()


def test_a_clock_that_runs_faster_is_followed():
    offsets = (0, 100), (10**9, 100 - 50_000)  # 50 us in a second
    assert to_driver(0, offsets) == 100
    assert to_driver(10**9, offsets) == 10**9 - 49_900
    assert to_driver(5 * 10**8, offsets) == 5 * 10**8 + 100 - 25_000
    assert to_driver(8, [(5, 7), (5, 7)]) == 15


@pytest.fixture
def one_profile(monkeypatch):
    """Processes that are this one, which can have one profile, have none."""
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **options: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)


class FakeProcess:
    """A rank's process, as far as tracing knows it, on a host of its own."""

    def __init__(self, rank, ahead):
        self.rank, self.ahead = rank, ahead
        self.transport = types.SimpleNamespace(recorder=None)


class FakeMesh:
    """Processes on hosts whose clocks are apart, each of which runs one rank of a local step."""

    def __init__(self, aheads):
        self.processes = [FakeProcess(rank, ahead) for rank, ahead in enumerate(aheads)]
        self.calls = collections.Counter()

    @property
    def first_ranks(self):
        return range(len(self.processes))

    def apply(self, function, args, ordered=True):
        self.calls[function.__name__, ordered] += 1
        return {n: self._on(self.processes[n], function, own) for n, own in args.items()}

    def _on(self, process, function, args):
        result = function(process, *args)
        if isinstance(result, Reading):
            monotonic = result.monotonic_ns + process.ahead
            return Reading(f"host {process.rank}", monotonic, result.unix_ns)
        if isinstance(result, Records):
            moved = [
                {key: tuple(t and t + process.ahead for t in times) for key, times in part.items()}
                for part in (result.runs, result.sent, result.received)
            ]
            return Records(*moved, result.calls)
        return result

    def run(self, local, call, step):
        """Runs a step that is loaded on a local mesh, each rank in its process."""

        def dispatch():
            for rank, chunk in local.order:
                process = self.processes[rank]
                worker = local.executors[rank]
                for instruction in chunk:
                    start = monotonic_ns()
                    process.transport.recorder.execute(worker, (instruction,), call, step)
                    if isinstance(instruction, Send):
                        message = instruction.message
                        jax.block_until_ready(local.transport.copies_of(message)[1])
                        process.transport.recorder.sent(call, message, start, monotonic_ns())
                    elif isinstance(instruction, Receive):
                        message = instruction.message
                        process.transport.recorder.received(call, message, start, monotonic_ns())

        return dispatch


def test_processes_with_clocks_far_apart_give_one_timeline(tmp_path, one_profile):
    step = steps.step_of(mesh_of(2))
    params, x = steps.params_of(2), steps.batch()
    compiled = step.lower(params, x).compile()
    loaded: Any = compiled._run
    local = loaded.step
    mesh: Any = FakeMesh([10**12, -(10**12)])
    tracing = _tracing.start_trace(mesh, tmp_path / "run", "waits", None)
    assert all(p.transport.recorder is not None for p in mesh.processes)
    tracing.steps[7] = compiled.bundle
    before = monotonic_ns()
    for call in (3, 4):
        leaves = [w.copy() for w in params] + [x]
        local(leaves, mesh.run(local, call, 7))
    after = monotonic_ns()
    trace = _tracing.stop_trace(mesh, tracing, [0, 1])
    assert all(p.transport.recorder is None for p in mesh.processes)
    assert trace.calls == (3, 4) and not trace.errors
    window = [(t - tracing.started.monotonic_ns) / 1e9 for t in (before, after)]
    # The clocks are 1,000 s apart; a watcher may wake up late on a machine that is busy.
    assert all(window[0] - 0.5 < r.start <= r.end < window[1] + 0.5 for r in trace.runs)
    sends = sum(len(p.sends) for p in compiled.bundle.programs)
    assert len(trace.messages) == 2 * sends
    runs = sum(isinstance(i, Run) for p in compiled.bundle.programs for i in p.instructions)
    assert len(trace.runs) == 2 * runs
    assert trace.picture_path is not None
    assert mesh.calls["_start", True] == mesh.calls["stop_recording", True] == 1
    assert mesh.calls["read_clock", False] == 2 * 2 * _clock.ROUND_TRIPS


def test_where_one_process_cannot_start_none_does(tmp_path, monkeypatch, one_profile):
    mesh = FakeMesh([0, 0])
    started = _tracing._start

    def start(process, *args):
        if process is mesh.processes[1]:
            raise RuntimeError("no profiler here")
        started(process, *args)

    monkeypatch.setattr(_tracing, "_start", start)
    with pytest.raises(RuntimeError, match="no profiler here"):
        _tracing.start_trace(mesh, tmp_path / "run", "waits", None)
    assert all(p.transport.recorder is None for p in mesh.processes)


def test_a_process_that_is_reset_within_a_trace_can_be_traced_again(tmp_path):
    """JAX's profiler does not run on there, when the trace is lost with a rank."""
    process: Any = Worker((0,))
    process._new_transport = functools.partial(SocketTransport, {0: jax.devices()[0]})
    process.have(process._new_transport(b"secret"), lambda reference: None)
    for turn in (0, 1):
        _tracing._start(process, tmp_path / str(turn), "profile", 0, "here")
        process.reset(turn, b"another")
        assert process.transport.recorder is None
    process.transport.close()
