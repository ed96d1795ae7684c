"""Finds from the reports of workers which one failed first, and makes the error that tells it.

A report of a worker is a `Failure` that it has described itself, the exception with which Ray has
ended a call of it, or a sentence of our own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray.exceptions

from jaxpp.runtime.remote.calls import Failure, RankError
from jaxpp.runtime.remote.group._member import Member
from jaxpp.runtime.transport import PeerLost

_END = (
    "All ranks have ended the step; arrays on the mesh are lost. Call mesh.restart() and load the "
    "last checkpoint to go on."
)
#: The reports of workers, by their numbers, in the order in which they came.
Reports = Mapping[int, Failure | BaseException | str]


def culprit(members: Sequence[Member], reports: Reports, settled: bool = False) -> int | None:
    """Finds the worker whose failure does not follow from another's; None where it is not known.

    Args:
        members: the workers.
        reports: what has been heard of some of them.
        settled: whether nothing more will be.
    """
    for worker, what in list(reports.items()):
        if isinstance(what, Failure):
            if not what.follows:
                return worker
            continue
        # The death of a rank's first process ends the others.
        first = members[worker].first
        if first in reports or settled:
            return worker if isinstance(reports.get(first), Failure | None) else first
    return None


def suspect(members: Sequence[Member], reports: Reports) -> int | None:
    """Finds a worker that another waited for in vain, where none has failed by itself."""
    for worker, what in list(reports.items()):
        if (found := _waited_for(members[worker], what)) is not None:
            return found
    return None


def _waited_for(member: Member, what: Any) -> int | None:
    """Finds the worker that another waited for: processes send to those of the same number."""
    if not isinstance(what, Failure) or what.waited_for is None:
        return None
    return what.waited_for * member.processes + member.process


def explain(
    members: Sequence[Member],
    reports: Reports,
    worker: int,
    describe: Callable[[int, str], str],
) -> RankError:
    """Makes the error of all workers.

    Args:
        members: the workers.
        reports: what has been heard of them.
        worker: the one that has failed first.
        describe: gives the stage and source line of a task, from its call's number and its label.
    """
    if (found := _cut_off(members, reports, worker)) is not None:
        return found
    member, what = members[worker], reports.get(worker)
    call, task = member.box.read() if member.box else (-1, "")
    if call < 0:  # the worker has no flight recorder, or does not write into it
        call, task = member.at
    cause: BaseException | None = None
    waits = {
        w: report
        for w, report in sorted(reports.items())
        if isinstance(report, Failure)
        and report.follows
        and _waited_for(members[w], report) == worker
    }
    if isinstance(what, Failure) and not what.follows:
        call, task, reason = what.call, what.task, what.exception
        cause = what.cause()
    elif isinstance(what, BaseException):
        crash = member.box.crash() if member.box else ""
        reason, cause = f"its process has died: {crash}" if crash else why(what), what
    elif isinstance(what, str):
        reason = what
    else:  # the worker lives; only reports of others tell of it
        own = what.exception if isinstance(what, Failure) else "it has ended the step"
        reason = next((w.exception for w in waits.values()), own)
    waiting = [f"rank {members[w].rank} in {r.task}" for w, r in waits.items()]
    of_call = f" of call {call}" if call >= 0 else ""
    doing = f" in {task}{describe(call, task)}{of_call}" if task else ""
    waited = f" Waiting for it: {', '.join(waiting)}." if waiting else ""
    return member.error(
        f"{member} has failed{doing}: {reason}.{waited} {_END}", reason, task, cause
    )


def _cut_off(members: Sequence[Member], reports: Reports, worker: int) -> RankError | None:
    """Makes the error where no worker has failed, and two that live lost their connection.

    A third one that waited for one of them may be the first that says so.
    """
    own = reports.get(worker)
    if not isinstance(own, Failure) or not own.follows:
        return None
    for other, what in sorted(reports.items()):
        if not isinstance(what, Failure) or not isinstance(cause := what.cause(), PeerLost):
            continue
        peer = cause.rank * members[other].processes + members[other].process
        pair = members[other], members[peer]
        if isinstance(reports.get(peer), Failure):
            return pair[1].error(
                f"The connection between {pair[0]} and {pair[1]} broke, but both processes live: "
                f"in {what.task}, rank {pair[0].rank} found that {cause.reason}. Look at the "
                f"network between them. {_END}",
                f"its connection to rank {pair[0].rank} broke",
                what.task,
                cause,
            )
    return None


def why(error: BaseException) -> str:
    """Returns Ray's reason for the death of a worker, in a line."""
    text = str(error)
    if isinstance(error, ray.exceptions.OutOfMemoryError) or "running low on memory" in text:
        return "Ray has killed it because its host ran out of memory"
    if isinstance(error, ray.exceptions.RayActorError):
        found = re.search(r"exit type: (\w+) Worker exit detail: ([^.]*)", text)
        return "its process has died" + (f" (Ray: {found[1]}, {found[2]})" if found else "")
    return f"{type(error).__name__}: {error}"
