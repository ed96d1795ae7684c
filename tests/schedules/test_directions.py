"""DualPipe, DualPipeV, Chimera, Hanayo and Seq1F1B: their laws, closed forms and domains."""

import collections
import dataclasses
import itertools
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxpp.schedules import (
    Chimera,
    Costs,
    DualPipe,
    DualPipeV,
    Hanayo,
    Kind,
    OneFOneB,
    ScheduleError,
    Seq1F1B,
    Table,
    check,
    simulate,
)

ALL = [
    DualPipe(),
    DualPipeV(),
    Chimera(),
    *(Hanayo(w) for w in (1, 3)),
    *(Seq1F1B(k) for k in (1, 3)),
]
SIZES = list(itertools.product(range(1, 9), range(1, 25)))

ranks = st.integers(1, 8)
even_ranks = st.sampled_from([2, 4, 6, 8])
microbatches = st.integers(1, 24)
costs = st.integers(1, 9)


def possible(schedule, p: int, m: int) -> bool:
    """The domain of each schedule, as published."""
    if isinstance(schedule, DualPipe):
        return p % 2 == 0 and m % 2 == 0 and m >= 2 * p
    if isinstance(schedule, DualPipeV):
        return m >= 2 * p
    return not isinstance(schedule, Chimera) or p % 2 == 0


def bubble(schedule, p: int, m: int, forward=1, input_grad=1, weight_grad=1) -> float:
    """The makespan less the work of one rank, for costs of a rank's share of a microbatch."""
    v = schedule.stages_per_rank
    each = Costs(forward, input_grad, weight_grad).divided(v)
    timeline = simulate(schedule.table(p * v, m), each)
    return timeline.makespan - m * (forward + input_grad + weight_grad)


def peaks(schedule, p: int, m: int) -> tuple[int, ...]:
    return schedule.table(p * schedule.stages_per_rank, m).peak_in_flight()


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_every_table_of_the_domain_is_sound_and_no_other_is_made(schedule):
    for p, m in SIZES:
        num_stages = p * schedule.stages_per_rank
        if possible(schedule, p, m):
            check(schedule.table(num_stages, m))
            continue
        with pytest.raises(ValueError, match=rf"got {p} ranks and {m} microbatches; use") as at:
            schedule.table(num_stages, m)
        found = re.search(r"use (\d+)(?: or (\d+))? (microbatches|ranks)", str(at.value))
        assert found
        for number in (int(number) for number in found.groups()[:2] if number):
            if found[3] == "microbatches":
                assert possible(schedule, p, number)
            else:
                assert any(possible(schedule, number, n) for n in range(1, 4 * number + 1))


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_microbatches_accumulate_in_order_on_each_rank(schedule):
    for p, m in SIZES[::3]:
        if not possible(schedule, p, m):
            continue
        for tasks in schedule.table(p * schedule.stages_per_rank, m).ranks:
            of = collections.defaultdict(list)
            for task in tasks:
                of[task.kind, task.stage].append(task.microbatch)
            assert all(each == sorted(each) for each in of.values())


@pytest.mark.parametrize("schedule", [DualPipe(), Chimera()], ids=repr)
def test_two_directions_mirror_each_other_and_share_the_microbatches(schedule):
    for p, m in SIZES:
        if not possible(schedule, p, m):
            continue
        table = schedule.table(p, m)
        down, up = table.directions
        assert down == tuple(range(p)) and up == down[::-1]
        taken = [table.direction_of.count(d) for d in (0, 1)]
        assert sum(taken) == m and taken[0] - taken[1] == m % 2
        for task, rank in ((t, r) for r, tasks in enumerate(table.ranks) for t in tasks):
            assert rank == table.directions[table.direction_of[task.microbatch]][task.stage]


