"""Delayed steps in one program: sound, in no more memory, and faster where a step drains."""

import random

import pytest

from jaxpp.schedules import (
    CATALOGUE,
    Costs,
    GPipe,
    Kind,
    Memory,
    OneFOneB,
    by_name,
    check,
    joined,
    simulate,
)

NAMES = [name for name in CATALOGUE if name not in ("forward_only", "seq1f1b")]


@pytest.mark.parametrize(("ranks", "microbatches", "gain"), [(4, 8, 1.31), (8, 16, 1.36)])
def test_eight_steps_of_1f1b_take_the_time_of_one_table(ranks, microbatches, gain):
    one = OneFOneB().table(ranks, microbatches)
    many = simulate(joined(one, 8)).makespan
    assert many == simulate(OneFOneB().table(ranks, 8 * microbatches)).makespan
    assert round(8 * simulate(one).makespan / many, 2) == gain


@pytest.mark.parametrize("name", NAMES)
def test_any_schedule_is_joined_in_its_time_and_memory(name):
    one = by_name(name).table_for_ranks(4, 8)
    many = joined(one, 3)
    check(many)
    assert many.num_microbatches == 24 and many.placement == one.placement
    costs, memory = Costs(per="stage"), Memory(per="stage")
    assert simulate(many, costs).makespan <= 3 * simulate(one, costs, overlap="none").makespan
    assert memory.peaks(many) == memory.peaks(one)


def test_where_memory_is_full_when_a_step_ends_nothing_is_gained():
    one = GPipe().table(4, 8)
    assert simulate(joined(one, 3)).makespan == 3 * simulate(one).makespan


@pytest.mark.parametrize("name", ["zb_v", "gpipe", "hanayo", "v_half"])
def test_with_costs_a_joined_table_is_never_slower_than_steps_one_by_one(name):
    """By the times of kinds alone it may be, where stages are very uneven."""
    one, choose, gains = by_name(name).table_for_ranks(4, 8), random.Random(3), []
    for _ in range(8):
        forward, inputs, weights = (
            tuple(choose.choice((1.0, 2.0, 9.0)) for _ in range(one.num_stages)) for _ in range(3)
        )
        costs = Costs(forward, inputs, weights, latency=choose.choice((0.0, 2.0)))
        many = joined(one, 3, costs=costs)
        check(many)
        assert Memory(per="stage").peaks(many) <= Memory(per="stage").peaks(one)
        apart, kinds, best = (simulate(t, costs).makespan for t in (one, joined(one, 3), many))
        assert best <= min(kinds, 3 * apart * (1 + 1e-12))
        gains.append(kinds / best)
    assert max(gains) > 1


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_stage_waits_for_the_update_that_its_delay_names(delay):
    """With two microbatches the fourth rank's weights of a step ago are late."""
    many = joined(OneFOneB().table(4, 2), 6, delay)
    for order in many.ranks:
        for n, task in enumerate(order):
            step = task.microbatch // 2
            if task.kind is Kind.F and step > delay:
                before = {own.microbatch for own in order[:n] if own.kind is Kind.B}
                assert {2 * (step - delay - 1), 2 * (step - delay - 1) + 1} <= before
    # What has to wait longer takes longer.
    times = [simulate(joined(OneFOneB().table(4, 2), 6, own)).makespan for own in (delay, 3)]
    assert times[0] >= times[1]


def test_recomputation_and_offload_are_joined_too():
    for name in ("Recompute", "Offload"):
        one = by_name(f"jaxpp.schedules:{name}(schedule='1f1b')").table(4, 8)
        many = joined(one, 3)
        check(many)
        assert simulate(many, Costs(offload=0.1, load=0.1)).makespan <= (
            3 * simulate(one, Costs(offload=0.1, load=0.1)).makespan
        )


@pytest.mark.parametrize(("steps", "delay"), [(0, 1), (2, -1)])
def test_bad_numbers_are_named(steps, delay):
    with pytest.raises(ValueError, match=f"got {steps} and {delay}"):
        joined(OneFOneB().table(2, 2), steps, delay)
