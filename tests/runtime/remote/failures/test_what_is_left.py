"""Connections that are cut or are no worker's, and what meshes and drivers leave."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import psutil
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.core.generated.common_pb2")

import jaxpp  # noqa: E402
from benchmarks import faults  # noqa: E402
from tests.helpers import assert_same, wait_until  # noqa: E402
from tests.runtime.local.test_mesh import batch  # noqa: E402
from tests.runtime.remote.failures.failing import begin, command, fail, pids  # noqa: E402

# ---- connections that are cut, or are no worker's -----------------------------------------------


def cut(process, rank):
    process.transport.peers[rank].reader.connection.shutdown(socket.SHUT_RDWR)


def test_a_cut_between_two_ranks_names_the_connection_and_replaces_nobody(mesh, step):
    before, state = pids(mesh), step(*begin(), batch())
    jax.block_until_ready(state)
    mesh.apply(cut, {0: (1,)})
    began = time.monotonic()
    error = fail(step)
    assert time.monotonic() - began < faults.LIMIT
    text = (
        r"The connection between rank \d \(.*\) and rank \d \(.*\) broke, but both processes live"
    )
    assert re.match(text, str(error)), error
    mesh.restart()
    assert pids(mesh) == before


def addresses(rank):
    return rank.transport.addresses


def test_nobody_connects_to_a_mesh_that_has_started(mesh, step, expected):
    found, before = mesh.apply(addresses, {0: (), 1: ()}), pids(mesh)
    for own in found.values():
        with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(ConnectionRefusedError):
            stranger.connect(own.unix)
    mesh.restart()
    assert_same(jax.device_get(step(*begin(), batch())), expected)
    assert pids(mesh) == before


def test_200_connections_of_strangers_hold_up_no_restart(mesh, step, expected):
    """While a worker lets the others in; half say nothing, half garbage."""
    before = pids(mesh)
    strangers: list[socket.socket] = []
    over = threading.Event()

    def come():
        while len(strangers) < 200 and not over.is_set():
            for name in re.findall(r"@(jaxpp-\w+)", open("/proc/net/unix").read()):
                connection = socket.socket(socket.AF_UNIX)
                try:
                    connection.connect(b"\0" + name.encode())
                    connection.sendall(b"" if len(strangers) % 2 else b"GET / HTTP/1.1")
                except OSError:  # the door is closed
                    connection.close()
                else:
                    strangers.append(connection)
            time.sleep(0.001)

    crowd = threading.Thread(target=come)
    crowd.start()
    try:
        began = time.monotonic()
        mesh.restart()
        got = jax.device_get(step(*begin(), batch()))
        assert time.monotonic() - began < 5
    finally:
        over.set()
        crowd.join()
        for connection in strangers:
            connection.close()
    assert pids(mesh) == before
    assert_same(got, expected)


def test_the_ports_that_other_hosts_reach_are_told(ray_session, caplog):
    host = ray.util.get_node_ip_address()
    for address in (None, host):
        caplog.clear()
        with jaxpp.RemoteMpmdMesh((1,), address=address):
            told = [r.getMessage() for r in caplog.records if r.name == "jaxpp"]
        found = [re.match(rf"Workers listen .* at {host} port \d+\. ", text) for text in told]
        assert all(found) and len(found) == (address is not None and host != "127.0.0.1")


# ---- what is left ---------------------------------------------------------------------------


def counts(process=None):
    own = psutil.Process()
    return own.num_threads(), own.num_fds()


def test_restarts_leave_no_thread_and_no_file(mesh, step):
    def once():
        float(step(*begin(), batch())[3])
        mesh.restart()
        float(step(*begin(), batch())[3])
        gc.collect()

    def all_counts():
        workers = mesh.apply(counts, {rank: () for rank in range(2)})
        return [counts(), *workers.values()]

    for _ in range(3):
        once()
    before = all_counts()
    for _ in range(10):
        once()
    # Threads that have been told to end may need a moment.
    assert wait_until(
        lambda: all(
            n <= most + 1
            for now, then in zip(all_counts(), before, strict=True)
            for n, most in zip(now, then, strict=True)
        ),
        5,
    ), (before, all_counts())


DRIVER = """
import os, signal, sys, time
import jax, jaxpp, ray
from tests.runtime.local.test_mesh import batch, init_params, start, step_of
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with jaxpp.RemoteMpmdMesh((2,), heartbeat_timeout=1.0) as mesh:
        step = jaxpp.place(step_of(), mesh)
        state = step(*start(init_params(2)), batch())
        float(state[3])
        print("ready", flush=True)
        if sys.argv[1] == "pause":
            sys.stdin.readline()
            time.sleep(2)  # the monitor asks for signs of life
            print(float(step(*state[:3], batch())[3]), flush=True)
            sys.exit()
        if sys.argv[1] == "early":
            ray.shutdown()
            for use in (lambda: float(state[3]), lambda: step(*state[:3], batch())):
                try:
                    use()
                except RuntimeError as error:
                    print("Ray session" in str(error), flush=True)
            time.sleep(1)
            mesh.shutdown()
            print("started again" if ray.is_initialized() else "ended", flush=True)
            sys.exit()
        while True:
            state = step(*state[:3], batch())
            float(state[3])
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Drivers with a Ray session of their own, by how they end; they start next to each other."""
    script = tmp_path_factory.mktemp("drivers") / "driver.py"
    script.write_text(DRIVER)
    environment = os.environ | {
        "RAY_ADDRESS": "local",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    found = {
        how: subprocess.Popen(
            [sys.executable, str(script), how],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for how in ("SIGINT", "SIGKILL", "early", "pause")
    }
    yield found
    for process in found.values():
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGKILL"])
def test_a_driver_that_is_ended_leaves_no_process(drivers, how):
    driver = drivers[how]
    assert driver.stdout.readline() == "ready\n"
    children = psutil.Process(driver.pid).children(recursive=True)
    commands = {c.pid: command(c) for c in children}
    assert sum("jaxpp_rank" in found for found in commands.values()) == 2
    time.sleep(0.2)
    if how == "SIGINT":
        os.killpg(driver.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        _, errors = driver.communicate(timeout=60)
        assert "KeyboardInterrupt" in errors
    else:
        driver.kill()
        driver.wait()
    # Ray's agents try for up to a minute to tell the session that has gone that it has.
    children = [c for c in children if how == "SIGINT" or "Agent" not in commands[c.pid]]
    _, alive = psutil.wait_procs(children, timeout=45)
    assert not alive


@pytest.mark.slow
def test_a_session_that_the_user_ends_is_not_started_again(drivers):
    output, errors = drivers["early"].communicate(timeout=100)
    assert output.split() == ["ready", "True", "True", "ended"], errors
    assert drivers["early"].returncode == 0


@pytest.mark.slow
def test_a_driver_that_was_stopped_goes_on(drivers):
    driver = drivers["pause"]
    assert driver.stdout.readline() == "ready\n"
    driver.send_signal(signal.SIGSTOP)
    time.sleep(8)  # times the timeout of a worker that has been stopped
    driver.send_signal(signal.SIGCONT)
    output, errors = driver.communicate("go on\n", timeout=60)
    assert np.isfinite(float(output)), errors
