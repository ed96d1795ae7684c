"""The bubble and the peak of each schedule are what is published, for any microbatch count."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedules import (
    GIS,
    Costs,
    Eager1F1B,
    ForwardOnly,
    GPipe,
    Interleaved1F1B,
    InterleavedZeroBubble,
    Kind,
    OneFOneB,
    Schedule,
    ZeroBubbleH1,
    ZeroBubbleH2,
    ZeroBubbleV,
    by_name,
    check,
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


def span_bubble(schedule: Schedule, p: int, m: int, forward=1, input_grad=1, weight_grad=1):
    """The longest time from a rank's first start to its last end, less its work."""
    v = schedule.stages_per_rank
    costs = Costs(forward, input_grad, weight_grad).divided(v)
    timeline = simulate(schedule.table(p * v, m), costs)
    return timeline.longest_span - m * (forward + input_grad + weight_grad)


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
        (InterleavedZeroBubble(2), 4, 8, 25.5, 0.059, 4),
        (InterleavedZeroBubble(2), 8, 16, 51.5, 0.068, 8),
        (InterleavedZeroBubble(2), 16, 32, 103.5, 0.072, 16),
        (InterleavedZeroBubble(4), 4, 8, 24.75, 0.030, 4),
        (InterleavedZeroBubble(4), 8, 16, 49.75, 0.035, 8),
        (InterleavedZeroBubble(4), 16, 32, 99.75, 0.038, 16),
        (ZeroBubbleV(), 4, 8, 25.5, 0.059, 4),
        (ZeroBubbleV(), 8, 16, 51.5, 0.068, 8),
        (ZeroBubbleV(), 16, 32, 103.5, 0.072, 16),
    ],
)
def test_reference_makespans(schedule, p, m, makespan, fraction, peak):
    v = schedule.stages_per_rank
    table = schedule.table(p * v, m)
    timeline = simulate(table, Costs().divided(v))
    assert timeline.makespan == makespan
    assert timeline.bubble_fraction == pytest.approx(fraction, abs=5e-4)
    assert max(table.peak_in_flight()) / v == peak


@given(v=CHUNKS, p=RANKS, m=MICROBATCHES, f=COSTS)
def test_forward_only(v, p, m, f):
    schedule = ForwardOnly(v)
    assert bubble(schedule, p, m, f) == pytest.approx(f * fill_and_drain(p, m, v))
    assert schedule.table(p * v, m).peak_in_flight() == (1,) * p


@given(v=CHUNKS, p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS)
def test_gpipe(v, p, m, f, i, w):
    schedule = GPipe(v)
    assert bubble(schedule, p, m, f, i, w) == pytest.approx((f + i + w) * fill_and_drain(p, m, v))
    assert schedule.table(p * v, m).peak_in_flight() == (m * v,) * p


@given(p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS)
def test_one_f_one_b(p, m, f, i, w):
    assert bubble(OneFOneB(), p, m, f, i, w) == (p - 1) * (f + i + w)
    assert OneFOneB().table(p, m).peak_in_flight() == tuple(min(p - r, m) for r in range(p))


