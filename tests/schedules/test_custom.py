"""Schedules made of lists of tasks, and tables in torch's CSV."""

import dataclasses
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpp
from jaxpp.schedules import (
    CATALOGUE,
    DualPipeV,
    FromTable,
    GPipe,
    Kind,
    OneFOneB,
    Schedule,
    ScheduleError,
    Table,
    Task,
    by_name,
    check,
    from_csv,
    from_tasks,
    to_csv,
)

# Written by torch 2.15.0, p = 4, m = 8, two stages on each rank: `_dump_csv` of the schedules that
# the files are named after, `compute_only`, but for the one named `_comms`.
TORCH_FILES = pathlib.Path(__file__).parent / "data" / "torch_2.15.0"

ALL = [by_name(name) for name in CATALOGUE]


def of_size(schedule: Schedule, p: int, m: int) -> Table:
    return schedule.table(p * schedule.stages_per_rank, m)


def test_tasks_may_be_written_as_they_print_as_torch_writes_them_or_as_they_are():
    ours = [["F0.0", "F0.1", "B0.0", "B0.1"], ["F1.0", "B1.0", "F1.1", "B1.1"]]
    torchs = [["0F0", " 0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    table = OneFOneB().table(2, 2)
    assert from_tasks(ours).ranks == from_tasks(torchs).ranks == table.ranks
    assert from_tasks(table.ranks).ranks == table.ranks
    assert from_tasks([["12F34"]]).ranks == from_tasks([["F12.34"]]).ranks


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_the_tasks_of_a_table_make_that_table(schedule):
    table = of_size(schedule, 4, 8)
    words = [list(map(str, tasks)) for tasks in table.ranks]
    again = from_tasks(
        words,
        placement=table.placement,
        stage_inputs=table.stage_inputs,
        overlaps=list(map(str, table.overlaps)),
        direction_of=table.direction_of,
    )
    assert again == table and hash(again) == hash(table)


def test_a_fixed_schedule_is_a_value_with_one_table():
    words = [["F0.0", "B0.0"], ["F1.0", "B1.0"]]
    schedule = FromTable(from_tasks(words))
    assert schedule == FromTable(from_tasks(words))
    assert hash(schedule) == hash(FromTable(from_tasks(words)))
    assert schedule != FromTable(from_tasks(words[:1]))
    check(schedule.table(2, 1))
    for size in ((2, 2), (1, 1), (4, 1)):
        with pytest.raises(
            ValueError, match=r"for 2 stages and 1 microbatches only, got \d stages"
        ):
            schedule.table(*size)


def test_a_fixed_schedule_trains():
    def loss(w, x):
        h = jaxpp.pipeline_enter_stage(jnp.tanh(x @ w))
        return jnp.mean((h @ w) ** 2)

    grad = jaxpp.microbatch(jax.grad(jaxpp.wrap_forward(loss)), 2)
    w, x = (
        jax.random.normal(jax.random.key(0), (3, 3)),
        jax.random.normal(jax.random.key(1), (4, 3)),
    )
    # Microbatch 1 goes first, which no schedule of the catalogue does.
    words = [["F0.1", "F0.0", "B0.1", "B0.0"], ["F1.1", "B1.1", "F1.0", "B1.0"]]
    scheduled = jaxpp.schedule(grad, FromTable(from_tasks(words)))
    np.testing.assert_allclose(scheduled(w, x), grad(w, x), rtol=1e-6)
    with pytest.raises(ScheduleError, match="missing"):
        jaxpp.schedule(grad, FromTable(from_tasks([words[0], words[1][:-1]])))(w, x)
    with pytest.raises(
        ValueError, match="for 2 stages and 1 microbatches only, got 2 stages and 2"
    ):
        jaxpp.schedule(grad, FromTable(OneFOneB().table(2, 1)))(w, x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: from_tasks([["F0.0"], ["F0.0", "X1.2"]]),
            "'X1.2' in place 1 of rank 1 is no task",
        ),
        (lambda: from_tasks([[3]]), "3 in place 0 of rank 0 is no task; write a Task, or"),  # pyright: ignore
        (lambda: from_tasks([["F0.0"]], overlaps=["F0"]), "'F0' of the overlaps is no task"),
        (lambda: from_tasks([[], []]), "got 2 ranks without any"),
        (lambda: from_csv("0F0,0Z1\n"), "'0Z1' in cell 2 of row 1 is no action of torch's"),
        (lambda: from_csv("0F0\n1F\n"), "'1F' in cell 1 of row 2 is no action of torch's"),
        (lambda: from_csv("(0F0;1X0)OVERLAP_F_B\n"), "'1X0' in cell 1 of row 1"),
        (lambda: from_csv("(0F0;1B0)OVERLAP\n"), r"'\(0F0;1B0\)OVERLAP' in cell 1 of row 1"),
        (lambda: from_csv(""), "got 0 ranks without any"),
    ],
)
def test_errors_name_the_value_the_place_and_the_way_out(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@given(st.sampled_from(ALL), st.sampled_from([2, 4]), st.integers(4, 8).map(lambda half: 2 * half))
def test_a_table_survives_torchs_format(schedule, p, m):
    table = of_size(schedule, p, m)
    again = from_csv(
        to_csv(table),
        placement=table.placement,
        stage_inputs=table.stage_inputs,
        direction_of=table.direction_of,
    )
    assert again == table


def test_the_stage_comes_first_and_pairs_share_a_cell():
    table = from_tasks([["F0.1", "F3.2", "B0.7", "R3.2", "I3.2", "W2.0"]], overlaps=["F3.2"])
    assert to_csv(table) == "0F1,(3F2;0B7)OVERLAP_F_B,3R2,3I2,2W0\n"
    assert from_csv(to_csv(table)) == from_tasks([["0F1", "3F2", "0B7", "3R2", "3I2", "2W0"]],
                                                 overlaps=["3F2"])  # fmt: skip


def test_idle_steps_and_what_follows_from_the_data_flow_are_skipped():
    text = (
        "0UNSHARD,0F0,0SEND_F0,0WAIT_SEND_F0,,0RECV_B0,0I0,0W0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,"
        "0RESHARD\r\n,1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0\r\n"
    )
    ranks = from_csv(text).ranks
    assert [list(map(str, tasks)) for tasks in ranks] == [
        ["F0.0", "I0.0", "W0.0"],
        ["F1.0", "B1.0"],
    ]


@pytest.mark.parametrize("path", sorted(TORCH_FILES.glob("*.csv")), ids=lambda path: path.stem)
def test_tables_of_torch_are_sound(path):
    table = from_csv(path.read_text())
    assert (table.num_ranks, table.num_stages, table.num_microbatches) == (4, 8, 8)
    check(table)
    assert bool(table.overlaps) == ("DualPipeV" in path.stem)


def test_dualpipe_v_is_that_of_torch_with_and_without_its_transfers():
    ours = DualPipeV().table(8, 8)
    for name in ("ScheduleDualPipeV", "ScheduleDualPipeV_comms"):
        theirs = from_csv((TORCH_FILES / f"{name}.csv").read_text())
        assert theirs.ranks == ours.ranks and theirs.overlaps == ours.overlaps


# From here on torch itself reads and writes, where it is installed (not part of the tests' extra).


@pytest.fixture(scope="module")
def torch_schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_stages(p: int, v: int):
    """What torch's schedules ask of their stages, for rank 0."""
    return [
        types.SimpleNamespace(
            stage_index=0, group_rank=0, group_size=p, num_stages=p * v, group=None,
            has_backward=True, submod=None, is_first=True, is_last=p * v == 1,
        )
        for _ in range(v)
    ]  # fmt: skip


def torch_knows(table: Table) -> bool:
    """Whether a table is of the sort that torch runs: trained, each stage once, a chain."""
    chain = table.stage_inputs is None
    return chain and len(table.directions) == 1 and not table.forward_only


def as_tasks(actions) -> list[Task]:
    """Flattens torch's actions to tasks."""
    flat = [a for action in actions if action for a in (action.sub_actions or (action,))]
    return [
        Task(Kind(a.computation_type.value), a.stage_index, a.microbatch_index) for a in flat
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_torch_reads_every_action(torch_schedules, schedule):
    table = of_size(schedule, 4, 8)
    lines = to_csv(table).splitlines()
    for line, tasks in zip(lines, table.ranks, strict=True):
        actions = [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        assert as_tasks(actions) == list(tasks)
        assert ",".join(map(str, actions)) == line
        pairs = [a for a in actions if a.computation_type == torch_schedules.OVERLAP_F_B]
        assert len(pairs) == len(table.overlaps & set(tasks))


@pytest.mark.parametrize(
    "schedule",
    [s for s in ALL if torch_knows(of_size(s, 4, 8))],
    ids=repr,
)
def test_torch_loads_and_lowers_our_file(torch_schedules, schedule, tmp_path):
    """Lowering places every transfer, for which torch runs the ranks against each other."""
    v, table = schedule.stages_per_rank, of_size(schedule, 4, 8)
    path = tmp_path / "table.csv"
    path.write_text(to_csv(table))
    runtime = torch_schedules._PipelineScheduleRuntime(
        torch_stages(4, v), 8, loss_fn=lambda *_: None
    )
    runtime._load_csv(str(path), format="compute_only")
    assert [as_tasks(runtime.pipeline_order[r]) for r in range(4)] == [*map(list, table.ranks)]
    assert runtime.stage_index_to_group_rank == dict(enumerate(table.directions[0]))
    assert "Rank 3" in torch_schedules._format_pipeline_order(runtime.pipeline_order)
    runtime._dump_csv(str(path), format="compute_comms")
    again = from_csv(path.read_text())
    assert (again.ranks, again.overlaps) == (table.ranks, table.overlaps)


@pytest.mark.parametrize(
    ("name", "v"),
    [
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleaved1F1B", 3),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16)])
def test_tables_that_torch_makes_are_sound(torch_schedules, name, v, p, m, tmp_path):
    make = getattr(torch_schedules, name)
    schedule = make(torch_stages(p, v), m, loss_fn=lambda *_: None)
    path = tmp_path / "table.csv"
    for form in ("compute_only", "compute_comms"):
        schedule._dump_csv(str(path), format=form)
        table = from_csv(path.read_text())
        check(table)
        assert (table.num_ranks, table.num_stages, table.num_microbatches) == (p, p * v, m)
        assert table.directions[0] == tuple(
            schedule.stage_index_to_group_rank[s] for s in range(p * v)
        )
    if name == "ScheduleDualPipeV":
        assert table.ranks == DualPipeV().table(2 * p, m).ranks


def test_torchs_own_way_to_write_a_table_is_ours(torch_schedules, tmp_path):
    schedule = torch_schedules.ScheduleDualPipeV(torch_stages(4, 2), 8, loss_fn=lambda *_: None)
    path = tmp_path / "table.csv"
    schedule._dump_csv(str(path), format="compute_only")
    assert path.read_text() == to_csv(DualPipeV().table(8, 8))
    assert from_csv(to_csv(GPipe().table(4, 2))).ranks == GPipe().table(4, 2).ranks


def test_a_field_of_a_schedule_of_ones_own_comes_first():
    """`stages_per_rank` has its place only in the class that writes it."""

    @dataclasses.dataclass(frozen=True)
    class Mine(Schedule):
        more: int = 1
        stages_per_rank: int = 2

        def orders(self, num_ranks, num_microbatches):
            return ()

    assert repr(Mine(3)).endswith("Mine(more=3, stages_per_rank=2)")
    assert (Mine(3).more, Mine(3).stages_per_rank, Mine(3, 4).num_ranks(8)) == (3, 2, 2)
    with pytest.raises(ValueError, match="stages_per_rank to be an integer of at least 1, got 0"):
        Mine(1, 0)
