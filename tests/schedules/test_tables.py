"""What holds for the table of every schedule, at every size."""

import dataclasses
import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedules import (
    CATALOGUE,
    Costs,
    Dependencies,
    Eager1F1B,
    GPipe,
    Interleaved1F1B,
    Kind,
    OneFOneB,
    Schedule,
    Table,
    Task,
    by_name,
    check,
    execution_order,
    register,
    simulate,
    stage_dependencies,
)
from tests.schedules.catalogue import SCHEDULES, tables, valid_size


def inputs(table: Table, task: Task, needs: Dependencies) -> set[Task]:
    """The tasks that one comes after: a backward in the form that the table has it in."""
    after = needs[task.kind, task.stage]
    return {Task(kind, stage, task.microbatch) for kind, stage in after} & table.tasks


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
    for p, m in itertools.product(range(1, 6), range(1, 14)):
        if schedule.broken_rule(p, m) is None:
            check(schedule.table(p * schedule.stages_per_rank, m))


@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 40))
def test_any_table_is_sound(schedule, p, m):
    p, m = valid_size(schedule, p, m)
    table = schedule.table(p * schedule.stages_per_rank, m)
    assert table.num_ranks == p == schedule.num_ranks(table.num_stages)
    assert table.directions == schedule.placement(p)
    assert table == schedule.table(p * schedule.stages_per_rank, m)
    check(table, kinds=table.kinds)


@given(tables(8, 40))
def test_microbatches_accumulate_in_order(table):
    assert in_order(table)


def test_the_test_of_order_can_fail():
    table = OneFOneB().table(2, 2)
    assert not in_order(dataclasses.replace(table, ranks=tuple(t[::-1] for t in table.ranks)))


@given(tables(8, 40))
def test_execution_order_respects_ranks_and_dependencies(table):
    order = execution_order(table)
    for rank, tasks in enumerate(table.ranks):
        assert tuple(task for r, task in order if r == rank) == tasks
    needs = stage_dependencies(table)
    done = set()
    for _, task in order:
        assert done.issuperset(inputs(table, task, needs))
        done.add(task)


def test_a_backward_costs_its_two_halves_by_default():
    table = OneFOneB().table(1, 2)
    assert simulate(table, Costs(forward=3)).makespan == 2 * (3 + 2)
    assert simulate(table, Costs(input_grad=4, weight_grad=5)).makespan == 2 * (1 + 9)


def test_stages_of_a_branching_graph_run_by_their_own_dependencies():
    """Two encoders, 0 and 1, which stage 2 reads: stage 1 does not wait for stage 0."""
    table = OneFOneB().table(3, 1)
    needs = stage_dependencies(table, [(0, 2), (1, 2), (0, 2)])
    assert needs[Kind.F, 2] == ((Kind.F, 0), (Kind.F, 1))
    assert needs[Kind.B, 0] == ((Kind.F, 0), (Kind.B, 2))
    assert needs[Kind.F, 1] == ()
    check(table, dependencies=needs)
    assert simulate(table, dependencies=needs).makespan == 1 + 1 + 2 + 2
    assert [str(task) for _, task in execution_order(table, needs)[:2]] == ["F0.0", "F1.0"]


def test_peak_counts_from_the_forward_to_the_weight_gradient():
    def peak(*words: str) -> tuple[int, ...]:
        return Table((tuple(Task(Kind(k), 0, int(i)) for k, i in words),), 1, 2).peak_in_flight()

    assert peak("F0", "I0", "F1", "W0", "I1", "W1") == (2,)
    assert peak("F0", "I0", "W0", "F1", "I1", "W1") == (1,)
    assert peak("F0", "B0", "F1", "B1") == (1,)
    assert peak("F0", "F1", "R0", "B0", "B1") == (2,)
    assert peak("F0", "F1", "R0", "B0", "R1", "B1") == (1,)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_makes_every_schedule(name):
    schedule = by_name(name)
    assert isinstance(schedule, Schedule)
    assert schedule == by_name(name)
    assert hash(schedule) == hash(by_name(name))
    p, m = valid_size(schedule, 4, 8)
    check(schedule.table(p * schedule.stages_per_rank, m))


def test_the_catalogue_passes_knobs_on():
    assert by_name("gpipe", stages_per_rank=3) == GPipe(stages_per_rank=3)
    assert by_name("gpipe(stages_per_rank=3)") == GPipe(stages_per_rank=3)
    assert by_name("gpipe(stages_per_rank=3)", stages_per_rank=2) == GPipe(stages_per_rank=2)


@dataclasses.dataclass(frozen=True)
class Mine(Schedule):
    """A schedule that is not in the catalogue."""

    warmup: int = 1

    def orders(self, num_ranks, num_microbatches):
        return GPipe().orders(num_ranks, num_microbatches)


FIXED = GPipe(stages_per_rank=2)
NO_TEXT = cast(Any, GPipe())


