"""The health monitor: if one worker of a mesh fails, all end at once, and with one error."""

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ray
import ray.exceptions

from jaxpp.runtime.remote.calls import Failure, Kind, Lane, RankError, pack, unpack
from jaxpp.runtime.remote.cluster import RUNS
from jaxpp.runtime.remote.group._blame import culprit, explain, suspect
from jaxpp.runtime.remote.group._member import Member

#: Seconds between two heartbeats.
HEARTBEAT = 0.5
#: Seconds that a worker has to answer when all are asked to end what they do.
ANSWER = 0.7
#: Seconds that the workers have to report their failures, before the silent ones are suspected.
SETTLING = 1.0
#: Seconds within which Ray tells of a worker's death.
DYING = 2.0
#: Seconds between two looks at whether the error is known.
POLL = 0.01
#: A process that runs may be silent for so many times the timeout: C code may hold Python's lock.
PATIENCE = 100


class HealthMonitor:
    """Watches the workers of a mesh until one fails; then ends the work of all.

    Three signs tell of a worker: the end of its connection, its death by Ray's account, silence.

    Args:
        members: the workers.
        timeout: seconds without an answer to a heartbeat after which a worker counts as lost whose
            process does not run. One that runs has `PATIENCE` times as long.
        describe: gives the stage and source line of a task, from its call's number and its label.
    """

    def __init__(
        self, members: Sequence[Member], timeout: float, describe: Callable[[int, str], str]
    ):
        self.error: RankError | None = None
        self.members = list(members)
        self._timeout = timeout
        self._describe = describe
        self._reports: dict[int, Failure | BaseException | str] = {}
        self._first: int | None = None
        self._changed = threading.Condition()
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="jaxpp-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts to watch; each worker must have its client."""
        for member in self.members:
            # `live` never returns; Ray fails this call as soon as the worker has died.
            living = member.actor.live.remote().future()
            living.add_done_callback(functools.partial(self._hear_of_death, member.worker))
        self._pulse.start()

    # ---- for the rest of the driver -------------------------------------------------------------

    def check(self) -> None:
        """Raises the error of the workers, if one has failed."""
        if not ray.is_initialized():
            self.report(0, _no_session())
        if self._first is not None:
            self._wait()
        if self.error is not None:
            raise self.error.with_traceback(None)  # the traceback would grow with every raise
        if self._closed.is_set():
            raise RuntimeError(
                "The mesh has been shut down or restarted meanwhile, or could not be restarted; "
                "call mesh.restart() and load the last checkpoint to go on."
            )

    def end(self) -> NoReturn:
        """Raises the error of the workers, once it is known; one of them must be reported."""
        self._wait()
        self.check()
        raise AssertionError("no worker has failed")

    def _wait(self) -> None:
        """Waits until the error is known; a Ctrl-C in `Event.wait` could leave a lock locked."""
        while not self._settled.is_set():
            time.sleep(POLL)

    def report(self, worker: int, what: Failure | BaseException | str) -> None:
        """Notes that a worker has failed: by its own or Ray's account, or for a reason of ours."""
        with self._changed:
            if self._closed.is_set():
                return
            self._reports.setdefault(worker, what)
            # The death of a worker says more than its own earlier report.
            if not isinstance(what, Failure):
                self._reports[worker] = what
            first = self._first is None
            self._first = worker if first else self._first
            self._changed.notify_all()
        if first:
            threading.Thread(target=self._settle, name="jaxpp-settle", daemon=True).start()

    def note(self, worker: int, kind: Kind, pieces: Sequence[Any]) -> None:
        """Takes the answer to a call that must not fail: reports the failure, if it is one."""
        if kind == Kind.LOST:
            self.connection_ended(worker)
        elif kind != Kind.RETURNED:
            self.report(worker, unpack(pieces))

    def connection_ended(
        self, worker: int, why: str = "it has closed its connection to the driver"
    ) -> None:
        """Reports a worker whose connection has ended, unless Ray soon reports its death."""
        if worker not in self._reports:
            with self._changed:
                known = lambda: worker in self._reports or self._closed.is_set()  # noqa: E731
                self._changed.wait_for(known, DYING)
        if worker not in self._reports:
            self.report(worker, why)

    def _hear_of_death(self, worker: int, living: Any) -> None:
        error = living.exception()
        # At the end of the session Ray cancels the call.
        if error is not None and not isinstance(error, concurrent.futures.CancelledError):
            self.report(worker, error)

    def close(self) -> None:
        """Ends the monitor; threads that wait for a worker get an error."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._settled.set()
        if self._pulse.is_alive() and threading.current_thread() is not self._pulse:
            self._pulse.join(timeout=2.0)

    # ---- heartbeats -----------------------------------------------------------------------------

    def _beat(self) -> None:
        """Asks all workers for signs of life, and looks at those that are silent."""
        silent = dict.fromkeys(range(len(self.members)), 0.0)
        asked: dict[int, Any] = {}
        now = time.monotonic()
        while not self._closed.wait(HEARTBEAT) and self._first is None:
            if not ray.is_initialized():
                self.report(0, _no_session())
                return
            # If this process was stopped itself, that was no silence of the workers.
            before, now = now, time.monotonic()
            passed = min(now - before, 2 * HEARTBEAT)
            for worker, member in enumerate(self.members):
                if worker in asked and not asked[worker].done():
                    silent[worker] += passed
                    self._look_at(member, silent[worker])
                else:
                    if worker in asked:
                        silent[worker] = 0.0
                        self._take(member, *asked[worker].result())
                    asked[worker] = member.client.call(Lane.CONTROL, "pulse")
                member.client.flush(wait=False)

    def _take(self, member: Member, kind: Kind, pieces: Sequence[Any]) -> None:
        if kind == Kind.RETURNED:
            member.at = unpack(pieces)
        self.note(member.worker, kind, pieces)

    def _look_at(self, member: Member, silence: float) -> None:
        """Reports a worker that is silent for too long."""
        if silence < self._timeout - ANSWER:
            return
        state = member.state()
        if silence > (PATIENCE if state in RUNS else 1) * self._timeout:
            self.report(member.worker, f"no sign of life for {silence:.1f} s, {told(state)}")

    # ---- the end --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Ends the step on all workers, finds which failed first and why, and makes the error."""
        try:
            self.error = explain(self.members, self._reports, self._find_culprit(), self._describe)
        except BaseException as error:  # noqa: B036  `check` waits for an error
            member = self.members[self._first or 0]
            reason = f"{type(error).__name__}: {error}"
            self.error = member.error(
                f"{member} has failed, and the Ray session does not say why: {reason}. Shut the "
                f"mesh down, make a new one, and load the last checkpoint.",
                reason,
            )
        self._settled.set()
        for member in self.members:
            if member.dead:
                member.kill()

    def _find_culprit(self) -> int:
        """Aborts all workers; returns the one whose failure does not follow from another's."""
        if not ray.is_initialized():
            raise _no_session()
        first = self.members[self._first or 0]
        left = {member.worker for member in self.members} - self._reports.keys()

        def ended(worker: int, kind: Kind, pieces: Sequence[Any]) -> None:
            left.discard(worker)
            self.note(worker, kind, pieces)

        for member in [self.members[worker] for worker in left]:
            abort = pack(("abort", (f"{first} has failed",)))
            member.client.post(Lane.CONTROL, abort, functools.partial(ended, member.worker))
            member.client.flush(wait=False)
        with self._changed:
            self._changed.wait_for(
                lambda: culprit(self.members, self._reports) is not None, SETTLING
            )
            self._changed.wait_for(lambda: left <= self._reports.keys(), ANSWER)
        silent = left - self._reports.keys()
        for worker in silent:
            state = self.members[worker].state()
            if state not in RUNS:
                self.report(worker, f"it does not answer, {told(state)}")
        for member in self.members:
            reported = self._reports.get(member.worker)
            # A worker that described its failure, or could be aborted, is fit after `restart`.
            gone = reported is not None and not isinstance(reported, Failure)
            member.dead = gone or member.worker in silent
        found = culprit(self.members, self._reports, settled=True)
        found = suspect(self.members, self._reports) if found is None else found
        return self._first or 0 if found is None else found


def _no_session() -> Exception:
    return ray.exceptions.RaySystemError("the Ray session has been shut down")


def told(state: str) -> str:
    """Returns the state of a process as the end of a sentence about a worker."""
    return f"and its process is {state}" if state else "and its host does not answer"
