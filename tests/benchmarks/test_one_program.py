"""The program of a table hands on what the table says, and computes the placed step's gradients."""

import re

import chex
import jax
import numpy as np
import optax
import pytest

import jaxpp
from benchmarks.equal_blocks import Loop, draw, placed_step
from jaxpp.schedules import GPipe, OneFOneB
from tests.scripts import load_script

TABLES = [GPipe().table(4, 8), OneFOneB().table(4, 8), OneFOneB().table(2, 5), GPipe().table(3, 1)]


@pytest.fixture
def script(monkeypatch):
    script = load_script("benchmarks.one_program")
    monkeypatch.setattr(script.module.jax.config, "update", lambda *_: None)  # conftest.py did
    return script


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_each_task_finds_its_input_and_what_its_forward_kept(script, table):
    ticks, ranks = script.module.Ticks.of(table), table.num_ranks
    ups, downs, kept = ([{} for _ in range(ranks)] for _ in range(3))
    done = [[] for _ in range(ranks)]
    for kind, microbatch, slot, taken, up, down in zip(
        ticks.kind, ticks.microbatch, ticks.kept, ticks.taken, ticks.up, ticks.down, strict=True
    ):
        makes = [
            {1: "F", 2: "B"}[k] + str(m) if k else "" for k, m in zip(kind, microbatch, strict=True)
        ]
        for rank, made in enumerate(makes):
            if made.startswith("F"):
                assert rank == 0 or ups[rank][taken[rank]] == made
                kept[rank][slot[rank]] = microbatch[rank]
            elif made:
                from_loss = rank == ranks - 1
                assert downs[rank][taken[rank]] == ("F" if from_loss else "B") + made[1:]
                assert kept[rank][slot[rank]] == microbatch[rank]
            if made:
                done[rank].append(made)
        for rank in range(ranks):
            ups[rank][up[rank]] = makes[rank - 1] if rank else ""
            downs[rank][down[rank]] = makes[min(rank + 1, ranks - 1)]
    assert done == [[f"{t.kind}{t.microbatch}" for t in order] for order in table.ranks]
    assert ticks.slots[0] == max(table.peak_in_flight())


def test_the_time_in_lockstep_is_that_of_the_longest_tasks(script):
    """GPipe has ticks of forwards, then of backwards; in 1F1B they are side by side."""
    for schedule, expected in ((GPipe(), 1.0), (OneFOneB(), 40 / 33)):
        table = schedule.table(4, 8)
        timeline = jaxpp.schedules.simulate(table)
        assert script.module.lockstep(script.module.Ticks.of(table), timeline) == expected


@pytest.mark.parametrize("branch", ["loop", "switch"])
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=str)
def test_two_steps_are_those_of_the_placed_step(script, schedule, branch):
    optimizer = optax.sgd(0.1, momentum=0.9)
    state, batch = draw(4, 8, 12, optimizer)
    mesh = jaxpp.MpmdMesh((4,), ("mpmd",), devices=jax.devices()[:4])
    placed = Loop(placed_step(schedule, 4, 6, optimizer, mesh), state, batch)
    perform = script.module.PERFORM[branch]
    program, spread = script.module.program_step(schedule.table(4, 6), optimizer, state, perform)
    one = Loop(program, (spread,), batch)
    for _ in range(2):
        (expected, loss), ((found,), own_loss) = placed(), one()
        expected = script.module.stacked(jax.device_get(expected))
        leaves = [jax.tree.leaves(tree) for tree in (jax.device_get(found), expected)]
        chex.assert_trees_all_close(*leaves, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(own_loss, loss, rtol=1e-5)
    assert max(np.abs(x).max() for x in leaves[0]) > 0.1


def test_the_report_compares_the_three(script, capsys):
    script.main(sizes=["8:2"], schedules=["1f1b"], microbatches=4, repeats=2)
    shown = capsys.readouterr().out
    for pair in ("program / placed", "program / plain", "placed / plain"):
        assert re.search(rf"{pair}: [\d.]+ \(quartiles .*first call [\d.]+", shown)
    difference = re.search(r"differ by ([\d.e+-]+) from placed", shown)
    assert difference and float(difference[1]) < 1e-6
    assert "4 slots (table 4 to 1)" in shown
