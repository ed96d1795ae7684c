"""Joining a Ray session, holding room in it, and leaving nothing behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from ray.util.placement_group import placement_group_table  # noqa: E402

from jaxpp import _compat  # noqa: E402
from jaxpp.runtime.remote import _environment, _places, _session  # noqa: E402
from tests.helpers import wait_until  # noqa: E402


def reservation_on(*nodes, **resources):
    """Room for a rank on each of these nodes; nothing reads its placement group."""
    places = tuple((_places.Place(n, node, "", ""),) for n, node in enumerate(nodes))
    worker = {"CPU": 1.0} | {name: amount for name, amount in resources.items() if amount}
    group: Any = None
    return _places.Reservation(group, worker, places, {})


@pytest.fixture(scope="module")
def session():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        session = _session.join_session()
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


def groups() -> list[str]:
    """The placement groups that hold resources, or wait for some."""
    table = placement_group_table()
    return [number for number, group in table.items() if group["state"] != "REMOVED"]


SAY = """
def say(what):
    import json, sys
    with open(sys.argv[1], "a") as told:
        told.write(json.dumps(str(what)) + "\\n")
"""


def said(script: str, *, within: float = 120) -> list[str]:
    """What a driver of its own says: into a file, as Ray writes between what is printed."""
    environment = os.environ | {"RAY_ADDRESS": "local"}
    with tempfile.NamedTemporaryFile("r") as told:
        command = [sys.executable, "-c", SAY + script, told.name]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=within
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in told]


# Joining.


@pytest.mark.parametrize("address", ["127.0.0.1:CLOSED", "auto", "ray://localhost:CLOSED", "here"])
def test_an_address_without_a_session_is_an_error_at_once(alone, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address.replace("CLOSED", str(closed_port())))
    start = time.monotonic()
    with pytest.raises(ConnectionError):
        _session.join_session()
    assert time.monotonic() - start < _session.ANSWER_TIMEOUT + 1


def test_an_error_about_an_address_tells_the_variable_and_the_way_out(alone, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(
        ConnectionError, match=r"RAY_ADDRESS=ray://head.*HOST:PORT.*set it to local"
    ):
        _session.join_session()


def test_a_session_of_ray_client_is_refused_with_the_way_out(monkeypatch):
    """Its driver is on no node: what is asked of Ray would be done on another machine."""
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(ValueError, match="Ray Client.*ray start --address=.*RAY_ADDRESS"):
        _session.join_session()


def test_what_a_crashed_session_has_left_is_not_waited_for(alone, monkeypatch):
    alone.write_text(f"127.0.0.1:{closed_port()}")
    started = []
    monkeypatch.setattr(_session, "_start", lambda: started.append(1))
    with pytest.warns(UserWarning, match="does not answer"):
        _session._open()
    with warnings.catch_warnings(action="error"):  # one is enough for a process
        _session._open()
    assert len(started) == 2
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConnectionError, match="No Ray session answers"):
        _session._open()


@pytest.mark.parametrize("variable", ["", "auto", "ADDRESS"])
def test_a_session_that_answers_is_joined_as_ray_finds_it(alone, monkeypatch, variable):
    monkeypatch.setattr(_session, "_init", lambda **arguments: arguments)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        alone.write_text(address)
        monkeypatch.setenv("RAY_ADDRESS", variable.replace("ADDRESS", address))
        assert _session._open() == {"started": False}


def test_a_process_is_in_one_session(session, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port()}")
    again = _session.join_session()
    assert again is session and again.started
    _session.leave_session(again)
    assert ray.is_initialized()


INTERRUPTED = """
import os, signal, sys, threading, time
import psutil, ray
from jaxpp.runtime.remote import _session

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, handler := lambda *_: None)
me = psutil.Process()

def interrupt(processes):  # as soon as Ray has started so many
    while len(me.children()) < processes:
        time.sleep(0.01)
    os.kill(me.pid, signal.SIGINT)

for processes in (1, 3):
    threading.Thread(target=interrupt, args=[processes], daemon=True).start()
    try:
        _session.join_session()
        say("joined")
    except KeyboardInterrupt:
        gone, left = psutil.wait_procs(me.children(recursive=True), 10)
        say((ray.is_initialized(), len(left)))
