"""Tracing of a mesh whose ranks are all in this process."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp._program import Bundle
from jaxpp.runtime.trace import Recorder, Times, Trace, Tracing, start_trace, stop_trace


class LocalTracing:
    """The trace of a local mesh, and the mesh's one process, for `start_trace`.

    `recorder` records the runs of the mesh's steps, where it is not None.
    """

    first_ranks = (0,)

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.transport = self  # `start` sets its recorder; steps record their messages themselves
        self._tracing: Tracing | None = None
        self._calls = itertools.count()

    def apply(
        self, function: Any, args: Mapping[int, tuple], *, ordered: bool = True
    ) -> dict[int, Any]:
        """Runs `function(process, *args)`."""
        return {number: function(self, *own) for number, own in args.items()}

    def start(self, directory: str | os.PathLike[str], times: Times) -> None:
        """Starts a trace."""
        self._tracing = start_trace(self, directory, times, self._tracing)

    def stop(self, homes: Sequence[Any]) -> Trace:
        """Ends the trace, and writes its files."""
        tracing, self._tracing = self._tracing, None
        distinct = list(dict.fromkeys(homes))
        return stop_trace(self, tracing, [distinct.index(home) for home in homes])

    def begin(self, bundle: Bundle) -> int:
        """Notes a call of a step whose number is its id; gives the number of the call."""
        assert self._tracing is not None
        self._tracing.steps[id(bundle)] = bundle  # kept alive, so that no other gets its id
        return next(self._calls)
