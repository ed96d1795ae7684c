"""A step on two workers, and ways in which it fails."""

import os

import psutil
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.core.generated.common_pb2")

from benchmarks import faults  # noqa: E402
from benchmarks.faults import Fault  # noqa: E402
from jaxpp.runtime import RankError  # noqa: E402
from tests.runtime.local.test_mesh import batch, init_params, start  # noqa: E402


def begin():
    return start(init_params(2))


def arm(mesh, tmp_path, kind, rank, call=1, position=0.5):
    note = tmp_path / "note.json"
    mesh.apply(faults.arm, {rank: (Fault(kind, rank, call, position), str(note))})
    return note


def fail(step, calls=3):
    """Calls the step until it fails."""
    with pytest.raises(RankError) as caught:
        state = begin()
        for n in range(calls):
            *state, loss = step(*state, batch(n))
        float(loss)
    return caught.value


def pid_of(process):
    return os.getpid()


def pids(mesh):
    return mesh.apply(pid_of, {rank: () for rank in range(mesh.num_ranks)})


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


class Unmade:
    """An array whose computation has failed."""

    error = RuntimeError("out of memory")

    def block_until_ready(self):
        raise self.error