def test_a_schedule_of_ones_own_has_a_name_on_a_command_line(monkeypatch):
    assert by_name("tests.schedules.test_tables:Mine(warmup=3)") == Mine(3)
    assert by_name("tests.schedules.test_tables:FIXED") is FIXED
    monkeypatch.setattr("jaxpp.schedules._catalogue._names._REGISTERED", {})
    register("mine", Mine)
    register("mine", Mine)
    assert by_name("mine(warmup=2)") == Mine(2)
    with pytest.raises(ValueError, match="a schedule named 'mine' already"):
        register("mine", GPipe)
    with pytest.raises(ValueError, match="a schedule named 'gpipe' already"):
        register("gpipe", Mine)
    with pytest.raises(ValueError, match="letters, digits and underscores, got 'a:b'"):
        register("a:b", Mine)
    with pytest.raises(ValueError, match="use one of .*seq1f1b, mine, or 'package.module:Class'"):
        by_name("yours")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_name("1f2b"), "no schedule named '1f2b'; use one of forward_only, gpipe, 1f1b"),
        (lambda: by_name("1f1b", chunks=2), "'1f1b' has no knob 'chunks'; it has none"),
        (lambda: by_name("gpipe", v=2), "'gpipe' has no knob 'v'; its knobs are stages_per_rank"),
        (
            lambda: by_name(cast(Any, GPipe())),
            r"named by text, such as '1f1b', got GPipe\(.*register",
        ),
        (lambda: by_name("gpipe(2)"), r"'gpipe\(2\)' is no schedule; write its knobs by name, as"),
        (lambda: by_name("gpipe(stages_per_rank=2"), "is no schedule; write its knobs by name"),
        (lambda: by_name("gpipe(stages_per_rank=x)"), "is no schedule; write its knobs by name"),
        (lambda: by_name("no.such:Thing"), "no schedule 'no.such:Thing': No module named 'no'"),
        (lambda: by_name("math:Thing"), "no schedule 'math:Thing': module 'math' has no attribute"),
        (lambda: by_name("math:pi"), "math:pi is 3.14.*; give a class, or a function"),
        (lambda: by_name("jaxpp.schedules:Costs"), r"Costs makes Costs\(.*\), which is no"),
        (lambda: GPipe(0), "GPipe needs stages_per_rank to be an integer of at least 1, got 0"),
        (lambda: GPipe(True), "at least 1, got True"),
        (
            lambda: Interleaved1F1B(2).table(7, 4),
            r"Interleaved1F1B\(stages_per_rank=2.*\) needs num_stages divisible by its 2 "
            "stages_per_rank, got 7 stages; use 6 stages on 3 ranks or 8 stages on 4 ranks",
        ),
        (lambda: Interleaved1F1B(4).num_ranks(3), "got 3 stages; use 4 stages"),
        (lambda: OneFOneB().table(0, 4), r"OneFOneB\(\) needs num_stages .* got 0; use 1"),
        (lambda: OneFOneB().table(4, 0), "needs num_microbatches to be an integer of at least 1"),
        (lambda: OneFOneB().table(4, 2.0), "got 2.0; use 1 to run the batch whole"),  # pyright: ignore
        (lambda: Table((), 1, 1).directions, "no rank has a task of stage 0"),
    ],
)
def test_errors_name_the_value_the_rule_and_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedules_are_told_apart_by_type_and_knobs():
    assert len(set(SCHEDULES)) == len({repr(schedule) for schedule in SCHEDULES})
    assert GPipe(2) != GPipe(3)
    assert OneFOneB() != Eager1F1B()
    assert repr(OneFOneB()) == "OneFOneB()"


# ---- two directions -----------------------------------------------------------------------------


def test_a_table_with_two_directions_says_which_each_microbatch_takes():
    forwards = ((Task(Kind.F, 0, 0), Task(Kind.F, 1, 1)), (Task(Kind.F, 0, 1), Task(Kind.F, 1, 0)))
    both = ((0, 1), (1, 0))
    assert Table(forwards, 2, 2, both, direction_of=(0, 1)).direction_of == (0, 1)
    for wrong in [(), (0,), (0, 2)]:
        with pytest.raises(ValueError, match="2 directions needs direction_of .* from 0 to 1"):
            Table(forwards, 2, 2, both, direction_of=wrong)


# ---- stages that form a graph, and backwards in both forms --------------------------------------


def test_a_table_has_the_dependencies_of_its_own_graph():
    forwards = tuple((Task(Kind.F, stage, 0),) for stage in range(3))
    table = Table(forwards, 3, 1, stage_inputs=((), (), (0, 1)))
    assert stage_dependencies(table)[Kind.F, 2] == ((Kind.F, 0), (Kind.F, 1))
    assert simulate(table).makespan == 2


def test_halves_are_whole_backwards_written_out():
    table = OneFOneB().table(2, 3)
    halves = table.with_halves()
    check(halves, kinds={Kind.F, Kind.I, Kind.W})
    assert halves.peak_in_flight() == table.peak_in_flight()
    # The stage before waits for I alone.
    assert simulate(halves).makespan < simulate(table).makespan
