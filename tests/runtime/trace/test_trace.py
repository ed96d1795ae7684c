"""A trace has each run and each message once, when it was, and changes nothing."""

import dataclasses
import json
import statistics
from collections import Counter
from time import monotonic_ns
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp._program import Run
from jaxpp.runtime.trace._clock import assemble
from jaxpp.runtime.trace._recorder import Recorder, Records
from tests.helpers import assert_same, mesh_of
from tests.runtime.trace import steps

SCHEDULES = [
    (jaxpp.schedules.OneFOneB(), 3, 3),
    (jaxpp.schedules.ZeroBubbleH1(), 3, 3),
    (jaxpp.schedules.Interleaved1F1B(2), 4, 2),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Three calls of a step of three stages under 1F1B, each stage on a device of its own."""
    return steps.traced(tmp_path_factory.mktemp("trace") / "run")


@pytest.mark.parametrize("times", ["profile", "waits"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize(("schedule", "stages", "ranks"), SCHEDULES, ids=str)
def test_each_run_and_each_message_is_there_once(tmp_path, schedule, stages, ranks, shared, times):
    trace, step = steps.traced(
        tmp_path, stages=stages, ranks=ranks, shared=shared, schedule=schedule, times=times
    )
    runs = Counter((run.call, run.rank, run.position) for run in trace.runs)
    assert runs == Counter(
        (call, program.rank, n)
        for call in range(3)
        for program in step.programs
        for n, instruction in enumerate(program.instructions)
        if isinstance(instruction, Run)
    )
    assert not trace.errors
    found = Counter((m.call, m.message.tag) for m in trace.messages)
    sent = [send.message.tag for program in step.programs for send in program.sends]
    assert found == Counter((call, tag) for call in range(3) for tag in sent if not shared)


@pytest.mark.parametrize("times", ["profile", "waits"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_times_are_in_the_order_of_what_happens(tmp_path, shared, times):
    schedule = jaxpp.schedules.ZeroBubbleH1()  # all results of a weight gradient are donated
    trace, _ = steps.traced(tmp_path, shared=shared, schedule=schedule, times=times)
    by_device = {}
    for run in trace.runs:
        assert 0 < run.dispatched <= run.start <= run.end
        by_device.setdefault(trace.device_of[run.rank], []).append(run)
    for runs in by_device.values():
        runs.sort(key=lambda run: run.dispatched)
        assert all(a.end <= b.start for a, b in zip(runs, runs[1:], strict=False))
    made: dict[Any, Any] = {(run.call, run.rank, run.position): run for run in trace.runs}
    for m in trace.messages:
        assert m.maker is not None and m.reader is not None
        maker, reader = made[m.made_by], made[m.read_by]
        assert maker.end <= m.start <= m.sent and maker.end <= reader.start
        assert m.arriving <= m.end <= reader.end and m.start <= m.end


def test_a_receiver_may_note_a_message_before_its_sender_does(tmp_path):
    """Threads that wait may be woken late: those of a process that callbacks keep busy are."""
    trace, _ = steps.traced(tmp_path, stages=2, ranks=2, calls=1)

    order: dict[Any, int] = {
        (run.rank, run.position): 1_000_000 * n for n, run in enumerate(trace.runs)
    }
    call, records = trace.calls[0], {}
    for rank in range(2):
        runs: dict[Any, Any] = {
            (call, of, position): (start, None, start + 1_500_000)
            for (of, position), start in order.items()
            if of == rank
        }
        sent, received = {}, {}
        for m in trace.messages:
            start = order[m.message.source, m.maker] + 500_000
            if m.message.source == rank:
                sent[call, m.message.tag] = start, start + 2_000_000
            else:
                received[call, m.message.tag] = start, start + 100_000
        records[rank] = Records(runs, sent, received, {call: 0})
    offsets = dict.fromkeys(range(2), ((0, 0), (1, 0)))
    found = assemble(records, offsets, 0, {0: trace.steps[call]}, range(2))
    made: dict[Any, Any] = {(run.rank, run.position): run for run in found.runs}
    assert len(found.messages) == len(trace.messages) > 4
    for m in found.messages:
        maker, reader = made[m.message.source, m.maker], made[m.message.target, m.reader]
        assert maker.end <= min(m.start, reader.start) and m.end <= reader.end
    latency = found.costs().latency
    assert isinstance(latency, float) and latency >= 0 and found.simulated().makespan > 0


@pytest.mark.parametrize("times", ["profile", "waits"])
def test_a_task_lasts_as_long_as_it_does(tmp_path, times):
    trace, _ = steps.traced(tmp_path, stages=2, ranks=2, loss=steps.sleepy_loss_fn, times=times)
    naps = [run.end - run.start for run in trace.runs if run.label.startswith("F1.")]
    others = [run.end - run.start for run in trace.runs if run.label.startswith("F0.")]
    assert len(naps) == 3 * steps.MICROBATCHES
    # On average: what wakes the watcher may be late once in a while.
    assert 0.9 * steps.NAP < statistics.median(naps) < 3 * steps.NAP
    assert statistics.median(others) < 0.5 * steps.NAP
    measured, simulated = trace.timeline(), trace.simulated()
    assert steps.MICROBATCHES * steps.NAP < measured.makespan
    assert 0.5 < simulated.makespan / measured.makespan < 2


def test_costs_are_of_all_that_keeps_a_rank(tmp_path):
    """They have the time until a rank goes on, and each late task once; not a call's delay."""
    schedule = jaxpp.schedules.GPipe()
    trace, _ = steps.traced(tmp_path, stages=2, ranks=2, schedule=schedule)
    seconds = {"F0": 1.0, "F1": 0.5, "B0": 1.0, "B1": 2.0}
    last = {m.read_by: n for n, m in enumerate(trace.messages)}
    runs, messages, clocks = [], list(trace.messages), [0.0, 0.0]
    for run in trace.runs:
        where = run.call, run.rank, run.position
        task, start = run.label[:2] in seconds, clocks[run.rank]
        if where in last and messages[last[where]].end > start:
            start = messages[last[where]].end + 0.125  # it was waiting, and had to be woken
        elif task:
            start += 0.25
        late = 16.0 * (run.call == trace.calls[1]) + (run.label == "F0.1")
        end = clocks[run.rank] = start + (seconds[run.label[:2]] + late if task else 0.0)
        runs.append(dataclasses.replace(run, start=start, end=end))
        for n, m in enumerate(messages):
            if m.made_by == where:
                times = {"start": end + 0.25, "sent": end + 0.25, "arriving": end, "end": end + 0.5}
                messages[n] = dataclasses.replace(m, **times)
    costs = dataclasses.replace(trace, runs=tuple(runs), messages=tuple(messages)).costs()
    kinds = jaxpp.schedules.Kind
    found = [costs.of(jaxpp.schedules.Task(kinds(n[0]), int(n[1]), 0)) for n in seconds]
    # A rank goes on 0.25 later, but where the next task waits for its message.
    assert found == [(1.25 * 3 + 1 + 1) / 4, (0.5 * 3 + 0.75) / 4, 1.0, (2.25 * 3 + 2) / 4]
    assert costs.latency == 0.625


def test_links_are_what_messages_of_all_sizes_take(tmp_path):
    """Sums of gradients, too: activations alone have one size, which tells no bandwidth."""
    trace, _ = steps.traced(tmp_path, stages=2, ranks=2, schedule=jaxpp.schedules.DualPipe())
    assert len({m.message.nbytes for m in trace.messages if "edge" in m.message.kinds}) == 1
    alike: dict[Any, list[Any]] = {}
    for m in trace.messages:
        alike.setdefault((m.call, m.message.nbytes), []).append(m)
    early = []
    for own in alike.values():
        for n, m in enumerate(own):  # they differ, and their mean counts
            seconds = 0.25 + m.message.nbytes / 1024 + (n - (len(own) - 1) / 2) / 64
            times = {"start": -9.0, "sent": -9.0, "arriving": -9.0, "end": -9.0 + seconds}
            early.append(dataclasses.replace(m, **times))
    costs = dataclasses.replace(trace, messages=tuple(early)).costs()
    assert (costs.latency, costs.bandwidth) == pytest.approx((0.25, 1024.0))


def test_a_run_is_what_its_device_did_then(tmp_path):
    """Callbacks in the stages, which are all the same computation, tell which one runs when."""
    for shared in (False, True):
        seen: dict[str, list[int]] = {}

        def note(h, seen=seen):
            seen.setdefault(f"F{int(h[0, 0])}.{int(h[0, 1])}", []).append(monotonic_ns())
            return np.zeros((), np.float32)

        def loss_fn(params, x, note=note):
            """The first column of `x` counts stages, the second one has the microbatch."""
            for i, w in enumerate(params):
                x = x if i == 0 else jaxpp.pipeline_enter_stage(x)
                shape = jax.ShapeDtypeStruct((), jnp.float32)
                zero = jax.pure_callback(note, shape, jax.lax.stop_gradient(x))
                h = jnp.tanh(x[:, 2:] @ w) + zero
                x = jnp.concatenate([x[:, :1] + 1, x[:, 1:2], h], axis=1)
            return jnp.mean(x**2)

        x = jnp.repeat(jnp.arange(steps.MICROBATCHES), steps.BATCH // steps.MICROBATCHES)
        x = jnp.concatenate([jnp.stack([0 * x, x], axis=1), steps.batch()], axis=1)
        mesh = mesh_of(4, shared)
        step = steps.step_of(mesh, loss=loss_fn)
        params, _ = step(steps.params_of(4), x)
        jax.block_until_ready(params)
        seen.clear()
        mesh.start_trace(tmp_path / str(shared))
        zero: Any = mesh._tracing
        for _ in range(3):
            params, _ = step(params, x)
        trace = mesh.stop_trace()
        assert len(seen) == 4 * steps.MICROBATCHES and not trace.errors
        for label, times in seen.items():
            runs = [r for r in trace.runs if r.label == label]
            assert len(runs) == len(times) == 3
            for run, time in zip(runs, times, strict=True):
                assert run.start < (time - zero.started.monotonic_ns) / 1e9 < run.end


def test_tracing_changes_no_result(tmp_path):
    mesh = mesh_of(3)
    step = steps.step_of(mesh)
    expected = [steps.params_of(3)]
    for _ in range(3):
        expected.append(step([jnp.copy(w) for w in expected[-1]], steps.batch())[0])
    params = steps.params_of(3)
    mesh.start_trace(tmp_path / "run")
    for wanted in expected[1:]:
        params, _ = step([jnp.copy(w) for w in params], steps.batch())
        assert_same(params, wanted)
    mesh.stop_trace()


@pytest.mark.more
def test_calls_outside_of_the_trace_are_not_in_it(tmp_path):
    """Nor are those that go on as it starts, and whose results nobody has."""

    def long_loss_fn(params, x):
        start = jax.lax.stop_gradient(jnp.full((64, 64), x[0, 0]))
        y = jax.lax.fori_loop(0, 2000, lambda _, y: jnp.tanh(y @ y), start)
        return steps.loss_fn(params, x + 0 * y[0, 0])

    mesh = mesh_of(2)
    step = steps.step_of(mesh, loss=long_loss_fn)
    params, _ = step(steps.params_of(2), steps.batch())
    step([jnp.copy(w) for w in params], steps.batch())
    mesh.start_trace(tmp_path / "run")
    params, _ = step(params, steps.batch())
    first = mesh.stop_trace()
    params, _ = step(params, steps.batch())
    mesh.start_trace(tmp_path / "run")
    for _ in range(2):
        params, _ = step(params, steps.batch())
    second = mesh.stop_trace()
    assert (first.calls, second.calls) == ((0,), (1, 2))
    assert not first.errors and not second.errors
    assert mesh._process.recorder is None


@pytest.mark.parametrize("times", ["profile", "waits"])
def test_a_call_that_fails_leaves_the_others(tmp_path, times):
    def fail(x):
        if np.asarray(x).max() > 100:
            raise ValueError("too large")
        return np.asarray(x)

    def loss(params, x):
        x = jaxpp.pipeline_enter_stage(jnp.tanh(x @ params[0])) @ params[1]
        checked = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.mean((x + 0 * jax.lax.stop_gradient(checked)) ** 2)

    mesh = mesh_of(2)
    loop = jaxpp.microbatch(jaxpp.wrap_forward(loss), steps.MICROBATCHES)
    step = jaxpp.place(jaxpp.schedule(loop, jaxpp.schedules.ForwardOnly()), mesh)
    params = steps.params_of(2)
    mesh.start_trace(tmp_path, times=times)
    step(params, steps.batch())
    with pytest.raises(Exception, match="too large"):
        jax.block_until_ready(step([params[0], 1e6 * params[1]], steps.batch()))
    trace = mesh.stop_trace()
    assert trace.typical_call == 0
    with pytest.raises(ValueError, match="Call 1 was not traced to its end"):
        trace.timeline(1)
    step(params, steps.batch())  # the mesh is well, and no error waits for the next test
    jax.effects_barrier()


def test_what_a_thread_sees_fail_is_an_error_of_the_trace():
    class Failed:
        def block_until_ready(self):
            raise RuntimeError("too large\nand more")

    recorder, noted = Recorder(waits=True), []
    before = monotonic_ns()
    recorder._wait("a way", Failed(), noted.append)
    recorder._wait("a way", jnp.ones(2), noted.append)
    assert recorder.stop().errors == ["too large"]
    (end,) = noted
    assert before < end < monotonic_ns()


def test_the_timeline_of_a_call_has_the_order_of_the_table(plain):
    trace, _ = plain
    table = jaxpp.schedules.OneFOneB().table(3, steps.MICROBATCHES)
    for call in trace.calls:
        assert trace.timeline(call).table.ranks == table.ranks
    assert trace.simulated().table.ranks == table.ranks
    assert trace.timeline() == trace.timeline(trace.typical_call)
    spans = sorted(trace.timeline(call).makespan for call in trace.calls)
    assert trace.timeline().makespan == spans[1]


def test_ranks_that_share_a_device_are_one_row(tmp_path):
    trace, _ = steps.traced(tmp_path, shared=True)
    timeline = trace.timeline()
    assert timeline.num_ranks == 1 and len(timeline.table.ranks[0]) == 2 * 3 * steps.MICROBATCHES
    assert trace.device_of == (0, 0, 0)


def test_calls_that_have_no_timeline_are_named(plain, tmp_path):
    trace, _ = plain
    with pytest.raises(ValueError, match=r"Call 9 was not traced; those that were are \(0, 1, 2\)"):
        trace.timeline(9)
    mesh = mesh_of(1)
    square = jaxpp.place(lambda x: x * x, mesh)
    mesh.start_trace(tmp_path)
    square(jnp.ones(3))
    trace = mesh.stop_trace()
    assert trace.picture_path is None and trace.timeline_path.exists()
    with pytest.raises(ValueError, match="no call of a step with a scheduled loop"):
        trace.timeline()
    with pytest.raises(ValueError, match="without a scheduled loop"):
        trace.timeline(0)


def test_a_trace_without_calls_is_empty(tmp_path):
    mesh = mesh_of(2)
    mesh.start_trace(tmp_path)
    trace = mesh.stop_trace()
    assert trace.runs == trace.messages == trace.calls == ()
    assert json.loads(trace.timeline_path.read_text())["traceEvents"]


def test_a_trace_is_started_and_stopped_once(tmp_path):
    mesh = mesh_of(1)
    with pytest.raises(RuntimeError, match="stop_trace: the mesh is not traced; call start_trace"):
        mesh.stop_trace()
    mesh.start_trace(tmp_path / "run")
    with pytest.raises(RuntimeError, match="traced already, into .*run'; call stop_trace first"):
        mesh.start_trace(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    mesh.stop_trace()
    with pytest.raises(RuntimeError, match="not traced"):
        mesh.stop_trace()


@pytest.mark.parametrize("taken", ["run", "run/profile-0"])
def test_nothing_starts_where_nothing_can_be_written(tmp_path, taken):
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("a file")
    mesh = mesh_of(1)
    with pytest.raises(OSError, match=f"cannot write to '.*{taken}': .* Give a folder"):
        mesh.start_trace(tmp_path / "run")
    assert mesh._process.recorder is None
    with pytest.raises(RuntimeError, match="not traced"):
        mesh.stop_trace()


def test_where_the_profiler_runs_already_nothing_starts(tmp_path):
    mesh = mesh_of(1)
    jax.profiler.start_trace(str(tmp_path / "own"))
    try:
        with pytest.raises(RuntimeError, match="[Pp]rofile"):
            mesh.start_trace(tmp_path / "run")
        assert mesh._process.recorder is None
    finally:
        jax.profiler.stop_trace()
