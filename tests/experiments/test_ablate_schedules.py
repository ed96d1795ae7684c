"""The grid of schedules: what is simulated, what is measured, and how two runs compare."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import ablate_schedules
from experiments.ablate_schedules import Row
from jaxpp.schedules import OneFOneB, Schedule, VMin, building_blocks


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script with some flags; gives its rows. Without more flags it is small."""
    monkeypatch.setattr(ablate_schedules, "make_devices", lambda: None)  # conftest.py makes them

    def run(**values):
        small = dict(schedules="1f1b", ranks=["2"], microbatches=["4"], caps=[], output=tmp_path)
        flags.FLAGS.mark_as_parsed()
        with flagsaver.flagsaver(**(small | values | {"output": str(tmp_path)})):
            ablate_schedules.main([])
        return ablate_schedules.read(tmp_path / "results.csv")

    return run


def test_the_whole_catalogue_is_simulated_and_what_does_not_fit_has_a_reason(run, tmp_path, capsys):
    rows = {
        row.schedule: row for row in run(schedules=",".join(ablate_schedules.NAMES), ranks=["3"])
    }
    assert set(rows) == set(ablate_schedules.NAMES)
    one_f_one_b = rows["1f1b"]  # (p - 1)(F + B) of bubble beside m(F + B) of work
    assert one_f_one_b.makespan == 18.0 and one_f_one_b.peak_memory == 3.0
    assert math.isclose(one_f_one_b.bubble or 0.0, 1 / 3)
    assert "even" in rows["dualpipe"].reason and rows["dualpipe"].bubble is None
    shown = capsys.readouterr().out
    assert rows["dualpipe"].reason in shown and "zb_h1" in shown
    assert (tmp_path / "bubbles.png").stat().st_size > 10_000


def test_costs_and_memory_are_those_of_a_rank_whatever_its_stages(run):
    rows = run(schedules="1f1b,v_min,dualpipe", ranks=["4"], microbatches=["8"])
    by_name = {row.schedule: row for row in rows}
    work = 8 * 3.0
    for row in rows:  # the work of a rank is the same: what is not bubble
        assert math.isclose(row.makespan * (1 - row.bubble), work)  # pyright: ignore
    assert by_name["v_min"].stages_per_rank == 2
    in_stages = max(VMin().table(8, 8).peak_in_flight())
    assert by_name["v_min"].peak_memory == in_stages / 2
    assert by_name["dualpipe"].parameters == 2 and by_name["1f1b"].parameters == 1


def test_flags_change_the_cost_model(run):
    (plain,) = run(schedules="zb_h1")
    (slower,) = run(schedules="zb_h1", latency=0.5)
    (larger,) = run(schedules="zb_h1", input_grad_memory=1.0)
    assert slower.makespan > plain.makespan and slower.peak_memory == plain.peak_memory
    assert larger.makespan == plain.makespan and larger.peak_memory > plain.peak_memory


def test_synthesized_tables_keep_to_their_caps(run):
    rows = run(schedules="", ranks=["4"], microbatches=["8"], caps=["0.5", "1", "0.1"])
    by_name = {row.schedule: row for row in rows}
    assert len(rows) == 6 and all(row.is_synthesized for row in rows)
    for cap in (0.5, 1.0):
        assert by_name[f"synthesized v {cap:g}"].peak_memory <= 4 * cap
    assert by_name["synthesized chain 1"].makespan == 27.0  # proved optimal
    assert by_name["synthesized v 1"].makespan == 25.5
    assert by_name["synthesized v 0.1"].reason and by_name["synthesized v 0.1"].makespan is None


def test_the_front_has_what_nothing_beats():
    points = [(1, 0.5), (2, 0.5), (2, 0.3), (3, 0.4), (4, 0.1)]
    rows = [Row(str(n), 2, 4, peak_memory=m, bubble=b) for n, (m, b) in enumerate(points)]
    assert [row.schedule for row in ablate_schedules.pareto_front(rows)] == ["0", "2", "4"]


def test_schedules_are_measured(run, tmp_path, capsys):
    tiny = dict(measure=True, width=8, sequence_length=8, sequences=1, repeats=1, layers=["1", "2"])
    too_few, row = run(**tiny)
    assert (too_few.layers, row.layers) == (1, 2) and "2 stages need" in too_few.reason
    assert row.measured and row.predicted and row.predicted_from_tasks_alone
    assert row.shortest_task and row.shortest_task < row.predicted
    assert row.error == row.predicted / row.measured - 1
    shown = capsys.readouterr().out
    assert "predicted ms" in shown and "largest error" in shown
    assert (tmp_path / "predictions.png").stat().st_size > 10_000


