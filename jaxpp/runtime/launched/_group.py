"""The processes of a launched mesh: each calls its own ranks, and meets the others."""

import concurrent.futures
import functools
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp._program import Bundle
from jaxpp.runtime.launched import _agreement
from jaxpp.runtime.launched._environment import Place, find_secret
from jaxpp.runtime.launched._hub import Hub
from jaxpp.runtime.site import (
    LANES,
    POLL,
    Death,
    Failed,
    Failure,
    Group,
    Hello,
    Member,
    Plain,
    Process,
    RankError,
    Watch,
    end_stopped,
    versions,
)
from jaxpp.runtime.transport import host_identity

#: What the user can do after a failure.
ADVICE = "Start the job again from its last checkpoint."
#: Seconds that a process has to end after the failure of another, if it calls the mesh no more.
END_TIMEOUT = 30.0
#: A process of another host may be silent for so many times the timeout: nobody can look at it.
PATIENCE = 10


class Lanes:
    """Runs methods of a site, each in its lane. The threads do not keep the process from ending."""

    def __init__(self, process: Process):
        self._process, self._turn = process, 0
        self._queues = {name: queue.SimpleQueue() for name in LANES}
        self._lock = threading.Lock()
        for name, number in LANES.items():
            for _ in range(number):
                run = functools.partial(self._run, self._queues[name])
                threading.Thread(target=run, name=f"jaxpp-{name}", daemon=True).start()

    def call(self, method: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
        """Starts a method; returns its result to come."""
        name: str = getattr(method, "lane", "control")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if name == "steps":
                args, self._turn = (self._turn, *args), self._turn + 1
            self._queues[name].put((future, method, args))
        return future

    def _run(self, waiting: "queue.SimpleQueue[Any]") -> None:
        while True:
            future, method, args = waiting.get()
            try:
                future.set_result(method(self._process, *args))
            except BaseException as error:  # noqa: B036  who waits has to know of every exception
                future.set_exception(error)
            del future, method, args  # they would hold arrays while the thread waits


class LaunchedGroup(Group):
    """The processes of a launched mesh, of which this one calls its own.

    All processes make the same calls in the same order. Most concern their own ranks alone. At some
    they meet: each brings what its ranks have, and all get all of it.

    Args:
        place: of this process.
        settings: a text of what all must have asked for.
        start: starts JAX and the transport of this process's ranks, at an address that the others
            reach; returns the transport, and the description of the process.
        ranks: the ranks of each process.
        describe: gives the stage and source line of a task, from its call's number and its label.
        heartbeat_timeout: as of the mesh.
        start_timeout: as of the mesh.
    """

    carrier = Plain
    _watch: "LaunchedWatch"

    def __init__(
        self,
        place: Place,
        settings: str,
        start: Callable[[bytes, str], tuple[Any, Hello]],
        ranks: Sequence[tuple[int, ...]],
        describe: Callable[[int, str], str],
        heartbeat_timeout: float,
        start_timeout: float,
    ):
        super().__init__("LaunchedMpmdMesh")
        self.place = place
        self._numbers, self._others, self._calls = itertools.count(), itertools.count(), 0
        self._named: dict[str, Any] = {}
        #: At process 0: for each meeting in the order of all, where those are that have come.
        self._course: dict[int, dict[int, tuple[str, int]]] = {}
        self._next, self._leads = 0, False
        self._lock = threading.RLock()
        self._members = [Member(n, own) for n, own in enumerate(ranks)]
        own = self._members[place.number]
        self.members = [own]
        self._process = Process(own.ranks)
        self._lanes = Lanes(self._process)
        timeout, secret = heartbeat_timeout, find_secret() if place.count > 1 else b""
        self._watch = LaunchedWatch(self, self._members, timeout, describe)
        self.hub = Hub(place, secret, start_timeout, self._hear, self._lose)
        try:
            self._begin(settings, *start(secret, self.hub.address))
        except BaseException as error:
            self.fail(error)
            self.hub.close()
            raise

    def _begin(self, settings: str, transport: Any, hello: Hello) -> None:
        """Begins to work with the other processes."""
        self._process.have(transport, 0, lambda reference: reference)
        self._watch.start()
        self._process.when_failed(self.report)
        found = self.meet(f"makes a mesh with {settings}", hello).values()
        for member in self._members:
            member.hello = found[member.worker]
            self._check(member)
        peers = {rank: m.hello.addresses for m in self._members for rank in m.ranks if m.hello}
        transport.connect(peers)
        self.meet("has connected", None).values()  # none sends before all are connected

    def _check(self, member: Member) -> None:
        own, theirs = versions(), member.hello.versions if member.hello else {}
        if apart := [f"{n} {theirs[n]} (here {v})" for n, v in own.items() if theirs[n] != v]:
            raise ValueError(
                f"LaunchedMpmdMesh: {member} has {', '.join(apart)}; install the same versions on "
                f"every host."
            )

    # ---- calls ----------------------------------------------------------------------------------

    def send(self, method: Callable[..., Any], args: Mapping[int, tuple], **_: Any) -> "Call":
        """Calls a method of `Process` for this process's ranks; does not wait."""
        own = self.place.number
        if own not in args:
            return Call(self._watch, None, set())
        return Call(self._watch, self._lanes.call(method, *args[own]), {own})

    def send_steps(self, calls: Mapping[int, Any]) -> None:
        """Calls a step, and counts the call."""
        self._calls += 1
        super().send_steps(calls)

    def put(self, value: Any) -> Any:
        """Returns the value itself, since all processes have it."""
        return value

    def hellos(self) -> list[tuple[tuple[int, ...], Hello]]:
        """Returns for each process its ranks, and its description of itself."""
        return [(m.ranks, m.hello) for m in self._members if m.hello is not None]

    def _owner(self, rank: int) -> int:
        return next(m.worker for m in self._members if rank in m.ranks)

    def fetch(self, rank: int, numbers: Sequence[int], split: bool) -> list[tuple[Any, int]]:
        """Brings arrays of a rank to all processes."""
        owner, key = self._owner(rank), self._arrive(f"fetches arrays {numbers} of rank {rank}")
        here = owner == self.place.number
        local = self._lanes.call(Process.fetch, rank, numbers) if here else None
        return [(self._bring(key, local), owner)]

    def wait(self, rank: int, number: int) -> tuple[Any, int]:
        """Starts to wait for an array; where other processes have it, for this one's last call."""
        own = self.place.number
        if self._owner(rank) == own:
            return self.send(Process.wait, {own: (rank, (number,))}), own
        return self.send(Process.reach, {own: ()}), own

    def apply(self, name: str, packed: Mapping[int, Any], ordered: bool, processes: int) -> Any:
        """Starts a function on the ranks of each process; all get the results of all."""
        if self._leads:
            key = "led", next(self._others)
            self.hub.tell(("led", key, packed, ordered))
        elif ordered:
            key = self._arrive(f"runs {name}")
        else:
            key = name, next(self._named.setdefault(name, itertools.count()))
        return self._apply(key, packed, ordered)

    def _apply(self, key: Any, packed: Mapping[int, Any], ordered: bool) -> "Call":
        own = {r: packed[r] for r in self.members[0].ranks if r in packed}
        method = Process.apply_in_order if ordered else Process.apply
        return self._bring(key, self._lanes.call(method, own))

    # ---- meetings -------------------------------------------------------------------------------

    def meet(self, what: str, value: Any) -> "Call":
        """Brings a value to a meeting of all processes; does not wait.

        Args:
            what: what the process does, in words, which must be the same in all of them.
            value: its value.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(value)
        return self._bring(self._arrive(what), future)

    def _arrive(self, what: str) -> Any:
        """Comes to the next meeting in the order of all; returns its key."""
        with self._lock:
            self._next = number = next(self._numbers)
            self._next += 1
            self._note(self.place.number, (number, what, self._calls))
            if self.place.number:
                self.hub.tell(("comes", (number, what, self._calls)))
        return number, what

    def _bring(self, key: Any, local: "concurrent.futures.Future[Any] | None") -> "Call":
        """Brings to a meeting what a call of this process gives, as soon as it does."""
        meeting = self.hub.meeting(key)

        def bring(done: "concurrent.futures.Future[Any]") -> None:
            try:
                self.hub.bring(key, done.result())
            except Failed as error:
                self.hub.bring(key, error)
            except Exception as error:
                failure = Failure.of(error, self.members[0].ranks[0], -1, "")
                self.hub.bring(key, Failed(failure, ends=False))

        if local is None:
            self.hub.bring(key, None)
        else:
            local.add_done_callback(bring)
        return Call(self._watch, meeting, set(range(self.place.count)), local)

    def agree(self, number: int, bundle: Bundle) -> None:
        """Compares a step with those of the other processes.

        Raises:
            ValueError: one has another step; all processes raise it.
        """
        if self.place.count == 1:
            return
        text = _agreement.text_of(bundle)
        digests = self.meet(f"places step {number}", _agreement.digest_of(text)).values()
        if len(set(digests.values())) == 1:
            return
        texts = self.meet("compares a step", text).values()
        raise ValueError(
            f"LaunchedMpmdMesh: the processes do not have the same step: "
            f"{_agreement.first_difference(texts)}\n{_agreement.CAUSES}"
        )

    def lead(self, what: str, function: Callable[[], Any], arrays: Any) -> Any:
        """Runs a function in process 0, whose ranks and those of others it reaches by `apply`.

        Args:
            what: its name.
            function: the function.
            arrays: the records of arrays; what the function has made there is dropped again.

        Returns:
            In all processes what it has returned; raises what it has raised.
        """
        first = arrays.new_ids(0)
        if self.place.number:
            found = self.meet(what, None).values()[0]
        else:
            key, result = self._arrive(what), concurrent.futures.Future()
            self._leads = True
            try:
                result.set_result((function(), arrays.new_ids(0)))
            except Exception as error:
                failure = Failure.of(error, 0, -1, what)
                result.set_result((Failed(failure, ends=False), arrays.new_ids(0)))
            finally:
                self._leads = False
            found = self._bring(key, result).values()[0]
        outcome, last = found
        if self.place.number and last > first:
            arrays.new_ids(last - first)
            made = tuple(range(first, last))
            self.send_by_rank(Process.drop, dict.fromkeys(self.members[0].ranks, made))
        if isinstance(outcome, Failed):
            raise outcome.failure.cause()
        return outcome

    # ---- news -----------------------------------------------------------------------------------

    def _hear(self, source: int, news: Any) -> None:
        kind, *content = news
        self._watch.heard.add(source)
        match kind:
            case "comes":
                self._note(source, *content)
            case "beats":
                self._compare(source, *content)
            case "fails":
                if self.place.number == 0:
                    self.hub.pass_on(source, news)
                self._watch.report(*content)
            case "led":
                key, packed, ordered = content
                self._apply(key, packed, ordered)

    def _lose(self, number: int) -> None:
        death = Death("its process has ended")
        self._watch.report(number, death)
        if self.place.number == 0:
            self.hub.tell(("fails", number, death))

    def beat(self) -> None:
        """Gives a sign of life, and says how far this process has come."""
        self.hub.tell(("beats", (self._next, self._calls)))
        self._compare(0, (self._next, self._calls))

    def _note(self, number: int, at: tuple[int, str, int]) -> None:
        """Notes at process 0 that one has come to a meeting, and compares it with the others."""
        if self.place.number:
            return
        with self._lock:
            meeting, what, calls = at
            there = self._course.setdefault(meeting, {})
            for other, (theirs, their_calls) in there.items():
                if (theirs, their_calls) != (what, calls):
                    self._diverge((number, what, calls), (other, theirs, their_calls))
            there[number] = what, calls
            if len(there) == self.place.count:
                del self._course[meeting]

    def _compare(self, number: int, at: tuple[int, int]) -> None:
        """Compares at process 0 how far one has come with those who wait in a meeting."""
        if self.place.number:
            return
        with self._lock:
            meeting, calls = at
            for other, (what, theirs) in self._course.get(meeting, {}).items():
                if calls > theirs and other != number:
                    self._diverge((number, "calls a step again", calls), (other, what, theirs))

    def _diverge(self, one: tuple[int, str, int], other: tuple[int, str, int]) -> None:
        """Reports that two processes do not make the same calls."""
        each = " and ".join(f"process {n} {what} after {c} calls" for n, what, c in (other, one))
        error = RuntimeError(
            f"the processes do not make the same calls: {each}. Each process calls the steps, "
            f"fetches results (float, gather, print) and saves in the same order; only what it "
            f"does with plain values may depend on its number"
        )
        number = one[0] or other[0]
        failure = Failure.of(error, self._members[number].ranks[0], -1, "")
        self._watch.report(number, failure)
        self.hub.tell(("fails", number, failure))

    def report(self, failure: Failure) -> None:
        """Tells all processes of the failure of this one."""
        self._watch.report(self.place.number, failure)
        self.hub.tell(("fails", self.place.number, failure))

    # ---- its end --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tells all processes that the user's script has raised an error in this one."""
        if self.is_well and not self.stopped and not isinstance(error, RankError):
            self.report(Failure.of(error, self.members[0].ranks[0], -1, "the script"))

    def end_work(self, reason: str) -> None:
        """Ends the work of this process's ranks."""
        self._process.abort(reason)

    def stop(self) -> None:
        """Leaves the other processes; waits for them first, where all is well."""
        with self.order:
            if self.stopped:
                return
            try:
                if not self._watch.fails:
                    self.meet("shuts the mesh down", None).values()
            finally:
                self.stopped = True
                self._watch.close()
                self.hub.close()
                self._process.close()


class Call:
    """A call of this process, or of all, that is under way.

    Args:
        watch: the watch over the processes.
        future: what it will give: by process where all meet, else of this one alone.
        workers: the processes that it is of.
        local: where all meet, the part of this process.
    """

    def __init__(self, watch: Watch, future: Any, workers: set[int], local: Any = None):
        self._watch, self._future, self._workers = watch, future, workers
        self._local = future if len(workers) == 1 and local is None else local

    def wait(self, timeout: float = POLL) -> bool:
        """Waits until this process's part has ended; tells whether it has."""
        return self._local is None or not concurrent.futures.wait([self._local], timeout).not_done

    def values(self) -> dict[int, Any]:
        """Waits; gives the results by process, or raises what one has raised."""
        if self._future is None:
            return {}
        while not concurrent.futures.wait([self._future], POLL).done:
            self._watch.check()
        found = self._future.exception() or self._future.result()
        if self._local is self._future:
            found = dict.fromkeys(self._workers, found)
        for own in found.values():
            if isinstance(own, Failed):
                if own.ends:
                    self._watch.end()
                raise own.failure.cause()
            if isinstance(own, BaseException):
                raise own
        return found

    def value(self, worker: int, place: int = 0) -> Any:
        """Waits for one result of a method that gives None where the process has failed."""
        value = self.values()[worker]
        if isinstance(value, list):
            value = value[place]
        if value is None:
            self._watch.end()
        return value


class LaunchedWatch(Watch):
    """Watches the processes of a job: process 0 all, the others process 0, which tells them."""

    def __init__(self, group: LaunchedGroup, members: Any, timeout: float, describe: Any):
        super().__init__(members, timeout, describe, ADVICE)
        self._group = group
        #: The processes that have given a sign of life since the last look.
        self.heard: set[int] = set()
        self._told = threading.Event()

    @property
    def fails(self) -> bool:
        """Tells whether a process has failed."""
        return self._fails

    def end(self) -> Any:
        """Raises the error of the processes."""
        if threading.current_thread() is threading.main_thread():
            self._told.set()
        super().end()

    def _beat(self) -> None:
        self._group.beat()
        super()._beat()

    def has_beaten(self, member: Member) -> bool:
        """Tells whether a process has given a sign of life; of most only process 0 hears."""
        own, worker = self._group.place.number, member.worker
        if worker in self.heard or worker == own or own and worker:
            self.heard.discard(worker)
            return True
        return False

    def why_dead(self, member: Member, silence: float) -> str:
        """Looks at a silent process of this host; one of another may be silent for longer."""
        there = member.hello
        if there is not None and there.node == host_identity():
            return "its process is stopped" if end_stopped(there.pid) else ""
        return "its host does not answer" if silence > PATIENCE * self._timeout else ""

    def end_others(self, member: Member) -> None:
        """Ends the work of this process's ranks; the others hear of the failure themselves."""
        self._group.end_work(f"{member} has failed")
        if member.worker != self._group.place.number:
            threading.Thread(target=self._end_this, name="jaxpp-end", daemon=True).start()

    def is_settled(self) -> bool:
        """Tells whether the first failure is known that is no echo of another."""
        return super().is_settled() or any(
            isinstance(what, Death) or not what.is_echo for what in self.reports.values()
        )

    def _take(self, worker: int, what: Failure | Death) -> None:
        died = isinstance(what, Death) and what.reason.startswith("no sign of life")
        if died and self._group.place.number == 0 and worker not in self.reports:
            self._group.hub.tell(("fails", worker, what))
        super()._take(worker, what)

    def _end_this(self) -> None:
        """Ends this process where its script does not come to hear of the failure."""
        if self._told.wait(END_TIMEOUT) or self._closed:
            return
        print(
            f"jaxpp: this process has not called the mesh for {END_TIMEOUT:g} s after the failure "
            f"of another, and is ended: {self.error}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
