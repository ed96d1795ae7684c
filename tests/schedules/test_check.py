"""The checker rejects each way in which a table can be wrong, for its own reason."""

import dataclasses

import pytest

from jaxpp.schedules import (
    GPipe,
    Kind,
    OneFOneB,
    ScheduleError,
    Table,
    Task,
    ZeroBubbleH1,
    check,
    execution_order,
    simulate,
)


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
            r"F\[stage 0, microbatch 0\] of rank 0 is repeated: each task runs once",
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
        # Deadlock: each rank's order is sound by itself, but together they wait in a circle.
        pytest.param(
            table("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", microbatches=2),
            r"the table deadlocks: rank 0 is at B\[stage 0, microbatch 0\], which needs "
            r"B\[stage 1, microbatch 0\] of rank 1; rank 1 is at F\[stage 1, microbatch 1\], which "
            r"needs F\[stage 0, microbatch 1\] of rank 0. The cycle is rank 0 -> rank 1 -> rank 0",
            id="crossing_orders",
        ),
        # Deadlock of one rank with itself: an earlier stage's backward before a later one's.
        pytest.param(
            table("F0.0 F1.0 B0.0 B1.0"),
            r"the table deadlocks: rank 0 is at B\[stage 0, .* The cycle is rank 0 -> rank 0: ",
            id="one_rank_against_itself",
        ),
    ],
)
def test_a_broken_table_is_rejected_for_its_reason(broken, message):
    with pytest.raises(ScheduleError, match=message):
        check(broken)


def test_a_rank_that_waits_for_a_cycle_is_not_in_it():
    orders = ["F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1", "F2.0 F2.1 B2.0 B2.1"]
    message = "rank 0 is at B.* of rank 1; .* The cycle is rank 1 -> rank 2 -> rank 1:"
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


def test_every_missing_or_repeated_task_of_a_schedule_is_found():
    sound = GPipe(stages_per_rank=2).table(4, 3)
    for rank, tasks in enumerate(sound.ranks):
        for at, one in enumerate(tasks):
            for tampered, rule in [
                ((*tasks[:at], *tasks[at + 1 :]), "is missing"),
                ((*tasks, one), "is repeated"),
            ]:
                ranks = (*sound.ranks[:rank], tampered, *sound.ranks[rank + 1 :])
                with pytest.raises(ScheduleError, match=rule) as error:
                    check(dataclasses.replace(sound, ranks=ranks))
                assert one.describe() in str(error.value)


def test_what_executes_a_table_finds_its_deadlock_too():
    crossed = table("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", microbatches=2)
    for run in (execution_order, simulate):
        with pytest.raises(ScheduleError, match="the table deadlocks"):
            run(crossed)
