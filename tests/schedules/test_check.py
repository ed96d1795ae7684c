"""The checker rejects each way in which a table can be wrong, for its own reason."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxpp.schedules import (
    GPipe,
    Kind,
    Memory,
    OneFOneB,
    ScheduleError,
    Table,
    Task,
    ZeroBubbleH1,
    check,
    execution_order,
    simulate,
    stage_dependencies,
)
from tests.schedules.catalogue import tables


def task(text: str) -> Task:
    stage, microbatch = text[1:].split(".")
    return Task(Kind(text[0]), int(stage), int(microbatch))


def table(*ranks: str, stages: int = 2, microbatches: int = 1) -> Table:
    return Table(
        tuple(tuple(task(word) for word in rank.split()) for rank in ranks), stages, microbatches
    )


SOUND = table("F0.0 B0.0", "F1.0 B1.0")


def test_the_sound_table_passes():
    check(SOUND)
    check(SOUND, kinds={Kind.F, Kind.B})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        # Incomplete.
        pytest.param(
            table("F0.0", "F1.0 B1.0"),
            r"B\[stage 0, microbatch 0\] is missing: with F and B, .* to the order of rank 0",
            id="no_backward",
        ),
        pytest.param(
            table("F0.0 B0.0", "B1.0"), r"F\[stage 1, microbatch 0\] is missing", id="no_forward"
        ),
        pytest.param(
            table("F0.0 I0.0 W0.0", "F1.0 I1.0"),
            r"W\[stage 1, microbatch 0\] is missing: with F, I ",
            id="no_weight_gradient",
        ),
        pytest.param(
            table("F0.0 I0.0 W0.0", "F1.0 W1.0"),
            r"I\[stage 1, microbatch 0\] is missing",
            id="no_input_gradient",
        ),
        pytest.param(
            table("F0.0 B0.0", ""),
            r"F\[stage 1, microbatch 0\] is missing: .* the order of a rank",
            id="no_task_of_a_stage",
        ),
        pytest.param(
            table("F0.0", "F1.0", microbatches=2),
            r"F\[stage 0, microbatch 1\] is missing: with F, ",
            id="no_task_of_a_microbatch",
        ),
        # Repeated.
        pytest.param(
            table("F0.0 F0.0 B0.0", "F1.0 B1.0"),
            r"F\[stage 0, microbatch 0\] of rank 0 is repeated: .* number 0 of rank 0 and number 1",
            id="repeated",
        ),
        # A stage on two ranks.
        pytest.param(
            table("F0.0", "F1.0 B1.0 B0.0"),
            r"B\[stage 0, microbatch 0\] of rank 1 is on another rank than "
            r"F\[stage 0, microbatch 0\], which is on rank 0: all tasks of a stage run on one rank",
            id="backward_on_another_rank",
        ),
        pytest.param(
            table("F0.0 B0.0", "F1.0 B1.0 F0.0"),
            r"F\[stage 0, microbatch 0\] of rank 1 is on anoth",
            id="forward_on_both_ranks",
        ),
        # Out of range.
        pytest.param(
            table("F0.0 B0.0", "F1.0 B1.0 F2.0"),
            r"F\[stage 2, microbatch 0\] of rank 1 is out of range: the table has 2 stages",
            id="stage_too_high",
        ),
        pytest.param(
            table("F0.0 B0.0 F-1.0", "F1.0 B1.0"),
            r"F\[stage -1, microbatch 0\] .* out of range",
            id="stage_too_low",
        ),
        pytest.param(
            table("F0.0 B0.0 B0.1", "F1.0 B1.0"),
            r"B\[stage 0, microbatch 1\] of rank 0 is out of range: the table has 1 microbatches",
            id="microbatch_too_high",
        ),
        # Both forms of one backward.
        pytest.param(
            table("F0.0 B0.0 W0.0", "F1.0 B1.0"),
            r"B\[stage 0, microbatch 0\] and W\[stage 0, .*\] of rank 0 are the same work",
            id="whole_and_weight_half",
        ),
        pytest.param(
            table("F0.0 I0.0 B0.0", "F1.0 B1.0"),
            r"B\[.*\] and I\[.*\] of rank 0 are the same work",
            id="whole_and_input_half",
        ),
        # The wrong order on a rank.
        pytest.param(
            table("B0.0 F0.0", "F1.0 B1.0"),
            r"B\[stage 0, microbatch 0\] of rank 0 comes before F\[stage 0, .*\]: .* swap",
            id="backward_before_forward",
        ),
        pytest.param(
            table("I0.0 F0.0 W0.0", "F1.0 B1.0"),
            r"I\[.*\] of rank 0 comes before F\[",
            id="input_half_before_forward",
        ),
        pytest.param(
            table("F0.0 W0.0 I0.0", "F1.0 B1.0"),
            r"W\[.*\] of rank 0 comes before I\[",
            id="weight_half_before_input_half",
        ),
        pytest.param(
            table("R0.0 F0.0 B0.0", "F1.0 B1.0"),
            r"R\[stage 0, .*\] of rank 0 comes before F\[stage 0, .*\]: .* swap",
            id="recomputation_before_forward",
        ),
        pytest.param(
            table("F0.0 B0.0 R0.0", "F1.0 B1.0"),
            r"B\[stage 0, .*\] of rank 0 comes before R\[stage 0, .*\]: .* swap",
            id="recomputation_after_backward",
        ),
        pytest.param(
            table("F0.0 I0.0 R0.0 W0.0", "F1.0 B1.0"),
            r"I\[stage 0, .*\] of rank 0 comes before R\[",
            id="recomputation_between_the_halves",
        ),
        pytest.param(
            table("F0.0 R0.0 R0.0 B0.0", "F1.0 B1.0"),
            r"R\[stage 0, microbatch 0\] of rank 0 is repeated",
            id="recomputed_twice",
        ),
        pytest.param(
            table("F0.0 B0.0", "F1.0 R0.0 B1.0"),
            r"R\[stage 0, .*\] of rank 1 is on another rank than F\[stage 0, ",
            id="recomputed_on_another_rank",
        ),
        pytest.param(
            table("R0.0 B0.0", "F1.0 B1.0"),
            r"F\[stage 0, microbatch 0\] is missing",
            id="recomputed_without_forward",
        ),
        pytest.param(
            table("F0.0 R0.0", "F1.0"),
            r"B\[stage 0, microbatch 0\] is missing: with F and B,",
            id="recomputed_for_no_backward",
        ),
        # Deadlock: each rank's order is sound by itself, but together they wait in a circle.
        pytest.param(
            table("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", microbatches=2),
            r"the table deadlocks: rank 0 -> rank 1 -> rank 0 is a cycle(.|\n)* in brackets:\n"
            r"  rank 0 \| .*\[B0.0\].* needs B1.0 of rank 1\n"
            r"  rank 1 \| .*\[F1.1\].* needs F0.1 of rank 0$",
            id="crossing_orders",
        ),
        # Deadlock of one rank with itself: an earlier stage's backward before a later one's.
        pytest.param(
            table("F0.0 F1.0 B0.0 B1.0"),
            r"deadlocks: rank 0 -> rank 0 is a cycle(.|\n)*\[B0.0\].* needs B1.0 of rank 0",
            id="one_rank_against_itself",
        ),
    ],
)
def test_a_broken_table_is_rejected_for_its_reason(broken, message):
    with pytest.raises(ScheduleError, match=message):
        check(broken)


def test_a_rank_that_waits_for_a_cycle_is_not_in_it():
    orders = ["F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1", "F2.0 F2.1 B2.0 B2.1"]
    message = r"rank 1 -> rank 2 -> rank 1 is a cycle(.|\n)*rank 0 \| .*\[B0.0\].* of rank 1"
    with pytest.raises(ScheduleError, match=message):
        check(table(*orders, stages=3, microbatches=2))


@pytest.mark.parametrize(
    ("schedule", "kinds", "message"),
    [
        (OneFOneB(), {Kind.F}, r"B\[.*\] of rank 0 is of a kind that is not wanted: .* are F;"),
        (
            OneFOneB(),
            {Kind.F, Kind.I, Kind.W},
            r"B\[.*\] of rank 0 is of a kind .* are F, I and W;",
        ),
        (ZeroBubbleH1(), {Kind.F, Kind.B}, r"I\[.*\] of rank 0 is of a kind .* are F and B;"),
    ],
)
def test_kinds_that_are_not_wanted_are_rejected(schedule, kinds, message):
    with pytest.raises(ScheduleError, match=message):
        check(schedule.table(2, 2), kinds=kinds)


def test_kinds_that_are_wanted_must_be_there():
    forwards = table("F0.0", "F1.0")
    check(forwards)
    check(forwards, kinds={Kind.F})
    with pytest.raises(ScheduleError, match=r"B\[stage 0, microbatch 0\] is missing"):
        check(forwards, kinds={Kind.F, Kind.B})
    with pytest.raises(ScheduleError, match=r"I\[stage 0, microbatch 0\] is missing"):
        check(forwards, kinds={Kind.F, Kind.I, Kind.W})


def test_a_dependency_that_no_rank_runs_is_named():
    needs = {(Kind.B, 0): [(Kind.W, 1)]}
    message = r"B\[stage 0, .*\] of rank 0 depends on W\[stage 1, .*\], which no rank runs"
    with pytest.raises(ScheduleError, match=message):
        check(SOUND, dependencies=needs)


def test_what_executes_a_table_finds_its_deadlock_too():
    crossed = table("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", microbatches=2)
    for run in (execution_order, simulate):
        with pytest.raises(ScheduleError, match="the table deadlocks"):
            run(crossed)


def broken_rank(sound: Table, rank: int, order: Sequence[Task]) -> Table:
    return dataclasses.replace(
        sound, ranks=(*sound.ranks[:rank], tuple(order), *sound.ranks[rank + 1 :])
    )


def a_task(data: st.DataObject, sound: Table) -> tuple[int, int]:
    rank = data.draw(st.sampled_from([r for r, order in enumerate(sound.ranks) if order]), "rank")
    return rank, data.draw(st.integers(0, len(sound.ranks[rank]) - 1), "place")


@given(tables(), st.data())
def test_a_task_that_is_left_out_is_missed(sound, data):
    rank, place = a_task(data, sound)
    order = sound.ranks[rank]
    assume(order[place].kind is not Kind.R)  # without it the forward keeps what it makes
    with pytest.raises(ScheduleError, match="is missing") as error:
        broken = broken_rank(sound, rank, order[:place] + order[place + 1 :])
        check(broken, kinds=sound.kinds)
    assert order[place].describe() in str(error.value)
    assert f"rank {rank}" in str(error.value)
    assert f"[{order[place]}?]" in str(error.value)


@given(tables(), st.data())
def test_a_task_that_is_there_twice_is_found(sound, data):
    rank, place = a_task(data, sound)
    order = sound.ranks[rank]
    again = data.draw(st.integers(0, len(order)), "again")
    with pytest.raises(ScheduleError, match="is repeated") as error:
        check(broken_rank(sound, rank, (*order[:again], order[place], *order[again:])))
    assert order[place].describe() in str(error.value)


@given(tables(), st.data())
def test_a_task_on_another_rank_is_found(sound, data):
    rank, place = a_task(data, sound)
    order = sound.ranks[rank]
    others = [r for r in range(sound.num_ranks) if r != rank]
    assume(others)
    other = data.draw(st.sampled_from(others), "other")
    moved = broken_rank(sound, rank, order[:place] + order[place + 1 :])
    to = sound.ranks[other]
    moved = broken_rank(moved, other, (*to[: place + 1], order[place], *to[place + 1 :]))
    with pytest.raises(ScheduleError, match="is on the wrong rank") as error:
        check(moved)
    assert f"{order[place].describe()} of rank {other}" in str(error.value)


@given(tables(), st.data())
def test_a_task_before_its_inputs_is_found(sound, data):
    """Two tasks of a rank, of which one needs the other, are swapped."""
    rank, place = a_task(data, sound)
    order = list(sound.ranks[rank])
    needs = stage_dependencies(sound)[order[place].kind, order[place].stage]
    earlier = [
        at
        for at, t in enumerate(order[:place])
        if (t.kind, t.stage) in needs and t.microbatch == order[place].microbatch
    ]
    assume(earlier)
    order[place], order[earlier[0]] = order[earlier[0]], order[place]
    broken = dataclasses.replace(broken_rank(sound, rank, order), overlaps=frozenset())
    with pytest.raises(ScheduleError, match="comes before|the table deadlocks"):
        check(broken)


# ---- traps met in existing implementations ----------------------------------------------------


def test_a_1f1b_whose_last_rank_starts_at_its_second_forward():
    sound = OneFOneB().table(4, 8)
    with pytest.raises(ScheduleError, match=r"F\[stage 3, microbatch 0\] is missing"):
        check(broken_rank(sound, 3, sound.ranks[3][1:]))


def test_an_interleaved_gpipe_whose_backward_cursor_never_moves():
    sound = GPipe(stages_per_rank=2).table(8, 4)
    stuck = [
        tuple(dataclasses.replace(t, microbatch=0) if t.kind is Kind.B else t for t in order)
        for order in sound.ranks
    ]
    with pytest.raises(ScheduleError, match=r"B\[stage 4, microbatch 0\] of rank 0 is repeated"):
        check(dataclasses.replace(sound, ranks=tuple(stuck)))


def test_orders_that_cross_are_each_sound_alone():
    """Rank 0 sends microbatch 1 after it has the gradient of 0, and rank 1 wants 1 before that."""
    first, second = "F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"
    check(table("F0.0 F0.1 B0.0 B0.1", second, microbatches=2))
    check(table(first, "F1.0 B1.0 F1.1 B1.1", microbatches=2))
    with pytest.raises(ScheduleError, match="the table deadlocks"):
        check(table(first, second, microbatches=2))


# ---- backwards, whole and split -----------------------------------------------------------------


def test_a_backward_may_be_split_for_some_microbatches_only():
    mixed = table("F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 B1.0 F1.1 I1.1 W1.1", microbatches=2)
    check(mixed)
    check(mixed, kinds=Kind)
    with pytest.raises(ScheduleError, match="deadlocks"):  # I0.0 waits for B1.0, a whole backward
        check(table("F0.0 I0.0 W0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 I1.1 W1.1", microbatches=2))


def test_what_is_missing_is_missing_in_the_form_that_its_stage_uses():
    sound = ZeroBubbleH1().table(2, 3)
    gone = [t for t in sound.ranks[0] if t.kind is Kind.F or t.microbatch != 1]
    with pytest.raises(
        ScheduleError, match=r"I\[stage 0, microbatch 1\] is missing: with F, I and W"
    ):
        check(broken_rank(sound, 0, gone))


# ---- two directions -----------------------------------------------------------------------------


def two_ways(*ranks: str) -> Table:
    both = table(*ranks, microbatches=2)
    return dataclasses.replace(both, placement=((0, 1), (1, 0)), direction_of=(0, 1))


def test_a_stage_is_on_a_rank_for_each_direction():
    check(two_ways("F0.0 F1.1 B1.1 B0.0", "F0.1 F1.0 B1.0 B0.1"))
    message = (
        r"B\[stage 0, microbatch 0\] of rank 1 is on the wrong rank: microbatch 0 goes in "
        r"direction 0, which has stage 0 on rank 0; keep"
    )
    with pytest.raises(ScheduleError, match=message):
        check(two_ways("F0.0 F1.1 B1.1", "F0.1 F1.0 B1.0 B0.1 B0.0"))
    with pytest.raises(
        ScheduleError, match="repeated: .* number 0 of rank 0 and number 0 of rank 1"
    ):
        check(two_ways("F0.0 F1.1 B1.1 B0.0", "F0.0 F0.1 F1.0 B1.0 B0.1"))


@pytest.mark.parametrize("placement", [((0,),), ((0, 2),), ((0, 1), (1, -1))])
def test_a_placement_is_a_rank_for_each_stage(placement):
    with pytest.raises(ScheduleError, match="placement .* is not one of 2 ranks for each of its 2"):
        check(dataclasses.replace(SOUND, placement=placement))


# ---- tasks that overlap -------------------------------------------------------------------------


def overlapping(*tasks: str) -> Table:
    sound = table("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.0 F1.1 B1.0 F1.2 B1.1 B1.2", microbatches=3)
    return dataclasses.replace(sound, overlaps=frozenset(map(task, tasks)))


@pytest.mark.parametrize(
    ("overlaps", "message"),
    [
        (["B0.7"], r"B0.7 is to overlap .*, but the table has no such task"),
        (
            ["B0.2"],
            r"B\[stage 0, microbatch 2\] of rank 0 cannot overlap .*: no task comes after it",
        ),
        (["F1.1", "B1.0"], r"F\[stage 1, microbatch 1\] of rank 1 cannot .* with the next, too"),
        # Rank 1 makes the gradient that B0.0 waits for of what F0.2 sends... but not so F0.0.
    ],
)
def test_an_overlap_is_of_a_pair(overlaps, message):
    check(overlapping("F1.1"))
    with pytest.raises(ScheduleError, match=message):
        check(overlapping(*overlaps))


def folded(*ranks: str) -> Table:
    """A V of two ranks: stages 0 and 3 on the first, 1 and 2 on the second."""
    return table(*ranks, stages=4)


def test_of_two_that_overlap_neither_waits_for_the_other():
    sound = folded("F0.0 F3.0 B3.0 B0.0", "F1.0 F2.0 B2.0 B1.0")
    check(sound)
    # At once, by what the second reads:
    message = r"F\[stage 1, .*\] of rank 1 cannot .*: F\[stage 2, .*\], which comes after it, needs"
    with pytest.raises(ScheduleError, match=message):
        check(dataclasses.replace(sound, overlaps=frozenset({task("F1.0")})))
    # Or by way of another rank, which only executing it shows.
    message = r"the table deadlocks: rank 0 -> rank 1 -> rank 0 .* or leave out an overlap"
    with pytest.raises(ScheduleError, match=message):
        check(dataclasses.replace(sound, overlaps=frozenset({task("F0.0")})))


def test_two_of_one_stage_and_microbatch_do_not_overlap():
    split = table("F0.0 I0.0 W0.0", "F1.0 B1.0")
    with pytest.raises(ScheduleError, match=r"W\[stage 0, microbatch 0\], which .* needs it first"):
        check(dataclasses.replace(split, overlaps=frozenset({task("I0.0")})))


# ---- memory -------------------------------------------------------------------------------------


def test_a_rank_holds_no_more_than_its_limit():
    sound = OneFOneB().table(4, 8)
    check(sound, memory_limit=4)
    check(sound, memory_limit=(4, 3, 2, 1))
    message = (
        r"F\[stage 1, microbatch 2\] of rank 1 exceeds its memory: the rank then holds 3, 3 at its "
        r"peak, and its limit is 2; run backwards earlier, or raise memory_limit"
    )
    with pytest.raises(ScheduleError, match=message):
        check(sound, memory_limit=(4, 2, 2, 1))
    with pytest.raises(ValueError, match="memory_limit has 3 numbers, but the table has 4 ranks"):
        check(sound, memory_limit=(4, 3, 2))


def test_the_limit_is_in_the_units_of_the_memory_model():
    sound = OneFOneB().table(4, 8)
    thirds = Memory(forward=1 / 3, weight_grad=-1 / 3)
    check(sound, memory=thirds, memory_limit=4 / 3)
    with pytest.raises(ScheduleError, match="exceeds its memory"):
        check(sound, memory=thirds, memory_limit=1.3)
    check(sound, memory=Memory(forward=lambda task: float(task.microbatch)), memory_limit=24)


# ---- what errors look like ----------------------------------------------------------------------


def test_an_error_shows_the_orders_around_the_fault():
    sound = OneFOneB().table(4, 8)
    order = sound.ranks[1]
    with pytest.raises(ScheduleError) as error:
        check(broken_rank(sound, 1, (*order[:8], task("F1.3"), *order[8:])))
    assert str(error.value).split("\n")[1:] == [
        "  rank 0 |      F0.0  F0.1  F0.2  F0.3  B0.0  F0.4  B0.1  ...",
        "  rank 1 | ...  B1.1  F1.4  B1.2 [F1.3] F1.5  B1.3  F1.6  ...",
        "  rank 2 | ...  B2.0  F2.2  B2.1  F2.3  B2.2  F2.4  B2.3  ...",
        "  rank 3 | ...  B3.1  F3.2  B3.2  F3.3  B3.3  F3.4  B3.4  ...",
    ]


def test_an_error_of_a_large_table_is_of_bounded_size():
    sound = OneFOneB().table(64, 96)
    late = [t for order in sound.ranks[63:] for t in order if t != Task(Kind.B, 63, 0)]
    with pytest.raises(ScheduleError) as stuck:  # every rank waits for the last
        check(broken_rank(sound, 63, (*late[:70], Task(Kind.B, 63, 0), *late[70:])))
    with pytest.raises(ScheduleError) as missing:
        check(broken_rank(sound, 63, late))
    for error, lines in ((stuck, 65), (missing, 4)):
        text = str(error.value).split("\n")
        assert len(text) == lines
        assert max(map(len, text[1:])) <= 100
