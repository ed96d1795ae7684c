"""What holds for the table of every schedule, at every size."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedules import (
    CATALOGUE,
    Eager1F1B,
    ForwardOnly,
    GPipe,
    Interleaved1F1B,
    Kind,
    OneFOneB,
    Schedule,
    Table,
    Task,
    ZeroBubbleH1,
    by_name,
    check,
    execution_order,
    simulate,
    stage_dependencies,
)

SCHEDULES = [
    ForwardOnly(),
    GPipe(),
    OneFOneB(),
    Eager1F1B(),
    ZeroBubbleH1(),
    *(make(v) for v in (1, 2, 3, 4) for make in (ForwardOnly, GPipe, Interleaved1F1B)),
]

schedules = st.sampled_from(SCHEDULES)
ranks = st.integers(1, 8)
microbatches = st.integers(1, 40)


def in_order(table: Table) -> bool:
    """Whether each stage runs each kind of task in the order of its microbatches."""
    for tasks in table.ranks:
        seen: dict[tuple[Kind, int], int] = {}
        for task in tasks:
            if task.microbatch <= seen.get((task.kind, task.stage), -1):
                return False
            seen[task.kind, task.stage] = task.microbatch
    return True


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_every_small_table_is_sound(schedule):
    for p, m in itertools.product(range(1, 7), range(1, 21)):
        check(schedule.table(p * schedule.stages_per_rank, m))


@settings(deadline=None)
@given(schedules, ranks, microbatches)
def test_any_table_is_sound(schedule, p, m):
    table = schedule.table(p * schedule.stages_per_rank, m)
    assert table.num_ranks == p == schedule.num_ranks(table.num_stages)
    assert table.stage_ranks == tuple(s % p for s in range(table.num_stages))
    backward = {Kind.I, Kind.W} if table.splits_backward else {Kind.B}
    check(table, kinds={Kind.F} if table.forward_only else {Kind.F, *backward})


@settings(deadline=None)
@given(schedules, ranks, microbatches)
def test_microbatches_accumulate_in_order(schedule, p, m):
    assert in_order(schedule.table(p * schedule.stages_per_rank, m))


def test_the_test_of_order_can_fail():
    table = OneFOneB().table(2, 2)
    assert not in_order(dataclasses.replace(table, ranks=tuple(t[::-1] for t in table.ranks)))


@settings(deadline=None)
@given(schedules, ranks, microbatches)
def test_execution_order_respects_ranks_and_dependencies(schedule, p, m):
    table = schedule.table(p * schedule.stages_per_rank, m)
    order = execution_order(table)
    for rank, tasks in enumerate(table.ranks):
        assert tuple(task for r, task in order if r == rank) == tasks
    needs = stage_dependencies(table)
    done = set()
    for _, task in order:
        assert done.issuperset(needs(task))
        done.add(task)


@settings(deadline=None)
@given(schedules, ranks, microbatches, st.randoms(use_true_random=False))
def test_simulated_spans_keep_every_rule(schedule, p, m, random):
    """No two tasks of a rank overlap, and none starts before its inputs have arrived."""
    table = schedule.table(p * schedule.stages_per_rank, m)
    costs = {task: random.randint(1, 9) for task in sorted(table.tasks, key=str)}
    timeline = simulate(
        table,
        forward=costs.__getitem__,
        backward=costs.__getitem__,
        input_grad=costs.__getitem__,
        weight_grad=costs.__getitem__,
        communication=2,
    )
    spans = {span.task: span for span in timeline.spans}
    needs = stage_dependencies(table)
    for rank, tasks in enumerate(table.ranks):
        free = 0
        for task in tasks:
            span = spans[task]
            arrivals = [
                spans[n].end + (2 if spans[n].rank != span.rank else 0) for n in needs(task)
            ]
            assert span.rank == rank
            assert span.start == max([free, *arrivals])
            assert span.end - span.start == costs[task]
            free = span.end
    busy = sum(costs.values()) / (p * timeline.makespan)
    assert timeline.bubble_fraction == pytest.approx(1 - busy)


def test_a_backward_costs_two_forwards_by_default():
    table = OneFOneB().table(1, 2)
    assert simulate(table, forward=3).makespan == 2 * (3 + 6)
    forward = {task: 1.0 + task.microbatch for task in table.tasks if task.kind is Kind.F}
    assert simulate(table, forward=forward.__getitem__).makespan == 3 + 6


def test_stages_of_a_branching_graph_run_by_their_own_dependencies():
    """Two encoders, 0 and 1, which stage 2 reads: stage 1 does not wait for stage 0."""
    table = OneFOneB().table(3, 1)
    needs = stage_dependencies(table, [(0, 2), (1, 2), (0, 2)])
    assert [str(task) for task in needs(Task(Kind.F, 2, 0))] == ["F0.0", "F1.0"]
    assert [str(task) for task in needs(Task(Kind.B, 0, 0))] == ["F0.0", "B2.0"]
    assert list(needs(Task(Kind.F, 1, 0))) == []
    check(table, dependencies=needs)
    assert simulate(table, dependencies=needs).makespan == 1 + 1 + 2 + 2
    assert [str(task) for _, task in execution_order(table, needs)[:2]] == ["F0.0", "F1.0"]


def test_peak_counts_from_the_forward_to_the_weight_gradient():
    def peak(*words: str) -> tuple[int, ...]:
        return Table((tuple(Task(Kind(k), 0, int(i)) for k, i in words),), 1, 2).peak_in_flight()

    assert peak("F0", "I0", "F1", "W0", "I1", "W1") == (2,)
    assert peak("F0", "I0", "W0", "F1", "I1", "W1") == (1,)
    assert peak("F0", "B0", "F1", "B1") == (1,)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_makes_every_schedule(name):
    schedule = by_name(name)
    assert isinstance(schedule, Schedule)
    assert schedule == by_name(name)
    assert hash(schedule) == hash(by_name(name))
    check(schedule.table(4 * schedule.stages_per_rank, 8))


def test_the_catalogue_passes_knobs_on():
    assert by_name("gpipe", stages_per_rank=3) == GPipe(stages_per_rank=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_name("1f2b"), "no schedule named '1f2b'; use one of forward_only, gpipe, 1f1b"),
        (lambda: by_name("1f1b", chunks=2), "'1f1b' has no knob 'chunks'; it has none"),
        (lambda: by_name("gpipe", v=2), "'gpipe' has no knob 'v'; its knobs are stages_per_rank"),
        (lambda: GPipe(0), "GPipe needs stages_per_rank to be an integer of at least 1, got 0"),
        (lambda: GPipe(True), "at least 1, got True"),
        (
            lambda: Interleaved1F1B(2).table(7, 4),
            r"Interleaved1F1B\(stages_per_rank=2\) needs num_stages divisible by stages_per_rank, "
            "got 7 stages; use 6 or 8 stages",
        ),
        (lambda: Interleaved1F1B(4).num_ranks(3), "got 3 stages; use 4 stages"),
        (lambda: OneFOneB().table(0, 4), r"OneFOneB\(\) needs num_stages .* got 0; use 1"),
        (lambda: OneFOneB().table(4, 0), "needs num_microbatches to be an integer of at least 1"),
        (lambda: OneFOneB().table(4, 2.0), "got 2.0; use 1 to run the batch whole"),  # pyright: ignore
        (lambda: Table((), 1, 1).stage_ranks, "no rank has a task of stage 0"),
    ],
)
def test_errors_name_the_value_the_rule_and_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedules_are_told_apart_by_type_and_knobs():
    assert len(set(SCHEDULES)) == len(SCHEDULES) - 2  # two are spelled with their default, too
    assert OneFOneB() != Eager1F1B()
    assert repr(OneFOneB()) == "OneFOneB()"
