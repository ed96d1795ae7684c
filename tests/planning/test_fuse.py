"""A plan chooses which tasks are fused by what a task gains that is not dispatched alone."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxpp
from jaxpp._program import Run
from jaxpp.planning._plan import solve
from jaxpp.schedules import by_name
from tests.helpers import assert_same

DEVICE = jaxpp.Device(1e9, 1e9, host_bandwidth=1e9)
RANKS, MICROBATCHES, WIDTH = 2, 4, 16
KEYS = jax.random.split(jax.random.key(0), 5)
WEIGHTS = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in KEYS[1:]]
X = jax.random.normal(KEYS[0], (8 * MICROBATCHES, WIDTH))


def loss(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def planned(name, fusing, **options: Any):
    """A plan for a schedule, as if each task that is not dispatched alone gained so much."""
    sizes: Any = dict(ranks=RANKS, microbatches=MICROBATCHES, at_least=4, device=DEVICE)
    free = jaxpp.plan(loss, WEIGHTS, X, schedules=[name], **sizes, **options)
    found = dataclasses.replace(free.problem.profiles[MICROBATCHES], fusing=fusing)
    return solve(dataclasses.replace(free.problem, profiles={MICROBATCHES: found}))


def placed(plan, fuse):
    grad_fn = jax.value_and_grad(jaxpp.wrap_forward(jaxpp.split_stages(loss, at=plan.cuts)))
    grad_fn = jaxpp.schedule(jaxpp.microbatch(grad_fn, plan.microbatches), plan.order)
    return jaxpp.place(grad_fn, jaxpp.MpmdMesh((RANKS,)), fuse=fuse)


def joined(step):
    """The number of tasks that are in a computation with the one before."""
    runs = [i for program in step.programs for i in program.instructions if isinstance(i, Run)]
    return sum(len(run.tasks) - 1 for run in runs if run.tasks)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "gpipe", "looped_bfs"])
def test_chains_of_a_table_are_those_that_place_makes(name):
    plan = planned(name, 1e-5)
    step = placed(plan, "chains")
    assert_same(step(WEIGHTS, X), placed(plan, "none")(WEIGHTS, X))
    table = plan.order.table_for_ranks(RANKS, MICROBATCHES)
    assert 0 < joined(step) == len(table.fused("chains"))


def test_the_plan_takes_what_gains_most_and_says_so():
    plain = planned("1f1b", 0.0)
    assert plain.fuse == "none" and "fused" not in str(plain)
    small = planned("1f1b", 1e-9)
    assert small.fuse == "none" and "fused: no tasks" in str(small)
    plan = planned("1f1b", 4e-6)
    assert plan.fuse == "chains" and "fused: chains, for place(fuse=)" in str(plan)
    # The last rank is the busiest; each of its backwards comes right after its forward.
    assert plan.timeline.busy[1] == pytest.approx(plain.timeline.busy[1] - MICROBATCHES * 4e-6)
    assert plan.lower_bound < plan.seconds < plain.seconds
    assert plain.lower_bound > plan.lower_bound
    # Chains hold more: there are none within a limit.
    within = planned("1f1b", 4e-6, memory_limit=2 * max(plan.peak_bytes))
    assert within.fuse == "none" and within.seconds == plain.seconds
    both = planned("dualpipe_v", 4e-6, memory_limit=2 * max(plan.peak_bytes))
    assert both.fuse == "pairs" and both.seconds < planned("dualpipe_v", 0.0).seconds


def test_a_plan_that_fuses_is_saved(tmp_path):
    plan = planned("1f1b", 4e-6)
    plan.save(tmp_path / "plan.json")
    assert jaxpp.Plan.load(tmp_path / "plan.json") == plan
    assert by_name(plan.schedule) == plan.order


def test_profile_measures_what_fused_tasks_gain():
    sizes: Any = dict(at_least=4, repeats=1)
    measured = jaxpp.profile(loss, WEIGHTS, X[:8], fuse=True, **sizes)
    assert 0 <= measured.fusing < math.inf
    assert jaxpp.profile(loss, WEIGHTS, X[:8], fuse=True, device=DEVICE, **sizes).fusing == 0
