"""A worker as the driver knows it, and its end."""

import contextlib
import dataclasses
from typing import Any

import ray

from jaxpp.runtime._remote._black_box import BlackBox
from jaxpp.runtime._remote._lookout import end_stopped


@dataclasses.dataclass
class Member:
    """A worker as the driver knows it: the process of a rank, or one of several.

    `worker` is its number among all of the mesh, `process` that within its `rank`, which has
    `processes`. `seen` is when it last gave a sign of life (seconds of the monotonic clock), and
    `at` what it was at then; `box` says what it was at last, if it is on this host. `dead` ones
    cannot be used again.
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
        """The worker that is the first process of its rank; without it the others end."""
        return self.worker - self.process

    def renewed(self) -> "Member":
        """The member of the next watch: without an actor, if that is dead."""
        own = self.rank, self.process, self.processes
        if not self.dead:
            return Member(self.worker, self.actor, *own, box=self.box)
        if self.box is not None:
            self.box.close()
        return Member(self.worker, None, *own)


def kill(member: Member) -> None:
    """Ends a worker's process, whatever state it is in; may be repeated."""
    if not ray.is_initialized():  # Ray would start a session for it
        return
    with contextlib.suppress(Exception):  # the session goes just now
        if member.node == ray.get_runtime_context().get_node_id():
            end_stopped(member.pid)
        ray.kill(member.actor)
