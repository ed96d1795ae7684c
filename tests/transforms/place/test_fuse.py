"""Tasks that a table has run together are one computation: the same bits, or the reason why not."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp import _compat, jaxprs
from jaxpp._program import Receive, Run, Send
from jaxpp.extend import edit_tasks
from jaxpp.schedules import (
    DualPipe,
    DualPipeV,
    FromTable,
    Kind,
    OneFOneB,
    Recompute,
    Task,
    ZeroBubbleH1,
    from_tasks,
)  # fmt: skip
from tests.helpers import assert_same, mesh_of

RANKS, M = 2, 6
X = jax.random.normal(jax.random.key(1), (4 * M, 8))


def weights(stages):
    return list(jax.random.normal(jax.random.key(0), (stages, 8, 8)))


def loss_fn(ws, x, act=jnp.tanh):
    for w in ws[:-1]:
        x = jaxpp.pipeline_enter_stage(act(x @ w) * jnp.exp(-ws[0].sum()))
    return jnp.mean((x @ ws[-1]) ** 2), x.sum(-1)  # the tied weight is read by all stages


def placed(schedule, stages, fuse: Any = "pairs", mesh=None, fun=loss_fn, m=M, **options):
    grad = jax.value_and_grad(jaxpp.wrap_forward(fun), has_aux=True)
    grad = jaxpp.microbatch(grad, m, reduce=(("mean", "stack"), "mean"))

    def step(ws, x):
        out, grads = jaxpp.schedule(grad, schedule)(ws, x)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], out

    return jaxpp.place(step, mesh or mesh_of(RANKS), donate_argnums=0, fuse=fuse, **options)


def run(step, stages):
    return jax.device_get(step(weights(stages), X))


def by_rank(step):
    found = ([i for i in p.instructions if isinstance(i, Run)] for p in step.programs)
    return [[run for run in own if run.task] for own in found]


def runs(step):
    return [run for own in by_rank(step) for run in own]


def own(orders, overlaps, **options):
    return FromTable(from_tasks([o.split() for o in orders], overlaps=overlaps, **options))


ALIKE_ORDERS = [
    "F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 B0.0 B0.1 B0.2 B0.3 B0.4 B0.5",
    "F1.0 F1.1 F1.2 F1.3 F1.4 F1.5 B1.0 B1.1 B1.2 B1.3 B1.4 B1.5",
]
#: Pairs of two microbatches of a stage: they write the same sums, and results of one buffer.
ALIKE = own(ALIKE_ORDERS, ["F0.0", "F1.0", "F1.2", "B0.0", "B0.2", "B1.2", "B1.4"])
#: A forward and a backward of one stage, which read the same weight.
BESIDE = own(
    ["F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2 F0.5 B0.3 B0.4 B0.5"]
    + ["F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 F1.4 B1.3 F1.5 B1.4 B1.5"],
    ["F0.3", "F0.4", "F1.1"],
)
CASES = [
    (DualPipe(), 2, 4),
    (DualPipeV(), 4, 5),
    (Recompute(DualPipeV()), 4, 5),
    (ALIKE, 2, 7),
    (BESIDE, 2, 3),
]


@pytest.mark.parametrize("fuse", ["pairs", "chains"])
@pytest.mark.parametrize(("schedule", "stages", "pairs"), CASES)
def test_fused_tasks_are_one_computation_and_give_the_same_bits(schedule, stages, pairs, fuse):
    alone, together = (placed(schedule, stages, which) for which in ("none", fuse))
    assert_same(run(together, stages), run(alone, stages))
    proofs = [jaxpp.certify(step, weights(stages), X) for step in (alone, together)]
    assert len({(p.exact, p.regrouped, p.results) for p in proofs}) == 1
    fused = [r for r in runs(together) if r.others]
    assert len(fused) >= pairs and not together.bundle.notes
    assert all(r.label == "+".join(map(str, r.tasks)) for r in fused)
    orders = [[[t for r in own for t in r.tasks] for own in by_rank(s)] for s in (alone, together)]
    assert orders[0] == orders[1]
    sums = [[r.accumulator_bytes for r in step.describe().ranks] for step in (alone, together)]
    assert sums[0] == sums[1]  # each sum is added up in its memory


@pytest.mark.parametrize("schedule", [OneFOneB(), ZeroBubbleH1()])
def test_a_chain_is_all_that_has_no_message_inside(schedule):
    alone, together = (placed(schedule, 2, which) for which in ("none", "chains"))
    assert_same(run(together, 2), run(alone, 2))
    for program, own in zip(alone.programs, by_rank(together), strict=True):
        chains: list[list[Task]] = [[]]
        for i in program.instructions:
            if isinstance(i, Send | Receive):
                chains.append([])
            elif isinstance(i, Run):
                chains[-1] += i.tasks
        assert [list(r.tasks) for r in own] == list(filter(None, chains))


@pytest.mark.parametrize("fuse", ["pairs", "chains"])
def test_fused_tasks_of_ranks_of_two_devices_give_the_same_bits(fuse):
    def run_on_two(which):
        mesh = jaxpp.MpmdMesh((RANKS, 2), ("mpmd", "data"))
        specs = {"in_specs": (P(), P("data")), "zero3": "data"}
        step = placed(DualPipe(), 2, which, mesh, **specs)
        return run(step, 2), step

    (want, _), (got, step) = map(run_on_two, ("none", fuse))
    assert_same(got, want)
    assert any(r.others for r in runs(step))


def test_equal_pairs_share_a_computation():
    step = placed(DualPipeV(), 4, m=8)
    lowered = step.lower(weights(4), jnp.tile(X, (2, 1))[:32])
    fused = [r for r in runs(lowered) if r.others]
    kinds = {tuple((t.kind, t.stage) for t in r.tasks) for r in fused}
    assert len({r.computation for r in fused}) <= len(kinds) < len(fused)


def test_elsewhere_than_on_cpu_the_tasks_are_not_calls():
    """XLA overlaps what is in one computation; a barrier stands before each task."""
    lowered = placed(DualPipe(), 2).lower(weights(2), X)
    computation = lowered.bundle.computations[
        next(r for r in runs(lowered) if r.others).computation
    ]
    inlined = jaxprs.inline(computation.jaxpr, _compat.is_call_apart)
    assert sum(map(_compat.is_call_apart, computation.jaxpr.eqns)) == 2
    assert not any(map(_compat.is_call_apart, inlined.eqns))
    assert sum(e.primitive.name == "optimization_barrier" for e in inlined.eqns) == 2
    keys = jax.random.split(jax.random.key(2), len(inlined.in_avals))
    args = [
        jax.random.normal(key, a.shape) if a.dtype == jnp.float32 else jnp.ones(a.shape, a.dtype)
        for key, a in zip(keys, inlined.in_avals, strict=True)
    ]
    got, want = (
        jax.jit(functools.partial(jaxprs.run, own))(*args) for own in (inlined, computation.jaxpr)
    )
    assert_same(got, want)


def test_a_pair_that_would_wait_for_itself_stays_apart():
    """Its second task reads what another rank makes of the first: an edit asks for it anyway."""
    want = Task(Kind.B, 0, 0)

    def join(graph):
        tasks = [
            dataclasses.replace(t, beside=want) if t.task == Task(Kind.F, 0, 5) else t
            for t in graph.tasks
        ]
        return dataclasses.replace(graph, tasks=tuple(tasks))

    step = edit_tasks(placed(own(ALIKE_ORDERS, []), 2), join)
    lowered = step.lower(weights(2), X)
    assert not any(r.others for r in runs(lowered))
    (note,) = lowered.bundle.notes
    assert "F0.5 and B0.0" in note and "of rank 1" in note
    assert note in lowered.as_text()
    assert_same(run(step, 2), run(placed(own(ALIKE_ORDERS, []), 2, "none"), 2))


def test_of_two_pairs_that_would_wait_for_each_other_one_stays_apart():
    """`B0.0` reads what `B1.0` makes, and `F1.1` what `F0.1` makes."""
    wanted = {
        Task(Kind.F, 0, 1): Task(Kind.B, 0, 0),
        Task(Kind.B, 1, 0): Task(Kind.F, 1, 1),
    }

    def join(graph):
        tasks = [dataclasses.replace(t, beside=wanted.get(t.task)) for t in graph.tasks]
        find = {t.label: t for t in tasks}
        tasks.remove(find["F1.1"])  # it stands between the tasks of the other pair
        tasks.insert(tasks.index(find["B1.0"]) + 1, find["F1.1"])
        return dataclasses.replace(graph, tasks=tuple(tasks))

    step = edit_tasks(placed(OneFOneB(), 2), join)
    assert_same(run(step, 2), run(placed(OneFOneB(), 2, "none"), 2))
    assert [r.label for r in runs(step) if r.others] == ["F0.1+B0.0"]
    assert "B1.0 and F1.1" in step.as_text()


def prints(x):
    jax.debug.callback(lambda v: None, x.sum())
    return jnp.tanh(x)


def calls(x):
    return jax.pure_callback(np.tanh, x, x, vmap_method="sequential")


@pytest.mark.parametrize("act", [prints, jax.custom_jvp(calls)])
def test_tasks_that_call_back_stay_apart(act):
    if isinstance(act, jax.custom_jvp):
        act.defjvp(lambda x, dx: (calls(*x), dx[0]))
    fun = functools.partial(loss_fn, act=act)
    step = placed(ALIKE, 2, fun=fun)
    assert_same(run(step, 2), run(placed(ALIKE, 2, "none", fun=fun), 2))
    assert "F0 calls back to Python" in step.as_text()
    labels = [r.label for r in runs(step) if r.others]
    assert "F0.0+F0.1" not in labels and "F1.0+F1.1" in labels


def test_predictions_and_traces_know_what_runs_as_one(tmp_path):
    mesh = mesh_of(RANKS)
    step = placed(DualPipe(), 2, mesh=mesh)
    run(step, 2)
    mesh.start_trace(tmp_path)
    run(step, 2)
    trace = mesh.stop_trace()
    fused = {r.label: r.tasks for r in runs(step) if r.others}
    assert {r.label: r.tasks for r in trace.runs if r.others} == fused
    assert trace.simulated().makespan > 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {e["name"] for e in events if e["name"] in fused} == set(fused)
    measured = jaxpp.measure(step, weights(2), X, repeats=1)
    for timeline in (
        trace.timeline(),
        measured.timeline,
        jaxpp.predict(step, weights(2), X, costs=measured).timeline,
        jaxpp.predict(step, weights(2), X, costs="h100").timeline,
    ):
        spans = {s.task: (s.start, s.end) for s in timeline.spans}
        assert all(len({spans[task] for task in tasks}) == 1 for tasks in fused.values())


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"fuse is one of .*'pairs'.*, got 'all'"):
        placed(DualPipe(), 2, "all")
