"""Failures of a rank: a worker's description, and the error that the driver raises of it."""

import copyreg
import dataclasses
import functools
import pickle
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx

from jaxpp import _compat
from jaxpp.runtime.transport import PeerLost, TransportError

_END = "All ranks have ended the step; arrays on the mesh are lost."
#: The way out for the user of a `RemoteMpmdMesh` after a failure.
RESTART = "Call mesh.restart() and load the last checkpoint to go on."


class RankError(RuntimeError):
    """A rank in another process has failed, and with it the step on all ranks.

    A `RemoteMpmdMesh` does nothing more until `mesh.restart()`; a `LaunchedMpmdMesh` has ended.
    The rank's own exception is the cause (`__cause__`) where there is one.

    Args:
        message: what happened.
        rank: the rank that failed first; of a process with several, the first one.
        host: the host it runs on.
        task: what it was at, as in `place(...).lower(...).as_text()`; empty if that is not known.
        reason: why, in short: an exception, a signal, no answer.
        process: the number of the process that failed, among those of the rank.
    """

    __module__ = "jaxpp"  # as it is imported, and printed

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        host: str = "",
        task: str = "",
        reason: str = "",
        process: int = 0,
    ):
        super().__init__(message)
        self.rank, self.host, self.task, self.reason = rank, host, task, reason
        self.process = process

    def __reduce__(self):
        named = {n: getattr(self, n) for n in ("rank", "host", "task", "reason", "process")}
        return functools.partial(RankError, **named), (str(self),)


_TRACEBACK = "Traceback (most recent call last):"


def _equinox_error(*args: Any) -> eqx.EquinoxRuntimeError:
    return eqx.EquinoxRuntimeError(*args)


# The class is in no module under its name.
copyreg.pickle(eqx.EquinoxRuntimeError, lambda error: (_equinox_error, error.args))


class Lost(RuntimeError):
    """A call came to nothing: its array is not there, or its turn has passed."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A worker's description of an exception; it can be pickled whatever the exception is.

    The `rank` met it in a `call`, or in none (-1), in a `task`, of which `where` has the stage and
    the user's line, or in a message of the rank that it `waited_for`. It `is_echo` where it is the
    consequence of another rank's failure. `exception` is its type and message, `details` the
    traceback, and `pickled` empty where it cannot be.
    """

    rank: int
    call: int
    task: str
    waited_for: int | None
    is_echo: bool
    exception: str
    details: str
    pickled: bytes
    where: str = ""

    @staticmethod
    def of(
        error: BaseException,
        rank: int,
        call: int,
        task: str,
        waited_for: int | None = None,
        where: str = "",
    ) -> "Failure":
        """Describes an exception."""
        error = _compat.public_error(error)
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # a user's exception class may raise anything
            pickled = b""
        line = traceback.format_exception_only(error)[0].strip()
        if _TRACEBACK in line:  # of a callback; what it has raised is the last line
            kind, *_, line = line.split("\n")
            line = f"{kind.partition(_TRACEBACK)[0]}{line}"
        details = "".join(traceback.format_exception(error))
        is_echo = isinstance(error, TransportError | Lost)
        return Failure(rank, call, task, waited_for, is_echo, line, details, pickled, where)

    def cause(self) -> BaseException:
        """Returns the exception, or a `RuntimeError` with its text."""
        error: Any = None
        if self.pickled:
            try:
                error = pickle.loads(self.pickled)
            except Exception:  # a module that the driver does not have
                error = None
        error = error if isinstance(error, BaseException) else RuntimeError(self.exception)
        error.add_note(f"On rank {self.rank}:\n{self.details}")
        return error


class Failed(Exception):
    """The error of a worker's method; `ends` tells whether the worker has failed, or goes on."""

    def __init__(self, failure: Failure, ends: bool):
        super().__init__(failure, ends)
        self.failure, self.ends = failure, ends