@dataclasses.dataclass(frozen=True)
class Patient(Schedule):
    """1F1B with more warm-up."""

    more: int = 1

    def orders(self, num_ranks, num_microbatches):
        for rank in range(num_ranks):
            passes = [(rank, i) for i in range(num_microbatches)]
            warmup = num_ranks - 1 - rank + self.more
            yield building_blocks.one_forward_one_backward(passes, passes, warmup)


def layers_of_my_own(key, num_microbatches):
    params = [0.3 * jax.random.normal(k, (8, 8)) for k in jax.random.split(key, 4)]

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss_fn, params, jax.random.normal(key, (2 * num_microbatches, 8))


def test_a_schedule_and_a_model_of_ones_own_are_ablated(run):
    here = "tests.experiments.test_ablate_schedules"
    rows = run(
        schedules=f"1f1b,{here}:Patient(more=2),interleaved_1f1b(stages_per_rank=2)",
        model=f"{here}:layers_of_my_own",
        measure=True,
        repeats=1,
    )
    assert [row.schedule for row in rows][1:] == [
        f"{here}:Patient(more=2)",
        "interleaved_1f1b(stages_per_rank=2)",
    ]
    assert [row.peak_memory for row in rows] == [2.0, 4.0, 2.5]
    assert all(row.measured and row.predicted for row in rows)


@pytest.mark.slow
def test_steps_on_worker_processes_are_timed(run):
    (row,) = run(model=f"{__name__}:layers_of_my_own", measure=True, repeats=2, mesh="ray")
    assert row.measured and row.fastest and row.predicted is None


def test_the_machine_of_the_flags_is_simulated(run):
    (plain,) = run()
    (slow,) = run(speeds=["1", "0.5"])
    (late,) = run(update=3.0)
    (shared,) = run(transfer=4.0, shared_links=True)
    (free,) = run(transfer=4.0)
    (blocked,) = run(transfer=4.0, blocking_sends=True)
    assert late.makespan == plain.makespan + 3
    assert slow.makespan > plain.makespan
    assert plain.makespan < free.makespan < shared.makespan <= blocked.makespan


def test_a_run_is_compared_with_another(run, tmp_path, capsys):
    run(schedules="1f1b,gpipe", ranks=["2", "4"])
    other = tmp_path / "other.csv"
    (tmp_path / "results.csv").rename(other)
    capsys.readouterr()
    run(schedules="1f1b,zb_h1", compare=str(other))
    assert "1 alike, 0 different, 1 only here, 3 only there" in capsys.readouterr().out
    run(forward=2.0, compare=str(other))
    shown = capsys.readouterr().out
    # p = 2, m = 4: 5 times F + B, so that the makespan goes from 15 to 20.
    assert "1f1b (2 ranks, 4 microbatches): makespan 15 -> 20 (+33.3%)" in shown
    assert "0 alike, 1 different, 0 only here, 3 only there" in shown


def test_rows_survive_the_file(tmp_path):
    full = Row("1f1b", 2, 4, "", 1, 1, 15.0, 0.2, 0.2, 2.0, 8, 0.0, 0.005, 0.1, 0.09, 0.11, 0.1)
    rows = [full, Row("dualpipe", 3, 4, reason="needs an even number, got 3")]
    ablate_schedules.write(rows, tmp_path / "rows.csv")
    assert ablate_schedules.read(tmp_path / "rows.csv") == rows


def test_another_file_is_not_compared_with(run, tmp_path):
    (tmp_path / "other.csv").write_text("name,time\n1f1b,3\n")
    with pytest.raises(SystemExit, match="name, time"):
        run(compare=str(tmp_path / "other.csv"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": ["two"]}, "--ranks takes positive numbers, got 'two'"),
        ({"microbatches": ["0"]}, "--microbatches takes positive numbers, got '0'"),
        ({"caps": ["inf"]}, "--caps takes positive numbers, got 'inf'"),
        ({"schedules": "2f2b"}, "--schedules=2f2b: there is no schedule named '2f2b'; use one of"),
        ({"schedules": "gpipe(2)"}, "write its knobs by name"),
        ({"speeds": ["1"]}, "--speeds has 1 numbers; give one for each rank"),
        ({"model": "nothing:here", "measure": True}, "--model=nothing:here is no package.module"),
        ({"width": 6}, "--width must be a multiple of 4, got 6"),
    ],
)
def test_wrong_flags_are_named(run, values, message):
    with pytest.raises(SystemExit, match=message):
        run(**values)


def test_the_script_knows_the_peak_of_1f1b_as_the_table_does(run):
    (row,) = run(ranks=["4"], microbatches=["8"])
    assert row.peak_memory == max(OneFOneB().table(4, 8).peak_in_flight())
