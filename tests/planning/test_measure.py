"""What a step is measured to take, and what follows from it."""

import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.runtime.executor import _executor
from jaxpp.runtime.trace import _figures
from jaxpp.schedules import Costs, Kind, Task, simulate, stage_dependencies
from tests.helpers import assert_same, mesh_of

WIDTH, BATCH, MICROBATCHES = 8, 8, 4


def loss_fn(params, x):
    for i, w in enumerate(params):
        x = jnp.tanh((x if i == 0 else jaxpp.pipeline_enter_stage(x)) @ w)
    return jnp.mean(x**2)


def skip_loss_fn(params, x):
    """The last stage reads the result of the first, too."""
    first = jnp.tanh(x @ params[0])
    second = jnp.tanh(jaxpp.pipeline_enter_stage(first) @ params[1])
    third = jaxpp.pipeline_enter_stage(second) + first
    return jnp.mean((third @ params[2]) ** 2)


def grad_fn_of(loss=loss_fn, schedule=None):
    loop = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), MICROBATCHES)
    return jaxpp.schedule(loop, schedule or jaxpp.schedules.OneFOneB())


def step_of(loss=loss_fn, schedule=None):
    grad_fn = grad_fn_of(loss, schedule)

    def step(params, x):
        return [w - 0.1 * g for w, g in zip(params, grad_fn(params, x), strict=True)]

    return step


def params_of(stages):
    keys = jax.random.split(jax.random.key(0), stages)
    return [jax.random.normal(k, (WIDTH, WIDTH)) for k in keys]


def batch():
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def measured(stages=3, ranks=3, shared=False, schedule=None, loss=loss_fn, repeats=1):
    step = jaxpp.place(step_of(loss, schedule), mesh_of(ranks, shared), donate_argnums=0)
    return jaxpp.measure(step, params_of(stages), batch(), repeats=repeats)


@pytest.fixture(scope="module")
def plain():
    """A step of three stages, each on a rank and device of its own, under 1F1B."""
    return measured(repeats=3)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks"),
    [
        (jaxpp.schedules.ZeroBubbleH1(), 3, 3),
        (jaxpp.schedules.Interleaved1F1B(2), 4, 2),
    ],
    ids=str,
)
def test_each_kind_of_task_of_each_stage_is_measured_in_the_order_of_the_schedule(
    schedule, stages, ranks
):
    found = measured(stages, ranks, schedule=schedule)
    table = schedule.table(stages, MICROBATCHES)
    # A task that computes nothing is not there: stage 0 has no input gradient.
    present = {(task.kind, task.stage) for task in table.tasks} - {(Kind.I, 0)}
    assert set(found.times) == set(found.times_alone) == present
    assert all(0 < t < math.inf for t in (*found.times.values(), *found.times_alone.values()))
    wanted = [[t for t in order if (t.kind, t.stage) != (Kind.I, 0)] for order in table.ranks]
    assert [list(order) for order in found.table.ranks] == wanted


def test_arguments_are_left_as_they_are():
    params = params_of(2)
    before = [np.asarray(w).copy() for w in params]
    step = jaxpp.place(step_of(), mesh_of(2), donate_argnums=0)
    jaxpp.measure(step, params, batch(), repeats=1)
    assert_same(params, before)


def test_measuring_changes_no_result():
    step = jaxpp.place(step_of(), mesh_of(2))
    expected = step(params_of(2), batch())
    jaxpp.measure(step, params_of(2), batch(), repeats=1)
    assert_same(step(params_of(2), batch()), expected)


def test_where_ranks_share_a_device_the_prediction_is_the_sum():
    found = measured(shared=True)
    assert found.table.num_ranks == 1 and len(found.table.ranks[0]) == 2 * 3 * MICROBATCHES
    tasks = sum(found.times[task.kind, task.stage] for task in found.table.ranks[0])
    assert found.latency == 0.0
    assert math.isclose(found.predict(), found.before[0] + tasks + found.after[0])


def test_where_ranks_have_devices_the_prediction_is_the_makespan(plain):
    costs = Costs(forward=2.0, backward=3.0)
    makespan = simulate(jaxpp.schedules.OneFOneB().table(3, MICROBATCHES), costs).makespan
    assert math.isclose(plain.predict(costs), max(plain.before) + makespan + max(plain.after))


def test_the_dependencies_of_a_chain_give_the_times_of_a_chain(plain):
    table = jaxpp.schedules.OneFOneB().table(3, MICROBATCHES)
    for key, needs in plain.dependencies.items():
        assert set(needs) >= set(stage_dependencies(table)[key])
    costs = Costs(forward=(1.0, 2.0, 3.0), backward=(5.0, 1.0, 2.0), latency=0.5)
    there = simulate(plain.table, costs, dependencies=plain.dependencies)
    assert there.ends == simulate(table, costs).ends


def test_what_skips_a_stage_is_a_dependency():
    found = measured(loss=skip_loss_fn)
    assert set(found.dependencies[Kind.F, 2]) == {(Kind.F, 0), (Kind.F, 1)}
    # Stage 1 adds the cotangent of what skips it to its own.
    assert {s for kind, s in found.dependencies[Kind.B, 1] if kind == Kind.B} == {2}
    assert {s for kind, s in found.dependencies[Kind.B, 0] if kind == Kind.B} == {1}
    assert found.table.stage_inputs == ((), (0,), (0, 1))


