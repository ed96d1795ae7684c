"""Joining a Ray session, holding room in it, and leaving nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest.mock
from pathlib import Path
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

from ray.util.placement_group import placement_group_table  # noqa: E402

from jaxpp.runtime.remote.cluster import _cluster, _environment, _session  # noqa: E402
from jaxpp.runtime.remote.group import _gang  # noqa: E402


@pytest.fixture(scope="module")
def session():
    session = _session.join_session("local")
    yield session
    _session.leave_session(session)


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A process in no session, on a machine where `ray start` has left none."""
    monkeypatch.setattr(_session.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return holds


def groups() -> list[str]:
    """The placement groups that hold resources, or wait for some."""
    return [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]


# Joining.


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("127.0.0.1:CLOSED", ConnectionError, "No Ray session answers at 127.0.0.1:"),
        ("auto", ConnectionError, "ray start --head"),
        ("ray://127.0.0.1:10001", ValueError, "Ray Client"),
        ("nonsense", ValueError, "HOST:PORT"),
    ],
)
def test_an_address_without_a_session_is_an_error_at_once(alone, address, error, words):
    start = time.monotonic()
    with pytest.raises(error, match=words):
        _session.join_session(address.replace("CLOSED", str(closed_port())))
    assert time.monotonic() - start < _session.CONNECT_TIMEOUT + 1


def test_ray_address_is_taken_where_none_is_given(alone, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port()}")
    with pytest.raises(ConnectionError, match="RAY_ADDRESS"):
        _session.join_session()


def test_what_a_crashed_session_has_left_is_not_waited_for(alone, monkeypatch):
    alone.write_text(f"127.0.0.1:{closed_port()}")
    started = []
    monkeypatch.setattr(_session, "_start", lambda: started.append(1))
    with pytest.warns(UserWarning, match="does not answer"):
        _session._open(None)
    assert started
    with pytest.raises(ConnectionError):
        _session._open("auto")


