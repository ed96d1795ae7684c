"""Two hosts on one machine: network namespaces joined by a link, each with its own Ray node.

They share the machine's name, boot id, process ids and files, so that Ray's id of the node and the
network namespace tell them apart, and nothing else. A driver has to run on the first: Ray looks for
the node of a driver among the processes of the machine, and prefers the head.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

#: `ray`, of this Python.
RAY = (sys.executable, "-m", "ray.scripts.scripts")
PORT = 6379
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclasses.dataclass(frozen=True)
class Host:
    """One of the hosts.

    Args:
        namespace: the name of its network namespace.
        address: its IP address.
        interface: its end of the link.
        folder: where its Ray node keeps its files.
        environment: of the processes on it.
    """

    namespace: str
    address: str
    interface: str
    folder: Path
    environment: dict[str, str]

    def command(self, *command: str) -> list[str]:
        """A command line, to run on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def start(self, *command: str, **options) -> subprocess.Popen:
        """Starts a command on this host."""
        return subprocess.Popen(
            self.command(*command), env=os.environ | self.environment, text=True, **options
        )

    def run(self, *command: str, timeout: float = 60) -> str:
        """Runs a command on this host; returns its output, raises if it fails."""
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} gave {process.returncode}:\n{output}")
        return output

    def processes(self, name: str = "") -> list[int]:
        """The ids of the processes on this host, or of those with `name` in their command line."""
        found = [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]
        return [pid for pid in found if name in command_line(pid)]

    def crash(self) -> None:
        """Ends all that runs on the host."""
        end = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def unplug(self) -> None:
        """Cuts the host off, without a word to its peers."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def plug_in(self) -> None:
        """Connects it again."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up")


def command_line(pid: int) -> str:
    """The command line of a process; of one that has ended, none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    name = f"jaxpp-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except (OSError, RuntimeError):
        return False
    return True


@contextlib.contextmanager
def two_hosts(cpus: tuple[int, int] = (1, 1)) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nothing else; the first has the head of a Ray session.

    Args:
        cpus: that the Ray nodes claim to have, so that the session spreads ranks over both.
    """
    environment = {
        "JAX_PLATFORMS": "cpu",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # hosts of one session show each other the same
        "RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}",
    }
    with linked_hosts(environment) as hosts:
        for host, own in zip(hosts, cpus, strict=True):
            start_ray(host, own)
        yield hosts


@contextlib.contextmanager
def linked_hosts(environment: dict[str, str]) -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other, without Ray."""
    hosts = []
    with contextlib.ExitStack() as undo:
        for n in range(2):
            folder = Path(tempfile.mkdtemp(prefix=f"jaxpp{n}-", dir="/tmp"))  # sockets: short names
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            namespace = f"jaxpp-{os.getpid()}-{n}"
            host = Host(namespace, ADDRESSES[n], f"veth{n}", folder, environment)
            _ip("netns", "add", namespace)
            undo.callback(_remove, host)
            hosts.append(host)
        _link(*hosts)
        yield hosts[0], hosts[1]


def start_ray(host: Host, cpus: int = 1) -> None:
    """Starts the Ray node of a host, as a user does it: on the first host the head, then others."""
    head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    is_head = host.address == ADDRESSES[0]
    host.run(
        *RAY,
        "start",
        *(head if is_head else [f"--address={host.environment['RAY_ADDRESS']}"]),
        f"--node-ip-address={host.address}",
        f"--temp-dir={host.folder}",
        f"--num-cpus={cpus}",
        f"--object-store-memory={100 << 20}",
        "--disable-usage-stats",
    )


def _link(first: Host, second: Host) -> None:
    end = ("type", "veth", "peer", "name", second.interface, "netns", second.namespace)
    _ip("link", "add", first.interface, "netns", first.namespace, *end)
    for host in (first, second):
        _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
        for interface in ("lo", host.interface):
            _ip("-n", host.namespace, "link", "set", interface, "up")


def _remove(host: Host) -> None:
    host.crash()
    _ip("netns", "del", host.namespace)
