"""A table with offload gives the same bits, with the bytes on the device that it says."""

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jaxpp
from jaxpp._program import Run, Wait
from jaxpp.runtime.executor import interleave
from jaxpp.runtime.trace._clock import assemble
from jaxpp.runtime.trace._recorder import Records
from jaxpp.schedules import Costs, FromTable, Offload, by_name
from tests.helpers import assert_close, assert_same, mesh_of
from tests.scripts import load_script
from tests.transforms.tasks.test_recompute import OPTIMIZER, PARAMS, data, placed, trained

ARGUMENTS = PARAMS, OPTIMIZER.init(PARAMS), data(0)
CASES = [("1f1b", 4), ("interleaved_1f1b", 2), ("zb_h1", 4), ("dualpipe", 4), ("zb_v", 2)]


@pytest.mark.more
@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_offload_keeps_each_bit_and_the_peak_is_the_predicted_one(optimized, name, ranks):
    mesh, table = mesh_of(ranks), by_name(name).table(4, 8)
    plain, want = trained(FromTable(table), mesh)
    step, got = trained(Offload(name), mesh)
    assert_same(got, want)
    # What is offloaded is sent nowhere, and the proof holds.
    sends = jaxpp.testing.count_sends
    assert sends(step) == sends(plain)
    assert jaxpp.certify(step, *ARGUMENTS).exact
    labels = {
        label for own in step.lower(*ARGUMENTS).as_text().split("\n") for label in own.split()
    }
    assert any(label.startswith("O") for label in labels)
    assert any(label.startswith("L") for label in labels)
    memory_peaks = load_script("benchmarks.prediction").module.memory_peaks
    measured, predicted = memory_peaks(step, ARGUMENTS)
    np.testing.assert_allclose(measured, predicted, rtol=0.02)
    free = Costs(offload=0, load=0)
    held = [
        [peak.bytes["activations"] for peak in jaxpp.predict(s, *ARGUMENTS, costs=free).peaks]
        for s in (step, plain)
    ]
    assert max(held[0]) < max(held[1])


@pytest.mark.more
def test_some_of_the_microbatches_may_be_offloaded(optimized):
    mesh = mesh_of(4)
    _, want = trained(by_name("1f1b"), mesh)
    step, got = trained(Offload("1f1b", stages=[0, 1], share=0.5, ahead=0), mesh)
    assert_same(got, want)
    found = jaxpp.predict(step, *ARGUMENTS, costs=Costs(offload=0.5, load=0.5))
    assert found.timeline.table.lanes == ("copy",)
    assert any(moment.bytes.get("host") for moment in found.memory[0])
    assert not any(moment.bytes.get("host") for moment in found.memory[3])


def test_a_copy_begins_when_what_the_device_computes_has_ended():
    """Else a GPU, which takes memory at dispatch, holds the activations of all tasks ahead."""
    programs = placed(Offload("1f1b"), mesh_of(4)).lower(*ARGUMENTS).programs
    waited = 0
    for program in programs:
        computed: tuple[int, ...] = ()
        for instruction in program.instructions:
            if isinstance(instruction, Run):
                copies = instruction.task and instruction.task.kind.lane == "copy"
                assert not (copies and computed), instruction.label
                computed = () if copies else instruction.outputs
            elif isinstance(instruction, Wait) and set(instruction.slots) & set(computed):
                computed, waited = (), waited + 1
    assert waited
    # No rank waits in a piece that has a run before: the others get theirs first.
    for _, piece in interleave(programs):
        kinds = [type(i) for i in piece]
        assert Wait not in kinds[kinds.index(Run) :] if Run in kinds else True


