"""Gathers and reductions as tasks: the same bits, fewer collectives, the bytes that are said."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from experiments.hlo_collectives import count_collectives
from jaxpp._program import Role
from jaxpp.schedules import (
    Gather,
    GPipe,
    Interleaved1F1B,
    Offload,
    Recompute,
    Reduce,
    by_name,
)
from tests.helpers import assert_same, train_step_of
from tests.scripts import load_script

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "inside_a_rank.md"
WIDTH, LAYERS, MICROBATCHES, EXAMPLES = 16, 4, 8, 32
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))


def loss(params, x, decay=0.0):
    for n, own in enumerate(params):
        x = jaxpp.pipeline_enter_stage(x) if n else x
        x = x + jnp.tanh(x @ own["up"]) @ own["down"]
    # What depends on parameters alone is computed once a step, and gathered as they are.
    return jnp.mean(x**2) + decay * sum(jnp.sum(own["up"] ** 2) for own in params if decay)


def parameters():
    up, down = jax.random.split(jax.random.key(0))
    up = jax.random.normal(up, (LAYERS, WIDTH, 4 * WIDTH)) / WIDTH**0.5
    down = jax.random.normal(down, (LAYERS, 4 * WIDTH, WIDTH)) / WIDTH
    return [{"up": a, "down": b} for a, b in zip(up, down, strict=True)]


def start():
    return (params := parameters()), OPTIMIZER.init(params)


def batch(seed):
    return np.random.default_rng(seed).normal(size=(EXAMPLES, WIDTH)).astype(np.float32)


def placed(schedule, replicas=2, ranks=2, decay=0.0, **options: Any):
    loss_fn = functools.partial(loss, decay=decay)
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(loss_fn))
    grad_fn = jaxpp.microbatch(grad_fn, MICROBATCHES, replicas=replicas)
    step = train_step_of(OPTIMIZER, jaxpp.schedule(grad_fn, schedule))
    mesh = jaxpp.MpmdMesh((ranks, 2), ("mpmd", "data"))
    in_specs = (None, None, P("data"))
    return jaxpp.place(step, mesh, donate_argnums=(0, 1), in_specs=in_specs, **options)


def train(step):
    (params, state), losses = start(), []
    for seed in range(2):
        params, state, value = step(params, state, batch(seed))
        losses.append(value)
    return params, state, losses


CASES = [
    (Gather(GPipe(2), held=1), 2),
    pytest.param(Gather("1f1b"), 4, marks=pytest.mark.more),
    pytest.param(Gather("interleaved_zb", held=0, ahead=1), 2, marks=pytest.mark.more),
    pytest.param(Gather("dualpipe", held=1), 4, marks=pytest.mark.more),
    pytest.param(Recompute(Gather("interleaved_1f1b")), 2, marks=pytest.mark.more),
    pytest.param(Offload(Gather("1f1b", held=0)), 4, marks=pytest.mark.more),
    pytest.param(Reduce(Gather(GPipe(2), held=1)), 2, marks=pytest.mark.more),
    pytest.param(Reduce("interleaved_zb"), 2, marks=pytest.mark.more),
    pytest.param(Reduce("dualpipe"), 4, marks=pytest.mark.more),
]


def plain_of(schedule):
    while hasattr(schedule, "schedule"):
        schedule = schedule.schedule
    return schedule


def is_split(schedule) -> dict[str, Any]:
    """Tells what `place` splits for a schedule: all of ZeRO-3, or the state alone."""
    return dict(zero3="data") if "Gather" in str(schedule) else dict(zero1="data")


@pytest.mark.parametrize(("schedule", "ranks"), CASES)
def test_it_gives_the_bits_of_zero1_and_the_proof_holds(schedule, ranks):
    want = train(placed(plain_of(schedule), ranks=ranks, decay=0.01, zero1="data"))
    step = placed(schedule, ranks=ranks, decay=0.01, **is_split(schedule))
    assert_same(train(step), want)
    assert jaxpp.certify(step, *start(), batch(0)).exact
    for rank in count_collectives(step):
        assert ("all-gather over data" in rank.once) == ("zero1" in is_split(schedule))
        assert not any(key[0] in "FBIW" for key in rank.in_tasks)


@pytest.mark.parametrize("fuse", ["pairs", "chains"])
@pytest.mark.parametrize(
    "schedule", [Reduce(Gather("dualpipe", held=1)), Reduce(Gather(Interleaved1F1B(2)))]
)
def test_fused_tasks_leave_collectives_apart(schedule, fuse):
    ranks = 4 // schedule.stages_per_rank
    step, alone = (placed(schedule, ranks=ranks, zero3="data", fuse=own) for own in (fuse, "none"))
    assert_same(train(step), train(alone))
    collectives = [[rank.all, rank.once] for rank in count_collectives(step)]
    assert collectives == [[rank.all, rank.once] for rank in count_collectives(alone)]
    assert jaxpp.certify(step, *start(), batch(0)).exact


@pytest.mark.parametrize("schedule", [Reduce(Gather("1f1b")), Reduce("1f1b", every=2)])
def test_steps_that_overlap_gather_and_reduce_as_each_does(schedule):
    grad = jaxpp.microbatch(jax.value_and_grad(jaxpp.wrap_forward(loss)), 4, replicas=2)
    one = jaxpp.delay(train_step_of(OPTIMIZER, jaxpp.schedule(grad, schedule)))

    def steps(params, state, xs):
        for x in xs:
            params, state, value = one(params, state, x)
        return params, state, value

    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    specs: Any = (None, None, P("data"))
    step = jaxpp.place(steps, mesh, in_specs=specs, **is_split(schedule))
    plain = jaxpp.place(steps, mesh, in_specs=specs)
    params = parameters()[:2]
    args = (params, params), OPTIMIZER.init(params), [batch(n) for n in range(3)]
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(plain(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert jaxpp.certify(step, *args)


def test_sums_that_are_reduced_each_time_are_those_of_another_order():
    step = placed(Reduce("1f1b", every=1), ranks=4, zero1="data")
    want = train(placed(by_name("1f1b"), ranks=4, zero1="data"))
    for got, own in zip(jax.tree.leaves(train(step)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, own, rtol=2e-6, atol=2e-7)
    found = jaxpp.certify(step, *start(), batch(0))
    assert not found.exact and "sums in another order" in str(found)
    for rank in count_collectives(step):
        assert rank.all["reduce-scatter over data"] == 2 * MICROBATCHES


@pytest.mark.more
def test_the_page_has_collectives_and_bytes_of_each_window():
    script, args = load_script("benchmarks.windows").module, (*start(), batch(0))
    whole = sum(x.nbytes for x in jax.tree.leaves(parameters())) // 2
    lines = []
    for name, base in (("GPipe(2)", GPipe(2)), ("Interleaved1F1B(2)", Interleaved1F1B(2))):
        for window, (order, options) in script.windows(base).items():
            step = placed(order, **options)
            gathers, scatters, *held, ratio = script.figures(step, args)
            assert abs(ratio - 1) <= 0.02
            shares = " | ".join(f"{nbytes / whole:.2f}" for nbytes in held)
            lines.append(f"| `{name}` | {window} | {gathers} | {scatters} | {shares} |")
    print("\n".join(lines))
    page = PAGE.read_text().splitlines()
    assert not [line for line in lines if line not in page]


@pytest.mark.more
def test_a_gpt2_gathers_each_parameter_once_a_step():
    script = load_script("benchmarks.windows").module
    sizes = dict(layers=4, width=16, vocabulary=256, ranks=2, dp=2, microbatches=8, batch_size=16)
    config = script.Config(model="gpt2", schedule="gpipe(stages_per_rank=2)", **sizes)

    def gathers(order):
        step, args = script.make(config, order, dict(zero3="data"))
        jax.block_until_ready(step(*args))
        return step, count_collectives(step)[0]

    # 2 x 8 tasks a stage, each of which gathers what it reads.
    _, plain = gathers(config.order)
    assert set(plain.in_tasks) == {"F0", "B0", "F2", "B2"}
    each = sum(own["all-gather over data"] for own in plain.in_tasks.values())
    assert plain.all["all-gather over data"] == 8 * each
    step, once = gathers(Gather(config.order))
    assert set(once.in_tasks) == {"G0", "G2"}
    read = [a for a in step.bundle.arguments if a.role is Role.PARAMETER and a.stages & {0, 2}]
    assert once.all["all-gather over data"] == len(read) < each


@pytest.mark.more
def test_without_replicas_tasks_gather_what_the_axis_splits():
    step = placed(Gather("1f1b"), replicas=1, ranks=4, zero3="data")
    want = train(placed(by_name("1f1b"), replicas=1, ranks=4, zero3="data"))
    got = train(step)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for rank in count_collectives(step):
        gathered = {key: own for key, own in rank.in_tasks.items() if key[0] == "G"}
        assert gathered and "all-gather over data" not in rank.in_tasks.get("F0", {})


def test_a_device_takes_the_time_of_the_bytes_that_are_gathered():
    step = placed(Gather(GPipe(2), held=1), decay=0.01, zero3="data")
    args = *start(), batch(0)
    device = jaxpp.Device(flops=1e30, bandwidth=1e30)
    found = jaxpp.predict(step, *args, costs=device, reduction_bandwidth=1e6)
    spans = [s for s in found.timeline.spans if s.task.kind.of_stage and s.rank == 0]
    stage = sum(x.nbytes for x in jax.tree.leaves(parameters()[0]))
    assert [str(span.task) for span in spans] == ["G0.0", "G2.0", "H0.0"]
    # A backward reads `down` and what is made of `up` before the loop, but `up` only for the
    # cotangents that another rank waits for.
    times = [stage / 2, stage * 3 / 4, stage / 2]
    assert [s.end - s.start for s in spans] == pytest.approx([t / 1e6 for t in times])


def test_a_device_takes_the_time_of_the_bytes_that_are_reduced():
    step = placed(Reduce("1f1b"), ranks=4, zero1="data")
    args = *start(), batch(0)
    device = jaxpp.Device(flops=1e30, bandwidth=1e30)
    found = jaxpp.predict(step, *args, costs=device, reduction_bandwidth=1e6)
    spans = {str(s.task): s.end - s.start for s in found.timeline.spans if s.task.kind == "S"}
    # Of two devices each sends the half of a stage's gradients; the last stage has the loss, too.
    half = sum(x.nbytes for x in jax.tree.leaves(parameters()[0])) / 2
    assert spans["S0.7"] == pytest.approx(half / 1e6)
    assert spans["S3.7"] == pytest.approx((half + 4) / 1e6)


def test_sums_that_are_reduced_are_not_there_before_the_first_backward():
    step = placed(Reduce("gpipe"), ranks=4, zero1="data")
    device = jaxpp.Device(flops=1e30, bandwidth=1e30)
    found = jaxpp.predict(step, *start(), batch(0), costs=device)
    moments = [own for own in found.memory[-1] if own.running.startswith("F")]
    assert {own.bytes["accumulators"] for own in moments} == {4}  # of the loss


def test_whole_parameters_are_not_gathered():
    step = placed(Gather("1f1b"), ranks=4, zero1="data")
    assert "G0.0" not in step.lower(*start(), batch(0)).as_text()
