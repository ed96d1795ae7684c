"""The worker group of a mesh: starts the workers, calls them in one order, and replaces them."""

import collections
import contextlib
import functools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ray
import ray.exceptions

from jaxpp.runtime.remote.calls import (
    DRIVER,
    Answer,
    Client,
    Kind,
    Lane,
    pack,
    pack_code,
    uninterrupted,
    unpack,
)
from jaxpp.runtime.remote.cluster import (
    Place,
    join_session,
    leave_session,
    release_places,
    renew_places,
    reserve_places,
    warn_of_driver,
    warn_of_platform,
    worker_options,
)
from jaxpp.runtime.remote.group._health import HealthMonitor
from jaxpp.runtime.remote.group._member import Member
from jaxpp.runtime.remote.worker import (
    LOOPBACK,
    BlackBox,
    Hello,
    Settings,
    Setup,
    actor_of,
    versions,
)
from jaxpp.runtime.transport import Hello as Greeting
from jaxpp.runtime.transport import TransportError, warn_of_open_ports

#: Seconds that a worker has to end its current work when the mesh is restarted.
RESET_TIMEOUT = 5.0
#: Calls of steps that may be under way before the next one waits for the oldest.
IN_FLIGHT = 4
#: Seconds that a worker has to close its connections when the mesh is shut down.
CLOSING = 2.0
#: Seconds between two checks of the workers in a wait.
POLL = 0.2
#: What a call is posted with: the worker, the lane, the pieces, and who gets the answer.
Post = tuple[int, Lane, Sequence[Any], Callable[..., None]]


