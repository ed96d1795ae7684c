"""The driver's health monitor: if one worker fails, all end at once and with one error."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ray
import ray.exceptions

from jaxpp.runtime.remote.calls import Failure, RankError
from jaxpp.runtime.remote.cluster import BUSY, UNKNOWN, post_lookouts, process_state, told
from jaxpp.runtime.remote.group._blame import culprit, explain, suspect
from jaxpp.runtime.remote.group._member import Member, kill

#: Seconds between two heartbeats.
HEARTBEAT = 0.5
#: Seconds that a look-up of a worker's process state takes at most.
LOOK = 0.7
#: Seconds that the workers have to report their failures, before the silent ones are suspected.
SETTLING = 1.0
#: Seconds within which Ray tells of a worker's death.
DYING = 2.0
#: Seconds between two checks that the result of a call can still come.
POLL = 0.2


class Watch:
    """A health monitor: watches the workers of a mesh until one fails.

    Args:
        members: the workers.
        timeout: seconds without a sign of life after which a worker that does not run (it has been
            stopped, or its host cannot be reached) counts as lost; one that runs, and only does not
            answer, after ten times as long.
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
        self._lookouts = post_lookouts({member.node for member in self._members})
        self._pulse = threading.Thread(target=self._beat, name="jaxpp-heartbeat", daemon=True)
        self._pulse.start()

    # ---- for the rest of the driver -------------------------------------------------------------

    def check(self) -> None:
        """Raises the error of the workers, if one has failed."""
        if not ray.is_initialized():
            self.report(0, no_session())
        if self._first is not None:
            self._settled.wait()
        if self.error is not None:
            raise self.error.with_traceback(None)  # the traceback would grow with every raise
        if self._closed.is_set():
            raise RuntimeError(
                "The mesh has been shut down or restarted meanwhile, or could not be restarted; "
                "call mesh.restart() and load the last checkpoint to go on."
            )

    def follow(self, worker: int, reference: Any) -> None:
        """Reports a worker as failed if this call of it fails."""
        reference.future().add_done_callback(functools.partial(self._hear, worker))

    def _hear(self, worker: int, future: Any) -> None:
        try:
            result = future.result()
        except BaseException as error:  # noqa: B036  on a thread of Ray, where nobody catches it
            self.report(worker, error)
        else:
            if isinstance(result, Failure):
                self.report(worker, result)

    def line_ended(self, worker: int) -> None:
        """Reports a worker that has closed its connection, unless Ray soon reports its death."""
        # A call of Ray here, on this thread, ends the process if the session is being shut down.
        if not self._settled.wait(DYING):
            self.report(worker, "it has closed its connection to the driver")

    def result(self, worker: int, reference: Any) -> Any:
        """Waits for the result of a call of a worker; a failure becomes that of all workers."""
        try:
            found = self._get(reference)
        except ray.exceptions.RayError as error:
            found = error
        if isinstance(found, Failure | ray.exceptions.RayError):
            self._fail(worker, found)
        return found

    def value(self, worker: int, reference: Any) -> Any:
        """Waits for the value of a function on a worker; its exception does not fail the worker."""
        try:
            found = self._get(reference)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ray.exceptions.RayError):  # another worker's end
                raised = error.as_instanceof_cause()
                raised.add_note(f"on {self._members[worker]}")
                raise raised from None
            found = error
        except ray.exceptions.RayError as error:
            found = error
        if isinstance(found, Failure | ray.exceptions.RayError):
            self._fail(worker, found)
        return found

    def _get(self, reference: Any) -> Any:
        """Waits for the result of a call; raises once the workers have failed."""
        # Without a session, `ray.wait` would start one.
        while ray.is_initialized():
            if isinstance(reference, concurrent.futures.Future):
                with contextlib.suppress(TimeoutError):
                    return reference.result(POLL)
            elif ray.wait([reference], timeout=POLL, fetch_local=False)[0]:
                return ray.get(reference)
            if self._settled.is_set():
                self.check()
        raise no_session()

    def _fail(self, worker: int, what: Failure | BaseException) -> NoReturn:
        """Reports the failure of a worker, and raises the error of all workers."""
        self.report(worker, what)
        self.check()
        raise AssertionError("a failure that is no error")

    def report(self, worker: int, what: Failure | BaseException | str) -> None:
        """Notes that a worker has failed: by its own or Ray's account, or for a reason of ours."""
        if isinstance(what, ray.exceptions.RayTaskError):  # the worker lives
            found = re.search(r"ray::\w+\.(\w+)", str(what))
            cause = getattr(what, "cause", None) or what
            what = Failure.of(cause, self._members[worker].rank, -1, found[1] if found else "")
            if isinstance(cause, ray.exceptions.RayError):  # another worker's result did not come
                what = dataclasses.replace(what, follows=True)
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

    def close(self) -> None:
        """Ends the monitor; threads that wait for a worker get an error."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._settled.set()
        if threading.current_thread() is not self._pulse:
            self._pulse.join(timeout=2.0)
        for lookout in self._lookouts.values() if ray.is_initialized() else ():
            ray.kill(lookout)

    # ---- heartbeats -----------------------------------------------------------------------------

    def _beat(self) -> None:
        try:
            self._ask_for_signs()
        except Exception as error:  # the session has gone, and all workers with it
            self.report(0, error)

    def _ask_for_signs(self) -> None:
        now = time.monotonic()
        for member in self._members:
            member.seen = now
            # `live` never returns; Ray fails this call as soon as the worker has died.
            self.follow(member.worker, member.actor.live.remote())
        asked: dict[int, Any] = {}
        while not self._closed.wait(0.05 if asked else HEARTBEAT) and self._first is None:
            if not ray.is_initialized():
                raise no_session()
            for member in self._members:
                if member.worker not in asked:
                    asked[member.worker] = member.actor.pulse.remote()
            answered, _ = ray.wait(
                list(asked.values()), num_returns=len(asked), timeout=POLL, fetch_local=False
            )
            for member in self._members:
                if asked[member.worker] in answered:
                    self._answer(member, asked.pop(member.worker))
                elif time.monotonic() - member.seen > self._timeout - LOOK:
                    self._look_at(member)

    def _answer(self, member: Member, reference: Any) -> None:
        try:
            found: Any = ray.get(reference)
        except ray.exceptions.RayError as error:
            self.report(member.worker, error)
            return
        member.seen = time.monotonic()
        if isinstance(found, Failure):
            self.report(member.worker, found)
        else:
            member.at = found

    def _look_at(self, member: Member) -> None:
        """Reports a worker that is silent for too long; a busy process has ten times as long."""
        state = self._state(member)
        silence = time.monotonic() - member.seen
        if silence > (10 if state in BUSY else 1) * self._timeout:
            self.report(member.worker, f"no sign of life for {silence:.1f} s, {told(state)}")

    def _state(self, member: Member) -> str:
        """Finds the state of a worker's process; `UNKNOWN` where its host does not answer."""
        if member.node not in self._lookouts:
            return process_state(member.pid)
        try:
            return ray.get(self._lookouts[member.node].state.remote(member.pid), timeout=LOOK)
        except ray.exceptions.RayError:
            return UNKNOWN

    # ---- the end --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Ends the step on all workers, finds which failed first and why, and makes the error."""
        try:
            self.error = explain(self._members, self._reports, self._find_culprit(), self._describe)
        except BaseException as error:  # noqa: B036  `check` waits for an error
            member = self._members[self._first or 0]
            reason = f"{type(error).__name__}: {error}"
            self.error = RankError(
                f"{member} has failed, and the Ray session does not say why: {reason}. Shut the "
                f"mesh down, make a new one, and load the last checkpoint.",
                rank=member.rank,
                host=member.host,
                reason=reason,
                process=member.process,
            )
        self._settled.set()
        for member in self._members:
            if member.dead:
                kill(member)

    def _find_culprit(self) -> int:
        """Aborts all workers; returns the one whose failure does not follow from another's."""
        if not ray.is_initialized():
            raise no_session()
        first = self._members[self._first or 0]
        aborts = {
            member.worker: member.actor.abort.remote(f"{first} has failed")
            for member in self._members
            if member.worker not in self._reports
        }
        for worker, reference in aborts.items():
            self.follow(worker, reference)
        with self._changed:
            self._changed.wait_for(
                lambda: culprit(self._members, self._reports) is not None, SETTLING
            )
        silent = self._silent(aborts)
        for worker in silent:
            state = self._state(self._members[worker])
            if state not in BUSY:
                self.report(worker, f"it does not answer, {told(state)}")
        for member in self._members:
            reported = self._reports.get(member.worker)
            # A worker that described its failure, or could be aborted, is fit after `restart`.
            gone = reported is not None and not isinstance(reported, Failure)
            member.dead = gone or member.worker in silent
            if member.dead and member.node in self._lookouts:
                self._lookouts[member.node].end_stopped.remote(member.pid)
        found = culprit(self._members, self._reports, settled=True)
        found = suspect(self._members, self._reports) if found is None else found
        return self._first or 0 if found is None else found

    def _silent(self, aborts: dict[int, Any]) -> list[int]:
        """Finds the workers that could not be aborted."""
        if not aborts:
            return []
        waiting = list(aborts.values())
        answered, _ = ray.wait(waiting, num_returns=len(waiting), timeout=LOOK, fetch_local=False)
        for worker, reference in aborts.items():
            if reference in answered:
                try:
                    self.report(worker, ray.get(reference))
                except ray.exceptions.RayError as error:
                    self.report(worker, error)
        return [w for w, ref in aborts.items() if ref not in answered and w not in self._reports]


def no_session() -> BaseException:
    """Makes the error for a `ray.shutdown` that came before the mesh was shut down."""
    return ray.exceptions.RaySystemError("the Ray session has been shut down")