@given(p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS, data=st.data())
def test_eager_1f1b_hides_what_it_sends(p, m, f, i, w, data):
    send = data.draw(st.integers(0, (f + i + w) // 2), label="send")
    assert bubble(Eager1F1B(), p, m, f, i, w, send) == (p - 1) * (f + i + w + 2 * send)
    peaks = tuple(min(2 * (p - 1 - r) + 1, m) for r in range(p))
    assert Eager1F1B().table(p, m).peak_in_flight() == peaks


def test_one_f_one_b_does_not_hide_what_it_sends():
    assert bubble(OneFOneB(), 4, 16, send=1) > bubble(Eager1F1B(), 4, 16, send=1)


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


@given(p=RANKS, m=MICROBATCHES)
def test_interleaved_1f1b_of_one_stage_is_1f1b(p, m):
    assert Interleaved1F1B(1).table(p, m) == OneFOneB().table(p, m)


@given(p=RANKS, m=MICROBATCHES, data=st.data())
def test_zero_bubble_h1(p, m, data):
    f, i = data.draw(COSTS, label="f"), data.draw(COSTS, label="i")
    w = data.draw(st.integers(1, min(f, i)), label="w")
    table = ZeroBubbleH1().table(p, m)
    if m >= p:
        assert bubble(ZeroBubbleH1(), p, m, f, i, w) == (p - 1) * (f + i - w)
    assert max(table.peak_in_flight()) == min(p, m)
    assert bubble(ZeroBubbleH1(), p, m, f, i, w) <= bubble(OneFOneB(), p, m, f, i, w)


@given(p=RANKS, m=MICROBATCHES, data=st.data())
def test_zero_bubble_h2(p, m, data):
    f, i = data.draw(COSTS, label="f"), data.draw(COSTS, label="i")
    w = data.draw(st.integers(1, min(f, i)), label="w")
    table = ZeroBubbleH2().table(p, m)
    if m >= 2 * p - 1:
        waits = f + i - 2 * w
        assert span_bubble(ZeroBubbleH2(), p, m, f, i, w) == (p - 1) * waits
        assert bubble(ZeroBubbleH2(), p, m, f, i, w) == (p - 1) * max(f, waits)
    assert max(table.peak_in_flight()) == min(2 * p - 1, m)


@pytest.mark.parametrize(("p", "m", "makespan"), [(4, 12, 39), (8, 24, 79)])
def test_with_a_barrier_h2_gains_nothing_over_h1(p, m, makespan):
    for schedule in ZeroBubbleH1(), ZeroBubbleH2():
        assert simulate(schedule.table(p, m)).makespan == makespan


@given(p=RANKS, m=MICROBATCHES)
def test_looped_breadth_first(p, m):
    schedule = by_name("looped_bfs")
    assert schedule == GPipe(2)
    assert bubble(schedule, p, m) == pytest.approx(3 * fill_and_drain(p, m, 2))


@given(v=CHUNKS, extra=st.integers(0, 3), p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS)
def test_more_warmup_holds_more_and_takes_as_long(v, extra, p, m, f, i, w):
    plain, ahead = Interleaved1F1B(v), Interleaved1F1B(v, extra_warmup=extra)
    check(ahead.table(p * v, m))
    assert bubble(ahead, p, m, f, i, w) == pytest.approx(bubble(plain, p, m, f, i, w))
    peaks = zip(*(s.table(p * v, m).peak_in_flight() for s in (plain, ahead)), strict=True)
    assert all(more == min(less + extra, m * v) for less, more in peaks)


def test_kimi_k2_parts_each_backward_from_its_forward():
    """So that of a forward and the backward after it, one may compute as the other communicates."""

    def waits(schedule: Schedule) -> int:
        pairs = [pair for r in schedule.table(8, 8).ranks for pair in zip(r, r[1:], strict=False)]
        return sum(a == dataclasses.replace(b, kind=Kind.F) for a, b in pairs if b.kind is Kind.B)

    kimi = by_name("kimi_k2")
    assert kimi == Interleaved1F1B(2, extra_warmup=1)
    assert waits(Interleaved1F1B(2)) > 0 == waits(kimi)


@given(v=st.integers(2, 4), p=RANKS, m=MICROBATCHES, data=st.data())
def test_groups_of_any_size_from_p(v, p, m, data):
    size = data.draw(st.integers(p, p + m), label="size")
    schedule = Interleaved1F1B(v, group_size=size)
    table = schedule.table(p * v, m)
    check(table)
    if m >= p:
        assert bubble(schedule, p, m) == pytest.approx(3 * (p - 1) / v, abs=1e-9)
    group = -(-m // max(m // size, 1))
    assert max(table.peak_in_flight()) == min(2 * (p - 1) + (v - 1) * group + 1, m * v)


@given(v=CHUNKS, p=RANKS, m=MICROBATCHES, f=COSTS, i=COSTS, w=COSTS)
def test_gis(v, p, m, f, i, w):
    schedule = GIS(v)
    if m >= p:
        assert bubble(schedule, p, m, f, i, w) == pytest.approx((p - 1) * (f + i) / v, abs=1e-9)
    group = -(-m // max(m // p, 1))
    peaks = tuple(min(p - 1 - r + (v - 1) * group + 1, m * v) for r in range(p))
    assert schedule.table(p * v, m).peak_in_flight() == peaks
    if m % p == 0:
        assert peaks[0] == p * v


@given(v=CHUNKS, p=RANKS, m=MICROBATCHES, data=st.data())
def test_interleaved_zero_bubble(v, p, m, data):
    f, i = data.draw(COSTS, label="f"), data.draw(COSTS, label="i")
    w = data.draw(st.integers(1, min(f, i)), label="w")
    schedule = InterleavedZeroBubble(v)
    if m >= p:
        form = (p - 1) * (f + i - w) / v
        assert bubble(schedule, p, m, f, i, w) == pytest.approx(form, abs=1e-9)
    group = -(-m // max(m // p, 1))
    peaks = schedule.table(p * v, m).peak_in_flight()
    assert max(peaks) == min((v - 1) * group + p, m * v)
    if m % p == 0:
        assert set(peaks) == {p * v}


@given(p=RANKS, m=MICROBATCHES)
def test_interleaved_zero_bubble_of_one_stage_is_zb_h1(p, m):
    assert InterleavedZeroBubble(1).table(p, m) == ZeroBubbleH1().table(p, m)


@given(v=CHUNKS, p=RANKS, m=MICROBATCHES, lag=st.integers(0, 8))
def test_a_smaller_lag_of_weight_gradients_holds_less(v, p, m, lag):
    schedule = InterleavedZeroBubble(v, weight_lag=lag)
    table, whole = (s.table(p * v, m) for s in (schedule, InterleavedZeroBubble(v)))
    check(table)
    pairs = zip(table.peak_in_flight(), whole.peak_in_flight(), strict=True)
    assert all(own <= most for own, most in pairs)
    shortest, longest = bubble(InterleavedZeroBubble(v), p, m), bubble(GIS(v), p, m)
    assert shortest <= bubble(schedule, p, m) + 1e-9 <= longest + 2e-9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Interleaved1F1B(2, extra_warmup=-1), "extra_warmup to be at least 0, got -1"),
        (lambda: InterleavedZeroBubble(2, weight_lag=-1), "weight_lag to be at least 0, got -1"),
        (
            lambda: Interleaved1F1B(2, group_size=3).table(8, 8),
            "a group_size of no less than the number of ranks, got 4 ranks .* use 3 ranks",
        ),
        (
            lambda: ForwardOnly(3, like=GPipe(2)),
            r"stages_per_rank=3, but GPipe\(stages_per_rank=2\), .* has 2; leave",
        ),
    ],
)
def test_a_knob_out_of_range_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
