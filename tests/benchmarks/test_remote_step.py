"""What the benchmark of worker processes compares is the same program, and its figures add up."""

import importlib.util
import json
import math
import sys
import types

import jax
import numpy as np
import pytest

import jaxpp
from benchmarks import equal_blocks, speedup
from benchmarks.empty_pipeline import LEARNING_RATE, TORCH_SCHEDULES, EmptyPipeline
from jaxpp.schedules import Kind, OneFOneB
from tests.scripts import load_script


@pytest.fixture
def script():
    return load_script("benchmarks.remote_step")


@pytest.fixture
def run(script, tmp_path, monkeypatch):
    """Runs the script with some flags; gives its figures."""
    # conftest.py makes the devices.
    monkeypatch.setattr(script.module, "make_devices", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", "local")

    def run(**values):
        small = dict(ranks=["2"], microbatches=["4"], steps=2, blocks=1, memory_steps=20)
        script.main(**(small | values | {"json": str(tmp_path / "figures.json")}))
        return json.loads((tmp_path / "figures.json").read_text())

    return run


def losses_by_hand(pipeline, steps):
    """The losses of the first steps, by derivatives written out in float64."""
    weights = list(pipeline.weights().astype(np.float64))
    x, y = pipeline.batch()
    for _ in range(steps):
        activations = [x.astype(np.float64)]
        for w in weights:
            activations.append(np.tanh(activations[-1] @ w))
        yield np.mean((activations[-1] - y) ** 2)
        cotangent = 2 * (activations[-1] - y) / y.size
        for n in reversed(range(len(weights))):
            cotangent = cotangent * (1 - activations[n + 1] ** 2)
            gradient = activations[n].T @ cotangent
            cotangent = cotangent @ weights[n].T
            weights[n] = weights[n] - LEARNING_RATE * gradient


@pytest.mark.parametrize("schedule", TORCH_SCHEDULES)
def test_the_empty_pipeline_trains_as_written_out(script, schedule):
    pipeline = EmptyPipeline(ranks=2, microbatches=4, schedule=schedule)
    mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=jax.devices()[:2])
    loop = script.module.empty_loop(pipeline, mesh)
    expected = list(losses_by_hand(pipeline, 3))
    np.testing.assert_allclose([float(loop()[1]) for _ in expected], expected, rtol=1e-5)
    tasks = sum(len(order) for order in _table(pipeline).ranks)
    assert tasks == pipeline.num_tasks


def _table(pipeline):
    schedule = jaxpp.schedules.by_name(pipeline.schedule)
    return schedule.table(pipeline.num_stages, pipeline.microbatches)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no torch")
def test_torch_trains_the_same_pipeline(run):
    # It raises where the losses differ.
    (row,) = run(parts=["empty"], torch_python=sys.executable)["empty"]
    assert row["call/torch"] == row["call_us"] / row["torch_us"]


def test_the_prediction_is_the_closed_form_of_1f1b():
    equal = {(kind, stage): t for kind, t in ((Kind.F, 1.0), (Kind.B, 2.0)) for stage in (0, 1)}
    assert speedup.TaskTimes(equal, 0.0).predicted_step(OneFOneB(), 16) == 3 * (16 + 1)
    # What is around the tasks is shared as the tasks are, and has no bubble.
    assert speedup.TaskTimes(equal, 4.0).predicted_step(OneFOneB(), 16) == 3 * (16 + 1) + 2
    unequal = equal | {(Kind.B, 1): 6.0}
    assert speedup.TaskTimes(unequal, 0.0).predicted_step(OneFOneB(), 16) > 7 * 16


def test_a_step_is_predicted_of_each_tasks_own_time():
    """Two microbatches on two ranks: a slow backward is waited for; updates are side by side."""
    seconds = dict.fromkeys(["F0.0", "F0.1", "F1.0", "F1.1"], 1)
    seconds |= {"B0.0": 2, "B0.1": 5, "B1.0": 2, "B1.1": 2}
    runs = [
        types.SimpleNamespace(label=label, rank=int(label[1]), start=10.0, end=10.0 + n)
        for label, n in seconds.items()
    ]
    runs += [
        types.SimpleNamespace(label="update", rank=rank, start=0.0, end=3.0 + rank)
        for rank in range(2)
    ]
    costs, around = speedup.costs_of(runs)
    # F0.0 1, then F1.0 B1.0 F1.1 B1.1 on the other rank until 7, and B0.1 after them.
    assert (speedup.simulated(costs, OneFOneB(), 2), around) == (12, 4)


def test_the_baseline_trains_as_two_ranks_do():
    sizes = speedup.Sizes(examples=2, microbatches=4, width=8)
    mesh = jaxpp.MpmdMesh((2,), ("mpmd",), devices=jax.devices()[:2])
    state, batch = speedup.start(sizes)
    step = speedup.placed(sizes, OneFOneB(), mesh)
    placed, plain = equal_blocks.Loop(step, state, batch), speedup.plain_loop(sizes)
    for _ in range(3):
        np.testing.assert_allclose(float(placed()[1]), float(plain()[1]), rtol=1e-5)


@pytest.mark.slow
def test_a_mesh_of_processes_is_measured(run, capsys):
    figures = run(parts=["empty", "launched", "threads", "local", "memory"], steps=20)
    (empty,), (launched,), (local,) = (figures[part] for part in ("empty", "launched", "local"))
    assert launched["launched/workers"] == launched["launched_us"] / launched["workers_us"] > 0
    for of in ("0", "1", "driver"):  # in a worker a thread of Ray's dispatches
        busiest = max((row for row in figures["threads"] if row["of"] == of), key=lambda r: r["us"])
        assert 50 < busiest["us"] < 1e6 and busiest["sleeps"] > 0
    assert math.isclose(empty["call_us"], empty["call_us_per_task"] * 2 * 2 * 4)
    assert "torch_us" not in empty
    assert local["dispatch"] == local["dispatch_us"] / local["local_dispatch_us"]
    assert 0 < local["dispatch_us"] < local["call_us"]
    held = {row["of"]: row for row in figures["memory"]}
    assert set(held) == {"driver", "rank 0", "rank 1", "object store"}
    assert held["rank 0"]["MiB before"] > 50 and held["rank 1"]["files after"] > 3
    # The step itself; what a call needs does not stay.
    assert held["object store"]["MiB after"] == held["object store"]["MiB before"] < 1
    shown = capsys.readouterr().out
    assert "torch is left out" in shown and "call_us" in shown and "rank 1" in shown


@pytest.mark.slow
def test_the_speedup_is_measured(run):
    rows = run(parts=["speedup"], task_ms=["2"], speedup_microbatches=4)["speedup"]
    assert [row["schedule"] for row in rows] == ["1f1b", "eager_1f1b"]
    for row in rows:
        for name in ("predicted", "predicted_alone"):
            assert math.isclose(row[f"speedup/{name}"] * row[name], row["speedup"])
            assert 0.5 < row[name] < 2 * 4 / (4 + 1) * 1.2
        best = min(row["plain_ms"], row["placed_on_one_ms"])
        assert math.isclose(row["speedup"], best / row["placed_on_two_ms"])