class WorkerGroup:
    """The workers of a mesh, in the order of ranks; the workers of a rank follow each other.

    Calls that several workers have to see in one order are posted under `order`.

    Args:
        settings: how they are started.
        describe: gives the stage and source line of a task, from its call's number and its label.

    Raises:
        ValueError: the cluster cannot hold them, or they differ from the driver in a version.
        RuntimeError: one did not start, or cannot be reached.
    """

    def __init__(self, settings: Settings, describe: Callable[[int, str], str]):
        #: Held where calls have to have one order on all workers.
        self.order = threading.RLock()
        self.stopped = self._warned = False
        self._settings, self._describe = settings, describe
        config: Any = jax.config
        self._x64 = bool(config.jax_enable_x64)
        self._secret = secrets.token_bytes(32)
        self._epoch = 0
        #: For each rank where its processes are joined; None where it has but one.
        self._coordinators: list[str | None] = [None] * settings.num_ranks
        #: The calls of steps that some rank may not have dispatched yet, the oldest first.
        self._flying: collections.deque[Pending] = collections.deque()
        every = range(settings.processes_per_rank)
        numbers = [(rank, process) for rank in range(settings.num_ranks) for process in every]
        self.members = [Member(n, *own, len(every)) for n, own in enumerate(numbers)]
        with contextlib.ExitStack() as undo:
            self._session = join_session()
            undo.callback(leave_session, self._session)
            self._reservation = reserve_places(
                self._session,
                settings.num_ranks,
                gpus_per_rank=settings.devices_per_rank * settings.gpus_per_rank,
                cpus_per_rank=settings.cpus_per_rank,
                processes_per_rank=settings.processes_per_rank,
            )
            undo.callback(release_places, self._reservation)
            undo.callback(self._kill)
            self._check_nodes()
            warn_of_driver(self._reservation)
            self._start()
            undo.pop_all()

    # ---- the workers ----------------------------------------------------------------------------

    @property
    def hellos(self) -> list[Hello]:
        """The workers' descriptions of themselves."""
        return [member.hello for member in self.members if member.hello is not None]

    def workers(self, rank: int) -> range:
        """Returns the numbers of a rank's processes, among the processes of all ranks."""
        processes = self._settings.processes_per_rank
        return range(rank * processes, (rank + 1) * processes)

    def has(self, rank: int) -> set[Any]:
        """Returns the set of what the processes of a rank have been given to keep."""
        return self.members[self.workers(rank)[0]].has

    def check_open(self) -> None:
        """Raises a `ValueError` where the workers have been stopped."""
        if self.stopped:
            raise ValueError("This RemoteMpmdMesh has been shut down; make a new one.")

    def check(self) -> None:
        """Raises the error of the workers, if one has failed or they have been stopped."""
        self.check_open()
        self._health.check()

    @property
    def is_well(self) -> bool:
        """Tells whether no worker has failed."""
        return self._health.error is None

    def warn_of_platform(self) -> None:
        """Warns once where the workers' platform is not this process's; it starts JAX here."""
        if not self._warned:
            self._warned = True
            warn_of_platform(jax.default_backend(), self.hellos[0].platform)

    # ---- calls ----------------------------------------------------------------------------------

    def post(self, posts: Sequence[Post]) -> None:
        """Posts calls, all of them or none, under `order`; `flush` sends them."""
        with uninterrupted():
            for worker, *own in posts:
                self.members[worker].client.post(*own)

    def flush(self, wait: bool = True) -> None:
        """Sends what has been posted, or what the connections take now if it is not to `wait`."""
        for client in filter(None, [member.client for member in self.members]):
            client.flush(wait)  # a restart that was interrupted has left some without one

    def call(self, lane: Lane, method: str, args: Mapping[int, tuple], **how: Any) -> "Pending":
        """Calls a method of some workers, as `begin` does, and sends the calls."""
        pending = self.begin(lane, method, args, **how)
        self.flush()
        return pending

    def begin(
        self,
        lane: Lane,
        method: str,
        args: Mapping[int, tuple],
        *,
        code: bool = False,
        kept: Any = None,
    ) -> "Pending":
        """Posts calls of a method of some workers.

        Args:
            lane: where the workers run it.
            method: of `Process`, or of a part: `"transport.connect"`.
            args: the arguments by worker.
            code: whether functions may be among them.
            kept: what must live until all have answered.

        Raises:
            Exception: an argument cannot be pickled; then no worker has the call.
        """
        packed = {w: (pack_code if code else pack)((method, own)) for w, own in args.items()}
        pending, posts = self._posts(lane, packed, kept)
        with self.order if lane == Lane.ORDERED else contextlib.nullcontext():
            self.post(posts)
        return pending

    def _posts(
        self, lane: Lane, packed: Mapping[int, Sequence[Any]], kept: Any = None, fatal: bool = False
    ) -> tuple["Pending", list[Post]]:
        """Makes the posts of a call; reports workers that fail, and where `fatal` any error."""
        answers, health = {worker: Answer(kept) for worker in packed}, self._health

        def answered(worker: int, kind: Kind, pieces: Sequence[Any]) -> None:
            answers[worker].set(kind, pieces)
            if fatal or kind != Kind.RAISED:
                health.note(worker, kind, pieces)

        posts = [(w, lane, p, functools.partial(answered, w)) for w, p in packed.items()]
        return Pending(answers, health), posts

    def posts(self, lane: Lane, method: str, rank: int, *args: Any) -> list[Post]:
        """Makes posts of a method, to a rank, that has no result and must not fail."""
        packed = dict.fromkeys(self.workers(rank), pack_code((method, args)))
        return self._posts(lane, packed, fatal=True)[1]

    def wait_for_room(self) -> None:
        """Waits until one more call of a step may be under way."""
        self.check()
        while len(self._flying) >= IN_FLIGHT:
            if self._flying[0].wait(POLL):
                self._flying.popleft()
            self.check()

    def steps(self, calls: Mapping[int, Sequence[Any]]) -> list[Post]:
        """Makes the posts of a step's call, and counts it as under way; post them with this.

        Args:
            calls: what `pack` gave for each rank.
        """
        packed = {w: pieces for rank, pieces in calls.items() for w in self.workers(rank)}
        pending, posts = self._posts(Lane.ORDERED, packed, fatal=True)
        self._flying.append(pending)
        return posts

    # ---- life -----------------------------------------------------------------------------------

    def restart(self) -> None:
        """Makes all workers fit for work: replaces the dead ones, and empties the others of arrays.

        All workers are replaced where `jax.distributed` has joined some (running processes cannot
        be joined again, and their collectives may wait for ever), and where JAX's transfers are
        used, whose servers keep what nobody has pulled.

        Raises:
            RuntimeError: a new one did not start; then all have ended, and it may be tried again.
        """
        self._disconnect()
        self._epoch += 1
        room = renew_places(self._session, self._reservation)
        lost, self._reservation = room is not self._reservation, room
        joined = self._settings.processes_per_rank > 1 or self._settings.transport == "jax"
        for member in reversed(self.members):  # without a rank's first process its others end
            if member.dead or joined or lost:
                member.kill()
        self.members = [member.renewed() for member in self.members]
        try:
            for member in self._unfit():
                member.kill()
            self.members = [member.renewed() if member.dead else member for member in self.members]
            self._start()
        except BaseException:
            self._kill()
            raise

    def _unfit(self) -> list[Member]:
        """Connects to the workers that live; gives those that are not fit for work soon."""
        asked = {}
        for member in self.members:
            if member.actor is not None:
                with contextlib.suppress(TransportError):
                    self._open(member)
                    asked[member.worker] = member.client.call(Lane.CONTROL, "pulse")
                    member.client.flush(wait=False)
        end = time.monotonic() + RESET_TIMEOUT
        answers = {w: a.result(max(0, end - time.monotonic())) for w, a in asked.items()}
        fit = [worker for worker, (kind, _) in answers.items() if kind == Kind.RETURNED]
        return [m for m in self.members if m.actor is not None and m.worker not in fit]

    def stop(self) -> None:
        """Ends all workers, and gives back their reservation in the cluster; may be repeated."""
        with self.order:
            if not self.stopped:
                self.stopped = True
                self._stop()

    def _stop(self) -> None:
        fit = {m.worker: () for m in self.members if m.client is not None and not m.dead}
        try:
            self._health.close()
            if ray.is_initialized():  # else the session has gone, and all workers with it
                self.call(Lane.CONTROL, "close", fit).wait(CLOSING)
        finally:
            self._disconnect()
            self._kill()
            with contextlib.suppress(ray.exceptions.RayError):  # the session has just gone
                release_places(self._reservation)
            leave_session(self._session)

    def _disconnect(self) -> None:
        self._health.close()  # the closed monitor stays, and refuses all calls
        for member in self.members:
            if member.client is not None:
                member.client.close()
        self._flying.clear()

    def _kill(self) -> None:
        for member in reversed(self.members):
            member.kill()

    # ---- the start ------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts an actor for each worker that has none, connects all workers, and watches them."""
        fresh = [member for member in self.members if member.actor is None]
        for member in fresh:
            options = worker_options(
                self._reservation,
                member.rank,
                member.process,
                environment=self._settings.environment,
                cores=self._settings.cores,
            )
            several = self._settings.processes_per_rank > 1
            actor = actor_of(member.rank, member.process if several else None)
            member.actor = actor.options(**options).remote()
            member.box = self._new_box(member)
        try:
            if len(fresh) == len(self.members):
                self._meet()
            hellos = self._ask_actors("start", fresh, lambda member: (self._setup(member),))
        finally:
            for member in fresh:
                if member.box is not None:
                    member.box.unlink()
        for member, hello in zip(fresh, hellos, strict=True):
            self._check(member, hello)
            member.hello = hello
            self._open(member)
        opened = [each for hello in hellos for each in (hello.addresses, hello.server)]
        warn_of_open_ports(filter(None, opened))
        timeout = self._settings.heartbeat_timeout
        self._health = HealthMonitor(self.members, timeout, self._describe)
        self._health.start()
        # Processes of the same number in their ranks send to each other.
        addresses, every = [h.addresses for h in self.hellos], self._settings.processes_per_rank
        peers = [dict(enumerate(addresses[process::every])) for process in range(every)]
        args = {m.worker: (peers[m.process],) for m in self.members}
        self.call(Lane.CONTROL, "transport.connect", args).values()

    def _open(self, member: Member) -> None:
        """Connects to a worker; this begins an epoch there."""
        assert member.hello is not None
        member.client = Client(
            Greeting(self._epoch, DRIVER, member.rank),
            member.hello.server,
            self._secret,
            functools.partial(_print, member.rank),
            lambda why: self._health.connection_ended(member.worker, why),
        )

    def _meet(self) -> None:
        """Settles where `jax.distributed` joins the processes of each rank, if it has several."""
        processes = self._settings.processes_per_rank
        if processes > 1:
            first = self.members[::processes]
            hosts = [self._address(member) or LOOPBACK for member in first]
            ports = self._ask_actors("free_port", first, lambda m: (self._address(m) or LOOPBACK,))
            pairs = zip(hosts, ports, strict=True)
            self._coordinators = [f"{host}:{port}" for host, port in pairs]

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

    def _place(self, member: Member) -> Place:
        return self._reservation.places[member.rank][member.process]

    def _address(self, member: Member) -> str | None:
        """Finds the address at which other hosts reach a worker's host; None where they do not."""
        wanted = self._settings.address
        return self._place(member).address if wanted == "auto" else wanted

    def _new_box(self, member: Member) -> BlackBox | None:
        here = ray.get_runtime_context().get_node_id()
        return BlackBox(BlackBox.create()) if self._place(member).node_id == here else None

    def _setup(self, member: Member) -> Setup:
        return Setup(
            self._settings,
            member.rank,
            member.process,
            self._secret,
            self._address(member),
            self._coordinators[member.rank],
            self._x64,
            self._epoch,
            member.box.path if member.box else None,
        )

    def _ask_actors(
        self, method: str, members: Sequence[Member], args: Callable[[Member], tuple]
    ) -> list[Any]:
        """Calls a method of actors, and waits for the results."""
        references = [getattr(m.actor, method).remote(*args(m)) for m in members]
        try:
            return ray.get(references, timeout=self._settings.start_timeout)
        except ray.exceptions.GetTimeoutError:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = [m.rank for m, r in zip(members, references, strict=True) if r not in done]
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


