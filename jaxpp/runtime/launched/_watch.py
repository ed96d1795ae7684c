"""The watch over the processes of a job, which tell each other by the hub."""

import os
import threading
from pathlib import Path
from typing import Any, NoReturn

from jaxpp.runtime.launched._calls import FAILED
from jaxpp.runtime.launched._hub import say
from jaxpp.runtime.site import Death, Failure, Member, Watch, end_stopped, has_ended
from jaxpp.runtime.transport import host_identity

#: The user's way out after a failure.
ADVICE = "Start the job again from its last checkpoint."
#: Seconds that a process has to end after the failure of another, if it calls the mesh no more.
END_TIMEOUT = 30.0
#: A process of another host may be silent for so many times the timeout: nobody can look at it.
PATIENCE = 10


def host_of_processes() -> str:
    """Names what this process sees the processes of: its host, or its container's part of it."""
    own = Path("/proc/self/ns/pid")
    return f"{host_identity()}-{own.stat().st_ino if own.exists() else 0}"


class LaunchedWatch(Watch):
    """Watches the processes of a job: process 0 all, the others process 0, which tells them."""

    def __init__(self, group: Any, members: Any, timeout: float, start_timeout: float):
        super().__init__(members, timeout, ADVICE)
        self._group, self._start_timeout = group, start_timeout
        #: The processes that have given a sign of life since the last look.
        self.heard: set[int] = set()
        self._told = threading.Event()

    @property
    def fails(self) -> bool:
        """Tells whether a process has failed."""
        return self._fails

    def report(self, worker: int, what: Failure | Death) -> None:
        """Notes that a process has failed, and with it this one."""
        if not self._closed:
            FAILED.set()
        super().report(worker, what)

    def end(self) -> NoReturn:
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
        there, patience = member.hello, PATIENCE * self._timeout
        if there is None:  # process 0 waits for those that come late, and starts JAX
            patience += self._start_timeout
        elif there.node == host_of_processes():
            if has_ended(there.pid):
                return "its process has ended"  # a fork of it may hold its connections
            return "its process is stopped" if end_stopped(there.pid) else ""
        return "its host does not answer" if silence > patience else ""

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
        say(
            f"jaxpp: this process has not called the mesh for {END_TIMEOUT:g} s after the failure "
            f"of another, and is ended: {self.error}"
        )
        os._exit(1)
