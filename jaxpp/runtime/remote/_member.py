"""The driver's record of a worker, and its calls there."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import ray

from jaxpp.runtime.site import Member


@dataclasses.dataclass
class WorkerMember(Member):
    """The driver's record of a worker.

    `actor` is Ray's, whose class is `Worker`, and `turn` is that of its next call in order.
    """

    actor: Any = None
    turn: int = 0

    def call(self, method: Callable[..., Any], *args: Any, returns: int = 1) -> Any:
        """Calls a method of `Worker` on the worker; returns the reference to the result.

        Args:
            method: the method: `Process.run`.
            *args: what it takes, but for its turn.
            returns: the number of results; of several, there is a reference to each.
        """
        assert self.actor is not None
        if getattr(method, "lane", "") == "steps":
            args, self.turn = (self.turn, *args), self.turn + 1
        own = getattr(self.actor, method.__name__)
        return own.remote(*args) if returns == 1 else own.options(num_returns=returns).remote(*args)

    def kill(self) -> None:
        """Ends the worker's process; it cannot be used again."""
        self.dead = True
        if self.actor is not None and ray.is_initialized():  # `ray.kill` would start a session
            with contextlib.suppress(Exception):  # the session may be ending at this moment
                ray.kill(self.actor)

    def renewed(self) -> "WorkerMember":
        """Makes the record of the worker that replaces this one."""
        return WorkerMember(self.worker, self.ranks, self.process, self.processes)
