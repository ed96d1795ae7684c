"""The watch over the processes of a mesh: if one fails, all end at once, and with one error."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxpp.runtime.site._failure import Death, Failure, RankError, judge
from jaxpp.runtime.site._group import Member

#: Seconds between two heartbeats.
BEAT = 0.5
#: Seconds between two looks of a thread that waits for a process; a Ctrl-C may come in between.
POLL = 0.05
#: Seconds that the thread of a watch has to end.
CLOSE_TIMEOUT = 10.0


class Watch:
    """Watches the processes of a mesh until one fails; then ends the work of all.

    A subclass hears of failures and deaths, and reports them. A process that has been stopped says
    nothing, and is found by its heartbeats: one that is silent for `timeout` seconds is looked at.
    One that runs is left in peace, however slow, since C code may hold Python's lock.
    For `advice` see `judge`.
    """

    def __init__(self, members: Sequence[Any], timeout: float, advice: str):
        self.error: RankError | None = None
        self.members = list(members)
        self._timeout, self._advice = timeout, advice
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        #: The news, in their order. Only the thread of the watch changes it.
        self.reports: dict[int, Failure | Death] = {}
        self._first = 0.0
        #: For each process how long it has been silent.
        self._silent = dict.fromkeys(range(len(members)), 0.0)
        self._beaten = time.monotonic()
        self._fails = self._settled = self._closed = False
        self._thread = threading.Thread(target=self._run, name="jaxpp-watch", daemon=True)

    # ---- what a subclass knows ------------------------------------------------------------------

    @property
    def watches(self) -> bool:
        """Tells whether there is something to watch with."""
        return True

    def has_beaten(self, member: Member) -> bool:
        """Tells whether a process has given a sign of life since the last one, and asks for one."""
        raise NotImplementedError

    def why_dead(self, member: Member, silence: float) -> str:
        """Returns why a silent process counts as dead; empty where it does not."""
        raise NotImplementedError

    def end_others(self, member: Member) -> None:
        """Ends the work of all processes, because one has failed."""
        raise NotImplementedError

    def last_words(self, member: Member) -> str:
        """Returns the last lines that a dead process has written, as far as they are known."""
        return ""

    # ---- for those who wait ---------------------------------------------------------------------

    def start(self) -> None:
        """Starts to watch."""
        self._thread.start()

    def check(self) -> None:
        """Raises the error of the processes, if one has failed."""
        if self._fails or self._closed:
            self.end()

    def end(self) -> NoReturn:
        """Raises the error of the processes, once it is known; one of them has failed."""
        # A Ctrl-C in `Event.wait` could leave a lock locked.
        while not (self._settled or self._closed):
            time.sleep(POLL)
        if self.error is not None:
            raise self.error.with_traceback(None)  # the traceback would grow with every raise
        raise RuntimeError(
            "The mesh has been shut down or restarted meanwhile, or could not be restarted. "
            + self._advice
        )

    def report(self, worker: int, what: Failure | Death) -> None:
        """Notes that a process has failed."""
        self._fails = True
        self._events.put((worker, what))

    def close(self) -> None:
        """Ends the watch; threads that wait for a process get an error."""
        self._closed = True
        self._events.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)

    # ---- its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            with contextlib.suppress(queue.Empty):
                if (event := self._events.get(timeout=BEAT)) is not None:
                    self._take(*event)
            if self.watches and time.monotonic() - self._beaten >= BEAT:
                self._beat()
            if self.reports and self.is_settled():
                self._settle()
                return

    def _take(self, worker: int, what: Failure | Death) -> None:
        """Notes what is heard of a process; after the first, ends all others."""
        member = self.members[worker]
        if isinstance(what, Death) and what.cause and not what.output:
            what = Death.of(what.cause, self.last_words(member))
        first = not self.reports
        self.reports.setdefault(worker, what)
        if first:
            self._first = time.monotonic()
            self._fails = True
            if self.watches:
                self.end_others(member)

    def _beat(self) -> None:
        """Looks at the processes that are silent."""
        # If this process was stopped itself, that was no silence of the others.
        before, self._beaten = self._beaten, time.monotonic()
        passed = min(self._beaten - before, 2 * BEAT)
        for member in self.members:
            worker = member.worker
            if worker in self.reports:
                continue
            self._silent[worker] = 0.0 if self.has_beaten(member) else self._silent[worker] + passed
            if self._silent[worker] >= self._timeout:
                silence = self._silent[worker]
                if why := self.why_dead(member, silence):
                    self._take(worker, Death(f"no sign of life for {silence:.1f} s, and {why}"))

    def is_settled(self) -> bool:
        """Tells whether all processes have ended the step, or have had their time to do so."""
        if len(self.reports) == len(self.members) or not self.watches:
            return True
        return time.monotonic() - self._first > self._timeout + 2 * BEAT

    def _settle(self) -> None:
        """Makes the error of all processes."""
        for worker, what in self.reports.items():
            self.members[worker].dead |= isinstance(what, Death)
        try:
            self.error = judge(self.members, self.reports, self._advice)
        except Exception as error:  # `end` waits for an error
            reason = f"{type(error).__name__}: {error}"
            self.error = self.members[0].error(f"A rank has failed: {reason}.", reason)
        self._settled = True


def has_ended(pid: int) -> bool:
    """Tells whether a process of this host has ended, if none has taken note of it, too."""
    return _state_of(pid) in ("", "Z", "X")


def _state_of(pid: int) -> str:
    """Returns the letter of a process's state, as `ps` shows it; empty where there is none."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        return stat.read_text().rpartition(")")[2].strip()[:1] if stat.exists() else ""
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return told.stdout.strip()[:1]


def end_stopped(pid: int) -> bool:
    """Kills a process of this host if it has been stopped; tells whether it was."""
    stopped = _state_of(pid) in ("T", "t")  # by a signal, or by a debugger
    if stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # nothing else reaches it
    return stopped