def test_a_session_that_answers_is_joined_as_ray_finds_it(alone, monkeypatch):
    connected = []
    monkeypatch.setattr(_session, "_connect", connected.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        _session._open(address)
        alone.write_text(address)
        _session._open(None)
        _session._open("auto")
    assert connected == [address, None, None]


def test_a_process_is_in_one_session(session):
    with pytest.raises(ValueError, match="one Ray session at a time"):
        _session.join_session("127.0.0.1:1")
    again = _session.join_session(session.address)
    assert again is session and again.started
    _session.leave_session(again)
    assert ray.is_initialized()


# Room.


def test_a_session_of_our_own_holds_more_ranks_than_cores(session):
    ranks = 3 * (os.cpu_count() or 1) + 5
    reservation = _cluster.reserve_places(session, ranks)
    places = [place for own in reservation.places for place in own]
    assert len(reservation.places) == ranks
    assert len({place.bundle for place in places}) == ranks
    assert [place.local_index for place in places] == list(range(ranks))
    assert {place.node_id for place in places} == {ray.get_runtime_context().get_node_id()}
    _cluster.release_places(reservation)
    assert wait_until(lambda: not groups(), 5)


def test_the_processes_of_a_rank_are_together(session):
    reservation = _cluster.reserve_places(session, 2, processes_per_rank=3, cpus_per_rank=0.6)
    bundles = [[place.bundle for place in own] for own in reservation.places]
    assert bundles == [[0, 0, 0], [1, 1, 1]]
    assert reservation.cpus == pytest.approx(0.2)
    _cluster.release_places(reservation)


def test_a_mesh_larger_than_the_session_is_an_error_that_says_what_is_there(session):
    with pytest.raises(ValueError) as error:
        _cluster.reserve_places(session, 4, cpus_per_rank=100)
    node = ray.nodes()[0]
    cpus = node["Resources"]["CPU"]
    assert "4 ranks with 100 CPU each" in str(error.value)
    assert f"{node['NodeManagerAddress']} ({socket.gethostname()}): {cpus:g} CPU" in str(
        error.value
    )
    with pytest.raises(ValueError, match="2 ranks with .* and 64 GPU each"):
        _cluster.reserve_places(session, 2, gpus_per_rank=64)
    assert not groups()


def test_two_meshes_on_one_set_of_resources_is_an_error_that_names_the_holder(session):
    cpus = ray.nodes()[0]["Resources"]["CPU"]
    first = _cluster.reserve_places(session, 1, cpus_per_rank=cpus)
    (name,) = groups()
    assert f"-{os.getpid()}-" in name
    with pytest.raises(TimeoutError, match=f"{cpus:g} CPU held by the placement group {name}"):
        _cluster.reserve_places(session, 1, cpus_per_rank=cpus, timeout=0.5)
    assert groups() == [name]
    _cluster.release_places(first)
    # This waits for the first's end.
    _cluster.release_places(_cluster.reserve_places(session, 1, cpus_per_rank=cpus))
    assert wait_until(lambda: not groups(), 5)


def test_an_interrupted_reservation_holds_nothing(session, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_cluster.PlacementGroup, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _cluster.reserve_places(session, 1)
    assert wait_until(lambda: not groups(), 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": 0}, "1 rank"),
        ({"ranks": 1, "cpus_per_rank": 0}, "some CPU"),
        ({"ranks": 1, "gpus_per_rank": 1.5}, "use 1 or 2"),
    ],
)
def test_a_request_that_makes_no_sense_is_an_error(session, arguments, words):
    with pytest.raises(ValueError, match=words):
        _cluster.reserve_places(session, **arguments)


# Workers.


class Worker:
    """What a worker finds when it starts."""

    def __init__(self, place, cores):
        import jax  # the actor's module brings JAX before anything can be prepared

        _environment.prepare_process(place, cores)
        jax.devices()

    def look(self, *variables):
        tasks = Path("/proc/self/task")
        names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
        cores = {c for task in tasks.iterdir() for c in os.sched_getaffinity(int(task.name))}
        pools = sum("Eigen" in name for name in names)
        return os.getpid(), cores, pools, sys.path, [os.environ.get(name) for name in variables]


def test_a_worker_has_its_cores_its_environment_and_the_imports_of_the_driver(session, monkeypatch):
    monkeypatch.syspath_prepend("/some/folder/of/the/driver")
    reservation = _cluster.reserve_places(session, 2)
    worker = ray.remote(Worker)
    actors = [
        worker.options(
            **_environment.worker_options(
                reservation, rank, cores=1, environment={"ANIMAL": "stoat"}
            )
        ).remote(reservation.places[rank][0], 1)
        for rank in range(2)
    ]
    found = ray.get([a.look.remote("ANIMAL", "JAX_PLATFORMS", "NPROC") for a in actors], timeout=60)
    own = sorted(os.sched_getaffinity(0))
    for rank, (_, cores, pools, path, variables) in enumerate(found):
        assert cores == {own[rank % len(own)]}
        assert pools == 1
        assert "/some/folder/of/the/driver" in path and os.getcwd() in path
        assert variables == ["stoat", "cpu", "1"]
    _cluster.release_places(reservation)
    pids = [pid for pid, *_ in found]
    assert wait_until(lambda: not any(is_running(pid) for pid in pids), 10)


def test_workers_that_share_a_gpu_share_its_memory():
    def variables(gpus):
        place = _cluster.Place(0, "", "", "", 0)
        reservation = _cluster.Reservation(None, ((place,),), 1.0, (gpus,))
        return _environment.worker_options(reservation, 0)["runtime_env"]["env_vars"]

    class_name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert float(variables(0.25)[class_name]) * 4 == pytest.approx(0.75, abs=0.01)
    assert class_name not in variables(1.0)
    assert [variables(gpus)["JAX_PLATFORMS"] for gpus in (0, 0.25, 1.0)] == ["cpu", "", ""]


def test_a_worker_with_a_gpu_that_runs_on_cpu_is_refused():
    gang, member = object.__new__(_gang.Gang), unittest.mock.Mock(rank=3)
    gang._settings = unittest.mock.Mock(gpus_per_rank=1.0, environment={"JAX_PLATFORMS": "cpu"})
    told = r"rank 3 on b has a GPU, for gpus_per_rank=1, but .* CPU there, with JAX_PLATFORMS='cpu'"
    with pytest.raises(RuntimeError, match=told):
        gang._check(member, unittest.mock.Mock(platform="cpu", host="b"))
    hello = unittest.mock.Mock(platform="cuda", versions=_gang.versions())
    gang._check(member, hello)


def test_only_one_variable_gives_the_fraction_of_a_gpus_memory(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.375")
    _environment.prepare_process(_cluster.Place(0, "", "", "", 0))
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.375"
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.2")
    _environment.prepare_process(_cluster.Place(0, "", "", "", 0))
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ


def nodes_with(*amounts):
    """Nodes as Ray describes them, with these CPUs and GPUs."""
    names = ("NodeManagerAddress", "NodeManagerHostname")
    return [
        {"NodeID": f"node {n}", "Resources": {"CPU": cpus, "GPU": gpus}, **dict.fromkeys(names, "")}
        for n, (cpus, gpus) in enumerate(amounts)
    ]


@pytest.mark.parametrize(
    ("gpus", "there", "fits"),
    [
        ((4, 2, 2), ((8, 4), (8, 4)), True),
        ((2, 4, 2), ((8, 4), (8, 4)), True),  # the largest first, else none is left for it
        ((4, 2, 4), ((8, 4), (8, 4)), False),
        ((2, 2, 2), ((2, 8),), False),  # for want of CPUs
        ((0.5, 0.5, 0.25), ((8, 1),), False),
        ((0.5, 0.25, 0.25), ((8, 1),), True),
    ],
)
def test_ranks_that_differ_in_their_gpus_fit(gpus, there, fits):
    needs = [_cluster._Need(1, own) for own in gpus]
    assert _cluster._all_fit(needs, nodes_with(*there)) == fits


def test_ranks_that_differ_in_their_gpus_get_what_they_need(session, monkeypatch):
    """Bundles are where Ray has put them, and ranks have those of their own size."""
    asked, nodes = [], nodes_with((8, 4), (8, 4))
    monkeypatch.setattr(_cluster, "_nodes", lambda: (nodes, []))
    monkeypatch.setattr(_cluster.ray, "nodes", lambda: nodes)

    class Group:
        def wait(self, timeout):
            return True

    def placement_group(bundles, *_, **__):
        asked.extend(bundles)
        return Group()

    where = {0: "node 1", 1: "node 0", 2: "node 0", 3: "node 1"}
    monkeypatch.setattr(_cluster, "placement_group", placement_group)
    monkeypatch.setattr(_cluster, "placement_group_table", lambda _: {"bundles_to_node_id": where})
    reservation = _cluster.reserve_places(session, 4, cpus_per_rank=1, gpus_per_rank=[2, 2, 1, 1])
    assert [bundle["GPU"] for bundle in asked] == [2, 2, 1, 1]
    bundles = [place.bundle for (place,) in reservation.places]
    # Ranks follow nodes, from that of the first bundle; none has the GPUs of ranks of another size.
    assert bundles == [0, 1, 3, 2]
    assert reservation.gpus == (2, 2, 1, 1)
    options = [_environment.worker_options(reservation, rank) for rank in range(4)]
    assert [own["num_gpus"] for own in options] == [2, 2, 1, 1]


def test_what_ranks_that_differ_need_is_said(session):
    with pytest.raises(
        ValueError, match="2 ranks with 1 CPU and 64 GPU each and 1 rank with .* 32"
    ):
        _cluster.reserve_places(session, 3, cpus_per_rank=1, gpus_per_rank=[64, 32, 64])


# Ends.

DRIVER = """
import os, sys, threading, time
import ray
from jaxpp.runtime.remote.cluster import _cluster, _environment, _session

def join():
    global session
    session = _session.join_session("local")

if sys.argv[1] == "thread":  # a session does not end with the thread that has joined it
    thread = threading.Thread(target=join)
    thread.start()
    thread.join()
else:
    join()

class Worker:
    def ready(self):
        return os.getpid()
    def compute(self):
        while True: pass

reservation = _cluster.reserve_places(session, 2)
options = [_environment.worker_options(reservation, rank) for rank in range(2)]
actors = [ray.remote(Worker).options(**o).remote() for o in options]
pids = ray.get([actor.ready.remote() for actor in actors])
for actor in actors:
    actor.compute.remote()
print(*pids, flush=True)
time.sleep(150)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


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
    places = [[_cluster.Place(n, node, "10.0.0.1", node, 0)] for n, node in enumerate(nodes)]
    gang = object.__new__(_gang.Gang)
    gang._reservation = SimpleNamespace(places=places)
    gang._settings = SimpleNamespace(address=address)
    if fits:
        gang._check_nodes()
        return
    with pytest.raises(
        ValueError, match=r"there \(10\.0\.0\.1\), not all on here,.*address='auto'"
    ):
        gang._check_nodes()


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


@pytest.mark.slow
def test_a_driver_that_ends_leaves_no_process_behind():
    # Of Ray's own processes, two agents of a session take another minute to see a killed driver.
    ends = {"main": signal.SIGKILL, "thread": signal.SIGINT}
    drivers = {
        thread: subprocess.Popen(
            [sys.executable, "-c", DRIVER, thread], stdout=subprocess.PIPE, text=True
        )
        for thread in ends
    }
    killers = [threading.Timer(150, driver.kill) for driver in drivers.values()]
    try:
        for killer in killers:
            killer.start()
        for thread, driver in drivers.items():
            workers = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(workers) == 2
            everything = descendants(driver.pid)
            assert set(workers) < set(everything)
            driver.send_signal(ends[thread])
            assert wait_until(lambda pids=workers: not any(map(is_running, pids)), 30)
            if ends[thread] != signal.SIGKILL:
                assert wait_until(lambda pids=everything: not any(map(is_running, pids)), 30)
    finally:
        for killer, driver in zip(killers, drivers.values(), strict=True):
            killer.cancel()
            driver.kill()
            driver.wait()
            driver.stdout.close()
