"""Launched jobs: the same results as on the local mesh, however they are cut and started."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.runtime.launched import jobs
from tests.runtime.launched.jobs import Job
from tests.runtime.launched.test_smoke import check_bitwise


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("plain", 2),
        ("interleaved", 2),
        ("zero_bubble", 2),
        ("offload", 2),
        ("replicas", 2),
        ("plain", 1),
        ("plain", 4),
        ("zero_bubble", 4),
    ],
)
def test_steps_are_bitwise_those_of_the_local_mesh(tmp_path, case, count):
    Job(count, case, tmp_path).succeed()
    check_bitwise(tmp_path, case, count)


@pytest.mark.parametrize("launcher", [name for name in jobs.LAUNCHERS if name != "torchrun"])
def test_each_launcher_is_understood(tmp_path, launcher):
    Job(2, "interleaved", tmp_path, launcher=launcher).succeed()
    check_bitwise(tmp_path, "interleaved", 2)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_mpirun_starts_a_job(tmp_path):
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-n", "2", "--oversubscribe", sys.executable, str(jobs.SCRIPT)]
    environment = jobs.environment() | allowed
    subprocess.run([*command, "plain", str(tmp_path)], env=environment, check=True, timeout=120)
    check_bitwise(tmp_path, "plain", 2)


def test_all_that_a_mesh_does_is_there(tmp_path):
    outputs = Job(2, "composes", tmp_path).succeed()
    for number, output in enumerate(outputs):
        assert f"of LaunchedMpmdMesh((2,), ('mpmd',)) in process {number}" in output
        assert "overwrite=True" in (tmp_path / f"refused{number}").read_text()
    assert {"timeline.json", "profile-0", "profile-1"} <= set(os.listdir(tmp_path / "trace"))


def test_a_script_may_have_one_mesh_after_the_other(tmp_path):
    Job(2, "twice", tmp_path).succeed()
    assert (tmp_path / "loss0").read_text() == (tmp_path / "loss1").read_text() != ""


def test_a_generator_that_is_left_ends_its_mesh_well(tmp_path):
    Job(2, "left", tmp_path).succeed()


def test_orbax_manages_the_checkpoints_of_joined_processes_and_saves_before_preemption(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    Job(2, "managed", tmp_path).succeed()
