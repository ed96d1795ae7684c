"""Launched jobs whose messages `jax.device_put` moves: the same laws as over sockets."""

import os
import signal
import time

import pytest

from tests.runtime.launched.jobs import Job
from tests.runtime.launched.test_launched_faults import LIMIT, started
from tests.runtime.launched.test_smoke import check_bitwise


@pytest.fixture(autouse=True)
def transport(monkeypatch):
    monkeypatch.setenv("JAXPP_TEST_TRANSPORT", "device_put")


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("plain", 2),
        ("interleaved", 2),
        ("zero_bubble", 2),
        ("offload", 2),
        ("replicas", 2),
        ("callbacks", 2),
        ("plain", 4),
        ("zero_bubble", 4),
        ("plain", 1),
    ],
)
def test_steps_are_bitwise_those_of_the_local_mesh(tmp_path, case, count):
    Job(count, case, tmp_path).succeed()
    check_bitwise(tmp_path, case, count)


def test_all_that_a_mesh_does_is_there_and_the_order_is_proven(tmp_path):
    Job(2, "composes", tmp_path).succeed()
    for number in range(2):
        assert "transfers between processes are proven" in (tmp_path / f"notes{number}").read_text()


def test_a_script_may_have_one_mesh_after_the_other(tmp_path):
    Job(2, "twice", tmp_path).succeed()
    assert (tmp_path / "loss0").read_text() == (tmp_path / "loss1").read_text() != ""


def test_a_step_whose_transfers_would_wait_for_each_other_is_not_placed(tmp_path):
    for output in Job(2, "disordered", tmp_path).succeed():
        assert "The order of transfers has " in output


def test_a_mesh_that_comes_after_the_first_use_of_jax_says_so_in_all_processes(tmp_path):
    codes, outputs = zip(*Job(2, "late", tmp_path).wait(), strict=True)
    assert codes == (1, 1)
    assert all("has to be asked for before JAX is used" in output for output in outputs)
    assert outputs[0].startswith("rank 1 ")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT"])
def test_a_signal_to_one_process_ends_the_other(tmp_path, name, victim):
    job, other = started(tmp_path, "none"), 1 - victim
    before = time.monotonic()
    os.kill(job.processes[victim].pid, getattr(signal, name))
    code = job.processes[other].wait(30)
    took = time.monotonic() - before
    found = job.wait(30)
    assert code != 0 and took < LIMIT
    # JAX ends the other at once where the first process, which has its coordinator, has died.
    told = f"jaxpp.RankError: rank {victim} (process {job.processes[victim].pid} on "
    assert told in found[other][1] or (victim == 0 and "JAX distributed service" in found[1][1])
    print(f"{name} of process {victim}: {took:.2f} s")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raises", "has failed in the script: ValueError: a bad loss: "),
        ("feed", "has failed in the function that feeds "),
        ("other", "do not make the same calls"),
    ],
)
def test_what_a_script_does_otherwise_in_one_process_ends_all(tmp_path, fault, told):
    found = Job(2, "faulty", tmp_path, fault).wait(90)
    assert all(code != 0 for code, _ in found)
    assert any(told in output for _, output in found), found
