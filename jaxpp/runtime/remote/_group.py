"""The worker group of a mesh: starts the workers, calls them in one order, and replaces them."""

import collections
import contextlib
import dataclasses
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ray
import ray.exceptions

from jaxpp._program import Bundle
from jaxpp.runtime.remote._environment import warn_of_driver, warn_of_platform, worker_options
from jaxpp.runtime.remote._places import (
    ranks_of_a_node,
    release_places,
    renew_places,
    reserve_places,
)
from jaxpp.runtime.remote._session import ANSWER_TIMEOUT, join_session, leave_session
from jaxpp.runtime.remote._watch import WorkerWatch
from jaxpp.runtime.remote._worker import LANES, LOOPBACK, Settings, Worker
from jaxpp.runtime.site import (
    POLL,
    RESTART,
    Death,
    Failed,
    Group,
    Member,
    Packed,
    Process,
    Watch,
    uninterrupted,
)
from jaxpp.runtime.transport import warn_of_open_ports

#: Seconds that Ray has to bring the last lines that ranks have printed.
PRINTING = 0.5

#: Ray's decorator; its overloads do not know its options.
_remote: Any = ray.remote

for _method in [*vars(Process).values(), *vars(Worker).values()]:
    if hasattr(_method, "lane"):
        ray.method(concurrency_group=_method.lane)(_method)


@dataclasses.dataclass
class WorkerMember(Member):
    """The driver's record of a worker: Ray's `actor`, and the `turn` of its next call in order."""

    actor: Any = None
    turn: int = 0

    def call(self, method: Callable[..., Any], *args: Any, **how: Any) -> Any:
        """Calls a method of `Worker` there, with Ray's options for it.

        Returns the reference to its result, or to each one.
        """
        if getattr(method, "lane", "") == "steps":
            args, self.turn = (self.turn, *args), self.turn + 1
        own = getattr(self.actor, method.__name__)
        return own.options(**how).remote(*args) if how else own.remote(*args)

    def kill(self) -> None:
        """Ends the worker's process; it cannot be used again."""
        self.dead = True
        if self.actor and ray.is_initialized():  # `ray.kill` would start a session
            with contextlib.suppress(Exception):  # the session may be ending at this moment
                ray.kill(self.actor)