def test_edges_have_the_bytes_that_are_sent(plain):
    size = BATCH // MICROBATCHES * WIDTH * 4
    assert dict(plain.edge_bytes) == {
        (Kind.F, 0): size, (Kind.F, 1): size, (Kind.B, 2): size, (Kind.B, 1): size
    }  # fmt: skip
    assert plain.costs.edge_bytes(Task(Kind.F, 2, 0)) == 0  # pyright: ignore


def test_the_timeline_keeps_the_order_of_ranks_and_data(plain):
    spans = {span.task: span for span in plain.timeline.spans}
    assert min(span.start for span in spans.values()) == 0.0
    for order in plain.table.ranks:
        for task, following in zip(order, order[1:], strict=False):
            assert spans[task].end <= spans[following].start
    for (kind, stage), needs in plain.dependencies.items():
        for microbatch in range(MICROBATCHES):
            for kind_before, stage_before in needs:
                early = spans[Task(kind_before, stage_before, microbatch)]
                assert early.end <= spans[Task(kind, stage, microbatch)].start


def test_what_runs_around_the_loop_is_counted_where_it_runs(plain):
    assert len(plain.before) == len(plain.after) == 3
    assert all(seconds > 0 for seconds in plain.after)  # the update of each rank's parameters


def test_as_many_steps_are_timed_as_asked_for(plain):
    assert len(plain.steps) == 3 and min(plain.steps) <= plain.step <= max(plain.steps)


def test_a_compiled_step_can_be_measured():
    step = jaxpp.place(step_of(), mesh_of(2))
    compiled = step.lower(params_of(2), batch()).compile()
    assert jaxpp.measure(compiled, params_of(2), batch(), repeats=1).step > 0
    with pytest.raises(TypeError, match="other arguments"):
        jaxpp.measure(compiled, params_of(2), batch()[:4])


def test_what_place_did_not_make_is_refused():
    with pytest.raises(TypeError, match="jaxpp.place"):
        jaxpp.measure(step_of(), params_of(2), batch())


def test_a_step_without_a_loop_is_refused():
    step = jaxpp.place(lambda x: x + 1, mesh_of(1))
    with pytest.raises(ValueError, match="no scheduled loop"):
        jaxpp.measure(step, batch())


def test_a_step_of_two_loops_has_the_tasks_of_both_with_stages_that_are_numbered_on():
    both = (grad_fn_of(), grad_fn_of(schedule=jaxpp.schedules.ZeroBubbleH1()))

    def step(params, x):
        grads = both[0](params, x)
        return both[1]([w - g for w, g in zip(params, grads, strict=True)], x)

    step = jaxpp.place(step, mesh_of(2))
    found = jaxpp.measure(step, params_of(2), batch(), repeats=1)
    kinds = [("FB", (0, 1)), ("FIW", (2, 3))]
    keys = {(kind, s) for letters, stages in kinds for kind in letters for s in stages}
    keys -= {("I", 2)}  # nobody reads a gradient of the batch
    assert set(found.times) == keys and len(found.table.tasks) == MICROBATCHES * len(keys)
    assert (
        found.dependencies[Kind.F, 3] == (("F", 2),)
        and ("B", 0) not in found.dependencies[Kind.F, 2]
    )
    assert found.predict() > 0
    # The costs of a stage count for both loops.
    times = Costs(forward=[3.0, 1.0], input_grad=0.0, weight_grad=1.0)
    spans = jaxpp.predict(step, params_of(2), batch(), costs=times).timeline.spans
    taken = {(s.task.kind, s.task.stage): s.end - s.start for s in spans}
    assert [taken[Kind.F, stage] for stage in range(4)] == [3.0, 1.0, 3.0, 1.0]
    predicted = jaxpp.predict(step, params_of(2), batch(), costs=found)
    assert predicted.seconds >= predicted.timeline.makespan > 0


def test_another_mesh_is_refused():
    class Elsewhere:
        num_ranks = 2

        def load(self, bundle):
            return lambda args: list(args)

    elsewhere: Any = Elsewhere()
    step = jaxpp.place(step_of(), elsewhere)
    with pytest.raises(TypeError, match="MpmdMesh"):
        jaxpp.measure(step, params_of(2), batch())


def test_no_repeats_are_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        measured(repeats=0)


def test_a_device_that_fails_does_not_leave_the_others_waiting(monkeypatch):
    execute = _executor.Executor.execute

    def failing(self, chunk):
        on_a_device = threading.current_thread() is not threading.main_thread()
        if on_a_device and any(getattr(i, "label", "") == "F0.1" for i in chunk):
            raise RuntimeError("out of luck")
        execute(self, chunk)

    monkeypatch.setattr(_executor.Executor, "execute", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        measured()


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([], (0.0, math.inf)),
        ([(100, 2.0), (100, 4.0), (100, 3.0)], (3.0, math.inf)),
        ([(100, 2.0), (300, 3.0)], (1.5, 200.0)),
        ([(100, 3.0), (300, 2.0)], (2.5, math.inf)),  # noise, not a negative bandwidth
    ],
)
def test_transfers_are_a_latency_and_a_bandwidth(points, line):
    np.testing.assert_allclose(_figures.fit_line(points), line)
