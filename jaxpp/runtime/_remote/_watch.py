"""The driver's watch over its workers: whoever fails, all end at once and with one error."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.exceptions

from jaxpp.runtime._remote._failure import Failure, Lost, RankError

#: Seconds between two signs of life, and after which a worker without one is looked at.
HEARTBEAT = 0.5
#: Seconds that the ranks get to say what went wrong.
SETTLING = 2.0


@dataclasses.dataclass
class Member:
    """A rank's worker as the driver knows it.

    `called` and `seen` are when it was last asked for a sign of life and last gave one (seconds of
    the monotonic clock); `at` is what it was at then.
    `dead` ones cannot be used again.
    """

    rank: int
    actor: Any
    host: str = ""
    pid: int = 0
    node: str = ""
    seen: float = 0.0
    at: tuple[int, str] = (-1, "")
    dead: bool = False

    def __str__(self):
        return f"rank {self.rank} (process {self.pid} on {self.host or 'a host not known yet'})"


class Watch:
    """Watches the workers of a mesh until one fails.

    Args:
        members: the workers.
        timeout: seconds without a sign of life after which a worker that does not run (it has been
            stopped, or its host cannot be reached) counts as lost.
        describe: gives the stage and source line of a task's label, or an empty string.
    """

    def __init__(self, members: Sequence[Member], timeout: float, describe: Callable[[str], str]):
        self.error: RankError | None = None
        self._members = list(members)
        self._timeout = timeout
        self._describe = describe
        self._reports: dict[int, Failure | BaseException | str] = {}
        self._first: int | None = None
        self._changed = threading.Condition()
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="jaxpp-heartbeat", daemon=True)
        self._pulse.start()

    # ---- what the rest of the driver calls ------------------------------------------------------

    def check(self) -> None:
        """Raises the error of the workers, if one has failed."""
        if self._first is not None:
            self._settled.wait()
        if self.error is not None:
            raise self.error

    def follow(self, rank: int, reference: Any, done: Callable[[], None] | None = None) -> None:
        """Hears of it when a call of a worker fails; `done` runs when the call has ended."""

        def ended(future):
            try:
                self._hear(rank, future)
            finally:
                if done is not None:
                    done()

        reference.future().add_done_callback(ended)

    def _hear(self, rank: int, future: Any) -> None:
        try:
            result = future.result()
        except BaseException as error:  # noqa: B036  on a thread of Ray, where nobody else hears
            self.report(rank, error)
        else:
            if isinstance(result, Failure):
                self.report(rank, result)

    def result(self, rank: int, reference: Any) -> Any:
        """The result of a call of a worker; a failure becomes the error of all workers."""
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError as error:
            self.report(rank, error)
        else:
            if not isinstance(found, Failure):
                return found
            self.report(rank, found)
        self.check()
        raise AssertionError("a failure that is no error")

    def value(self, rank: int, reference: Any) -> Any:
        """The value of a function that runs on a worker; what it raises is not the worker's end."""
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Lost):
                self.check()
            raise error.as_instanceof_cause() from None
        except ray.exceptions.RayError as error:
            self.report(rank, error)
        self.check()
        raise AssertionError("a failure that is no error")

    def report(self, rank: int, what: Failure | BaseException | str) -> None:
        """Takes note that a rank has failed: what it says itself, what Ray says, or why we say so."""
        if self._closed.is_set():
            return
        with self._changed:
            self._reports.setdefault(rank, what)
            # What a dead process said last is not why it is dead, and is no use to anybody.
            if not isinstance(what, Failure):
                self._reports[rank] = what
            first, self._first = self._first is None, rank if self._first is None else self._first
            self._changed.notify_all()
        if first:
            threading.Thread(target=self._settle, name="jaxpp-settle", daemon=True).start()

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        self._settled.set()
        if threading.current_thread() is not self._pulse:
            self._pulse.join(timeout=2.0)

    # ---- signs of life --------------------------------------------------------------------------

    def _beat(self) -> None:
        now = time.monotonic()
        for member in self._members:
            member.seen = now
        asked: dict[int, Any] = {}
        while not self._closed.wait(HEARTBEAT) and self._first is None:
            for member in self._members:
                if member.rank not in asked:
                    asked[member.rank] = member.actor.pulse.remote()
            answered, _ = ray.wait(
                list(asked.values()), num_returns=len(asked), timeout=HEARTBEAT, fetch_local=False
            )
            for member in self._members:
                if asked[member.rank] in answered:
                    self._answer(member, asked.pop(member.rank))
                elif time.monotonic() - member.seen > self._timeout:
                    self._silent(member)

    def _answer(self, member: Member, reference: Any) -> None:
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError as error:
            self.report(member.rank, error)
            return
        member.seen = time.monotonic()
        if isinstance(found, Failure):
            self.report(member.rank, found)
        else:
            member.at = found

    def _silent(self, member: Member) -> None:
        """A worker that has given no sign of life for long: busy, or will it never again?"""
        silence = time.monotonic() - member.seen
        state = process_state(member)
        if state in ("running", "sleeping", "disk-sleep", "idle") and silence < 10 * self._timeout:
            return
        self.report(member.rank, f"no sign of life for {silence:.1f} s; its process is {state}")

    # ---- the end --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Ends the step on all ranks, finds out which failed first and why, and says so."""
        deadline = time.monotonic() + SETTLING
        first = self._members[self._first or 0]
        for member in self._members:
            if member.rank not in self._reports:
                self._ask(member, member.actor.abort, f"{first} has failed")
        with self._changed:
            self._changed.wait_for(
                lambda: self._culprit() is not None, max(0.0, deadline - time.monotonic())
            )
        rank = self._culprit()
        if rank is None:
            rank = self._suspect()
        for member in self._members:
            if not isinstance(self._reports.get(member.rank), Failure):
                if member.rank == rank or not self._answers(member):
                    member.dead = True
                    ray.kill(member.actor)
        self.error = self._explain(rank)
        self._settled.set()

    def _ask(self, member: Member, method: Any, *args: Any) -> None:
        """Calls a worker that may be dead, and hears of it if it is."""
        self.follow(member.rank, method.remote(*args))

    def _culprit(self) -> int | None:
        """The rank whose failure does not follow from another's."""
        for rank, what in list(self._reports.items()):
            if not (isinstance(what, Failure) and what.follows):
                return rank
        return None

    def _suspect(self) -> int:
        """The rank that others waited for in vain, where none has failed by itself."""
        for what in list(self._reports.values()):
            if isinstance(what, Failure) and what.waited_for is not None:
                return what.waited_for
        return self._first or 0

    def _answers(self, member: Member) -> bool:
        """Whether a worker is fit to go on after `restart`."""
        reference = member.actor.pulse.remote()
        try:
            ray.get(reference, timeout=1.0)
        except ray.exceptions.RayError:
            return False
        return True

    def _explain(self, rank: int) -> RankError:
        member, what = self._members[rank], self._reports.get(rank)
        call, task = member.at
        cause: BaseException | None = None
        if isinstance(what, Failure):
            call, task, reason = what.call, what.task, what.exception
            cause = what.cause()
        elif isinstance(what, BaseException):
            reason, cause = _why(what), what
        else:
            reason = what or "other ranks waited for it in vain"
        waiting = [
            f"rank {r} in {w.task}"
            for r, w in sorted(self._reports.items())
            if isinstance(w, Failure) and w.follows and w.waited_for == rank
        ]
        doing = f" in {task}{self._describe(task)} of call {call}" if task else ""
        waited = f" Waiting for it: {', '.join(waiting)}." if waiting else ""
        error = RankError(
            f"{member} has failed{doing}: {reason}.{waited} All ranks have ended the step; arrays "
            f"on the mesh are lost. Call mesh.restart() and load the last checkpoint to go on.",
            rank=rank,
            host=member.host,
            task=task,
            reason=reason,
        )
        error.__cause__ = cause
        return error


def _why(error: BaseException) -> str:
    """What Ray says of a dead worker, in a line."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "Ray has killed it because its host ran out of memory"
    if isinstance(error, ray.exceptions.RayActorError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if "exit" in line.lower() or "died" in line.lower()]
        return "its process has died" + (f" ({told[-1].rstrip('.')})" if told else "")
    if isinstance(error, ray.exceptions.RayTaskError):
        return str(error.cause) if getattr(error, "cause", None) else str(error).splitlines()[-1]
    return f"{type(error).__name__}: {error}"


def process_state(member: Member) -> str:
    """The state of a worker's process, as `psutil` names it, or why it cannot be had."""
    here = ray.get_runtime_context().get_node_id() == member.node
    if here:
        return _state_of(member.pid)
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        member.node, soft=False
    )
    look = ray.remote(_state_of).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    try:
        return ray.get(look.remote(member.pid), timeout=1.5)
    except ray.exceptions.RayError as error:
        return f"out of reach ({type(error).__name__})"


def _state_of(pid: int) -> str:
    import psutil

    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "dead"