class WorkerGroup(Group):
    """The workers of a mesh, in the order of ranks; the workers of a rank follow each other.

    Raises:
        ValueError: the cluster cannot hold them, or they differ from the driver in a version.
        RuntimeError: one did not start, or cannot be reached.
    """

    def __init__(self, settings: Settings):
        super().__init__()
        self._settings, self._warned = settings, False
        #: Held by the thread that restarts the workers: `end_waits` is not for another restart.
        self.restarts = threading.RLock()
        #: The secret that workers prove to know; each restart takes another one.
        self._secret = secrets.token_bytes(32)
        #: For each rank where its processes are joined; None where it has but one.
        self._coordinators: list[str | None] = [None] * settings.num_ranks
        #: References to what is in Ray's store, by the value.
        self._stored: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        with contextlib.ExitStack() as undo:
            self._session = join_session()
            undo.callback(leave_session, self._session)
            gpus = settings.devices_per_rank * settings.gpus_per_rank
            many, every = settings.ranks_per_process, settings.processes_per_rank
            if many is None:
                share = gpus > 0 and every == 1 and settings.transport != "jax"
                many = ranks_of_a_node(settings.num_ranks, gpus) if share else 1
            self._reservation = reserve_places(
                self._session,
                settings.num_ranks,
                gpus_per_rank=gpus,
                cpus_per_rank=settings.cpus_per_rank,
                processes_per_rank=every,
                ranks_per_process=many,
                timeout=settings.start_timeout,
            )
            ranks = [tuple(range(n, n + many)) for n in range(0, settings.num_ranks, many)]
            numbers = [(own, p) for own in ranks for p in range(every)]
            self.members = [WorkerMember(n, own, p, every) for n, (own, p) in enumerate(numbers)]
            undo.callback(release_places, self._reservation)
            undo.callback(self._kill)
            self._check_nodes()
            warn_of_driver(self._reservation)
            self._start()
            undo.pop_all()

    def agree(self, number: int, bundle: Bundle) -> None:
        """Warns once where the workers' platform is not this process's; it starts JAX here."""
        if not self._warned:
            self._warned = True
            warn_of_platform(jax.default_backend(), self.members[0].hello.platform)

    # ---- calls ----------------------------------------------------------------------------------

    def send(self, method: Callable[..., Any], args: Mapping[int, tuple], **how: Any) -> "Pending":
        """Calls a method of `Process` on some workers, on all of them or none; does not wait."""
        with uninterrupted():
            each = {w: self.members[w].call(method, *own, **how) for w, own in args.items()}
        return Pending(self.members, self._watch, each)

    def pack(self, value: Any) -> Packed:
        """Pickles a value."""
        return Packed.of(value)

    def put(self, value: Any) -> Any:
        """Puts a value into Ray's store, where it stays while it lives; returns the reference."""
        reference = self._stored.get(value)
        if reference is None:
            reference = self._stored[value] = ray.put(value)
        return reference

    # ---- life -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Waits until the callbacks of all calls have been made, and their lines are here."""
        try:
            super().settle()
        finally:
            time.sleep(PRINTING)

    def end_waits(self) -> None:
        """Ends all waits for workers with an error: a thread that waits for room holds `order`."""
        self._watch.close()  # the closed watch stays, and refuses all calls

    def restart(self) -> None:
        """Makes all workers fit for work: replaces the dead ones, and empties the others of arrays.

        Raises:
            RuntimeError: a new one did not start; then all have ended, and it may be tried again.
        """
        self.end_waits()
        self._flying.clear()
        self._stored.clear()  # the session, and its store, may be new
        self._secret = secrets.token_bytes(32)
        room = renew_places(self._session, self._reservation)
        lost, self._reservation = room is not self._reservation, room
        # Running processes cannot be joined again, and servers of JAX keep what nobody has pulled.
        joined = self._settings.processes_per_rank > 1 or self._settings.transport == "jax"
        for member in reversed(self.members):  # without a rank's first process its others end
            if member.dead or joined or lost:
                member.kill()
        try:
            self._reset([member for member in self.members if member.actor and not member.dead])
            self.members = [
                WorkerMember(m.worker, m.ranks, m.process, m.processes) if m.dead else m
                for m in self.members
            ]
            self._start()
        except BaseException:
            self._kill()
            raise

    def _reset(self, members: Sequence[WorkerMember]) -> None:
        """Empties workers; kills those that are not fit for work soon."""
        # All are aborted first: else one would take the reset of another for its loss. What was
        # called before and waits for a thread must not come to the new ranks.
        passes = [({"concurrency_group": n}, Worker.pulse) for n in ("batches", "fetches", "aside")]
        for how, method, *args in (
            ({}, Process.abort, "The mesh is restarted."),
            *passes,
            ({}, Worker.reset, self._secret),
        ):
            call = self.send(method, {member.worker: tuple(args) for member in members}, **how)
            call.wait(ANSWER_TIMEOUT)  # for each, or a worker that does not answer takes all of it
            for member in members:
                try:
                    found = ray.get(call.references[member.worker], timeout=0)
                    if method is Worker.reset:
                        member.hello = dataclasses.replace(member.hello, addresses=found)
                        member.steps.clear()
                except ray.exceptions.RayError:
                    member.kill()
            members = [member for member in members if not member.dead]

    def stop(self) -> None:
        """Ends all workers, and gives back their reservation in the cluster; may be repeated."""
        self.end_waits()
        with self.order:
            if self.stopped:
                return
            self.stopped = True
            try:
                self._flying.clear()
                if ray.is_initialized():  # else the session has gone, and all workers with it
                    fit = {m.worker: () for m in self.members if m.actor and not m.dead}
                    self.send(Process.close, fit).wait(ANSWER_TIMEOUT)
            finally:
                self._kill()
                with contextlib.suppress(ray.exceptions.RayError):  # the session has just gone
                    release_places(self._reservation)
                leave_session(self._session)

    def _kill(self) -> None:
        for member in reversed(self.members):
            member.kill()

    # ---- the start ------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts an actor for each worker that has none, connects all workers, and watches them."""
        fresh = [member for member in self.members if member.actor is None]
        for member in fresh:
            member.actor = self._new_actor(member)
        if len(fresh) == len(self.members):
            self._meet()
        args = [
            (self._settings, self._secret, self._address(m), self._coordinators[m.ranks[0]])
            for m in fresh
        ]
        for member, hello in zip(fresh, self._ask(Worker.start, fresh, args), strict=True):
            member.hello = hello
            self._check(member)
        warn_of_open_ports(member.hello.addresses for member in fresh)
        self._watch = WorkerWatch(self.members, self._settings.heartbeat_timeout, RESTART)
        self._watch.start()
        # Processes of the same number in their ranks send to each other.
        peers: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        for member in self.members:
            peers[member.process] |= dict.fromkeys(member.ranks, member.hello.addresses)
        self.send(Process.connect, {m.worker: (peers[m.process],) for m in self.members}).values()

    def _new_actor(self, member: WorkerMember) -> Any:
        """Starts the process of a worker; `ps` shows the name of its class."""
        rank, process, settings = member.ranks[0], member.process, self._settings
        name = f"jaxpp_rank_{rank}" + (f"_process_{process}" if member.processes > 1 else "")
        how = {"environment": settings.environment, "cores": settings.cores}
        options = worker_options(self._reservation, rank, process, **how)
        own = type(name, (Worker,), {"__doc__": Worker.__doc__})
        actor = _remote(concurrency_groups=LANES)(own)
        return actor.options(**options).remote(member.ranks, process, member.processes)

    def _meet(self) -> None:
        """Settles where `jax.distributed` joins the processes of each rank, if it has several."""
        processes = self._settings.processes_per_rank
        if processes > 1:
            first = self.members[::processes]
            hosts = [self._address(member) or LOOPBACK for member in first]
            ports = self._ask(Worker.free_port, first, [(host,) for host in hosts])
            self._coordinators = [f"{h}:{port}" for h, port in zip(hosts, ports, strict=True)]

    def _check_nodes(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        places = [place for own in self._reservation.places for place in own]
        if self._settings.address is None and any(p.node_id != here for p in places):
            nodes = ", ".join(dict.fromkeys(f"{p.node_id[:8]} ({p.address})" for p in places))
            raise ValueError(
                f"RemoteMpmdMesh: the ranks are on the Ray nodes {nodes}, not all on {here[:8]}, "
                f"which this process is on, and workers listen for processes of their own node "
                f"only; give address='auto' to let them listen at the address that Ray knows of it."
            )

    def _address(self, member: WorkerMember) -> str | None:
        """Finds the address at which other hosts reach a worker's host; None where they do not."""
        wanted = self._settings.address
        place = self._reservation.places[member.ranks[0]][member.process]
        return place.address if wanted == "auto" else wanted

    def _ask(
        self, method: Callable[..., Any], members: Sequence[WorkerMember], args: Sequence[tuple]
    ) -> list[Any]:
        """Calls a method of workers that start, and waits for the results."""
        each = zip(members, args, strict=True)
        references = [member.call(method, *own) for member, own in each]
        try:
            return ray.get(references, timeout=self._settings.start_timeout)
        except ray.exceptions.GetTimeoutError:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = (m for m, r in zip(members, references, strict=True) if r not in done)
            ranks = [rank for member in late for rank in member.ranks]
            raise RuntimeError(
                f"RemoteMpmdMesh: the workers of ranks {ranks} have not started within "
                f"{self._settings.start_timeout:g} s; look at Ray's logs, or give a longer "
                f"start_timeout."
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"RemoteMpmdMesh: a worker has died while it started: {error}. If a module is "
                f"missing there, install this project and its packages on every host."
            ) from error

    def _check(self, member: WorkerMember) -> None:
        hello = member.hello
        if self._settings.gpus_per_rank and hello.platform == "cpu":
            given = (self._settings.environment or {}).get("JAX_PLATFORMS", "")
            raise RuntimeError(
                f"RemoteMpmdMesh: {member} has a GPU, for "
                f"gpus_per_rank={self._settings.gpus_per_rank:g}, but JAX runs on CPU there, with "
                f"JAX_PLATFORMS={given!r}. Install JAX for GPUs on that host (jax[cuda13]), or run "
                f"on CPU with gpus_per_rank=0."
            )
        member.check_versions("RemoteMpmdMesh")


class Pending:
    """A call that runs on some workers.

    `references` are by worker to its result, or to each of several.
    """

    def __init__(
        self, members: Sequence[WorkerMember], watch: Watch, references: Mapping[int, Any]
    ):
        self._members, self._watch, self.references = members, watch, references

    def wait(self, timeout: float = POLL) -> bool:
        """Waits until all have answered, `timeout` seconds at most; tells whether they have."""
        # The results of a worker come together.
        every = [own[0] if isinstance(own, list) else own for own in self.references.values()]
        return _wait(every, timeout)

    def values(self) -> dict[int, Any]:
        """Waits for all workers; gives their results by worker.

        Raises:
            Exception: what the method has raised on a worker, which goes on.
            RankError: a worker has failed.
        """
        try:
            outcomes = {w: self._outcome(w, reference) for w, reference in self.references.items()}
        except BaseException:
            for reference in self.references.values():
                reference.future()  # else Ray prints the errors that nobody gets
            raise
        for _, error in outcomes.values():
            if error is not None:
                raise error
        return {worker: value for worker, (value, _) in outcomes.items()}

    def value(self, worker: int, place: int = 0) -> Any:
        """Waits for one result of a method that gives None where the worker has failed."""
        own = self.references[worker]
        value, _ = self._outcome(worker, own[place] if isinstance(own, list) else own)
        if value is None:
            self._watch.end()
        return value

    def _outcome(self, worker: int, reference: Any) -> tuple[Any, BaseException | None]:
        """Waits for a result, or for what the method has raised."""
        while not _wait([reference], POLL):
            self._watch.check()
        if not ray.is_initialized():
            self._watch.check()
        try:
            return ray.get(reference), None  # with a timeout Ray might begin a transfer again
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Failed) and not cause.ends:
                raised = cause.failure.cause()
                raised.add_note(f"on {self._members[worker]}")
                return None, raised
            if not isinstance(cause, Failed):
                self._watch.report(worker, Death.of(error))
            self._watch.end()


def _wait(references: Sequence[Any], timeout: float) -> bool:
    """Waits until calls have ended, `timeout` seconds at most; tells whether they have."""
    if not (references and ray.is_initialized()):  # without a session Ray would start another one
        return True
    how: Any = {"num_returns": len(references), "timeout": timeout, "fetch_local": False}
    return not ray.wait(list(references), **how)[1]