def _print(rank: int, text: str) -> None:
    """Prints what has been printed on a rank, with the rank's name before each line."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stdout.write("".join(f"rank {rank}: {line}\n" for line in text.splitlines()))


class Pending:
    """A call that runs on some workers."""

    def __init__(self, answers: Mapping[int, Answer], health: HealthMonitor):
        self._answers, self._health = answers, health
        self._values: dict[int, Any] = {}

    def wait(self, timeout: float = -1) -> bool:
        """Waits until all have answered, `timeout` seconds at most; tells whether they have."""
        end = time.monotonic() + timeout
        for answer in self._answers.values():
            answer.result(timeout if timeout < 0 else max(0, end - time.monotonic()))
        return all(answer.done() for answer in self._answers.values())

    def values(self) -> dict[int, Any]:
        """Waits for all workers; gives their results by worker, or raises as `value` does."""
        return {worker: self.value(worker) for worker in self._answers}

    def results(self) -> dict[int, list[Any]]:
        """Waits as `values` does; gives by rank the results of its processes."""
        found: dict[int, list[Any]] = {}
        for worker, value in self.values().items():
            found.setdefault(self._health.members[worker].rank, []).append(value)
        return found

    def value(self, worker: int) -> Any:
        """Waits for the result of a worker.

        Raises:
            Exception: what the method has raised, which does not fail the worker.
            RankError: a worker has failed.
        """
        if worker not in self._values:
            kind, pieces = self._answers[worker].result()
            if kind == Kind.RAISED:
                error = unpack(pieces).cause()
                error.add_note(f"on {self._health.members[worker]}")
                raise error
            if kind != Kind.RETURNED:
                self._health.end()
            self._values[worker] = unpack(pieces)
        return self._values[worker]
