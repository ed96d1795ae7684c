"""The processes of a mesh, as the process of the user's script calls them."""

import collections
import dataclasses
import importlib.metadata
import itertools
import os
import platform
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxpp._program import Bundle, Message
from jaxpp._version import __version__
from jaxpp.runtime.site._failure import RankError
from jaxpp.runtime.site._interrupts import uninterrupted
from jaxpp.runtime.site._process import Process
from jaxpp.runtime.site._programs import Library
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


#: Calls of steps that may be under way before the next one waits for the oldest.
IN_FLIGHT = 4

Own = TypeVar("Own")


class Group:
    """The processes that this one calls, in the order of ranks. Subclasses say how.

    Calls that several processes have to see in one order are sent under `order`.
    """

    members: Sequence[Any]
    _watch: Any

    def __init__(self):
        #: Held where calls have to have one order on all processes.
        self.order = threading.RLock()
        self.stopped = False
        #: The steps that are called there.
        self.library = Library(self.put, self.pack)
        #: The numbers of calls of steps.
        self.calls = itertools.count(1)
        #: The calls of steps that some rank may not have dispatched yet, the oldest first.
        self._flying: collections.deque[Any] = collections.deque()

    # ---- what a subclass knows ------------------------------------------------------------------

    def send(self, method: Callable[..., Any], args: Mapping[int, tuple], **how: Any) -> Any:
        """Calls a method of `Process` on some processes; does not wait.

        Args:
            method: the method: `Process.run`.
            args: the arguments by process.
            **how: `num_returns`, the number of results of each, where these are several.

        Returns:
            The call that is under way. It has `wait(timeout)`, which tells whether it has ended;
            `values()`, which gives the results by process, or raises what a process has raised; and
            `value(worker, place)`, one result of a method that gives None where it has failed.
        """
        raise NotImplementedError

    def pack(self, value: Any) -> Any:
        """Makes a value of the user's ready to go to other processes, if there are some."""
        return value

    def put(self, value: Any) -> Any:
        """Puts a packed value where all processes find it, once; returns the reference."""
        return value

    def agree(self, number: int, bundle: Bundle) -> None:
        """Checks that all processes have the same step by a number."""

    def transfers_of(self, bundle: Bundle) -> tuple[Message, ...]:
        """Returns the messages for which all processes keep one order, in that order."""
        return ()

    def notes_of(self, bundle: Bundle) -> tuple[str, ...]:
        """Returns what a description of a step says of the way of its messages, a line each."""
        return ()

    def hellos(self) -> Sequence[tuple[tuple[int, ...], Hello]]:
        """Returns for each process its ranks, and its description of itself."""
        return [(m.ranks, m.hello) for m in self.members if m.hello is not None]

    def lead(self, what: str, function: Callable[[], Any], arrays: Any) -> Any:
        """Runs a function in one of the processes that run the user's script; see `SiteMesh.lead`.

        `arrays` are the records of arrays; what the function makes there does not outlive it.
        """
        return function()

    def fetch(self, rank: int, numbers: Sequence[int], split: bool) -> list[tuple[Any, int]]:
        """Asks for the values of arrays of a rank: the calls, and the process of each.

        The results of a call are those of the arrays; with `split`, each process gives its shares.
        """
        workers = self.workers(rank)[: None if split else 1]
        how = {"num_returns": len(numbers)} if len(numbers) > 1 else {}
        return [(self.send(Process.fetch, {w: (rank, numbers)}, **how), w) for w in workers]

    def wait(self, rank: int, number: int) -> tuple[Any, int]:
        """Starts to wait until a rank has computed an array: the call, and its process."""
        worker = self.workers(rank)[0]
        return self.send(Process.wait, {worker: (rank, (number,))}), worker

    def apply(self, name: str, packed: Mapping[int, Any], ordered: bool, processes: int) -> Any:
        """Starts a function of a name on ranks, in the first `processes` of each.

        `packed` is by rank the function and its arguments; an `ordered` one keeps its place among
        the steps.
        """
        method = Process.apply_in_order if ordered else Process.apply
        first = {m.worker for m in self.members if m.process < processes}
        each = self.by_worker(packed).items()
        return self.send(method, {w: (own,) for w, own in each if w in first})

    # ---- in all of them -------------------------------------------------------------------------

    def workers(self, rank: int) -> list[int]:
        """Returns the numbers of the processes that have a rank, by their order in the rank."""
        return [member.worker for member in self.members if rank in member.ranks]

    def by_worker(self, by_rank: Mapping[int, Own]) -> dict[int, dict[int, Own]]:
        """Returns for each process what is for its ranks, where there is something."""
        found = {m.worker: {r: by_rank[r] for r in m.ranks if r in by_rank} for m in self.members}
        return {worker: own for worker, own in found.items() if own}

    def check_open(self) -> None:
        """Raises a `ValueError` where the mesh has been shut down."""
        if self.stopped:
            raise ValueError("This mesh has been shut down; make a new one.")

    def check(self) -> None:
        """Raises the error of the processes, if one has failed or they have been stopped."""
        self.check_open()
        self._watch.check()

    @property
    def is_well(self) -> bool:
        """Tells whether no process has failed."""
        return self._watch.error is None

    def send_by_rank(
        self, method: Callable[..., Any], by_rank: Mapping[int, Any], *first: Any
    ) -> Any:
        """Calls a method on the processes of some ranks; what is for their ranks comes last."""
        own = self.by_worker(by_rank).items()
        return self.send(method, {worker: (*first, of_ranks) for worker, of_ranks in own})

    def send_steps(self, calls: Mapping[int, Any], inputs: Sequence[Any]) -> None:
        """Calls a step on all processes, with the `StepCall` of each, and counts it as under way.

        `inputs` are the arguments, those that go with the call as `Given`.
        """
        self._flying.append(self.send(Process.run, {w: (call,) for w, call in calls.items()}))

    def wait_for_room(self) -> None:
        """Waits until one more call of a step may be under way."""
        self.check()
        while len(self._flying) >= IN_FLIGHT:
            if self._flying[0].wait():
                self._flying.popleft().values()
            self.check()

    def settle(self) -> None:
        """Waits until the callbacks of all calls have been made."""
        self.send(Process.settle, {member.worker: () for member in self.members}).values()

    def install(self, step: int) -> None:
        """Brings a step to the processes that do not have it, before any begins to run it."""
        with uninterrupted():
            for number, unused in self.library.removals().items():
                self.send(Process.unload, {m.worker: (number, unused) for m in self.members})
                for member in self.members:
                    member.steps.discard(number)
        lack = [member for member in self.members if step not in member.steps]
        if not lack:  # as in every call but the first
            return
        ranks = {rank for member in lack for rank in member.ranks}
        loadings = {rank: self.library.loading(step, rank) for rank in ranks}
        self.send_by_rank(Process.load, loadings).values()
        for member in lack:
            member.steps.add(step)
