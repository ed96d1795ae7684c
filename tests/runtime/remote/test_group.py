"""What a group of workers checks before they run."""

import threading
import unittest.mock
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from jaxpp.runtime.remote import _environment, _group  # noqa: E402
from jaxpp.runtime.remote._group import WorkerMember  # noqa: E402
from jaxpp.runtime.site._group import versions  # noqa: E402


def test_a_driver_on_another_platform_is_warned_once(recwarn):
    group: Any = object.__new__(_group.WorkerGroup)
    group._warned, group.members = False, [SimpleNamespace(hello=SimpleNamespace(platform="gpu"))]
    for _ in range(2):
        group.agree(0, None)
    (warning,) = recwarn
    for part in ("on cpu in this process", "on gpu in the workers", "cudnn", "PREALLOCATE=false"):
        assert part in str(warning.message)
    _environment.warn_of_platform("gpu", "gpu")
    assert len(recwarn) == 1


def test_a_worker_with_a_gpu_that_runs_on_cpu_is_refused():
    group, member = object.__new__(_group.WorkerGroup), WorkerMember(0, (3,))
    group._settings = unittest.mock.Mock(gpus_per_rank=1.0, environment={"JAX_PLATFORMS": "cpu"})
    told = r"rank 3 \(process 7 on b .* has a GPU, for gpus_per_rank=1, but .* CPU there, with "
    told += "JAX_PLATFORMS='cpu'"
    with pytest.raises(RuntimeError, match=told):
        member.hello = unittest.mock.Mock(platform="cpu", host="b", address="a", pid=7)
        group._check(member)
    member.hello = unittest.mock.Mock(platform="cuda", versions=versions())
    group._check(member)


def test_what_an_interrupted_restart_has_left_is_shut_down(monkeypatch):
    for name in ("release_places", "leave_session"):
        monkeypatch.setattr(_group, name, unittest.mock.Mock())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(_group, "_wait", lambda references, timeout: True)
    monkeypatch.setattr(ray, "kill", unittest.mock.Mock())
    group: Any = object.__new__(_group.WorkerGroup)
    group._watch = group._flying = group._reservation = group._session = unittest.mock.Mock()
    started = unittest.mock.Mock()
    group.members = [WorkerMember(0, (0,)), WorkerMember(1, (1,), actor=started)]
    group.order, group.stopped = threading.RLock(), False
    group.stop()
    started.close.remote.assert_called_once_with()
    ray.kill.assert_called_once_with(started)


@pytest.mark.parametrize(
    ("nodes", "address", "fits"),
    [
        (["here", "here"], None, True),
        (["here", "there"], None, False),
        (["there", "there"], None, False),  # the driver has to reach them, too
        (["there", "there"], "auto", True),
    ],
)
def test_ranks_on_another_node_than_the_driver_need_an_address(monkeypatch, nodes, address, fits):
    """Nodes of one machine have one address, and differ in Ray's number of them."""
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    places = [[SimpleNamespace(node_id=node, address="10.0.0.1")] for node in nodes]
    group: Any = object.__new__(_group.WorkerGroup)
    group._reservation = SimpleNamespace(places=places)
    group._settings = SimpleNamespace(address=address)
    if fits:
        group._check_nodes()
        return
    with pytest.raises(
        ValueError, match=r"there \(10\.0\.0\.1\), not all on here,.*address='auto'"
    ):
        group._check_nodes()
