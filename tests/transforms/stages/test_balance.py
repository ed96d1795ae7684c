"""The balanced cut against every possible cut."""

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpp.transforms.stages._balance import balanced_cuts


def score(costs, crossing, cuts):
    """The slowest stage, the idlest, and the bytes of a cut."""
    bounds = [0, *cuts, len(costs)]
    stages = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    return max(stages), -min(stages), sum(crossing[c] for c in cuts)


def every_cut(costs, crossing, num_stages):
    allowed = [p for p in range(1, len(costs)) if crossing[p] < math.inf]
    return itertools.combinations(allowed, num_stages - 1)


def weigh(costs, crossing, borders, shared, cuts):
    """What is compared among the cuts whose slowest and idlest stages are good enough."""
    bounds = [0, *cuts, len(costs)]
    squares = sum(sum(costs[a:b]) ** 2 for a, b in itertools.pairwise(bounds))
    return (
        sum(c not in borders for c in cuts),
        sum(crossing[c] for c in cuts),
        sum(shared[c] for c in cuts),
        squares,
    )


problems = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 6), min_size=n, max_size=n),
        st.lists(st.one_of(st.integers(0, 5), st.just(math.inf)), min_size=n + 1, max_size=n + 1),
        st.integers(1, 5),
    )
)


@pytest.mark.more
@settings(max_examples=400)
@given(problems)
def test_no_cut_has_a_faster_slowest_stage_then_a_busier_idlest_one_then_fewer_bytes(problem):
    costs, crossing, num_stages = problem
    cuts = list(every_cut(costs, crossing, num_stages))
    if not cuts:
        with pytest.raises(ValueError, match=f"{num_stages} stages need {num_stages - 1} cuts"):
            balanced_cuts(costs, crossing, num_stages)
        return
    got = balanced_cuts(costs, crossing, num_stages)
    assert tuple(got) in cuts
    assert score(costs, crossing, got) == min(score(costs, crossing, c) for c in cuts)


@pytest.mark.more
@settings(max_examples=200)
@given(problems, st.data())
def test_within_the_tolerance_cuts_are_at_borders_then_send_little_then_share_little(problem, data):
    costs, crossing, num_stages = problem
    cuts = list(every_cut(costs, crossing, num_stages))
    if not cuts:
        return
    positions = range(len(costs) + 1)
    borders = data.draw(st.sets(st.sampled_from(positions)))
    shared = data.draw(st.lists(st.integers(0, 3), min_size=len(crossing), max_size=len(crossing)))
    tolerance = data.draw(st.sampled_from([0.0, 0.25, 0.5]))
    got = balanced_cuts(
        costs, crossing, num_stages, borders=borders, shared_bytes=shared, tolerance=tolerance
    )
    slack = 1e-6
    most = min(score(costs, crossing, c)[0] for c in cuts) * (1 + tolerance) + slack
    fast = [c for c in cuts if score(costs, crossing, c)[0] <= most]
    least = -min(score(costs, crossing, c)[1] for c in fast) * (1 - tolerance) - slack
    good = [c for c in fast if -score(costs, crossing, c)[1] >= least]
    assert tuple(got) in good
    assert weigh(costs, crossing, borders, shared, got) == min(
        weigh(costs, crossing, borders, shared, c) for c in good
    )


def test_cuts_of_several_ways_of_least_bytes_are_not_mixed():
    """A cut at 1 is on such a way, and one at 4, but none has both."""
    costs, crossing = [1, 1, 0, 1, 4, 0, 0, 0, 1], [math.inf, 1, 0, 0, 1, 0, 0, 0, 0, 0]
    cuts = balanced_cuts(costs, crossing, 4, tolerance=0.25)
    assert sum(crossing[cut] for cut in cuts) == 1


@given(st.lists(st.floats(0, 1e12), min_size=2, max_size=8), st.integers(1, 4))
@example([5e-324, 0.0, 0.0], 3)  # the smallest number, of which there is no half
def test_costs_may_be_any_numbers(costs, num_stages):
    crossing = [0.0] * (len(costs) + 1)
    cuts = list(every_cut(costs, crossing, num_stages))
    if cuts:
        best = min(score(costs, crossing, c)[0] for c in cuts)
        got = score(costs, crossing, balanced_cuts(costs, crossing, num_stages))[0]
        assert got <= best * (1 + 1e-6) + 1e-9 * sum(costs)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_the_unit_of_the_costs_does_not_matter(unit):
    costs, crossing = [3, 1, 4, 1, 5, 9, 2, 6], [5.0, 1, 4, 1, 3, 2, 2, 1, 0]
    assert balanced_cuts([unit * c for c in costs], crossing, 3) == balanced_cuts(
        costs, crossing, 3
    )
    assert balanced_cuts([unit * c for c in costs], crossing, 3) == [5, 6]


def test_equal_items_are_dealt_evenly():
    assert balanced_cuts([1.0] * 12, [0.0] * 13, 4) == [3, 6, 9]


def test_a_long_program_is_cut_quickly():
    cuts = balanced_cuts([1.0 + i % 7 for i in range(20_000)], [1.0] * 20_001, 16)
    assert len(cuts) == 15
    cuts = balanced_cuts([1.0] * 20_000, [1.0] * 20_001, 16, tolerance=0.05)
    assert len(cuts) == 15


@pytest.mark.parametrize(
    ("costs", "stages", "most"), [([1, 1, 1], 4, 3), ([1], 2, 1), ([1, 2, 3, 4], 9, 4)]
)
def test_too_many_stages_are_an_error_that_says_how_many_fit(costs, stages, most):
    with pytest.raises(ValueError, match=f"ask for at most {most} stages"):
        balanced_cuts(costs, [0] * (len(costs) + 1), stages)
