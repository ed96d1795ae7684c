"""The driver's record of a worker, and its calls there."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import ray

from jaxpp.runtime.remote._failure import RankError
from jaxpp.runtime.remote._start import Hello


@dataclasses.dataclass
class Member:
    """The driver's record of a worker: a process of one rank or more.

    `worker` is its number among all workers of the mesh, `ranks` are its ranks, and `process` is
    its number among the `processes` of its rank. `actor` is Ray's, whose class is `Process`, and
    `hello` the worker's description of itself. `turn` is that of its next call in order, and
    `steps` are those that have been loaded. A `dead` worker cannot be used again.
    """

    worker: int
    ranks: tuple[int, ...]
    process: int = 0
    processes: int = 1
    actor: Any = None
    hello: Hello | None = None
    turn: int = 0
    steps: set[int] = dataclasses.field(default_factory=set)
    dead: bool = False

    def __str__(self):
        return self.named()

    def named(self, rank: int | None = None) -> str:
        """Names the worker by its ranks, or by one of them, and its process."""
        ranks = self.ranks if rank is None else (rank,)
        pid = self.hello.pid if self.hello else "not known yet"
        where = f"process {pid} on {self.host or 'a host not known yet'}"
        if self.processes > 1:
            where = f"its process {self.process} of {self.processes}, {where}"
        return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))} ({where})"

    @property
    def host(self) -> str:
        """The worker's host, by its name and address."""
        return f"{self.hello.host} ({self.hello.address})" if self.hello else ""

    def call(self, method: Callable[..., Any], *args: Any, returns: int = 1) -> Any:
        """Calls a method of `Process` on the worker; returns the reference to the result.

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

    def error(
        self,
        message: str,
        reason: str,
        task: str = "",
        cause: BaseException | None = None,
        rank: int | None = None,
    ) -> RankError:
        """Makes the error that tells of the failure of the worker, or of one of its ranks."""
        rank = self.ranks[0] if rank is None else rank
        where = {"rank": rank, "host": self.host, "process": self.process}
        error = RankError(message, **where, task=task, reason=reason)
        error.__cause__ = cause
        return error

    def renewed(self) -> "Member":
        """Makes the record of the worker that replaces this one."""
        return Member(self.worker, self.ranks, self.process, self.processes)
