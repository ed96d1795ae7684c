"""The driver's watch over its workers: whoever fails, all end at once and with one error."""

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

from jaxpp.runtime._remote._blame import culprit, explain, suspect
from jaxpp.runtime._remote._failure import Failure, RankError
from jaxpp.runtime._remote._lookout import BUSY, UNKNOWN, post_lookouts, process_state, told
from jaxpp.runtime._remote._member import Member, kill

#: Seconds between two signs of life.
HEARTBEAT = 0.5
#: Seconds that a look at a worker's process takes at most.
LOOK = 0.7
#: Seconds that the workers get to say what went wrong, until the silent ones are suspected.
SETTLING = 1.0
#: Seconds within which Ray tells of a worker's death.
DYING = 2.0
#: Seconds between two looks at whether what a call waits for will never come.
POLL = 0.2


class Watch:
    """Watches the workers of a mesh until one fails.

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

    # ---- what the rest of the driver calls ------------------------------------------------------

    def check(self) -> None:
        """Raises the error of the workers, if one has failed."""
        if not ray.is_initialized():
            self.report(0, no_session())
        if self._first is not None:
            self._settled.wait()
        if self.error is not None:
            raise self.error.with_traceback(None)  # it may be raised often
        if self._closed.is_set():
            raise RuntimeError(
                "The mesh has been shut down or restarted meanwhile, or could not be restarted; "
                "call mesh.restart() and load the last checkpoint to go on."
            )

    def follow(self, worker: int, reference: Any) -> None:
        """Hears of it when a call of a worker fails."""
        reference.future().add_done_callback(functools.partial(self._hear, worker))

    def _hear(self, worker: int, future: Any) -> None:
        try:
            result = future.result()
        except BaseException as error:  # noqa: B036  on a thread of Ray, where nobody else hears
            self.report(worker, error)
        else:
            if isinstance(result, Failure):
                self.report(worker, result)

    def line_ended(self, worker: int) -> None:
        """Notes that a worker has closed its line; mostly it has died, which Ray tells us soon."""
        # To ask Ray, on this thread, ends the process where the session is just being shut down.
        if not self._settled.wait(DYING):
            self.report(worker, "it has closed its connection to the driver")

    def result(self, worker: int, reference: Any) -> Any:
        """The result of a call of a worker; a failure becomes the error of all workers."""
        try:
            found = self._get(reference)
        except ray.exceptions.RayError as error:
            found = error
        if isinstance(found, Failure | ray.exceptions.RayError):
            self._fail(worker, found)
        return found

    def value(self, worker: int, reference: Any) -> Any:
        """The value of a function that runs on a worker; what it raises is not the worker's end."""
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
        """What a call gives; ends when the workers have, whether or not anybody tells of it."""
        # Ray would start a session by itself where there is none.
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
        """Raises the error of all workers, now that the failure of one is known."""
        self.report(worker, what)
        self.check()
        raise AssertionError("a failure that is no error")

    def report(self, worker: int, what: Failure | BaseException | str) -> None:
        """Takes note that a worker has failed: what it or Ray says, or why we say so."""
        if isinstance(what, ray.exceptions.RayTaskError):  # the worker lives
            found = re.search(r"ray::\w+\.(\w+)", str(what))
            cause = getattr(what, "cause", None) or what
            what = Failure.of(cause, self._members[worker].rank, -1, found[1] if found else "")
            if isinstance(cause, ray.exceptions.RayError):  # what another worker was to give
                what = dataclasses.replace(what, follows=True)
        with self._changed:
            if self._closed.is_set():
                return
            self._reports.setdefault(worker, what)
            # That it is dead says more than what it said before.
            if not isinstance(what, Failure):
                self._reports[worker] = what
            first = self._first is None
            self._first = worker if first else self._first
            self._changed.notify_all()
        if first:
            threading.Thread(target=self._settle, name="jaxpp-settle", daemon=True).start()

    def close(self) -> None:
        """Ends the watch; who waits for a worker is told."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()
        self._settled.set()
        if threading.current_thread() is not self._pulse:
            self._pulse.join(timeout=2.0)
        for lookout in self._lookouts.values() if ray.is_initialized() else ():
            ray.kill(lookout)

    # ---- signs of life --------------------------------------------------------------------------

    def _beat(self) -> None:
        try:
            self._ask_for_signs()
        except Exception as error:  # the session has gone, and all of them with it
            self.report(0, error)

    def _ask_for_signs(self) -> None:
        now = time.monotonic()
        for member in self._members:
            member.seen = now
            # It never returns, so that Ray tells at once when the worker has died.
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
        """A worker that has given no sign of life for long: busy, or will it never again?"""
        state = self._state(member)
        silence = time.monotonic() - member.seen
        if silence > (10 if state in BUSY else 1) * self._timeout:
            self.report(member.worker, f"no sign of life for {silence:.1f} s, {told(state)}")

    def _state(self, member: Member) -> str:
        """The state of a worker's process, or that its host does not say."""
        if member.node not in self._lookouts:
            return process_state(member.pid)
        try:
            return ray.get(self._lookouts[member.node].state.remote(member.pid), timeout=LOOK)
        except ray.exceptions.RayError:
            return UNKNOWN

    # ---- the end --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Ends the step on all workers, finds out which failed first and why, and says so."""
        try:
            self.error = explain(self._members, self._reports, self._find_culprit(), self._describe)
        except BaseException as error:  # noqa: B036  somebody waits for it
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
        """Aborts all workers; gives the one whose failure does not follow from another's."""
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
            # Who has described a failure, or could be aborted, is fit to go on after `restart`.
            gone = reported is not None and not isinstance(reported, Failure)
            member.dead = gone or member.worker in silent
            if member.dead and member.node in self._lookouts:
                self._lookouts[member.node].end_stopped.remote(member.pid)
        found = culprit(self._members, self._reports, settled=True)
        found = suspect(self._members, self._reports) if found is None else found
        return self._first or 0 if found is None else found

    def _silent(self, aborts: dict[int, Any]) -> list[int]:
        """The workers that could not be aborted."""
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
    """The error where `ray.shutdown` has been called before the mesh was shut down."""
    return ray.exceptions.RaySystemError("the Ray session has been shut down")