session = _session.join_session()
_session.leave_session(session)
say(signal.getsignal(signal.SIGTERM) is handler)
"""


def test_an_interrupt_while_ray_starts_leaves_no_process_behind():
    """One comes when the first process of the session is there, one when there are some.

    Ray replaces the program's own handler of SIGTERM, which comes back.
    """
    assert said(INTERRUPTED) == ["(False, 0)", "(False, 0)", "True"]


# Room.


def test_a_session_of_our_own_holds_more_ranks_than_cores(session):
    ranks = 3 * (os.cpu_count() or 1) + 5
    reservation = _places.reserve_places(session, ranks)
    places = [place for own in reservation.places for place in own]
    assert len(reservation.places) == ranks
    assert len({place.bundle for place in places}) == ranks
    assert {place.node_id for place in places} == {ray.get_runtime_context().get_node_id()}
    _places.release_places(reservation)
    assert wait_until(lambda: not groups(), 5)


@pytest.mark.parametrize(
    ("how", "bundles", "cpus"),
    [
        ({"processes_per_rank": 3}, [[0, 0, 0], [1, 1, 1], [2, 2, 2], [3, 3, 3]], 0.2),
        ({"ranks_per_process": 2}, [[0], [0], [1], [1]], 1.2),
        ({}, [[0], [1], [2], [3]], 0.6),
    ],
)
def test_the_processes_of_a_rank_and_the_ranks_of_a_process_are_together(
    session, how, bundles, cpus
):
    reservation = _places.reserve_places(session, 4, cpus_per_rank=0.6, **how)
    assert [[place.bundle for place in own] for own in reservation.places] == bundles
    options = _environment.worker_options(reservation, 3)
    assert options["num_cpus"] == pytest.approx(cpus)
    _places.release_places(reservation)


def test_a_mesh_larger_than_the_session_is_an_error_that_says_what_is_there(session):
    with pytest.raises(ValueError) as error:
        _places.reserve_places(session, 4, cpus_per_rank=100)
    node = ray.nodes()[0]
    cpus = node["Resources"]["CPU"]
    assert "4 ranks with 100 CPU each" in str(error.value)
    assert f"{node['NodeManagerAddress']} ({socket.gethostname()}): {cpus:g} CPU" in str(
        error.value
    )
    with pytest.raises(ValueError, match="2 ranks with .* and 64 GPU each"):
        _places.reserve_places(session, 2, gpus_per_rank=64)
    assert not groups()


def test_two_meshes_on_one_set_of_resources_is_an_error_within_the_time(session):
    cpus = ray.nodes()[0]["Resources"]["CPU"]
    first = _places.reserve_places(session, 1, cpus_per_rank=cpus - 1)
    (own,) = groups()
    told = f"no room for 2 ranks with 1 CPU each, for 0.5 s.*{cpus:g} CPU.*1 CPU is free.*shutdown"
    with pytest.raises(TimeoutError, match=re.compile(told, re.DOTALL)):
        _places.reserve_places(session, 2, cpus_per_rank=1, timeout=0.5)
    assert wait_until(lambda: groups() == [own], 5)
    _places.release_places(first)
    # This waits for the first's end.
    _places.release_places(_places.reserve_places(session, 1, cpus_per_rank=cpus))
    assert wait_until(lambda: not groups(), 5)


def test_an_interrupted_reservation_holds_nothing(session, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_places.PlacementGroup, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _places.reserve_places(session, 1)
    assert wait_until(lambda: not groups(), 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cpus_per_rank": 0}, "some CPU.*cpus_per_rank=0"),
        ({"gpus_per_rank": -1}, "no less than no GPU.*gpus_per_rank=-1"),
    ],
)
def test_a_request_that_makes_no_sense_is_an_error(session, arguments, words):
    with pytest.raises(ValueError, match=words):
        _places.reserve_places(session, 2, **arguments)


NODE_LOST = """
import ray
from ray.cluster_utils import Cluster
from jaxpp.runtime.remote import _places, _session

def renew(reservation):
    try:
        return _places.renew_places(session, reservation)
    except ValueError as error:
        say(error)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
second = cluster.add_node(num_cpus=2)
ray.init(address=cluster.address)
session = _session.join_session()
reservation = _places.reserve_places(session, 3)
assert renew(reservation) is reservation
cluster.remove_node(second, allow_graceful=False)  # Ray takes some seconds to see it
assert renew(reservation) is None
cluster.add_node(num_cpus=1)
assert renew(reservation) is None
third = cluster.add_node(num_cpus=1)
found = renew(reservation)
say(len({place.node_id for (place,) in found.places}))
assert renew(found) is found
cluster.remove_node(third, allow_graceful=True)  # Ray knows it
assert renew(found) is None
"""


def test_a_lost_node_is_named_until_there_is_room_again():
    at_once, one_short, nodes, known = said(NODE_LOST)
    for told in (at_once, one_short):
        assert "has lost the node" in told and "had rank 1 and" in told and "had rank 2," in told
        assert "too small for 3 ranks with 1 CPU each" in told and "does not answer" in told
        assert "there again, call mesh.restart() again" in told
    assert nodes == "3"
    assert "has lost the node" in known


SESSION_LOST = """
import os, psutil, ray
import jaxpp