@dataclasses.dataclass(frozen=True)
class Death:
    """The end of a worker's process, as the driver has heard of it.

    `cause` is what Ray has raised, and `output` the last lines that the process has written.
    """

    reason: str
    cause: BaseException | None = None
    output: str = ""

    @staticmethod
    def of(error: BaseException, output: str = "") -> "Death":
        """Describes the error that Ray gives for a call of a worker, and the worker's output."""
        crash = re.search(r"Fatal Python error: (.*)", output)
        reason = f"its process has died: {crash[1]}" if crash else _told_by(error)
        return Death(reason, error, output)


def _told_by(error: BaseException) -> str:
    """Returns Ray's reason for the end of a call."""
    text = str(error)
    if "running low on memory" in text or type(error).__name__ == "OutOfMemoryError":
        return "Ray has killed it because its host ran out of memory"
    if type(error).__name__ in ("ActorDiedError", "RayActorError", "ActorUnavailableError"):
        found = re.search(r"exit type: (\w+) Worker exit detail: ([^.]*)", text)
        return "its process has died" + (f" (Ray: {found[1]}, {found[2]})" if found else "")
    return f"{type(error).__name__}: {error}"


# ---- the error of all ranks ---------------------------------------------------------------------

#: The news of workers, by their numbers, in the order in which they came.
Reports = Mapping[int, Failure | Death]


def judge(members: Sequence[Any], reports: Reports, advice: str = RESTART) -> RankError:
    """Makes the error of all ranks: of the first failure that is no echo of another.

    `advice` is what the user can do.
    """
    end = f"{_END} {advice}"
    worker = _culprit(members, reports)
    if worker is None:
        if (error := _cut_off(members, reports, end)) is not None:
            return error
        worker = next(iter(reports))
    member, what = members[worker], reports[worker]
    waiting = [
        f"rank {other.rank} in {other.task}"
        for _, other in sorted(reports.items())
        if isinstance(other, Failure) and other.is_echo and other.waited_for in member.ranks
    ]
    waited = f" Waiting for it: {', '.join(waiting)}." if waiting else ""
    if isinstance(what, Death):
        output = f"\nThe last lines of its output:\n{what.output}" if what.output else ""
        message = f"{member} has failed: {what.reason}.{waited} {end}{output}"
        return member.error(message, what.reason, cause=what.cause)
    of_call = f" of call {what.call}" if what.call >= 0 else ""
    where = f" ({what.where})" if what.where else ""
    doing = f" in {what.task}{where}{of_call}" if what.task else ""
    message = f"{member.named(what.rank)} has failed{doing}: {what.exception}.{waited} {end}"
    return member.error(message, what.exception, what.task, what.cause(), what.rank)


def _culprit(members: Sequence[Any], reports: Reports) -> int | None:
    """Finds the worker that has failed first; None where all that is heard of are echoes."""
    for worker, what in reports.items():
        if isinstance(what, Death):
            # The death of a rank's first process ends the others.
            first = worker - members[worker].process
            return first if isinstance(reports.get(first), Death) else worker
        if not what.is_echo:
            return worker
    return None


def _cut_off(members: Sequence[Any], reports: Reports, end: str) -> RankError | None:
    """Makes the error where one of the workers has lost its connection to another, if one has."""
    lost = [
        (worker, what, cause)
        for worker, what in sorted(reports.items())
        if isinstance(what, Failure) and isinstance(cause := what.cause(), PeerLost)
    ]
    if not lost:
        return None
    worker, what, cause = lost[0]
    own = members[worker]
    peer = next(m for m in members if cause.rank in m.ranks and m.process == own.process)
    ends = f"{own.named(what.rank)} and {peer.named(cause.rank)}"
    lives = "both processes live" if peer.worker in reports else "neither process has died"
    return peer.error(
        f"The connection between {ends} broke, but {lives}: in {what.task}, rank {what.rank} found "
        f"that {cause.reason}. Look at the network between them. {end}",
        f"its connection to rank {what.rank} broke",
        what.task,
        cause,
        cause.rank,
    )
