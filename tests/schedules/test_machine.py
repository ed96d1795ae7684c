"""The machine of a simulation: speeds, links that are shared, sends that block, and the update."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedules import (
    CATALOGUE,
    Costs,
    ForwardOnly,
    FromTable,
    GPipe,
    Interleaved1F1B,
    Kind,
    Machine,
    Memory,
    OneFOneB,
    Schedule,
    ScheduleError,
    Task,
    ZeroBubbleV,
    by_name,
    check,
    compare,
    from_tasks,
    simulate,
    synthesize,
)
from tests.schedules.catalogue import tables

#: Two ranks, three microbatches; what is sent takes three times as long as a task.
FORWARDS = from_tasks([["F0.0", "F0.1", "F0.2"], ["F1.0", "F1.1", "F1.2"]])
SLOW_LINK = Costs(bandwidth=2.0, edge_bytes=6.0, latency=0.5)


@pytest.mark.parametrize(
    ("machine", "sends", "reads"),
    [
        (Machine(), [0, 1, 2], [4.5, 5.5, 6.5]),
        (Machine(shared_links=True), [0, 1, 2], [4.5, 7.5, 10.5]),
        (Machine(blocking_sends=True), [0, 4.5, 9], [4.5, 9, 13.5]),
        (Machine(blocking_sends=True, shared_links=True), [0, 4.5, 9], [4.5, 9, 13.5]),
        (Machine(speed=(0.5, 1)), [0, 2, 4], [5.5, 7.5, 9.5]),
    ],
)
def test_transfers_and_speeds_by_hand(machine, sends, reads):
    found = simulate(FORWARDS, SLOW_LINK, machine=machine)
    assert list(map(list, found.starts)) == [sends, reads]
    assert found.makespan == reads[-1] + 1


def test_the_two_ways_of_a_link_and_different_links_do_not_wait_for_each_other():
    fan = from_tasks(
        [["F0.0"], ["F1.0"], ["F2.0"]],
        stage_inputs=[(), (0,), (0,)],
    )
    found = simulate(fan, SLOW_LINK, machine=Machine(shared_links=True))
    assert [own[0] for own in found.starts] == [0, 4.5, 4.5]
    there_and_back = from_tasks(
        [["F0.0", "F0.1", "B0.0", "B0.1"], ["F1.0", "B1.0", "F1.1", "B1.1"]]
    )
    alone = simulate(there_and_back, SLOW_LINK)
    shared = simulate(there_and_back, SLOW_LINK, machine=Machine(shared_links=True))
    assert shared.starts[0][2] == alone.starts[0][2]  # the first backward meets nothing on its way


@settings(deadline=None, max_examples=40)
@given(tables(max_microbatches=8), st.booleans(), st.booleans(), st.integers(0, 4))
def test_no_step_gets_shorter_where_ranks_and_links_wait(own, shared, blocking, latency):
    costs = Costs(latency=latency, bandwidth=1.0, edge_bytes=1.5, per="stage")
    machine = Machine(shared_links=shared, blocking_sends=blocking)
    before, after = simulate(own, costs), simulate(own, costs, machine=machine)
    for earlier, later in zip(before.starts, after.starts, strict=True):
        assert all(a <= b for a, b in zip(earlier, later, strict=True))
    if not (shared or blocking):
        assert before.starts == after.starts


def test_the_update_comes_after_the_last_task_of_a_rank():
    table = OneFOneB().table(2, 4)
    plain = simulate(table)
    machine = Machine(gradient_bytes=(8.0, 4.0), reduction_bandwidth=4.0, optimizer=3.0)
    found = simulate(table, machine=machine)
    assert found.update == (5.0, 4.0)
    ended = [ends[-1] for ends in plain.ends]
    assert found.makespan == max(ended[0] + 5, ended[1] + 4)
    assert found.busy == (plain.busy[0] + 5, plain.busy[1] + 4)
    assert found.critical_path[-1].rank == 0
    assert found.longest_span == max(ended[0] + 5, ended[1] - plain.starts[1][0] + 4)


def test_what_a_rank_holds_all_the_time_counts():
    found = simulate(OneFOneB().table(2, 4), machine=Machine(resident=(10.0, 20.0)))
    assert found.peak_memory == (12.0, 21.0)
    assert max(held for _, held in found.memory_over_time(1)) == 21.0


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine(speed=(1.0,)), "speed has 1 numbers for 2 ranks"),
        (Machine(speed=0.0), "speed is a finite number above 0 for each rank, got 0.0"),
        (Machine(optimizer=-1.0), "optimizer is a finite number of at least 0"),
        (Machine(resident=float("nan")), "resident is a finite number of at least 0"),
        (Machine(reduction_bandwidth=0.0), "reduction_bandwidth is above 0, got 0.0"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(machine, message):
    with pytest.raises(ValueError, match=message):
        simulate(OneFOneB().table(2, 4), machine=machine)


# ---- costs of a rank's share, and comparisons ---------------------------------------------------


def test_costs_are_of_a_stage_or_of_a_rank_as_is_said():
    table = Interleaved1F1B(stages_per_rank=2).table_for_ranks(2, 4)
    of_rank = simulate(table)
    assert sum(of_rank.busy) == 2 * 4 * 3
    halves = simulate(table, Costs().divided(2), memory=Memory().divided(2))
    assert of_rank.starts == halves.starts and of_rank.peak_memory == halves.peak_memory
    of_stage = simulate(table, Costs(per="stage"), memory=Memory(per="stage"))
    assert sum(of_stage.busy) == 2 * 4 * 2 * 3
    assert of_stage.peak_memory == tuple(2 * held for held in of_rank.peak_memory)
    # Ranks with other numbers of stages have a whole share each; what names stages is of stages.
    uneven = from_tasks([["F0.0", "F1.0"], ["F2.0"]])
    assert simulate(uneven).busy == (1.0, 1.0)
    assert simulate(uneven, Costs(forward=(2, 3, 4))).busy == (5.0, 4.0)
    assert simulate(uneven, Costs(forward=lambda task: 2.0)).busy == (4.0, 2.0)
    assert simulate(uneven, Costs(np.float32(2.0))).busy == (2.0, 2.0)  # pyright: ignore
    for model in (Costs, Memory):
        with pytest.raises(ValueError, match="per is 'rank', .* or 'stage', .* got 'step'"):
            model(per="step")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", [n for n in CATALOGUE if n != "forward_only"])
def test_one_model_of_costs_means_the_same_wherever_it_is_read(name):
    """The rows of `compare`, its timelines, `simulate`, `check` and `synthesize` agree."""
    schedule, ranks, microbatches = by_name(name), 2, 4
    costs, memory = Costs(1.0, 1.1, 0.9, latency=0.1), Memory(forward=2.0)
    rows = compare({name: schedule}, ranks, microbatches, costs, memory=memory)
    table = schedule.table_for_ranks(ranks, microbatches)
    alone = simulate(table, costs, memory=memory)
    assert rows[0].makespan == alone.makespan == rows.timelines[name].makespan
    assert rows[0].bubble == alone.bubble_fraction
    assert rows[0].peak_memory == max(alone.peak_memory) == max(memory.peaks(table))
    assert alone.busy == pytest.approx([3.0 * microbatches] * ranks)
    check(table, memory=memory, memory_limit=rows[0].peak_memory)
    limited = {"memory": memory, "memory_limit": rows[0].peak_memory, "evaluations": 1}
    found = synthesize(costs, table.directions, microbatches, **limited)
    assert found.timeline.busy == pytest.approx(alone.busy) or table.stage_inputs


def test_a_comparison_has_a_row_for_each_schedule_and_the_reason_where_there_is_no_table():
    machine = Machine(optimizer=2.0)
    rows = compare(
        {"gpipe": GPipe(), "other": Interleaved1F1B(2, group_size=3)}, 4, 2, machine=machine
    )
    assert [row.schedule for row in rows] == ["gpipe", "other"]
    found = simulate(GPipe().table(4, 2), machine=machine)
    assert (rows[0].makespan, rows[0].bubble) == (found.makespan, found.bubble_fraction)
    assert rows[0].peak_memory == 2.0 and rows[0].parameters == 1
    assert rows[1].makespan is None and "group_size" in rows[1].reason
    assert dataclasses.asdict(rows[0])["stages_per_rank"] == 1


@dataclasses.dataclass(frozen=True)
class Backwards(Schedule):
    """Runs the backward before its forward."""

    def orders(self, num_ranks, num_microbatches):
        return [[Task(kind, r, 0) for kind in (Kind.B, Kind.F)] for r in range(num_ranks)]


def test_schedules_are_compared_as_a_list_by_name_or_alone():
    listed = compare([OneFOneB(), GPipe()], 2, 4)
    header, first, second = repr(listed).splitlines()
    assert header.startswith("schedule") and header.endswith("peak memory")
    assert first.startswith("OneFOneB() ") and second.startswith("GPipe(stages_per_rank=1) ")
    assert len(first) == len(second) == len(header) and repr(compare([], 2, 4)) == "schedule"
    assert listed == compare({str(own): own for own in (OneFOneB(), GPipe())}, 2, 4)
    assert listed[:1] == compare(OneFOneB(), 2, 4) == compare(iter([OneFOneB()]), 2, 4)
    by_name = r"Write by_name\('1f1b'\)\.$"
    mistakes: list[tuple[Any, str]] = [
        (["1f1b"], by_name),
        ("1f1b", by_name),
        ({"1f1b": OneFOneB}, r"Write OneFOneB\(\)\.$"),
        ([OneFOneB().table(2, 4)], r"Write FromTable\(table\)\.$"),
        (3, r"3 for '3'\.$"),
    ]
    for wrong, way_out in mistakes:
        with pytest.raises(TypeError, match=f"as a list or by name; got .*{way_out}"):
            compare(wrong, 2, 4)


def test_a_comparison_names_the_schedule_whose_table_is_wrong():
    with pytest.raises(ScheduleError) as found:
        compare({"gpipe": GPipe(), "wrong": Backwards()}, 2, 1)
    assert found.value.__notes__ == ["in the table of 'wrong', for 2 ranks and 1 microbatches"]
    uneven = FromTable(from_tasks([["F0.0", "F1.0", "B1.0", "B0.0"], ["F2.0", "B2.0"]]))
    (row,) = compare({"uneven": uneven}, 2, 1)
    assert (row.reason, row.stages_per_rank, row.makespan) == ("", None, 6.0)


def test_evaluation_can_be_like_a_fixed_table():
    fixed = FromTable(ZeroBubbleV().table(4, 6))
    assert ForwardOnly(like=fixed).table(4, 3) == ForwardOnly(like=ZeroBubbleV()).table(4, 3)
    assert fixed.table_for_ranks(2, 6) is fixed.given
    with pytest.raises(ValueError, match="is for 2 ranks, got 4"):
        fixed.table_for_ranks(4, 6)
    uneven = FromTable(from_tasks([["F0.0", "F1.0", "B1.0", "B0.0"], ["F2.0", "B2.0"]]))
    assert ForwardOnly(like=uneven).table(3, 1).directions == uneven.given.directions
