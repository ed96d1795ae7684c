"""Four ranks in one, two and four processes, however started: all is as in one process, bitwise."""

import functools
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxpp
from tests.runtime.launched import jobs, script
from tests.runtime.launched.test_smoke import check_bitwise, expected

CASES = ("plain", "interleaved4", "zero_bubble", "offload4", "replicas4", "callbacks4")

pytestmark = [pytest.mark.slow]
expected = functools.cache(expected)


def check_saved(folder, case):
    """The checkpoint is that of one process, to the bit."""
    _, state = expected(case)
    saved = jaxpp.load_state(folder / "saved", script.begin(script.CASES[case][1]))
    for one, other in zip(jax.tree.leaves(saved), state, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_launched_processes(tmp_path, case, count):
    jobs.Job(count, case, tmp_path, "save").succeed()
    check_bitwise(tmp_path, case, count)
    check_saved(tmp_path, case)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("case", ["interleaved4", "zero_bubble"])
def test_mpirun(tmp_path, case, count):
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-n", str(count), "--oversubscribe", sys.executable, str(jobs.SCRIPT)]
    environment = jobs.environment() | allowed
    subprocess.run(
        [*command, case, str(tmp_path), "save"], env=environment, check=True, timeout=300
    )
    check_bitwise(tmp_path, case, count)
    check_saved(tmp_path, case)


@pytest.mark.parametrize("launcher", ["slurm", "open_mpi", "mpich", "jax_itself"])
def test_variables_of_four_processes(tmp_path, launcher):
    jobs.Job(4, "zero_bubble", tmp_path, "save", launcher=launcher).succeed()
    check_bitwise(tmp_path, "zero_bubble", 4)
    check_saved(tmp_path, "zero_bubble")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_workers_of_ray(ray_session, tmp_path, case, ranks):
    with jaxpp.RemoteMpmdMesh(*script.axes_of(case), ranks_per_process=ranks) as mesh:
        losses, state = script.train(case, mesh, tmp_path / "saved")
    own, others = expected(case)
    assert losses == own
    for one, other in zip(state, others, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    check_saved(tmp_path, case)
