"""The bubble and the peak of each schedule are what is published, for any microbatch count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedules import (
    Costs,
    Eager1F1B,
    ForwardOnly,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Schedule,
    ZeroBubbleH1,
    simulate,
)

RANKS = st.integers(1, 8)
MICROBATCHES = st.integers(1, 24)
CHUNKS = st.integers(1, 4)
COSTS = st.integers(1, 9)


def bubble(schedule: Schedule, p: int, m: int, forward=1, input_grad=1, weight_grad=1, send=0):
    """The makespan less the work of one rank, for costs of a rank's share of a microbatch."""
    v = schedule.stages_per_rank
    table = schedule.table(p * v, m)
    costs = Costs(forward, input_grad, weight_grad, latency=send)
    timeline = simulate(table, costs.divided(v))
    work = forward if table.forward_only else forward + input_grad + weight_grad
    return timeline.makespan - m * work


def fill_and_drain(p: int, m: int, v: int) -> float:
    """The bubble of a loop of p ranks and v chunks, in units of a microbatch's work on a rank.

    It is (p-1)/v where the microbatches are enough to keep every rank busy, once round the loop.
    """
    return max(p - m, 0) + (min(p, m) - 1) / v


@pytest.mark.parametrize(
    ("schedule", "p", "m", "makespan", "fraction", "peak"),
    [
        (GPipe(), 4, 8, 33, 0.273, 8),
        (GPipe(), 8, 16, 69, 0.304, 16),
        (GPipe(), 16, 32, 141, 0.319, 32),
        (OneFOneB(), 4, 8, 33, 0.273, 4),
        (OneFOneB(), 8, 16, 69, 0.304, 8),
        (OneFOneB(), 16, 32, 141, 0.319, 16),
        (ZeroBubbleH1(), 4, 8, 27, 0.111, 4),
        (ZeroBubbleH1(), 8, 16, 55, 0.127, 8),
        (ZeroBubbleH1(), 16, 32, 111, 0.135, 16),
        (Interleaved1F1B(2), 4, 8, 28.5, 0.158, 5.5),
        (Interleaved1F1B(2), 8, 16, 58.5, 0.179, 11.5),
        (Interleaved1F1B(2), 16, 32, 118.5, 0.190, 23.5),
        (Interleaved1F1B(4), 4, 8, 26.25, 0.086, 4.75),
        (Interleaved1F1B(4), 8, 16, 53.25, 0.099, 9.75),
        (Interleaved1F1B(4), 16, 32, 107.25, 0.105, 19.75),
    ],
)
def test_reference_makespans(schedule, p, m, makespan, fraction, peak):
    v = schedule.stages_per_rank
    table = schedule.table(p * v, m)
    timeline = simulate(table, Costs().divided(v))
    assert timeline.makespan == makespan
    assert timeline.bubble_fraction == pytest.approx(fraction, abs=5e-4)
    assert max(table.peak_in_flight()) / v == peak


@settings(deadline=None)
@given(v=CHUNKS, p=RANKS, m=MICROBATCHES, f=COSTS)
def test_forward_only(v, p, m, f):
    schedule = ForwardOnly(v)
    assert bubble(schedule, p, m, f) == pytest.approx(f * fill_and_drain(p, m, v))
    assert schedule.table(p * v, m).peak_in_flight() == (1,) * p


@settings(deadline=None)
@given(v=CHUNKS, p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS)
def test_gpipe(v, p, m, f, i, w):
    schedule = GPipe(v)
    assert bubble(schedule, p, m, f, i, w) == pytest.approx((f + i + w) * fill_and_drain(p, m, v))
    assert schedule.table(p * v, m).peak_in_flight() == (m * v,) * p


@settings(deadline=None)
@given(p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS)
def test_one_f_one_b(p, m, f, i, w):
    assert bubble(OneFOneB(), p, m, f, i, w) == (p - 1) * (f + i + w)
    assert OneFOneB().table(p, m).peak_in_flight() == tuple(min(p - r, m) for r in range(p))


@settings(deadline=None)
@given(p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS, data=st.data())
def test_eager_1f1b_hides_what_it_sends(p, m, f, i, w, data):
    send = data.draw(st.integers(0, (f + i + w) // 2), label="send")
    assert bubble(Eager1F1B(), p, m, f, i, w, send) == (p - 1) * (f + i + w + 2 * send)
    peaks = tuple(min(2 * (p - 1 - r) + 1, m) for r in range(p))
    assert Eager1F1B().table(p, m).peak_in_flight() == peaks


def test_one_f_one_b_does_not_hide_what_it_sends():
    assert bubble(OneFOneB(), 4, 16, send=1) > bubble(Eager1F1B(), 4, 16, send=1)


@settings(deadline=None)
@given(v=st.integers(2, 4), p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS)
def test_interleaved_1f1b(v, p, m, f, i, w):
    schedule = Interleaved1F1B(v)
    assert bubble(schedule, p, m, f, i, w) == pytest.approx((f + i + w) * fill_and_drain(p, m, v))
    rounds = max(m // p, 1)
    group = -(-m // rounds)
    peaks = tuple(min(2 * (p - 1 - r) + (v - 1) * group + 1, m * v) for r in range(p))
    assert schedule.table(p * v, m).peak_in_flight() == peaks
    if m % p == 0:
        assert group == p


@settings(deadline=None)
@given(p=RANKS, m=MICROBATCHES)
def test_interleaved_1f1b_of_one_stage_is_1f1b(p, m):
    assert Interleaved1F1B(1).table(p, m) == OneFOneB().table(p, m)


@settings(deadline=None)
@given(p=RANKS, m=MICROBATCHES, data=st.data())
def test_zero_bubble_h1(p, m, data):
    f, i = data.draw(COSTS, label="f"), data.draw(COSTS, label="i")
    w = data.draw(st.integers(1, min(f, i)), label="w")
    table = ZeroBubbleH1().table(p, m)
    if m >= p:
        assert bubble(ZeroBubbleH1(), p, m, f, i, w) == (p - 1) * (f + i - w)
    assert max(table.peak_in_flight()) == min(p, m)
    assert bubble(ZeroBubbleH1(), p, m, f, i, w) <= bubble(OneFOneB(), p, m, f, i, w)
