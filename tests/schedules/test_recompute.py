"""Recomputation in a table: where its tasks stand, what they take, and what they save."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedules import (
    Costs,
    DualPipe,
    ForwardOnly,
    FromTable,
    GPipe,
    Kind,
    Memory,
    OneFOneB,
    Recompute,
    Schedule,
    Table,
    Task,
    ZeroBubbleH1,
    by_name,
    check,
    simulate,
    stage_dependencies,
    synthesize,
)
from jaxpp.schedules._synthesis._fitting import fitted
from tests.schedules.catalogue import SCHEDULES, valid_size


@given(st.sampled_from([s for s in SCHEDULES if not isinstance(s, ForwardOnly)]), st.data())
def test_each_recomputation_comes_right_before_its_backward(schedule, data):
    p, m = valid_size(schedule, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)))
    plain = schedule.table(p * schedule.stages_per_rank, m)
    again = Recompute(schedule).table(plain.num_stages, m)
    check(again)
    assert again.kinds == plain.kinds | {Kind.R}
    assert len(again.tasks) == len(plain.tasks) + plain.num_stages * m
    for order, before in zip(again.ranks, plain.ranks, strict=True):
        assert tuple(task for task in order if task.kind is not Kind.R) == before
        for n, task in enumerate(order):
            if task.kind in (Kind.B, Kind.I):
                # Between the two may come others of a pair that overlaps.
                own = Task(Kind.R, task.stage, task.microbatch)
                alone = not {task, order[n - 1], order[n - 2]} & again.overlaps
                assert own in order[max(0, n - (1 if alone else 3)) : n]
    assert again.with_recomputation(lambda _: True) == again


def test_a_rank_that_waits_for_a_gradient_recomputes_meanwhile():
    plain, again = (s.table(4, 4) for s in (OneFOneB(), Recompute("1f1b")))
    first, last = (simulate(again, overlap="none").ends[rank] for rank in (0, 3))
    starts = dict(zip(again.ranks[0], simulate(again).starts[0], strict=True))
    assert starts[Task(Kind.R, 0, 0)] == 4 < starts[Task(Kind.B, 0, 0)] - 1
    assert max(first) > max(last)
    # The last rank never waits: of each microbatch, the step is longer by one recomputation.
    assert simulate(again).makespan == simulate(plain).makespan + 4
    only_first = Recompute("1f1b", stages=[0], microbatches=[0]).table(4, 4)
    assert simulate(only_first).makespan == simulate(plain).makespan


def test_a_rank_holds_one_microbatch_and_the_inputs_of_the_others():
    memory = Memory(forward=10, weight_grad=-10, recompute=8)
    for schedule, held in ((OneFOneB(), (4, 3, 2, 1)), (GPipe(), (8, 8, 8, 8))):
        assert memory.peaks(schedule.table(4, 8)) == tuple(10.0 * n for n in held)
        again = Recompute(schedule).table(4, 8)
        assert memory.peaks(again) == tuple(10.0 + 2 * (n - 1) for n in held)
        assert again.peak_in_flight() == (1, 1, 1, 1)
        some = Recompute(schedule, stages=[2]).table(4, 8)
        assert memory.peaks(some)[:2] == memory.peaks(schedule.table(4, 8))[:2]
        assert memory.peaks(some)[2] == memory.peaks(again)[2]
    # Activations are held from an I to its W, whatever made them.
    assert Recompute(ZeroBubbleH1()).table(4, 8).peak_in_flight() == (1, 2, 3, 4)


def test_a_backward_depends_on_its_recomputation_and_that_on_its_forward():
    needs = stage_dependencies(Recompute("1f1b").table(3, 2))
    assert set(needs[Kind.B, 1]) == {(Kind.F, 1), (Kind.R, 1), (Kind.B, 2)}
    assert set(needs[Kind.R, 1]) == {(Kind.F, 1)}


def test_a_schedule_with_recomputation_is_a_value():
    schedule = Recompute("zb_h1", stages=[2, 0, 2])
    assert schedule == Recompute(ZeroBubbleH1(), stages=range(0, 4, 2)) != Recompute("zb_h1")
    assert hash(schedule) == hash(Recompute(ZeroBubbleH1(), stages=(0, 2)))
    assert by_name("jaxpp.schedules:Recompute(schedule='zb_h1', stages=[0, 2])") == schedule
    own = FromTable(OneFOneB().table(4, 6))
    assert Recompute(own).table(4, 6) == Recompute().table(4, 6)


@pytest.mark.parametrize("schedule", [by_name("1f1b_v"), by_name("seq1f1b"), DualPipe()], ids=repr)
def test_an_evaluation_goes_where_the_training_goes(schedule: Schedule):
    plain, again = (ForwardOnly(like=like) for like in (schedule, Recompute(schedule)))
    stages = 4 * schedule.stages_per_rank
    assert again.table(stages, 8) == plain.table(stages, 8)
    assert Recompute(schedule).table_for_ranks(4, 8).num_stages == stages


def test_two_that_overlap_stay_together():
    tasks = ("F0.0", "F0.1", "B0.0", "B0.1")
    table = dataclasses.replace(
        Recompute().table(1, 2),
        ranks=((*(t for t in map(Task.from_text, tasks) if t),),),
        overlaps=frozenset({Task(Kind.F, 0, 1)}),
    )
    again = table.with_recomputation(lambda task: True)
    assert [str(task) for task in again.ranks[0]] == ["F0.0", "R0.0", *tasks[1:3], "R0.1", "B0.1"]
    check(again)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recompute("2f2b"), "there is no schedule named '2f2b'; use one of"),
        (
            lambda: Recompute(stages=[1, 4, 7]).table(4, 8),
            r"Recompute names stages \[4, 7\], but the table has 4 stages, .* name "
            "some of these, or leave stages out for all",
        ),
        (
            lambda: Recompute(microbatches=[-1]).table(4, 8),
            r"microbatches \[-1\], but the table has 8 microbatches, numbered from 0",
        ),
        (
            lambda: Recompute(ForwardOnly()).table(4, 8),
            r"ForwardOnly\(.*\) has no backward, .* use it as it is",
        ),
        (lambda: Recompute(DualPipe()).table(4, 3), "DualPipe.* needs .*, got 4 ranks and 3"),
    ],
)
def test_errors_name_the_value_and_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- under a memory limit -----------------------------------------------------------------------


def test_a_synthesis_may_recompute_where_that_gains():
    costs, memory = Costs(), Memory(forward=10, weight_grad=-10, recompute=9)
    placement, m = (0, 1, 2, 3), 8
    kept = synthesize(costs, placement, m, memory=memory, memory_limit=20, evaluations=200)
    again = synthesize(
        costs, placement, m, memory=memory, memory_limit=20, evaluations=200, recompute=True
    )
    assert Kind.R in again.table.kinds and Kind.R not in kept.table.kinds
    assert max(memory.peaks(again.table)) <= 20 and max(memory.peaks(kept.table)) <= 20
    assert again.lower_bound <= again.value < kept.value
    check(again.table, memory=memory, memory_limit=20)
    # With room for all activations, nothing is recomputed.
    free = synthesize(costs, placement, m, memory=memory, memory_limit=80, recompute=True)
    assert Kind.R not in free.table.kinds
    assert free.value == synthesize(costs, placement, m, memory=memory).value


@given(st.sampled_from(SCHEDULES), st.floats(1, 12), st.floats(0, 1))
def test_what_is_recomputed_to_fit_fits(schedule, limit, kept):
    p, m = valid_size(schedule, 3, 6)
    table = schedule.table(p * schedule.stages_per_rank, m)
    memory = Memory(forward=1, weight_grad=-1, recompute=1 - kept)
    fitting = fitted(table, memory, [limit] * p, Table.with_recomputation)
    if fitting is None:
        again = Recompute(schedule).table(table.num_stages, m) if Kind.B in table.kinds else table
        assert table.forward_only or max(memory.peaks(again)) > limit
    else:
        assert max(memory.peaks(fitting)) <= limit * (1 + 1e-9)
        check(fitting)
        assert fitting == table or max(memory.peaks(table)) > limit
