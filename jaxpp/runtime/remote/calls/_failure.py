"""Failures of a rank: the worker's description, and the error that the driver raises."""

import copyreg
import dataclasses
import pickle
import traceback
from typing import Any

import equinox as eqx

from jaxpp import _compat
from jaxpp.runtime.transport import TransportError


class RankError(RuntimeError):
    """A rank of a `RemoteMpmdMesh` has failed, and with it the step on all ranks.

    The mesh does nothing more until `mesh.restart()`. The rank's own exception is the cause
    (`__cause__`) where there is one.

    Args:
        message: what happened.
        rank: the rank that failed first.
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
        return _rank_error, (str(self), named)


def _rank_error(message: str, named: dict[str, Any]) -> RankError:
    return RankError(message, **named)


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

    Args:
        rank: the worker's.
        call: the number of the step's call, or -1.
        task: what it was at.
        waited_for: the rank whose message it sent or waited for, if it did.
        follows: whether it is the consequence of another rank's failure.
        exception: the exception's type and message.
        details: its traceback.
        pickled: the exception itself, or nothing where it cannot be pickled.
    """

    rank: int
    call: int
    task: str
    waited_for: int | None
    follows: bool
    exception: str
    details: str
    pickled: bytes

    @staticmethod
    def of(
        error: BaseException, rank: int, call: int, task: str, waited_for: int | None = None
    ) -> "Failure":
        """Describes an exception."""
        error = _compat.public_error(error)
        follows = isinstance(error, TransportError | Lost)
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
        return Failure(rank, call, task, waited_for, follows, line, details, pickled)

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
