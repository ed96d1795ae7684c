"""`examples/extend/zero.py`: ZeRO by kinds of one's own is what the library's kinds give."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp
from examples.extend import zero
from experiments.hlo_collectives import count_collectives
from jaxpp.schedules import (
    ForwardOnly,
    Gather,
    Interleaved1F1B,
    OneFOneB,
    Reduce,
    ZeroBubbleH1,
    check,
    simulate,
    to_text,
)
from tests.helpers import assert_same, train_step_of
from tests.transforms.inside.test_gather import MICROBATCHES, OPTIMIZER, batch, loss, parameters

NAMES = str.maketrans("GHS", "AVQ")
SCHEDULES = [ZeroBubbleH1(), OneFOneB(), Interleaved1F1B(2)]


def start(schedule):
    params = parameters()[: 2 * schedule.stages_per_rank]
    return params, OPTIMIZER.init(params)


def placed(schedule, edit: Any = lambda fun: fun, **options: Any):
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(functools.partial(loss, decay=0.01)))
    grad_fn = jaxpp.schedule(jaxpp.microbatch(grad_fn, MICROBATCHES, replicas=2), schedule)
    mesh = jaxpp.MpmdMesh((2, 2), ("mpmd", "data"))
    step = train_step_of(OPTIMIZER, edit(grad_fn))
    return jaxpp.place(step, mesh, in_specs=(None, None, P("data")), **options)


def train(step, schedule):
    (params, state), losses = start(schedule), []
    for seed in range(2):
        params, state, value = step(params, state, batch(seed))
        losses.append(value)
    return params, state, losses


def own(text):
    """A text with the example's kinds in place of the library's."""
    return str(text).translate(NAMES)


@pytest.mark.cases(len(SCHEDULES))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("split", ["zero3", "zero1"])
def test_kinds_of_ones_own_give_the_bits_and_the_collectives_of_the_librarys(schedule, split):
    options = {split: "data"}
    theirs = placed(Gather(Reduce(schedule), held=1), **options)
    mine = placed(zero.Zero(schedule), zero.gather, **options)
    trained = train(mine, schedule)
    assert_same(trained, train(theirs, schedule))
    assert_same(trained, train(placed(schedule, zero1="data"), schedule))
    for counted, known in zip(*map(count_collectives, (mine, theirs)), strict=True):
        assert (counted.all, counted.once) == (known.all, known.once)
        assert counted.in_tasks == {own(key): n for key, n in known.in_tasks.items()}
        kinds = {key[0] for key in counted.in_tasks}
        assert set("AQ" if split == "zero3" else "Q") <= kinds <= set("AVQ")
    args = *start(schedule), batch(0)
    found = jaxpp.certify(mine, *args)
    assert found.exact and {"schedule", "edit_loops"} <= set(found.transforms)
    device = jaxpp.Device(flops=1e12, bandwidth=1e12)
    predicted = [
        jaxpp.predict(step, *args, costs=device, reduction_bandwidth=1e6) for step in (mine, theirs)
    ]
    assert predicted[0].seconds == predicted[1].seconds
    assert [p.bytes for p in predicted[0].peaks] == [p.bytes for p in predicted[1].peaks]


@pytest.mark.cases(len(SCHEDULES))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_their_tables_are_checked_simulated_and_drawn_as_the_librarys(schedule):
    sizes = 2 * schedule.stages_per_rank, MICROBATCHES
    mine, theirs = zero.Zero(schedule).table(*sizes), Gather(Reduce(schedule), held=1).table(*sizes)
    check(mine)
    assert [[str(t) for t in order] for order in mine.ranks] == [
        [own(t) for t in order] for order in theirs.ranks
    ]
    times, known = simulate(mine), simulate(theirs)
    assert times.makespan == known.makespan and times.busy == known.busy
    assert [(own(s.task), s.start) for s in known.spans] == [
        (str(s.task), s.start) for s in times.spans
    ]
    drawn, expected = (to_text(own, colour=False, width=400) for own in (times, known))
    assert drawn.splitlines()[:4] == [own(line) for line in expected.splitlines()[:4]]


def test_a_code_of_the_parameters_is_gathered_in_fewer_bytes():
    def in_half(*arrays):
        return [array.astype(jnp.bfloat16) for array in arrays]

    half = functools.partial(zero.gather, code=in_half, decode=lambda w: w.astype(jnp.float32))
    schedule = OneFOneB()
    steps = [placed(zero.Zero(schedule), edit, zero3="data") for edit in (half, zero.gather)]
    args = *start(schedule), batch(0)
    coded, plain = (
        [r.all["all-gather over data"] for r in (step(*args), count_collectives(step))[1]]
        for step in steps
    )
    assert coded == plain
    # Each device gets the half of the parameters from the other: of bfloat16, half the bytes.
    device = jaxpp.Device(flops=1e30, bandwidth=1e30)
    times = []
    for step in steps:
        found = jaxpp.predict(step, *args, costs=device, reduction_bandwidth=1e6)
        times.append([s.end - s.start for s in found.timeline.spans if s.task.kind == "A"])
    assert times[0] == pytest.approx([t / 2 for t in times[1]])
    # On one device, too, tasks read what was rounded.
    certificate = jaxpp.certify(steps[0], *args)
    assert certificate.exact and certificate.edits
    params, *_ = train(steps[0], schedule)
    for got, want in zip(
        jax.tree.leaves(params), jax.tree.leaves(train(steps[1], schedule)[0]), strict=True
    ):
        assert not np.array_equal(got, want)
        np.testing.assert_allclose(got, want, atol=0.03)


@pytest.mark.parametrize("backward", [True, False])
def test_a_stage_without_parameters_is_not_gathered(backward):
    def model(weights, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ weights[0]))
        h = jaxpp.pipeline_enter_stage(jnp.sin(h))
        return jnp.mean((h @ weights[1]) ** 2)

    def placed(edit, schedule):
        fun = jaxpp.wrap_forward(model)
        fun = jaxpp.microbatch(jax.grad(fun) if backward else fun, 2, replicas=2)
        mesh = jaxpp.MpmdMesh((3, 2), ("mpmd", "data"))
        fun = edit(jaxpp.schedule(fun, schedule))
        return jaxpp.place(fun, mesh, in_specs=(None, P("data")), zero3="data")

    base = OneFOneB() if backward else ForwardOnly()
    args = list(jax.random.normal(jax.random.key(0), (2, 4, 4))), jnp.ones((8, 4))
    mine, plain = placed(zero.gather, zero.Zero(base)), placed(lambda fun: fun, base)
    assert_same(mine(*args), plain(*args))
    assert jaxpp.certify(mine, *args).exact
