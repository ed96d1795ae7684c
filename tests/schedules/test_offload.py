"""Offload in a table: where its tasks stand, when they run, and what they save."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedules import (
    Costs,
    DualPipe,
    ForwardOnly,
    GPipe,
    Kind,
    Memory,
    Offload,
    OneFOneB,
    Recompute,
    ScheduleError,
    Task,
    ZeroBubbleH1,
    by_name,
    check,
    from_tasks,
    simulate,
    synthesize,
    to_text,
)
from tests.schedules.catalogue import SCHEDULES, valid_size

CLASS: Any = OneFOneB


def without_copies(order):
    return tuple(task for task in order if task.kind.lane == "compute")


@given(
    st.sampled_from([s for s in SCHEDULES if not isinstance(s, ForwardOnly)]),
    st.sampled_from([0.5, 1.0]),
    st.integers(0, 3),
    st.data(),
)
def test_copies_are_added_and_nothing_else_changes(schedule, share, ahead, data):
    p, m = valid_size(schedule, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)))
    plain = schedule.table(p * schedule.stages_per_rank, m)
    moved = Offload(schedule, share=share, ahead=ahead).table(plain.num_stages, m)
    check(moved)
    assert tuple(map(without_copies, moved.ranks)) == plain.ranks
    away = {task for task in moved.tasks if task.kind is Kind.O}
    assert {dataclasses.replace(task, kind=Kind.O) for task in moved.tasks - plain.tasks} == away
    assert len(away) <= share * plain.num_stages * m
    for order in moved.ranks:
        for n, task in enumerate(order):
            if task.kind is Kind.L:
                own = (task.stage, task.microbatch)
                reader = next(i for i in range(n, len(order)) if order[i].kind in "BIW"
                              and (order[i].stage, order[i].microbatch) == own)  # fmt: skip
                between = without_copies(order[n + 1 : reader])
                alone = plain.overlaps.isdisjoint((*between, *order[reader - 1 : reader + 1]))
                assert len(between) == ahead if alone else ahead <= len(between) <= ahead + 1
    held = zip(moved.peak_in_flight(), plain.peak_in_flight(), strict=True)
    assert all(own <= before for own, before in held)
    # Copies that take no time change nothing else of the clock.
    counted = Memory(per="stage")
    free = simulate(moved, Costs(offload=0, load=0), memory=counted)
    base = simulate(plain)
    spans = [s for s in free.spans if s.task.kind.lane == "compute"]
    assert spans == list(base.spans) and free.busy == base.busy
    assert free.peak_memory == moved.peak_in_flight()


def test_each_lane_runs_in_order_and_beside_the_other():
    """Times by hand: F = W = I = 1, B = 2, a copy 1.5."""
    table = from_tasks([["F0.0", "O0.0", "F0.1", "O0.1", "F0.2", "L0.0", "B0.2", "B0.0", "L0.1",
                         "B0.1"]])  # fmt: skip
    made = simulate(table, Costs(offload=1.5, load=1.5))
    clock = {str(s.task): (s.start, s.end) for s in made.spans}
    assert clock == {
        "F0.0": (0, 1),
        "F0.1": (1, 2),
        "F0.2": (2, 3),
        "O0.0": (1, 2.5),  # once the forward before it has ended
        "O0.1": (2.5, 4),  # once the lane is free
        "B0.2": (3, 5),
        "L0.0": (4, 5.5),
        "B0.0": (5.5, 7.5),  # once its load has ended
        "L0.1": (7.5, 9),
        "B0.1": (9, 11),
    }
    assert made.busy == (9,) and made.makespan == 11
    path = [str(span.task) for span in made.critical_path]
    assert path == ["F0.0", "O0.0", "O0.1", "L0.0", "B0.0", "L0.1", "B0.1"]
    # What is offloaded counts until its copy has ended.
    assert made.memory_over_time(0) == [
        (0, 1), (1, 2), (2, 3), (2.5, 2), (4, 2), (5, 1), (7.5, 1), (11, 0)
    ]  # fmt: skip
    assert made.peak_memory == (3,) and table.peak_in_flight() == (2,)
    text = to_text(made, colour=False, width=60).splitlines()
    assert text[0].startswith("rank 0 | F0") and "O" not in text[0] and "O0" in text[1]


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "gpipe", "gis"])
def test_at_the_time_of_a_forward_copies_cost_nothing(name):
    """A round trip takes two forwards, and a rank computes three for each microbatch."""
    schedule = by_name(name)
    plain, moved = (s.table_for_ranks(4, 16) for s in (schedule, Offload(schedule)))
    base, own = simulate(plain), simulate(moved, Costs(offload=1, load=1))
    assert own.makespan <= base.makespan + (name == "gpipe")
    assert max(own.peak_memory) == 2 / schedule.stages_per_rank <= max(base.peak_memory) / 2
    slow = [simulate(moved, Costs(offload=t, load=t)).makespan for t in (0, 1, 2, 4)]
    assert slow == sorted(slow) and slow[-1] > base.makespan


@pytest.mark.parametrize(("copy", "how"), [(0.5, "offloaded"), (8.0, "recomputed")])
def test_synthesis_offloads_or_recomputes_within_a_limit_whichever_takes_less(copy, how):
    costs = Costs(offload=copy, load=copy)
    found = {
        ways: synthesize(
            costs, (0, 1, 2, 3), 8, memory_limit=2, evaluations=20,
            recompute="r" in ways, offload="o" in ways,
        )
        for ways in ("", "r", "o", "ro")
    }  # fmt: skip
    both = found.pop("ro")
    assert both.value == min(own.value for own in found.values()) < found[""].value
    assert both.source.endswith(how) and both.lower_bound <= both.value
    check(both.table)
    assert max(simulate(both.table, costs).peak_memory) <= 2
    with_room = synthesize(costs, (0, 1, 2, 3), 8, evaluations=20, offload=True)
    assert not with_room.table.lanes


def test_late_weight_gradients_are_offloaded_where_the_time_is_longest():
    orders = Offload(ZeroBubbleH1()).table(4, 8).ranks
    first, last = ([str(t) for t in order if t.microbatch == 4] for order in (orders[0], orders[3]))
    assert first == ["F0.4", "O0.4", "L0.4", "I0.4", "W0.4"]
    assert last == ["F3.4", "I3.4", "O3.4", "L3.4", "W3.4"]


def test_a_copy_moves_what_the_memory_model_says():
    kept = Memory(forward=(10, 20), weight_grad=(-10, -20))
    o, load = (Task(kind, 1, 0) for kind in map(Kind, "OL"))
    assert (kept.of(o), kept.of(load)) == (-20, 20)
    some = dataclasses.replace(kept, offload=-7, load=7)
    assert (some.of(o), some.of(load)) == (-7, 7) == (some.divided(2).of(o) * 2, 7)
    table = Offload(GPipe()).table(2, 4)
    assert kept.peaks(table) == (20, 40) and some.peaks(table) == (10 + 3 * 3 + 7, 20 * 4 - 2 * 7)


def test_what_is_computed_again_is_not_offloaded():
    both = Offload(Recompute("gpipe", stages=[0])).table(2, 4)
    check(both)
    assert {t.stage for t in both.tasks if t.kind is Kind.O} == {1}
    own = Offload("gpipe", stages=[1]).table(2, 4)
    assert {t.stage for t in own.tasks if t.kind is Kind.L} == {1}
    assert Offload("jaxpp.schedules:ZeroBubbleH1", share=0.5) == by_name(
        "jaxpp.schedules:Offload(schedule='zb_h1', share=0.5)"
    )
    assert Offload(DualPipe()).table(8, 16).overlaps == DualPipe().table(8, 16).overlaps


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0 O0 F1 B1 B0", r"O\[stage 0, .* of rank 0: nothing loads .* add L\[stage 0"),
        ("F0 F1 B1 L0 B0", r"L\[.* depends on O\[stage 0, microbatch 0\], which no rank runs"),
        ("F0 O0 F1 B0 L0 B1", "nothing reads what L.* brings back; drop both, or move them up"),
        ("F0 O0 F1 I0 L0 W0 I1 W1", r"O.*: I\[.*\] reads what is away until L.*; move that one up"),
        ("O0 F0 L0 F1 B0 B1", "O.* comes before F.*: it reads what that one makes; swap them"),
        ("F0 L0 O0 F1 B0 B1", "L.* comes before O.*: it reads what that one makes; swap them"),
        ("F0 R0 O0 F1 B1 L0 B0", "O.*: an R computes what it is to offload again; drop one"),
    ],
)
def test_a_table_that_reads_what_is_away_is_refused(order, message):
    table = from_tasks([[f"{word[0]}0.{word[1]}" for word in order.split()]])
    with pytest.raises(ScheduleError, match=message):
        check(table)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Offload(share=0), "a share above 0 and at most 1, .* got share=0 and ahead=1"),
        (lambda: Offload(share=1.5), "share=1.5 .* use the schedule itself to offload nothing"),
        (lambda: Offload(ahead=-1), "ahead of at least 0, got share=1.0 and ahead=-1"),
        (lambda: Offload(stages=[9]).table(4, 8), r"Offload names stages \[9\], but the table has"),
        (lambda: Offload(ForwardOnly()).table(4, 8), r"ForwardOnly\(.*\) has no backward, for whi"),
        (lambda: Offload(CLASS), r"takes a schedule or its name, got .*; write OneFOneB\(\)"),
    ],
)
def test_errors_name_the_value_and_the_way_out(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()
