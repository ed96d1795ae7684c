"""What a cost says of a task, in each of the forms that it may have."""

import numpy as np
import pytest
from hypothesis import given

from jaxpp.schedules import Costs, Kind, Memory, Table, Task, simulate
from tests.schedules.catalogue import tables

F, B, I, W, R = (Task(kind, stage=1, microbatch=5) for kind in map(Kind, "FBIWR"))  # noqa: E741
KINDS = ("forward", "backward", "input_grad", "weight_grad", "recompute")


@pytest.mark.parametrize("name, task", list(zip(KINDS, (F, B, I, W, R), strict=True)))
@pytest.mark.parametrize("model", [Costs, Memory])
@pytest.mark.parametrize(
    "given",
    [
        7,
        7.0,
        (1.0, 7.0),
        [1, 7, 2],
        np.array([1.0, 7.0]),
        np.float32(7),
        np.int64(7),
        lambda task: task.stage + task.microbatch + 1,
    ],
)
def test_a_cost_is_a_number_or_one_for_each_stage_or_a_function(model, name, task, given):
    value = model(**{name: given}).of(task)
    assert value == 7
    assert type(value) is float


def test_a_whole_backward_is_its_halves_unless_it_says_otherwise():
    assert Costs(input_grad=2, weight_grad=lambda t: t.microbatch).of(B) == 7
    assert Costs(input_grad=2, weight_grad=3, backward=4).of(B) == 4
    assert Memory(input_grad=-2, weight_grad=-3).of(B) == -5
    assert Memory(backward=-4).of(B) == -4


def test_a_recomputation_is_a_forward_unless_it_says_otherwise():
    assert Costs(forward=lambda t: t.microbatch + 1).of(R) == Costs(recompute=(7, 6)).of(R) == 6
    assert Costs.measured({(Kind.F, 1): 2}).of(R) == 2
    assert Costs.measured({(Kind.F, 1): 2, (Kind.R, 0): 3}).of(R) == 2
    assert Costs.measured({(Kind.F, 1): 2, (Kind.R, 1): 3}).of(R) == 3
    assert Memory(forward=(7, 6)).of(R) == Memory(forward=7, recompute=6).of(R) == 6
    assert Costs(recompute=3).divided(2).of(R) == Memory(recompute=3).divided(2).of(R) == 1.5


def test_a_number_for_each_stage_is_one_for_each():
    for model in (Costs, Memory):
        with pytest.raises(
            ValueError, match=r"has 1 numbers, one for each stage, but .* F\[stage 1"
        ):
            model(forward=(1.0,)).of(F)


def test_memory_may_grow_and_shrink_but_is_finite():
    assert Memory(forward=-2.5).of(F) == -2.5
    with pytest.raises(
        ValueError, match=r"the memory of F\[stage 1, .* is nan; a cost is a finite"
    ):
        Memory(forward=float("nan")).of(F)


def test_measured_costs_are_of_each_kind_and_stage():
    costs = Costs.measured(
        {(Kind.F, 0): 1, (Kind.F, 1): 2, (Kind.I, 1): 3, (Kind.W, 1): 4}, latency=6
    )
    assert [costs.of(task) for task in (F, I, W, B)] == [2, 3, 4, 7]
    assert costs.of(Task(Kind.F, 0, 0)) == 1
    assert costs.of(Task(Kind.I, 0, 0)) == 0
    assert costs.transfer(F, 0, 1) == 6
    assert Costs.measured({(Kind.B, 1): 9}).of(B) == 9


def test_the_costs_of_a_stage_are_a_part_of_those_of_its_rank():
    whole = Costs(3, (6, 9), lambda task: 12.0, 15, lambda a, b: 18.0, latency=5, edge_bytes=7)
    part = whole.divided(3)
    assert [part.of(task) for task in (F, I, W, B)] == [1, 3, 4, 5]
    assert part.together(F, B) == 6
    assert (part.latency, part.edge_bytes) == (5, 7)  # as much is sent between smaller stages
    assert Costs().divided(2).of(B) == 1


def test_two_together_take_as_long_as_both_unless_told():
    assert Costs(2, 3, 4).together(F, B) == 9
    assert Costs(overlapped=lambda a, b: a.stage + 10.0 * (b.kind is Kind.B)).together(F, B) == 11


@pytest.mark.parametrize(
    ("links", "free"),
    [
        ({}, True),
        ({"edge_bytes": 5}, True),
        ({"bandwidth": 5}, True),
        ({"latency": 1}, False),
        ({"bandwidth": 5, "edge_bytes": 5}, False),
        ({"latency": lambda a, b: 0.0}, False),
    ],
)
def test_what_moves_for_free(links, free):
    assert Costs(**links).moves_for_free is free
    assert not free or Costs(**links).transfer(F, 0, 1) == 0


@pytest.mark.parametrize("links", [{"latency": -1}, {"bandwidth": 0}, {"bandwidth": float("nan")}])
def test_a_link_is_possible(links):
    with pytest.raises(ValueError, match="a link needs .* from rank 2 to rank 3; correct Costs"):
        Costs(**links).transfer(F, 2, 3)


# ---- memory -------------------------------------------------------------------------------------


@given(tables())
def test_the_default_counts_activations(table):
    if not table.overlaps:
        assert Memory(per="stage").peaks(table) == table.peak_in_flight()
    peaks = Memory(per="stage").peaks(table)
    assert all(a >= b for a, b in zip(peaks, table.peak_in_flight(), strict=True))


def order(*tasks: Task, overlaps: tuple[Task, ...] = ()) -> Table:
    return Table((tasks,), 2, 6, overlaps=frozenset(overlaps))


def test_what_a_task_frees_it_holds_to_its_end():
    memory = Memory(forward=5, input_grad=-3, weight_grad=-2)
    assert memory.held(order(F, I, W), 0) == [5, 5, 2]
    assert memory.peaks(order(F, I, W)) == (5,)
    assert Memory(forward=1, input_grad=4, weight_grad=-5).held(order(F, I, W), 0) == [1, 5, 5]


def test_what_is_recomputed_is_held_during_the_forward_and_again_from_the_recomputation():
    memory = Memory(forward=5, input_grad=0, weight_grad=-5, recompute=4, per="stage")
    other = Task(Kind.F, stage=0, microbatch=5)
    assert memory.held(order(F, other, R, I, W), 0) == [5, 6, 10, 10, 10]
    assert memory.held(order(F, other, I, W), 0) == [5, 10, 10, 10]


def test_two_that_overlap_hold_what_both_add_before_either_frees():
    other = Task(Kind.F, stage=1, microbatch=4)
    memory = Memory()
    assert memory.held(order(F, B, other), 0) == [1, 1, 1]
    assert memory.held(order(F, B, other, overlaps=(B,)), 0) == [1, 2, 2]
    assert memory.held(order(F, other, B, overlaps=(other,)), 0) == [1, 2, 2]


def test_a_simulation_without_overlap_holds_less():
    tasks = tuple(Task(kind, 0, i) for i in range(2) for kind in (Kind.F, Kind.B))
    table = Table((tasks,), 1, 2, overlaps=frozenset({tasks[1]}))
    assert simulate(table).peak_memory == (2,)
    assert simulate(table, overlap="none").peak_memory == (1,)
