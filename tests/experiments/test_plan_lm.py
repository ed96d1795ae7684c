"""A training that is planned again keeps its state, and so its losses."""

import dataclasses
import types
from typing import Any

import jax
import pytest

import jaxpp
from experiments.training.plans import RANKS, Run, planned, step_of
from tests.helpers import assert_close, assert_same

RUN = Run("mixed", 16, 256, 8, 8, 4)


@pytest.fixture(scope="module")
def plan():
    process = types.SimpleNamespace(home=jax.devices()[0])
    return planned(process, RUN, schedules=["1f1b"])


@pytest.fixture(scope="module")
def mesh():
    return jaxpp.MpmdMesh((RANKS,))


def trained(step: Any, state: Any, numbers: range) -> tuple[Any, list[float]]:
    """Runs the steps of some numbers; gives the state after them, and their losses."""
    losses = []
    for number in numbers:
        *state, loss = step(*state, RUN.batch(number))
        losses.append(loss)
    return tuple(state), [float(loss) for loss in losses]


def test_a_new_plan_with_the_same_cut_changes_no_bit(plan, mesh):
    alone = trained(step_of(RUN, plan, mesh), RUN.start(), range(6))
    state, before = trained(step_of(RUN, plan, mesh), RUN.start(), range(3))
    again = plan.again(plan.costs)
    assert again.units == plan.units
    state, after = trained(step_of(RUN, again, mesh), state, range(3, 6))
    assert before + after == alone[1]
    assert_same(jaxpp.gather(state), jaxpp.gather(alone[0]))


def test_the_state_goes_on_to_another_cut_as_it_is(plan, mesh):
    costs = plan.costs
    backward = costs.backward
    assert isinstance(costs.forward, tuple) and isinstance(backward, tuple)
    first, second = costs.forward[0], backward[0]
    slow = dataclasses.replace(
        costs, forward=(9 * first, *costs.forward[1:]), backward=(9 * second, *backward[1:])
    )
    again = plan.again(slow)
    assert again.units[0] < plan.units[0]
    state, _ = trained(step_of(RUN, plan, mesh), RUN.start(), range(3))
    held = jaxpp.gather(state)
    moved, losses = trained(step_of(RUN, again, mesh), state, range(3, 6))
    from_file, expected = trained(step_of(RUN, again, mesh), held, range(3, 6))
    assert losses == expected
    assert_same(jaxpp.gather(moved), jaxpp.gather(from_file))
    _, uninterrupted = trained(step_of(RUN, plan, mesh), RUN.start(), range(6))
    assert_close(losses, uninterrupted[3:])
