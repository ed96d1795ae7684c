"""A process of a mesh, as the other processes know it."""

import dataclasses
import importlib.metadata
import os
import platform
import socket
from typing import Any

from jaxpp._version import __version__
from jaxpp.runtime.site._failure import RankError
from jaxpp.runtime.transport import Addresses


@dataclasses.dataclass(frozen=True)
class Hello:
    """The description of itself that a process gives once it has started.

    The `node` names its host for who watches it; `device` is the kind of its devices. It writes to
    the file `output`, if that is known, and others connect to it at its `addresses`.
    """

    versions: dict[str, str]
    host: str
    address: str
    pid: int
    node: str
    platform: str
    device: str
    output: str
    addresses: Addresses

    @staticmethod
    def of(address: str, node: str, device: Any, addresses: Addresses, output: str = "") -> "Hello":
        """Describes this process, which computes on a device."""
        host, pid = socket.gethostname(), os.getpid()
        kind = device.platform, device.device_kind
        return Hello(versions(), host, address, pid, node, *kind, output, addresses)


def versions() -> dict[str, str]:
    """Returns the versions that all processes must agree on."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return {"python": python, **found, "jaxpp": __version__}


@dataclasses.dataclass
class Member:
    """The record of a process of one rank or more.

    `worker` is its number among all processes of the mesh, `process` that among the `processes` of
    its rank. `hello` is its `Hello` once it has started, and `steps` have been loaded there. A
    `dead` process cannot be used again.
    """

    worker: int
    ranks: tuple[int, ...]
    process: int = 0
    processes: int = 1
    hello: Any = None
    steps: set[int] = dataclasses.field(default_factory=set)
    dead: bool = False

    def __str__(self):
        return self.named()

    def named(self, rank: int | None = None) -> str:
        """Names the process by its ranks, or by one of them."""
        ranks = self.ranks if rank is None else (rank,)
        pid = self.hello.pid if self.hello else "not known yet"
        where = f"process {pid} on {self.host or 'a host not known yet'}"
        if self.processes > 1:
            where = f"its process {self.process} of {self.processes}, {where}"
        return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))} ({where})"

    def check_versions(self, mesh: str) -> None:
        """Raises a `ValueError` where the process has other versions than this one."""
        own, theirs = versions(), self.hello.versions
        if apart := ", ".join(
            f"{n} {theirs[n]} (here {own[n]})" for n in own if theirs[n] != own[n]
        ):
            raise ValueError(
                f"{mesh}: {self} has {apart}; install the same versions on every host."
            )

    @property
    def host(self) -> str:
        """The host of the process, by its name and address."""
        return f"{self.hello.host} ({self.hello.address})" if self.hello else ""

    def error(
        self,
        message: str,
        reason: str,
        task: str = "",
        cause: BaseException | None = None,
        rank: int | None = None,
    ) -> RankError:
        """Makes the error that tells of the failure of the process, or of one of its ranks."""
        rank = self.ranks[0] if rank is None else rank
        where = {"rank": rank, "host": self.host, "process": self.process}
        error = RankError(message, **where, task=task, reason=reason)
        error.__cause__ = cause
        return error
