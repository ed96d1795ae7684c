"""The driver's record of a worker, and how the driver kills a worker."""

import contextlib
import dataclasses
from typing import Any

import ray

from jaxpp.runtime.remote.cluster import end_stopped
from jaxpp.runtime.remote.worker import BlackBox


@dataclasses.dataclass
class Member:
    """The driver's record of a worker: the process of a rank, or one of several.

    `worker` is its number among all workers of the mesh, and `process` its number in its `rank`,
    which has `processes`. `seen` is the time of its last heartbeat (seconds of the monotonic
    clock), and `at` the call and the task that it ran then. `box` is its flight recorder, if it is
    on this host. A `dead` worker cannot be used again.
    """

    worker: int
    actor: Any
    rank: int
    process: int = 0
    processes: int = 1
    host: str = ""
    pid: int = 0
    node: str = ""
    seen: float = 0.0
    at: tuple[int, str] = (-1, "")
    dead: bool = False
    box: BlackBox | None = None

    def __str__(self):
        where = f"process {self.pid} on {self.host or 'a host not known yet'}"
        if self.processes > 1:
            where = f"its process {self.process} of {self.processes}, {where}"
        return f"rank {self.rank} ({where})"

    @property
    def first(self) -> int:
        """The number of the first worker of this one's rank; without it the others end."""
        return self.worker - self.process

    def renewed(self) -> "Member":
        """Makes the record for the time after a restart; a dead worker's has no actor."""
        own = self.rank, self.process, self.processes
        if not self.dead:
            return Member(self.worker, self.actor, *own, box=self.box)
        if self.box is not None:
            self.box.close()
        return Member(self.worker, None, *own)


def kill(member: Member) -> None:
    """Ends a worker's process, whatever its state; may be repeated."""
    if not ray.is_initialized():  # `ray.kill` would start a session
        return
    with contextlib.suppress(Exception):  # the session may be ending at this moment
        if member.node == ray.get_runtime_context().get_node_id():
            end_stopped(member.pid)
        ray.kill(member.actor)