@given(st.sampled_from([DualPipe(), DualPipeV()]), ranks, microbatches)
def test_a_forward_overlaps_with_a_whole_backward_of_the_other_phase(schedule, p, m):
    assume(possible(schedule, p, m))
    table = schedule.table(p * schedule.stages_per_rank, m)
    found = 0
    for tasks in table.ranks:
        for task, after in itertools.pairwise(tasks):
            if task in table.overlaps:
                found += 1
                assert (task.kind, after.kind) == (Kind.F, Kind.B)
                assert task.stage == table.num_stages - 1 - after.stage
                assert after not in table.overlaps
    assert found == len(table.overlaps)
    depth, count, halves = (p // 2, m // 2, 2) if table.num_stages == p else (p, m, 1)
    pairs = sum(2 * (count - 2 * depth + r + 1) + depth - 1 - r for r in range(depth))
    assert found == halves * (pairs - 1)  # the first pair of a middle rank is apart


@given(half=st.integers(1, 4), extra=st.integers(0, 6))
def test_dualpipe_v_is_one_half_of_dualpipe_folded(half, extra):
    count = 2 * half + extra
    whole, folded = DualPipe().table(2 * half, 2 * count), DualPipeV().table(2 * half, count)
    for rank in range(half):
        assert [
            (t.kind, t.stage, t.microbatch % count) for t in whole.ranks[rank]
        ] == [(t.kind, t.stage, t.microbatch) for t in folded.ranks[rank]]  # fmt: skip


@pytest.mark.parametrize(("p", "m", "makespan"), [(4, 8, 27), (8, 16, 55), (16, 32, 111)])
def test_reference_makespans_of_dualpipe_v(p, m, makespan):
    table = DualPipeV().table(2 * p, m)
    timeline = simulate(table, Costs().divided(2))
    assert timeline.makespan == makespan
    assert timeline.bubble_fraction == pytest.approx(1 - 3 * m / makespan)
    assert set(table.peak_in_flight()) == {2 * p + 1}


@given(p=even_ranks, m=microbatches, forward=costs, data=st.data())
def test_dualpipe(p, m, forward, data):
    """(p/2-1)(F&B + B - 3W), with F&B = F + B and F = I >= W."""
    assume(possible(DualPipe(), p, m))
    w = data.draw(st.integers(1, forward), label="w")
    want = (p / 2 - 1) * (forward + 2 * (forward + w) - 3 * w)
    assert bubble(DualPipe(), p, m, forward, forward, w) == want
    assert peaks(DualPipe(), p, m) == (p + 1,) * p


@given(p=ranks, m=microbatches, forward=costs, data=st.data())
def test_dualpipe_v(p, m, forward, data):
    assume(possible(DualPipeV(), p, m))
    w = data.draw(st.integers(1, forward), label="w")
    want = (p - 1) * (forward + 2 * (forward + w) - 3 * w) / 2
    assert bubble(DualPipeV(), p, m, forward, forward, w) == want
    assert peaks(DualPipeV(), p, m) == (2 * p + 1,) * p


def test_overlap_shortens_dualpipe():
    table = DualPipe().table(4, 8)
    hidden = Costs(overlapped=lambda forward, backward: 2.0)
    assert simulate(table, hidden).makespan < simulate(table).makespan


@given(p=even_ranks, units=st.integers(1, 4), f=costs, i=costs, w=costs)
def test_chimera(p, units, f, i, w):
    b, m = i + w, units * p
    assert bubble(Chimera(), p, m, f, i, w) == (p - 2) * (min(f, b) + abs(b - f) * units)
    assert peaks(Chimera(), p, m) == tuple(p // 2 + 1 + min(r, p - 1 - r) for r in range(p))


@pytest.mark.parametrize("p", [4, 6, 8])
def test_chimera_against_1f1b_where_a_backward_is_twice_a_forward(p):
    for m in range(p, 5 * p, p):
        gain = bubble(OneFOneB(), p, m) - bubble(Chimera(), p, m)
        assert (gain >= 0) == (m <= p * (2 * p - 1) / (p - 2))


@given(waves=st.integers(1, 3), p=ranks, units=st.integers(1, 3), f=costs, i=costs, w=costs)
def test_hanayo(waves, p, units, f, i, w):
    schedule, b, m = Hanayo(waves), i + w, units * p
    want = (p - 1) * (min(f, b) + abs(b - f) * units) / waves
    assert bubble(schedule, p, m, f, i, w) == pytest.approx(want)
    assert peaks(schedule, p, m) == tuple(2 * waves * p - (p - 1 - r) for r in range(p))


def test_hanayo_goes_in_waves():
    assert Hanayo(2).placement(3) == ((0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),)
    assert Hanayo(2).stages_per_rank == 4


@given(k=st.integers(1, 4), p=ranks, m=microbatches, f=costs, i=costs, w=costs)
def test_seq1f1b(k, p, m, f, i, w):
    schedule = Seq1F1B(k)
    assert bubble(schedule, p, m, f, i, w) == pytest.approx((p - 1) * (f + i + w) / k)
    assert peaks(schedule, p, m) == tuple(min(p - 1 - r + k, m * k) for r in range(p))


@given(p=ranks, m=microbatches)
def test_seq1f1b_of_one_slice_is_1f1b(p, m):
    assert Seq1F1B(1).table(p, m).ranks == OneFOneB().table(p, m).ranks


def test_a_slice_reads_its_layers_before_it_and_itself_on_the_rank_before():
    assert Seq1F1B(3).stage_inputs(2) == ((), (0,), (0,), (2, 1), (2,), (4, 3))
    assert Seq1F1B(3).placement(2) == ((0, 1, 0, 1, 0, 1),)


def test_the_slices_go_backward_in_the_reverse_order():
    """The cotangents of a slice's keys and values come from the slices after it."""
    table = Seq1F1B(2).table(4, 1)
    swapped = tuple(tasks[:2] + tasks[:1:-1] for tasks in table.ranks)
    with pytest.raises(ScheduleError, match="deadlock"):
        check(dataclasses.replace(table, ranks=swapped))
    apart = Table(swapped, 4, 1, table.placement, ((), (0,), (), (2,)))
    check(apart)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DualPipe().table(3, 8), "num_ranks to be even, got 3 ranks .* use 2 or 4 ranks"),
        (lambda: DualPipe().table(4, 9), "even and at least twice .* use 8 or 10 microbatches"),
        (lambda: DualPipe().table(4, 2), "got 4 ranks and 2 microbatches; use 8 microbatches"),
        (lambda: DualPipe().table(64, 1), "got 64 ranks and 1 microbatches; use 128 microbatches"),
        (lambda: DualPipeV().table(8, 7), "at least twice the ranks, .* use 8 microbatches"),
        (
            lambda: DualPipeV().table(7, 14),
            "its 2 stages_per_rank, got 7 stages; use 6 stages on 3 ranks or 8 stages",
        ),
        (lambda: Chimera().table(5, 4), "num_ranks to be even, got 5 ranks .* use 4 or 6 ranks"),
        (lambda: Hanayo(0), "num_waves to be an integer of at least 1, got 0"),
        (
            lambda: Hanayo(2).table(6, 4),
            "its 4 stages_per_rank, got 6 stages; use 4 stages on 1 rank or 8 stages on 2 ranks",
        ),
        (lambda: Seq1F1B(True), "slices to be an integer of at least 1, got True"),
        (
            lambda: Seq1F1B(4).table(6, 4),
            "its 4 stages_per_rank, got 6 stages; use 4 stages on 1 rank or 8 stages on 2 ranks",
        ),
    ],
)
def test_errors_name_the_value_the_rule_and_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedules_are_told_apart_by_their_knobs():
    assert len(set(ALL)) == len(ALL)
    assert [repr(schedule) for schedule in (DualPipe(), Hanayo(2), Seq1F1B(3))] == [
        "DualPipe()",
        "Hanayo(num_waves=2)",
        "Seq1F1B(slices=3)",
    ]
