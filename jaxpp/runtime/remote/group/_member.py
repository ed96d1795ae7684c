"""The driver's record of a worker, and how the driver kills a worker."""

import contextlib
import dataclasses
from typing import Any

import ray

from jaxpp.runtime.remote.calls import RankError
from jaxpp.runtime.remote.cluster import end_stopped, process_state
from jaxpp.runtime.remote.worker import BlackBox, Hello


@dataclasses.dataclass
class Member:
    """The driver's record of a worker: the process of a rank, or one of several.

    `worker` is its number among all workers of the mesh, and `process` its number in its `rank`,
    which has `processes`. `actor` is Ray's, `hello` the worker's description of itself, `client`
    the driver's connection to it, and `box` its flight recorder, if it is on this host. `at` is the
    call and the task of its last heartbeat, and `has` all programs and functions that it keeps. A
    `dead` worker cannot be used again.
    """

    worker: int
    rank: int
    process: int
    processes: int
    actor: Any = None
    hello: Hello | None = None
    client: Any = None
    box: BlackBox | None = None
    at: tuple[int, str] = (-1, "")
    has: set[Any] = dataclasses.field(default_factory=set)
    dead: bool = False

    def __str__(self):
        pid = self.hello.pid if self.hello else "not known yet"
        where = f"process {pid} on {self.host or 'a host not known yet'}"
        if self.processes > 1:
            where = f"its process {self.process} of {self.processes}, {where}"
        return f"rank {self.rank} ({where})"

    @property
    def host(self) -> str:
        """The worker's host, by its name and address."""
        return f"{self.hello.host} ({self.hello.address})" if self.hello else ""

    @property
    def first(self) -> int:
        """The number of the first worker of this one's rank; without it the others end."""
        return self.worker - self.process

    def kill(self) -> None:
        """Ends the worker's process, whatever its state; it cannot be used again."""
        self.dead = True
        if self.actor is not None and ray.is_initialized():  # `ray.kill` would start a session
            with contextlib.suppress(Exception):  # the session may be ending at this moment
                if self.hello is not None:
                    end_stopped(self.hello.pid, self.hello.node)
                ray.kill(self.actor)
        if self.client is not None:
            self.client.close()

    def state(self) -> str:
        """Finds the state of the worker's process, in a word; empty where its host is silent."""
        assert self.hello is not None
        return process_state(self.hello.pid, self.hello.node)

    def error(
        self, message: str, reason: str, task: str = "", cause: BaseException | None = None
    ) -> RankError:
        """Makes the error that tells of the worker's failure."""
        where = {"rank": self.rank, "host": self.host, "process": self.process}
        error = RankError(message, **where, task=task, reason=reason)
        error.__cause__ = cause
        return error

    def renewed(self) -> "Member":
        """Makes the record for the time after a restart; that of a dead worker has no actor."""
        if not self.dead:
            return dataclasses.replace(self, client=None, at=(-1, ""))
        if self.box is not None:
            self.box.close()
        return Member(self.worker, self.rank, self.process, self.processes)
