"""Two hosts, as network namespaces of this machine: training across them, and losing one."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.remote import two_hosts
from tests.runtime.remote.two_hosts_driver import HEARTBEAT_TIMEOUT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not two_hosts.can_make_hosts(), reason="needs root and `ip netns`"),
]

DRIVER = Path(__file__).with_name("two_hosts_driver.py")


class Driver:
    """The driver on the first host; it goes on when it is told to."""

    def __init__(self, host: two_hosts.Host, *arguments: str):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = host.start(sys.executable, "-u", str(DRIVER), *arguments, **pipes)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self.process.kill()
        self.process.wait()

    def hears(self, what: str, within: float = 120) -> dict[str, Any]:
        """What it says next, which has to be `what`, in so many seconds."""
        end = time.monotonic() + within
        line = ""
        while not line.startswith("{"):  # not what Ray prints
            assert self.process.stdout
            ready, _, _ = select.select([self.process.stdout], [], [], end - time.monotonic())
            assert ready, f"nothing heard of {what!r} within {within:g} s"
            line = self.process.stdout.readline()
            assert line, f"the driver ended before {what!r}"
        found = json.loads(line)
        assert found["what"] == what, found
        return found

    def goes_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def driver_and_second_host():
    with two_hosts.two_hosts() as (first, second):
        driver = Driver(first)
        yield driver, second
        driver.close()


def after_a_kill(driver, pid, host):
    """Kills a worker of a host while it trains; gives what the driver says of it."""
    driver.goes_on()
    driver.hears("training")
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    failed = driver.hears("failed")
    assert failed["at"] - killed < 5
    assert host.address in failed["host"]
    return failed


def test_trains_across_two_hosts_and_survives_the_loss_of_a_worker_and_of_a_host(
    driver_and_second_host,
):
    driver, second = driver_and_second_host
    trained = driver.hears("trained")
    assert trained["same"]  # bitwise the local mesh's losses and parameters
    assert [w["address"] for w in trained["workers"]] == list(two_hosts.ADDRESSES)
    assert [w["listens"] for w in trained["workers"]] == list(two_hosts.ADDRESSES)  # not loopback
    pid = trained["workers"][1]["pid"]
    assert pid in second.processes()

    failed = after_a_kill(driver, pid, second)
    assert failed["type"] == "RankError" and failed["rank"] == 1
    driver.goes_on()
    assert driver.hears("restarted")["same"]

    driver.goes_on()
    driver.hears("training")
    time.sleep(1)
    second.unplug()
    unplugged = time.monotonic()
    failed = driver.hears("failed")
    assert failed["at"] - unplugged < HEARTBEAT_TIMEOUT + 10
    assert failed["rank"] == 1 and second.address in failed["message"]
    driver.goes_on()
    assert f"{second.address} (" in (lost := driver.hears("not restarted"))["message"]
    assert "does not answer" in lost["message"]
    second.crash()
    second.plug_in()
    two_hosts.start_ray(second)
    driver.goes_on()
    assert driver.hears("restarted")["same"]

    driver.goes_on()
    driver.hears("left")
    driver.goes_on()
    assert driver.process.wait(30) == 0
    assert second.processes("raylet")  # the session was there before, and stays
    assert not second.processes("ray::jaxpp_rank")


def test_a_rank_spans_the_two_hosts_and_survives_the_loss_of_a_process():
    """The first host has room for three of four processes: the second rank has one on each."""
    with two_hosts.two_hosts(cpus=(3, 1)) as (first, second):
        driver = Driver(first, "spanning")
        trained = driver.hears("trained")
        assert trained["same"]
        addresses = [w["address"] for w in trained["workers"]]
        assert addresses == [first.address] * 3 + [second.address]
        pid = trained["workers"][3]["pid"]
        assert pid in second.processes()
        failed = after_a_kill(driver, pid, second)
        assert (failed["type"], failed["rank"], failed["process"]) == ("RankError", 1, 1)
        driver.goes_on()
        assert driver.hears("restarted")["same"]
        driver.goes_on()
        driver.hears("left")
        driver.goes_on()
        assert driver.process.wait(30) == 0
        driver.close()


def test_what_the_page_on_hosts_says_works_after_a_local_run(tmp_path):
    """A session of a program's own has left Ray's token file, which turns authentication on."""
    page = (Path(__file__).parents[3] / "docs" / "multi_node.md").read_text()
    page = page[page.index("## Several hosts") :]
    blocks = re.findall(r"```(sh|python)\n(.*?)```", page, re.DOTALL)
    head, node, train, run = (textwrap.dedent(text) for _, text in blocks[:4])
    (tmp_path / "train.py").write_text(train)
    with two_hosts.linked_hosts({"HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}) as hosts:

        def shell(host, commands):
            small = "--num-cpus=1 --object-store-memory=100000000 --disable-usage-stats"
            commands = commands.replace("ray start", f"ray start {small} --temp-dir={host.folder}")
            path = f"PATH={Path(sys.executable).parent}:$PATH"
            roots = ":".join([str(Path(__file__).parents[3]), *sys.path])
            lines = ["set -e", path, f"export PYTHONPATH={roots}", f"cd {tmp_path}", commands]
            return host.run("bash", "-c", "\n".join(lines), timeout=120)

        start = f"import ray; ray.init('local', num_cpus=1, _temp_dir='{hosts[0].folder}')"
        hosts[0].run(sys.executable, "-c", start)
        assert (tmp_path / ".ray" / "auth_token").exists()
        shell(hosts[0], head)
        shell(hosts[1], node)
        printed = shell(hosts[0], run)
    values = [float(line.split()[1]) for line in printed.splitlines() if line[:1] in "012"]
    assert len(values) == 3 and values == sorted(values, reverse=True)


def test_hosts_leave_nothing_behind_when_a_test_fails():
    with pytest.raises(ZeroDivisionError), two_hosts.two_hosts() as hosts:
        pids = [pid for host in hosts for pid in host.processes()]
        assert len(pids) > 4
        raise ZeroDivisionError
    assert not any(two_hosts.command_line(pid) for pid in pids)
    assert not any(host.folder.exists() for host in hosts)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(host.namespace in left for host in hosts)