@pytest.mark.more
def test_a_trace_has_copies_beside_what_the_device_computes(optimized, tmp_path):
    mesh = mesh_of(4)
    step, _ = trained(Offload("1f1b"), mesh)
    mesh.start_trace(tmp_path)
    for _ in range(3):
        step(*ARGUMENTS)
    trace = mesh.stop_trace()
    found, costs = trace.timeline(), trace.costs()
    copied = [span.task for span in found.spans if span.task.kind.lane == "copy"]
    assert set(copied) == {t for t in Offload("1f1b").table(4, 8).tasks if t.kind in "OL"}
    assert all(costs.of(task) > 0 for task in copied)
    # Each lane has one task at a time.
    for rank, lane in itertools.product(range(4), ("compute", "copy")):
        own = [s for s in found.spans if s.rank == rank and s.task.kind.lane == lane]
        own.sort(key=lambda span: span.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    assert trace.simulated().makespan > 0
    # A copy that takes as long as twenty tasks delays none that is dispatched meanwhile.
    bundle, records = trace.steps[trace.calls[0]], {}
    for rank, program in enumerate(bundle.programs):
        runs = {
            (0, rank, n): (10**6 * n, None, 10**6 * n + 10**5 * (200 if i.lane == "copy" else 1))
            for n, i in enumerate(program.instructions)
            if isinstance(i, Run)
        }
        records[rank] = Records(runs, calls={0: 0})
    offsets = dict.fromkeys(range(4), ((0, 0), (1, 0)))
    for run in assemble(records, offsets, 0, {0: bundle}, range(4)).runs:
        if not run.task or run.task.kind.lane == "compute":
            assert run.start == run.dispatched


@pytest.mark.more
def test_on_one_device_nothing_is_moved():
    from tests.transforms.tasks.test_schedule import GRAD, WS, X

    grads = [jaxpp.schedule(GRAD, s) for s in (by_name("1f1b"), Offload("1f1b"))]
    texts = [jax.jit(grad).lower(WS, X).as_text() for grad in grads]
    assert texts[0] == texts[1]


# ---- with what else a step may have -------------------------------------------------------------


def stack(weights, x):
    """Four layers, stacked; each keeps two values that a policy may offload, by name."""

    def layer(h, w):
        g = checkpoint_name(jnp.tanh(h @ w), "g")
        return h + checkpoint_name(jnp.sin(g), "h") ** 2, None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


STACK = jax.random.normal(jax.random.key(0), (4, 6, 6)) / 3, data(1)[:, 0, :1] * jnp.ones((1, 6))


def placed_stack(schedule, mesh=None, names=None, replicas=1, **options):
    policy = names and jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names,
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    staged = jaxpp.wrap_forward(jaxpp.split_stages(stack, num_stages=2), policy=policy)
    grad = jaxpp.microbatch(jax.value_and_grad(staged), 4, replicas=replicas)
    return jaxpp.place(jaxpp.schedule(grad, schedule), mesh or mesh_of(2), **options)


@pytest.mark.more
def test_a_stack_with_a_policy_is_offloaded_too(optimized):
    """The host holds what the policy offloads of each layer, and the rest while that is away."""
    want = jax.jit(jax.value_and_grad(stack))(*STACK)
    held = {}
    for names in (None, ["h"], ["g", "h"]):
        steps = [placed_stack(s, names=names) for s in (by_name("gpipe"), Offload("gpipe"))]
        plain, moved = (jax.device_get(jaxpp.gather(step(*STACK))) for step in steps)
        assert_same(moved, plain)
        assert_close(moved, jax.device_get(want))
        assert jaxpp.certify(steps[1], *STACK).exact
        held[len(names or ())] = [
            [getattr(rank, f"{kind}_bytes") for kind in ("host", "activation")]
            for step in steps
            for rank in step.describe().ranks
        ]
    # The last rank's layers: nothing by a policy, one value of each of two layers, and two values.
    layers = 2 * STACK[1].nbytes
    assert [held[count][1][0] for count in (0, 1, 2)] == [0, layers, 2 * layers]
    for plain, moved in ((own[1], own[3]) for own in held.values()):
        assert moved[0] > plain[0] and moved[1] < plain[1]


@pytest.mark.more
@pytest.mark.parametrize("replicas", [1, 2])
def test_offload_with_axes_inside_a_rank_keeps_each_bit(optimized, replicas):
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    options: Any = dict(in_specs=(P(), P("data")), replicas=replicas)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an all-reduce in each backward, without replicas
        steps = [placed_stack(s, mesh, **options) for s in (by_name("gpipe"), Offload("gpipe"))]
        plain, moved = (jax.device_get(jaxpp.gather(step(*STACK))) for step in steps)
        assert_same(moved, plain)
        assert jaxpp.certify(steps[1], *STACK).exact
        ranks = steps[1].describe().ranks
    assert all(rank.host_bytes > 0 for rank in ranks)


@pytest.mark.more
def test_a_batch_of_steps_is_offloaded(optimized):
    from tests.transforms.tasks.test_schedule import GRAD, STAGES, WS, X

    args = WS, jnp.stack([X, 2 * X])
    grads = [jax.vmap(jaxpp.schedule(GRAD, s), (None, 0)) for s in (by_name("1f1b"), Offload())]
    plain, moved = (jaxpp.place(grad, mesh_of(STAGES)) for grad in grads)
    assert_same(jax.device_get(moved(*args)), jax.device_get(plain(*args)))
    assert any(rank.host_bytes for rank in moved.describe().ranks)
