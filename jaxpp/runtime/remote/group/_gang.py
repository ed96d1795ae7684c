"""The worker group of a mesh: processes that are started, connected and replaced together."""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ray
import ray.exceptions

from jaxpp.runtime.remote.calls import Line
from jaxpp.runtime.remote.cluster import (
    Place,
    join_session,
    leave_session,
    release_places,
    renew_places,
    reserve_places,
    warn_of_driver,
    worker_options,
)
from jaxpp.runtime.remote.group._member import Member, kill
from jaxpp.runtime.remote.group._settings import Settings
from jaxpp.runtime.remote.worker import LOOPBACK, Actor, BlackBox, Hello, Join, Setup, versions
from jaxpp.runtime.transport import RankDevices, choose_transport

#: Seconds that a worker has to end its current work when the mesh is restarted.
RESET_TIMEOUT = 5.0


class Gang:
    """The worker group of a mesh, in the order of ranks; a rank's workers follow each other.

    Args:
        settings: how they are started.

    Raises:
        ValueError: the cluster cannot hold them, or they differ from the driver in a version.
        RuntimeError: one did not start.
    """

    def __init__(self, settings: Settings):
        self.members: list[Member] = []
        self.hellos: list[Hello] = []
        self._settings = settings
        config: Any = jax.config
        self._x64 = bool(config.jax_enable_x64)
        self._secret = secrets.token_bytes(32)
        self._epoch = 0
        self._join: Join | None = None
        #: For each rank the way that its processes are joined; None where it has but one.
        self._spans: list[Join | None] = []
        with contextlib.ExitStack() as undo:
            self._session = join_session()
            undo.callback(leave_session, self._session)
            self._reservation = reserve_places(
                self._session,
                processes_per_rank=settings.processes_per_rank,
                cpus_per_rank=settings.cpus_per_rank,
                gpus_per_rank=[n * settings.gpus_per_rank for n in settings.devices_per_rank],
            )
            undo.callback(release_places, self._reservation)
            undo.callback(self._kill)
            self._check_nodes()
            warn_of_driver(self._reservation)
            of_rank = range(processes := settings.processes_per_rank)
            numbers = [(rank, process) for rank in range(settings.num_ranks) for process in of_rank]
            self._start([Member(n, None, *own, processes) for n, own in enumerate(numbers)])
            undo.pop_all()

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

    def lines(self, check: Callable[[], None], ended: Callable[[int], None]) -> list[Line]:
        """Opens an RPC client for each worker; see `Line` for the arguments."""
        lines = []
        try:
            for member, hello in zip(self.members, self.hellos, strict=True):
                where = self._epoch, member.rank, hello.line, self._secret
                lines.append(Line(member.worker, *where, check, ended))
        except BaseException:
            for line in lines:
                line.close()
            raise
        return lines

    def _start(self, members: Sequence[Member]) -> None:
        """Starts an actor for each worker that has none, and connects all workers."""
        self.members = list(members)
        try:
            for member in members:
                if member.actor is None:
                    options = worker_options(
                        self._reservation,
                        member.rank,
                        member.process,
                        environment=self._settings.environment,
                        cores=self._settings.cores,
                    )
                    member.actor = Actor.options(**options).remote()
                    member.box = self._new_box(member)
            self._meet()
            hellos = self._call_all("start", lambda member: (self._setup(member),))
        finally:
            for member in members:
                if member.box is not None:
                    member.box.unlink()
        for member, hello in zip(self.members, hellos, strict=True):
            self._check(member, hello)
            member.host = f"{hello.host} ({self._place(member).address})"
            member.pid, member.node = hello.pid, hello.node
        self.hellos = hellos
        self._connect([hello.addresses for hello in hellos])

    def _meet(self) -> None:
        """Settles which workers `jax.distributed` joins.

        All are joined for transfers between devices; else the processes of each rank, where it has
        several; else none.
        """
        gpus, processes = self._settings.gpus_per_rank, self._settings.processes_per_rank
        identities = self._call_all("identify", lambda m: (self._address(m) or LOOPBACK,))
        ports = [
            f"{self._address(member) or LOOPBACK}:{found.free_port}"
            for member, found in zip(self.members, identities, strict=True)
        ]
        self._join, self._spans = None, [None] * self._settings.num_ranks
        if processes > 1:
            self._spans = [Join(port, processes) for port in ports[::processes]]
        workers = [RankDevices("gpu" if gpus else "cpu", i.node, i.gpus) for i in identities]
        if choose_transport(workers, self._settings.transport) == "device":
            self._join = Join(ports[0], len(workers))

    @property
    def between_devices(self) -> bool:
        """Tells whether arrays go from device to device, and not over sockets."""
        return self._join is not None

    def _place(self, member: Member) -> Place:
        return self._reservation.places[member.rank][member.process]

    def _address(self, member: Member) -> str | None:
        """Gives the address at which other hosts reach a worker's host; None where they do not."""
        wanted = self._settings.address
        return self._place(member).address if wanted == "auto" else wanted

    def _new_box(self, member: Member) -> BlackBox | None:
        here = ray.get_runtime_context().get_node_id()
        return BlackBox(BlackBox.create()) if self._place(member).node_id == here else None

    def _setup(self, member: Member) -> Setup:
        settings = self._settings
        return Setup(
            member.rank,
            settings.num_ranks,
            member.process,
            member.processes,
            self._secret,
            self._address(member),
            settings.cores,
            settings.insides[member.rank],
            "auto" if settings.transport == "socket" else settings.transport,
            self._join,
            self._spans[member.rank],
            self._x64,
            self._epoch,
            member.box.path if member.box else None,
        )

    def _connect(self, addresses: Sequence[Any]) -> None:
        # Processes of the same number in their ranks send to each other.
        every = self._settings.processes_per_rank
        peers = [dict(enumerate(addresses[process::every])) for process in range(every)]
        self._call_all("connect", lambda member: (peers[member.process],))

    def _call_all(self, method: str, args: Callable[[Member], tuple]) -> list[Any]:
        references = [getattr(m.actor, method).remote(*args(m)) for m in self.members]
        try:
            return ray.get(references, timeout=self._settings.start_timeout)
        except ray.exceptions.GetTimeoutError:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = [m.rank for m, r in zip(self.members, references, strict=True) if r not in done]
            raise RuntimeError(
                f"RemoteMpmdMesh: the workers of ranks {late} have not started within "
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

    def _check(self, member: Member, hello: Hello) -> None:
        if self._settings.gpus_per_rank and hello.platform == "cpu":
            given = (self._settings.environment or {}).get("JAX_PLATFORMS", "")
            raise RuntimeError(
                f"RemoteMpmdMesh: the worker of rank {member.rank} on {hello.host} has a GPU, for "
                f"gpus_per_rank={self._settings.gpus_per_rank:g}, but JAX runs on CPU there, with "
                f"JAX_PLATFORMS={given!r}. Install JAX for GPUs on that host (jax[cuda13]), or run "
                f"on CPU with gpus_per_rank=0."
            )
        own = versions()
        apart = [
            f"{n} {hello.versions[n]} (here {own[n]})" for n in own if hello.versions[n] != own[n]
        ]
        if apart:
            raise ValueError(
                f"RemoteMpmdMesh: the worker of rank {member.rank} on {hello.host} has "
                f"{', '.join(apart)}; install the same versions on every host."
            )

    def renew(self) -> set[int]:
        """Makes all workers fit for work: replaces the dead ones, and empties the others of arrays.

        All workers are replaced where `jax.distributed` has joined some: running processes cannot
        be joined again, and their collectives may wait for ever.

        Returns:
            The ranks that have new workers.

        Raises:
            RuntimeError: a new one did not start; then all have ended, and it may be tried again.
        """
        self._epoch += 1
        room = renew_places(self._session, self._reservation)
        if room is not self._reservation:  # a host was lost, and the whole reservation with it
            self._reservation = room
            for member in self.members:
                member.dead = True
        self._try_all("abort", "The mesh is restarted.")
        if self._join is None and self._settings.processes_per_rank == 1:
            self._try_all("reset", self._epoch)
        else:  # processes that have been joined cannot be joined again
            for member in reversed(self.members):
                kill(member)
                member.dead = True
        fresh = {m.rank for m in self.members if m.dead}
        try:
            self._start([m.renewed() for m in self.members])
        except BaseException:
            self._kill()
            raise
        return fresh

    def _try_all(self, method: str, *args: Any) -> None:
        """Calls a method of all live workers; kills each worker that does not answer."""
        fit = [m for m in self.members if not m.dead]
        references = [getattr(m.actor, method).remote(*args) for m in fit]
        if references:
            ray.wait(references, num_returns=len(references), timeout=RESET_TIMEOUT)
        for member, reference in zip(fit, references, strict=True):
            try:
                ray.get(reference, timeout=0)
            except ray.exceptions.RayError:
                member.dead = True
        for member in self.members:
            if member.dead:
                kill(member)

    def stop(self) -> None:
        """Ends all workers, and gives back their reservation in the cluster."""
        if ray.is_initialized():  # else the session has gone, and all workers with it
            closing = [m.actor.close.remote() for m in self.members if not m.dead]
            try:
                ray.wait(closing, num_returns=len(closing), timeout=2.0) if closing else None
                self._kill()
                release_places(self._reservation)
            except ray.exceptions.RayError:
                pass  # the session has just gone
        leave_session(self._session)

    def _kill(self) -> None:
        for member in reversed(self.members):  # without a rank's first process its others end
            member.dead = True
            if member.actor is not None:
                kill(member)