def pids(mesh): return mesh.apply(lambda process: os.getpid(), {0: (), 1: ()})
meshes = [jaxpp.RemoteMpmdMesh((2,)) for _ in range(2)]
before = [pids(mesh) for mesh in meshes]
(raylet,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
raylet.kill()
raylet.wait()
try:
    meshes[0].restart()
except RuntimeError as error:
    say(error)
meshes[1].shutdown()
meshes[0].restart()
after = pids(meshes[0])
say(len({pid for own in (*before, after) for pid in own.values()}))
meshes[0].shutdown()
gone, left = psutil.wait_procs(psutil.Process().children(recursive=True), 10)
say((ray.is_initialized(), len(left)))
"""


def test_a_restarted_mesh_has_a_new_session_where_its_own_has_lost_its_node():
    """But not while another mesh counts on that session."""
    told, *rest = said(SESSION_LOST)
    assert "has lost its node" in told and "its 2 meshes" in told and "Shut them all down" in told
    assert rest == ["6", "(False, 0)"]


# Workers.


class Worker:
    """What a worker finds when it starts."""

    def __init__(self, cores, number):
        import jax  # the actor's module brings JAX before anything can be prepared

        _environment.prepare_process(cores, number)
        jax.devices()

    def look(self, *variables):
        tasks = Path("/proc/self/task")
        names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
        cores = {c for task in tasks.iterdir() for c in os.sched_getaffinity(int(task.name))}
        pools = sum("Eigen" in name for name in names)
        return os.getpid(), cores, pools, sys.path, [os.environ.get(name) for name in variables]


def test_a_worker_has_its_cores_its_environment_and_the_imports_of_the_driver(session, monkeypatch):
    monkeypatch.syspath_prepend("/some/folder/of/the/driver")
    reservation = _places.reserve_places(session, 2)
    worker = ray.remote(Worker)
    actors = [
        worker.options(
            **_environment.worker_options(
                reservation, rank, cores=1, environment={"ANIMAL": "stoat"}
            )
        ).remote(1, rank)
        for rank in range(2)
    ]
    found = ray.get([a.look.remote("ANIMAL", "JAX_PLATFORMS", "NPROC") for a in actors], timeout=60)
    there = os.sched_getaffinity(0)
    assert len(set.union(*(cores for _, cores, *_ in found))) == min(2, len(there))
    for _, cores, pools, path, variables in found:
        assert len(cores) == 1 and cores <= there
        assert pools == 1
        assert "/some/folder/of/the/driver" in path and os.getcwd() in path
        assert variables == ["stoat", "cpu", "1"]
    _places.release_places(reservation)
    pids = [pid for pid, *_ in found]
    assert wait_until(lambda: not any(is_running(pid) for pid in pids), 10)


@pytest.mark.parametrize(
    ("number", "cores", "own"),
    [(0, 1, {2}), (2, 1, {7}), (3, 1, {2}), (1, 2, {7, 2}), (1, 5, {2, 5, 7})],
)
def test_workers_take_cores_in_turn(monkeypatch, number, cores, own):
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 5})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, given: taken.append(given))
    _environment.prepare_process(cores, number)
    assert taken and all(given == own for given in taken), "of each thread"


@pytest.mark.parametrize(
    ("platform", "gpus", "node", "variables", "warns"),
    [
        ("gpu", 1.0, "here", {}, "has taken"),
        (None, 0.5, "here", {"JAX_PLATFORMS": "cuda"}, "takes, as soon as it is used,"),
        (None, 1.0, "here", {"JAX_PLATFORMS": "cpu"}, None),
        ("cpu", 1.0, "here", {}, None),
        ("gpu", 0.0, "here", {}, None),
        ("gpu", 1.0, "there", {}, None),
        ("gpu", 1.0, "here", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None),
        ("gpu", 1.0, "here", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, None),
    ],
)
def test_a_driver_that_takes_the_memory_of_a_ranks_gpu_is_warned(
    monkeypatch, recwarn, platform, gpus, node, variables, warns
):
    """JAX takes most of the memory of all GPUs that it sees when it starts."""
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(_compat, "started_platform", lambda: platform)
    jax_platforms = variables.pop("JAX_PLATFORMS", "")
    config = SimpleNamespace(jax_platforms=jax_platforms)
    monkeypatch.setattr(_environment, "jax", SimpleNamespace(config=config))
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _environment.warn_of_driver(reservation_on("there", node, GPU=gpus))
    told = [str(warning.message) for warning in recwarn]
    assert len(told) == (warns is not None)
    if warns:
        assert warns in told[0] and "which ranks 1 want" in told[0]
        assert "JAX_PLATFORMS=cpu" in told[0] and "PREALLOCATE=false" in told[0]


def test_workers_that_share_a_gpu_share_its_memory():
    def variables(gpus):
        reservation = reservation_on("here", GPU=gpus)
        return _environment.worker_options(reservation, 0)["runtime_env"]["env_vars"]

    class_name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert float(variables(0.25)[class_name]) * 4 == pytest.approx(0.75, abs=0.01)
    assert class_name not in variables(1.0)
    assert [variables(gpus)["JAX_PLATFORMS"] for gpus in (0, 0.25, 1.0)] == ["cpu", "", ""]


def test_only_one_variable_gives_the_fraction_of_a_gpus_memory(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.375")
    _environment.prepare_process()
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.375"
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.2")
    _environment.prepare_process()
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ


def nodes_with(*amounts):
    """Nodes as Ray describes them, with these CPUs and GPUs."""
    names = ("NodeManagerAddress", "NodeManagerHostname")
    return [
        {"NodeID": f"node {n}", "Answers": True, "Resources": {"CPU": cpus, "GPU": gpus}}
        | dict.fromkeys(names, "")
        for n, (cpus, gpus) in enumerate(amounts)
    ]


@pytest.mark.parametrize(
    ("gpus", "there", "room"),
    [
        (4, ((8, 4), (8, 8)), 3),
        (2, ((2, 8),), 2),  # for want of CPUs
        (0.5, ((8, 1), (8, 0)), 2),
        (3, ((8, 4), (8, 4)), 2),  # no bundle is on two nodes
    ],
)
def test_room_is_counted_node_by_node(gpus, there, room):
    nodes = nodes_with(*there)
    assert _places._room({"CPU": 1, "GPU": gpus}, nodes) == room
    nodes[0]["Answers"] = False
    assert _places._room({"CPU": 1, "GPU": gpus}, nodes) < room


@pytest.mark.parametrize(("here", "order"), [("elsewhere", [0, 3, 1, 2]), ("node 0", [1, 2, 0, 3])])
def test_ranks_fill_the_nodes_where_ray_has_put_their_bundles(monkeypatch, here, order):
    """Node after node, that of the driver first, else that of the first bundle."""
    session = _session.Session("", started=False)
    context = SimpleNamespace(get_node_id=lambda: here)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    asked, nodes = [], nodes_with((8, 4), (8, 4))
    monkeypatch.setattr(_places, "_nodes", lambda: nodes)
    monkeypatch.setattr(_places.ray, "nodes", lambda: nodes)

    class Group:
        def wait(self, timeout):
            return True

    def placement_group(bundles, *_, **__):
        asked.extend(bundles)
        return Group()

    where = {0: "node 1", 1: "node 0", 2: "node 0", 3: "node 1"}
    monkeypatch.setattr(_places, "placement_group", placement_group)
    monkeypatch.setattr(_places, "placement_group_table", lambda _: {"bundles_to_node_id": where})
    reservation = _places.reserve_places(session, 4, cpus_per_rank=1, gpus_per_rank=2)
    assert [bundle["GPU"] for bundle in asked] == [2, 2, 2, 2]
    assert [place.bundle for (place,) in reservation.places] == order
    assert _environment.worker_options(reservation, 3)["num_gpus"] == 2
    asked.clear()
    # No node has room for a whole rank: its processes are apart, with a half of its GPUs each.
    reservation = _places.reserve_places(
        session, 1, cpus_per_rank=1, gpus_per_rank=8, processes_per_rank=2
    )
    assert [bundle["GPU"] for bundle in asked] == [4, 4] == 2 * [reservation.worker["GPU"]]


# Ends.

DRIVER = """
import os, time
import ray
from jaxpp.runtime.remote import _environment, _places, _session

class Worker:
    def ready(self):
        return os.getpid()
    def compute(self):
        while True: pass

session = _session.join_session()
reservation = _places.reserve_places(session, 2)
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
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_leaves_no_process_behind(end):
    """Of Ray's own processes, two agents take another minute to see a killed driver."""
    environment = os.environ | {"RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        killer = threading.Timer(150, driver.kill)
        killer.start()
        try:
            workers = [int(pid) for pid in driver.stdout.readline().split()]
            everything = descendants(driver.pid)
            assert len(workers) == 2 and set(workers) < set(everything)
            driver.send_signal(end)
            gone = workers if end == signal.SIGKILL else everything
            assert wait_until(lambda: not any(map(is_running, gone)), 30)
        finally:
            killer.cancel()
            driver.kill()
