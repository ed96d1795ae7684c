"""A plan for split state chooses windows of gathers and reductions beside what stages keep."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.planning._plan import solve
from jaxpp.schedules import FromTable, by_name, check
from tests.scripts import load_script

WIDTH, MICROBATCHES, ORDER = 64, 4, "gpipe(stages_per_rank=2)"
DEVICE = jaxpp.Device(1e9, 1e9, host_bandwidth=1e9)


@functools.cache
def script():
    return load_script("benchmarks.windows").module


@functools.cache
def unlimited(zero=3):
    options = dict(reduction_bandwidth=1e8, device=DEVICE, zero=zero)
    return script().problem(WIDTH, MICROBATCHES, **options)


@pytest.mark.parametrize("name", [ORDER, "synthesized"])
def test_a_plan_that_needs_windows_and_offload_at_once_runs_as_planned(tmp_path, name):
    free, (weights, x) = unlimited()
    plan = script().limited(free)
    limit = plan.problem.memory_limit
    assert all(limit < own for own in script().alone(free))
    assert plan.choice and plan.choice.reduces and plan.choice.held
    if name == "synthesized":
        slower = plan
        plan = solve(dataclasses.replace(plan.problem, schedules=(ORDER, name)))
        assert plan.schedule == name and plan.seconds < slower.seconds
        assert plan.choice and plan.choice.reduces and plan.choice.held == 1
    assert max(plan.peak_bytes) <= limit and plan.lower_bound <= plan.seconds
    text = str(plan)
    assert "offloaded: the activations of stages 0, 1" in text
    assert "gathered: parameters of " in text and "after the last backward of a stage" in text
    table = plan.order.table_for_ranks(2, MICROBATCHES)
    check(table)
    assert set("GSOL") <= table.kinds
    order = FromTable(plan.table) if plan.table else by_name(name)
    assert plan.timeline.makespan == pytest.approx(
        plan.problem.cutter(MICROBATCHES, order).timeline(plan.choice).makespan
    )
    plan.save(tmp_path / "plan.json")
    assert jaxpp.Plan.load(tmp_path / "plan.json") == plan

    step = script().step_of(plan, plan.order)
    assert jaxpp.certify(step, weights, x).exact
    measured, predicted = script().memory_peaks(step, (weights, x))
    np.testing.assert_allclose(measured, predicted, rtol=0.02)
    results = [
        jaxpp.gather(own([jnp.copy(w) for w in weights], x))
        for own in (step, script().step_of(plan, by_name(ORDER)))
    ]
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(got, want)
    loss, grads = jax.value_and_grad(script().products)(weights, x)
    got, found = results[0]
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for own, w, g in zip(got, weights, grads, strict=True):
        np.testing.assert_allclose(own, w - 0.1 * g, rtol=1e-5, atol=1e-6)


def test_windows_count_where_state_is_split():
    """The times and bytes are those that the tasks of a stage say."""
    for zero, windows in ((0, 1), (1, 2), (3, 8)):
        free, _ = unlimited(zero)
        cutter = free.problem.cutter(MICROBATCHES, by_name(ORDER))
        choices, own = cutter.windows(cutter.even), 4 * WIDTH**2
        assert len(choices) == windows
        assert min(map(cutter.value, choices)) == cutter.value(free.choice)
        assert free.lower_bound <= min(cutter.value(choice)[1] for choice in choices)
        for choice in choices:
            setting, has = cutter.setting, choice.held is not None
            costs = setting.costs(choice)
            task = cutter.plain.ranks[0][0]
            plain = setting.sums["forward"][1]
            gather = own / 2 / 1e8
            assert costs.of(task) == pytest.approx(plain + gather * (zero == 3 and not has))
            # Parameters, and sums; the state is no more than these.
            split = (zero == 3) + choice.reduces
            assert setting.copies(choice.reduces) == 2 - split / 2
            kinds = cutter.table(choice).kinds
            assert ("G" in kinds, "S" in kinds) == (has, choice.reduces)
            after = setting.reduction_seconds(own, choice.reduces) / gather
            assert after == {0: 2, 1: 2, 3: 1}[zero] - choice.reduces


def test_tables_that_are_made_have_windows_too():
    free, _ = unlimited()
    made = dataclasses.replace(free.problem, schedules=(ORDER, "synthesized"))
    plans = {own.schedule: own for own in made.candidates()}
    for own in plans.values():
        assert own.choice.held and own.seconds < math.inf
    # Windows are made for a table that is given, too.
    table = by_name(ORDER).table_for_ranks(2, MICROBATCHES)
    kept = dataclasses.replace(free.choice, held=None, reduces=False)
    timed = made.timed("given", MICROBATCHES, kept, table)
    assert timed.choice == free.choice and timed.seconds == free.seconds
    assert timed.order.table_for_ranks(2, MICROBATCHES) == free.timeline.table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(zero=2), "zero is 0, 1 or 3, got 2; ZeRO-2 is zero=1"),
        (dict(zero=3, steps=2, replicas=2), "steps=2 is for state that is not split, got zero=3"),
        (dict(zero=3), "zero=3 splits state over replicas; give replicas="),
    ],
)
def test_other_splits_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        jaxpp.plan(jnp.sum, jnp.ones(2), ranks=2, microbatches=2, **options)
