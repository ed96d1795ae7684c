"""Runs with a random fault each: none hangs, each ends with the right error, each goes on bitwise.

`JAXPP_FAULTS` is the number of runs, `JAXPP_FIRST_FAULT` that of the first; each is the same
whenever it is run.
"""

import os
import statistics

import psutil
import pytest

pytest.importorskip("ray")

import jaxpp  # noqa: E402
from tests.runtime.remote import faults  # noqa: E402

FIRST, RUNS = (
    int(os.environ.get(f"JAXPP_{n}", d)) for n, d in (("FIRST_FAULT", 0), ("FAULTS", 20))
)

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def bench(ray_session):
    with jaxpp.RemoteMpmdMesh((3,)) as mesh:
        yield faults.Bench.on(mesh)


def used():
    return psutil.Process().num_threads(), psutil.Process().num_fds()


@pytest.fixture(scope="module")
def outcomes(bench):
    found = []
    before = used()
    yield found
    print(f"\nthreads and files of the driver: {before} before the runs, {used()} after", end="")
    for kind in faults.KINDS:
        own = [o for o in found if o.fault.kind == kind]
        for what in ("detection", "restart", "total") if own else ():
            times = [getattr(o, what) for o in own]
            middle, most = statistics.median(times), max(times)
            print(f"\n{kind:6} {what:9} {len(own)} runs: median {middle:.2f} s, most {most:.2f} s")


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_a_run_goes_on_after_a_random_fault(bench, outcomes, tmp_path, seed):
    fault = faults.Fault.random(seed, bench.mesh.num_ranks)
    with faults.deadline(120):
        try:
            outcomes.append(faults.run_with_fault(bench, fault, tmp_path, seed))
        except BaseException:
            bench.mesh.restart()
            bench.train_once()  # the next run starts with workers that have the step
            raise
