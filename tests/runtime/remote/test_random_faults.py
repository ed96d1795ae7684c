"""Runs with a random fault each: none hangs, each ends with the right error, each goes on bitwise.

`JAXPP_FAULTS` is the number of runs, `JAXPP_FIRST_FAULT` that of the first; each is the same
whenever it is run. `python -m benchmarks.random_faults` makes many, and prints a table.
"""

import os

import pytest

pytest.importorskip("ray")

import jaxpp  # noqa: E402
from benchmarks import faults  # noqa: E402

FIRST, RUNS = (
    int(os.environ.get(f"JAXPP_{n}", d)) for n, d in (("FIRST_FAULT", 0), ("FAULTS", 20))
)

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def bench(ray_session):
    with jaxpp.RemoteMpmdMesh((3,)) as mesh:
        yield faults.Bench.on(mesh)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_a_run_goes_on_after_a_random_fault(bench, tmp_path, seed):
    fault = faults.Fault.random(seed, bench.mesh.num_ranks)
    with faults.deadline(120):
        try:
            faults.run_with_fault(bench, fault, tmp_path, seed)
        except BaseException:
            bench.mesh.restart()
            bench.train_once()  # the next run starts with workers that have the step
            raise
