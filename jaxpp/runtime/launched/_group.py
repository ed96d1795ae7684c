"""The processes of a launched mesh: each calls its own ranks, and meets the others."""

import collections
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp._program import Bundle, Message
from jaxpp.runtime.launched import _agreement
from jaxpp.runtime.launched._calls import FAILED, Lanes, Outcome
from jaxpp.runtime.launched._course import At, Called, Course, LoadedArray
from jaxpp.runtime.launched._environment import Position, find_secret
from jaxpp.runtime.launched._hub import Hub
from jaxpp.runtime.launched._transfers import check_transfers, transfers_of
from jaxpp.runtime.launched._watch import LaunchedWatch, host_of_processes
from jaxpp.runtime.site import (
    POLL,
    Death,
    Failed,
    Failure,
    Group,
    Hello,
    Member,
    Process,
    RankError,
)
from jaxpp.runtime.transport import Aborted


class LaunchedGroup(Group):
    """The processes of a launched mesh, of which this one calls its own.

    All processes make the same calls in the same order. Most concern their own ranks alone. At some
    they meet: each brings what its ranks have, and all get all of it.

    Args:
        place: of this process.
        settings: a text of what all must have asked for.
        start: starts JAX and the transport of this process's ranks; returns it, and the description
            of the process. It is given the secret of all, an address that the others reach, and
            this group.
        ranks: the ranks of each process.
        heartbeat_timeout: as of the mesh.
        start_timeout: as of the mesh.
    """

    _watch: "LaunchedWatch"

    def __init__(
        self,
        place: Position,
        settings: str,
        start: Callable[[bytes, str, "LaunchedGroup"], tuple[Any, Hello]],
        ranks: Sequence[tuple[int, ...]],
        heartbeat_timeout: float,
        start_timeout: float,
    ):
        super().__init__()
        self.place = place
        self._numbers, self._others = itertools.count(), itertools.count()
        self._calls = 0
        #: True if `jax.device_put` moves the messages between processes.
        self.puts = False
        #: The calls of this process, and the loads of its ranks, since it said so last.
        self._done: collections.deque[Called | LoadedArray] = collections.deque()
        self._named: dict[str, Any] = {}
        #: Process 0 compares where all are.
        self._course = None if place.number else Course(place.count, self._differ)
        self._next, self._leads = 0, False
        self._lock = threading.RLock()
        self._members = [Member(n, own) for n, own in enumerate(ranks)]
        own = self._members[place.number]
        self.members = [own]
        self._process = Process(own.ranks)
        self._process.took = self._took
        self._lanes = Lanes(self._process)
        secret = find_secret() if place.count > 1 else b""
        self._watch = LaunchedWatch(self, self._members, heartbeat_timeout, start_timeout)
        self.hub = Hub(place, self._hear, self._lose)
        try:
            address = self.hub.join(secret, start_timeout)
            self._watch.start()
            self._begin(settings, *start(secret, address, self))
        except BaseException as error:
            self.fail(error)
            self._watch.close()
            self.hub.close()
            raise

    def _begin(self, settings: str, transport: Any, hello: Hello) -> None:
        """Begins to work with the other processes."""
        place = self.place.number
        self._process.have(transport, lambda reference: reference)
        self._process.end.add_done_callback(lambda end: self.report(place, end.result()))
        found = self.meet(f"makes a mesh with {settings}", hello).values()
        for member in self._members:
            member.hello = found[member.worker]
            member.check_versions("LaunchedMpmdMesh")
        peers = {rank: m.hello.addresses for m in self._members for rank in m.ranks if m.hello}
        transport.connect(peers)
        self.meet("has connected", None).values()  # none sends before all are connected
        FAILED.clear()

    # ---- calls ----------------------------------------------------------------------------------

    def send(self, method: Callable[..., Any], args: Mapping[int, tuple], **_: Any) -> "Outcome":
        """Calls a method of `Process` for this process's ranks; does not wait."""
        own = self.place.number
        if own not in args:
            return Outcome(self._watch, None, set())
        return Outcome(self._watch, self._lanes.call(method, *args[own]), {own})

    def send_steps(self, calls: Mapping[int, Any], inputs: Sequence[Any]) -> None:
        """Calls a step, counts the call, and takes note of it for the others."""
        (call,) = calls.values()
        digest = _agreement.digest_of_call(call.step, inputs)
        with self._lock:
            self._calls += 1
            self._done.append(Called(self.place.number, self._calls, digest))
        super().send_steps(calls, inputs)

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

    def _apply(self, key: Any, packed: Mapping[int, Any], ordered: bool) -> "Outcome":
        own = {r: packed[r] for r in self.members[0].ranks if r in packed}
        method = Process.apply_in_order if ordered else Process.apply
        return self._bring(key, self._lanes.call(method, own))

    # ---- meetings -------------------------------------------------------------------------------

    def meet(self, what: str, value: Any) -> "Outcome":
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
            number = next(self._numbers)
            self._next = number
            self.beat(what)
            self._next = number + 1
        return number, what

    def _bring(self, key: Any, local: "concurrent.futures.Future[Any] | None") -> "Outcome":
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
        return Outcome(self._watch, meeting, set(range(self.place.count)), local)

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

    def transfers_of(self, bundle: Bundle) -> tuple[Message, ...]:
        """Returns the transfers between processes in the order of all, once that is proven."""
        if not self.puts:
            return ()
        process_of = {rank: m.worker for m in self._members for rank in m.ranks}
        transfers = transfers_of(bundle.programs, process_of)
        check_transfers(transfers, bundle.programs, process_of)
        return transfers

    def notes_of(self, bundle: Bundle) -> tuple[str, ...]:
        """Says that no processes wait for each other, where they could."""
        if not self.puts:
            return ()
        return (
            f"The {len(self.transfers_of(bundle))} transfers between processes are proven to have "
            f"one order, in which each needs only earlier ones.",
        )

    def meet_compiled(self, step: int) -> None:
        """Waits, within a call of this process's site, until all processes have compiled a step."""
        key = "compiled", step
        meeting = self.hub.meeting(key)
        self.hub.bring(key, None)
        while not concurrent.futures.wait([meeting], POLL).done:
            if self._process.failure is not None:
                raise Aborted("another process has failed")

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
            case "at":
                if self._course is not None:
                    self._course.hear(source, *content)
            case "fails":
                if self.place.number == 0:
                    self.hub.tell(news, source)
                self._watch.report(*content)
            case "led":
                key, packed, ordered = content
                self._apply(key, packed, ordered)

    def _lose(self, number: int) -> None:
        there = self._members[number].hello
        near = there is None or there.node == host_of_processes()
        death = Death(f"its process has ended{'' if near else ', or its host is out of reach'}")
        self.report(number, death)

    def _took(self, rank: int, batch: int, array: int, value: Any) -> None:
        """Takes note of an array that a rank has loaded."""
        if (digest := _agreement.values_of(value)) is not None:
            self._done.append(LoadedArray(rank, batch, array, digest))

    def beat(self, what: str = "") -> None:
        """Gives a sign of life: says where this process is, and what it does there, if it waits."""
        with self._lock:
            done = tuple(self._done.popleft() for _ in range(len(self._done)))
            at = At(self._next, self._calls, what, done)
        self.hub.tell(("at", at))
        if self._course is not None:
            self._course.hear(0, at)

    def _differ(self, number: int, error: RuntimeError) -> None:
        """Tells all processes that one does not make the calls of another."""
        self.report(number, Failure.of(error, self._members[number].ranks[0], -1, ""))

    def report(self, number: int, what: Failure | Death) -> None:
        """Tells all processes of the failure of one."""
        # The others first: the watch ends the work of these ranks, which is a failure that is told.
        self.hub.tell(("fails", number, what))
        self._watch.report(number, what)

    # ---- its end --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tells all processes that the user's script has raised an error in this one."""
        if self.is_well and not self.stopped and not isinstance(error, RankError):
            failure = Failure.of(error, self.members[0].ranks[0], -1, "the script")
            self.report(self.place.number, failure)

    def end_work(self, reason: str) -> None:
        """Ends the work of this process's ranks."""
        FAILED.set()
        if self._process.transport is not None:  # it has begun
            self._process.abort(reason)

    def stop(self) -> None:
        """Leaves the other processes; waits for them first, where all is well."""
        with self.order:
            if self.stopped:
                return
            try:
                if not self._watch.fails:
                    dispatched = self._lanes.call(Process.reach)  # the next mesh begins as far
                    self._bring(self._arrive("shuts the mesh down"), dispatched).values()
                self._watch.check()  # it may have come after another number of calls
            finally:
                self.stopped = True
                self._watch.close()
                self.hub.close()
                self._process.close()
                self._lanes.close()
