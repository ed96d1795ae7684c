"""Gathers and reductions in a table: where they stand, when they run, what a rank holds."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedules import (
    Costs,
    ForwardOnly,
    Gather,
    GPipe,
    Kind,
    Memory,
    Offload,
    Recompute,
    Reduce,
    ScheduleError,
    check,
    from_csv,
    from_tasks,
    joined,
    simulate,
    to_csv,
    to_text,
    to_trace,
)
from tests.schedules.catalogue import SCHEDULES, valid_size

GATHERED = Memory(forward=0, weight_grad=0, gather=1, per="stage")


def computing(order):
    return tuple(task for task in order if task.kind.lane == "compute")


@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from([None, 0, 1, 2]),
    st.integers(0, 2),
    st.data(),
)
def test_each_task_has_what_its_stage_gathered_last(schedule, held, ahead, data):
    p, m = valid_size(schedule, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)))
    plain = schedule.table(p * schedule.stages_per_rank, m)
    made = Gather(schedule, held=held, ahead=ahead).table(plain.num_stages, m)
    check(made)
    assert tuple(map(computing, made.ranks)) == plain.ranks
    for rank, order in enumerate(made.ranks):
        known, stages = set(), {task.stage for task in order}
        for task in order:
            assert task.kind.of_stage or task.stage in known
            known.add(task.stage)
        gathers = [task for task in order if task.kind.of_stage]
        if held is None:
            assert len(gathers) == len(stages)
        elif held == 0 and not made.kinds & {"I", "R"} and not made.overlaps:
            assert len(gathers) == len(plain.ranks[rank])
        if not ahead and not made.kinds & {"I", "R"} and not made.overlaps:
            # A task with several readers in one microbatch keeps its stage's for the second.
            assert GATHERED.peaks(made)[rank] <= (len(stages) if held is None else max(held, 1))
    readers = [task for own in made.windows.values() for task in own]
    assert len(readers) == len(set(readers)) and set(readers) == plain.tasks
    # Gathers that take no time change nothing else of the clock.
    free, base = simulate(made, Costs(gather=0)), simulate(plain)
    assert [s for s in free.spans if s.task in plain.tasks] == list(base.spans)
    assert free.busy == base.busy


def test_each_lane_runs_in_order_and_beside_the_others():
    """Times by hand: F = 1, B = 2, a gather 1.5, a copy 0.5."""
    table = from_tasks([["G0.0", "F0.0", "O0.0", "G1.0", "F1.0", "H0.0", "B1.0", "L0.0", "B0.0"]])
    made = simulate(table, Costs(gather=1.5, offload=0.5, load=0.5, per="stage"))
    clock = {str(s.task): (s.start, s.end) for s in made.spans}
    assert clock == {
        "G0.0": (0, 1.5),
        "F0.0": (1.5, 2.5),  # once its parameters are there
        "O0.0": (2.5, 3),  # in another lane than the gather
        "G1.0": (2.5, 4),
        "F1.0": (4, 5),
        "H0.0": (5, 6.5),
        "B1.0": (5, 7),  # beside the gather
        "L0.0": (7, 7.5),
        "B0.0": (7.5, 9.5),
    }
    held = dataclasses.replace(made, memory=GATHERED).memory_over_time(0)
    assert held == [(0, 1), (2.5, 1), (5, 2), (7, 1), (9.5, 0)]
    assert made.busy == (6,)
    lines = to_text(made, colour=False, width=60).splitlines()
    assert "F0" in lines[0] and "G0" in lines[1] and "O==" in lines[2]


def test_a_picture_and_a_trace_have_lanes_of_their_own(tmp_path):
    made = simulate(Offload(Gather("1f1b")).table(2, 4))
    to_trace(made, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert "rank 0, copies" in text and "rank 0, collectives" in text
    assert from_csv(to_csv(made.table)).ranks == made.table.ranks


def test_breadth_first_a_stage_is_gathered_once_for_each_run_of_its_tasks():
    """Lamy-Poirier, arXiv 2211.05953: the least gathers for the stages that are held."""
    for held, gathers in ((1, 7), (2, 6), (3, 5), (None, 4)):
        made = Gather(GPipe(stages_per_rank=4), held=held).table(4, 8)
        assert sum(task.kind.of_stage for task in made.ranks[0]) == gathers
        assert GATHERED.peaks(made) == (held or 4,)


def test_what_is_gathered_ahead_is_held_longer():
    made = Gather(GPipe(stages_per_rank=2), held=1, ahead=1).table(2, 2)
    assert " ".join(map(str, made.ranks[0])) == (
        "G0.0 F0.0 G1.0 F0.1 F1.0 F1.1 B1.0 H0.0 B1.1 B0.0 B0.1"
    )
    assert GATHERED.peaks(made) == (2,)
    times = [simulate(made, Costs(gather=t)).makespan for t in (0, 0.5, 4)]
    assert times == [6, 6.25, 10.5]


def test_a_table_without_a_backward_gathers_too():
    made = Gather(ForwardOnly()).table(2, 2)
    assert [str(task) for task in made.ranks[1]] == ["G1.0", "F1.0", "F1.1"]
    assert Gather(ForwardOnly(), stages=[0]).table(2, 2).ranks[1] == made.ranks[1][1:]


def test_a_gather_that_nothing_reads_is_refused():
    with pytest.raises(ScheduleError, match=r"G\[stage 0, microbatch 0\] .*gather.*drop it"):
        check(from_tasks([["F0.0", "G0.0", "H0.0", "B0.0"]]))


def test_what_is_offloaded_is_not_computed_again():
    made = Recompute(Offload("gpipe", stages=[0])).table(2, 3)
    check(made)
    assert {*"RO"} <= made.kinds
    assert {(t.kind, t.stage) for t in made.tasks if t.kind in "RO"} == {("O", 0), ("R", 1)}
    check(Recompute(Offload("1f1b")).table(2, 4))


@pytest.mark.parametrize("wrong", [dict(held=-1), dict(ahead=-1)])
def test_a_number_below_zero_is_refused(wrong: Any):
    with pytest.raises(ValueError, match="Gather takes integers held and ahead of at least 0"):
        Gather(**wrong)


def test_the_cost_of_gathering_again_is_that_of_gathering():
    costs = Costs(gather=(1, 3), per="stage")
    tasks = Gather("gpipe", held=0).table(2, 1).tasks
    again = {task.stage: costs.of(task) for task in tasks if task.kind is Kind.H}
    assert again == {0: 1, 1: 3}
    assert not list(itertools.filterfalse(lambda t: t.kind.of_stage or costs.of(t), tasks))


M = Kind("M", "sum of half backwards", of_stage=True, takes="BI")
SUMS = Memory(forward=0, weight_grad=0, reduce=1, per="stage")


@given(
    st.sampled_from([s for s in SCHEDULES if not isinstance(s, ForwardOnly)]),
    st.sampled_from([None, 1, 2, 3]),
    st.data(),
)
def test_all_that_a_stage_sums_is_reduced_once(schedule, every, data):
    p, m = valid_size(schedule, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8)))
    plain = schedule.table(p * schedule.stages_per_rank, m)
    made = Reduce(schedule, every=every).table(plain.num_stages, m)
    check(made)
    assert tuple(map(computing, made.ranks)) == plain.ranks
    taken = [task for window in made.windows.values() for task in window]
    backward = {task for task in plain.tasks if task.kind in Kind.S.takes}
    assert len(taken) == len(set(taken)) and set(taken) == backward
    for rank, order in enumerate(made.ranks):
        stages = {task.stage for task in order}
        sums = [task for task in order if task.kind is Kind.S]
        if every is None:
            assert len(sums) == len(stages)
        elif every == 1:
            assert len(sums) == sum(task.kind in "BW" for task in order)
        assert SUMS.peaks(made)[rank] <= len(stages)
    # Reductions that take no time change nothing else of the clock.
    free, base = simulate(made, Costs(reduce=0)), simulate(plain)
    assert [s for s in free.spans if s.task in plain.tasks] == list(base.spans)


def test_breadth_first_a_rank_holds_the_sums_of_one_stage():
    made = Reduce(GPipe(stages_per_rank=4)).table(4, 8)
    assert SUMS.peaks(made) == (1,)
    held = simulate(made, Costs(reduce=1, per="stage"), memory=SUMS).memory_over_time(0)
    assert max(count for _, count in held) == 2  # beside the next stage's first backward


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (["F0.0", "S0.0", "B0.0"], "no task that it is for comes before it.*move it down"),
        (["F0.0", "F0.1", "B0.0", "S0.0", "B0.1"], "last S of its stage, but comes before B.*add"),
        (["F0.0", "F0.1", "B0.0", "B0.1", "S0.1", "S0.0"], "no task that it is for.*move it down"),
        (["F0.0", "I0.0", "M0.0", "W0.0"], "is the last M of its stage, but comes before W"),
        (["F0.0", "F0.1", "B0.0", "M0.0", "B0.1", "S0.1"], "take the sums of one stage; give it"),
    ],
)
def test_a_reduction_that_has_nothing_or_leaves_something_is_refused(order, words):
    with pytest.raises(ScheduleError, match=words):
        check(from_tasks([order]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ahead": 1.5}, "integers held and ahead of at least 0, got held=None and ahead=1.5"),
        ({"ahead": "x"}, "got held=None and ahead='x'"),
        ({"held": True}, "got held=True and ahead=0; leave held out"),
        ({"stages": 3}, "takes stages as a list of numbers, got 3; leave stages out for all"),
        ({"stages": ["a", 1]}, r"takes stages as a list of numbers, got \['a', 1\]"),
        ({"stages": range(3, 5)}, r"names stages \[4\], but the table has 4 stages"),
    ],
)
def test_a_gather_of_what_is_no_number_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Gather("1f1b", **fields).table(4, 2)


@pytest.mark.parametrize("every", [0, 1.5, "2", True])
def test_a_reduction_after_each_of_no_number_of_backwards_is_refused(every):
    with pytest.raises(ValueError, match=f"every of at least 1, got {every!r}"):
        Reduce(every=every)


def test_a_reduction_without_a_backward_is_refused():
    with pytest.raises(ValueError, match="no backward"):
        Reduce(ForwardOnly()).table(2, 2)


def test_a_table_of_several_steps_with_gathers_is_refused():
    with pytest.raises(ValueError, match="joined: the tasks G, S are of a stage in one step"):
        joined(Reduce(Gather("1f1b")).table(2, 4), 2)
