"""Schedules on a V: what is published of their bubbles and peaks, for any microbatch count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedules import (
    CATALOGUE,
    Costs,
    ForwardOnly,
    GPipe,
    Kind,
    OneFOneBV,
    Schedule,
    VHalf,
    VMin,
    ZeroBubbleH1,
    ZeroBubbleV,
    check,
    simulate,
)

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 24)
COSTS = st.integers(1, 9)
PEAKS = {
    ZeroBubbleV(): lambda p: p,
    VHalf(): lambda p: (p + 2) // 2,
    VMin(): lambda p: (p + 4) // 3,
    OneFOneBV(): lambda p: (2 * p + 3) // 3,
}
FASTER = [VHalf(reorder_steady=True), VMin(reorder_steady=True)]


def bubbles(schedule: Schedule, p: int, m: int) -> tuple[float, float]:
    """The makespan and the longest span, less the work, where F, I and W of a rank take 1 each."""
    timeline = simulate(schedule.table(2 * p, m), Costs().divided(2))
    return timeline.makespan - 3 * m, timeline.longest_span - 3 * m


@given(
    schedule=st.sampled_from([*PEAKS, *FASTER, OneFOneBV(reorder_steady=False)]),
    p=RANKS,
    m=MICROBATCHES,
)
def test_every_size_is_sound_and_within_its_peak(schedule, p, m):
    table = schedule.table(2 * p, m)
    check(table)
    assert table.directions == ((*range(p), *reversed(range(p))),)
    peak = next(peak for s, peak in PEAKS.items() if type(s) is type(schedule))
    assert max(table.peak_in_flight()) == 2 * min(peak(p), m)


@given(schedule=st.sampled_from(list(PEAKS)), p=RANKS, m=MICROBATCHES)
def test_microbatches_accumulate_in_order(schedule, p, m):
    for tasks in schedule.table(2 * p, m).ranks:
        for kind in Kind:
            for stage in range(2 * p):
                order = [t.microbatch for t in tasks if (t.kind, t.stage) == (kind, stage)]
                assert order == sorted(order)


@given(p=RANKS, m=MICROBATCHES)
def test_zb_v_waits_for_nothing(p, m):
    wall, span = bubbles(ZeroBubbleV(), p, m)
    if m >= 2 * p - 1:
        assert (wall, span) == ((p - 1) / 2, 0)
    assert wall <= simulate(ZeroBubbleH1().table(p, m)).makespan - 3 * m


@pytest.mark.parametrize(
    ("schedule", "p", "bubble", "peak"),
    [
        (VHalf(), 4, 2.5, 3),
        (VHalf(), 8, 8.5, 5),
        (VMin(), 4, 5.5, 2),
        (VMin(), 8, 13.5, 4),
        (VMin(reorder_steady=True), 8, 13, 4),
        (OneFOneBV(), 4, 7.5, 3),
        (OneFOneBV(), 8, 16.5, 6),
    ],
)
def test_published_figures(schedule, p, bubble, peak):
    for m in (p, 2 * p, 3 * p + 1):
        assert bubbles(schedule, p, m)[0] == bubble
        assert max(schedule.table(2 * p, m).peak_in_flight()) == 2 * peak


@pytest.mark.parametrize("p", [*range(3, 11), 16])
def test_the_bubbles_of_v_half_and_v_min(p):
    for m in (p, 2 * p + 1):
        half, least = bubbles(VHalf(), p, m)[0], bubbles(VMin(), p, m)[0]
        assert half == ((3 * p - 4) / 2 if p % 2 else max((3 * p - 7) / 2, 0))
        assert least == ((4 * p - 5) / 2 if p % 3 else (4 * p - 7) / 2)


@given(kind=st.sampled_from([VHalf, VMin, OneFOneBV]), p=RANKS, m=MICROBATCHES)
def test_reordering_the_steady_phase_loses_nothing(kind, p, m):
    before, after = (bubbles(kind(reorder_steady=on), p, m)[0] for on in (False, True))
    assert after <= before


@pytest.mark.parametrize("p", range(1, 25))
@pytest.mark.parametrize("schedule", [VHalf(), VMin(), OneFOneBV()], ids=repr)
def test_blocks_repeat_without_a_collision(schedule, p):
    length = 2 if schedule.backward is Kind.B else 1
    for down, up, back_down, back_up in schedule.offsets(p):
        backwards = [first + n for first in (back_down, back_up) for n in range(length)]
        assert len({slot % 6 for slot in (down, up, *backwards)}) == 2 + 2 * length


@pytest.mark.parametrize("name", CATALOGUE)
@settings(max_examples=10)
@given(half=st.integers(1, 4), m=MICROBATCHES)
def test_forward_only_runs_where_training_keeps_the_parameters(name, half, m):
    like = CATALOGUE[name]()
    p, v = 2 * half, like.stages_per_rank
    table = ForwardOnly(like=like).table(p * v, m)
    check(table, kinds={Kind.F})
    assert table.directions == like.placement(p)[:1]
    assert table.stage_inputs == like.stage_inputs(p)
    assert table.num_ranks == p


@given(p=RANKS, m=MICROBATCHES, f=COSTS)
def test_forward_only_on_a_v(p, m, f):
    table = ForwardOnly(like=ZeroBubbleV()).table(2 * p, m)
    makespan = simulate(table, Costs(f).divided(2)).makespan
    assert makespan - m * f == max(p - 1, 0) * f
    assert table.peak_in_flight() == (1,) * p


def test_forward_only_like_another_is_told_apart():
    assert ForwardOnly(like=VHalf()) != ForwardOnly(like=ZeroBubbleV()) != ForwardOnly(2)
    loop = ForwardOnly(like=GPipe(3)).table(6, 4)
    assert loop == ForwardOnly(3).table(6, 4)
