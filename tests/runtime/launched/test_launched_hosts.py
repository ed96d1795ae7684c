"""A launched job on two hosts, as network namespaces of this machine: it trains, and loses one."""

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.runtime.launched import jobs
from tests.runtime.launched.test_smoke import check_bitwise
from tests.runtime.remote import two_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not two_hosts.can_make_hosts(), reason="needs root and `ip netns`"),
]

#: Seconds after which a host that is out of reach is missed, and the others have ended.
LIMIT = 30


@pytest.fixture
def hosts():
    with two_hosts.linked_hosts({}) as found:
        yield found


def start(hosts, *args):
    """A process of a job on each host, with torchrun's variables; all meet at the first."""
    on_host = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(len(hosts))}
    to = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return [
        subprocess.Popen(
            host.command(sys.executable, str(jobs.SCRIPT), *map(str, args)),
            env=jobs.environment() | on_host | to | {"RANK": str(n)},
            text=True,
            **pipes,
        )
        for n, host in enumerate(hosts)
    ]


def wait(processes, timeout=120):
    """What all have written; none lives longer."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def started(hosts, folder):
    """A job that trains."""
    processes = start(hosts, "faulty", folder, "none")
    end = time.monotonic() + 90
    while not all((folder / f"pid{n}").exists() for n in range(2)):
        assert time.monotonic() < end and not any(p.poll() for p in processes), wait(processes, 1)
        time.sleep(0.02)
    return processes


@pytest.mark.parametrize("case", ["interleaved", "offload"])
def test_steps_on_two_hosts_are_bitwise_those_of_the_local_mesh(hosts, tmp_path, case):
    processes = start(hosts, case, tmp_path)
    outputs = wait(processes)
    assert [process.returncode for process in processes] == [0, 0], outputs
    check_bitwise(tmp_path, case, 2)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_on_another_host_is_named(hosts, tmp_path, victim):
    processes = started(hosts, tmp_path)
    os.kill(int((tmp_path / f"pid{victim}").read_text()), signal.SIGKILL)
    check_error(wait(processes, 30), processes, hosts, victim)


def test_hosts_that_do_not_reach_each_other_end_with_an_error(hosts, tmp_path):
    processes = started(hosts, tmp_path)
    before = time.monotonic()
    hosts[1].unplug()
    outputs = wait(processes, 60)
    assert time.monotonic() - before < LIMIT
    for victim in (0, 1):
        check_error(outputs, processes, hosts, victim)


def check_error(outputs, processes, hosts, victim):
    """The process on the other host names the victim, and its host."""
    other, address = 1 - victim, re.escape(hosts[victim].address)
    told = rf"RankError: rank {victim} \(process {processes[victim].pid} on .* \({address}\)\) "
    told += "has failed: its process has ended, or its host is out of reach"
    assert processes[other].returncode == 1 and re.search(told, outputs[other]), outputs[other]
