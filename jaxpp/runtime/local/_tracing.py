"""Tracing of a mesh whose ranks are all in this process."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxpp._program import Bundle, Message, Send
from jaxpp.runtime.executor import Chunk, Worker
from jaxpp.runtime.trace import Recorder, Trace, Tracing, clock, start_trace, stop_trace


class _Transport(Protocol):
    def arrays_of(self, message: Message) -> list[Any]: ...


class _Step(Protocol):
    bundle: Bundle
    homes: Sequence[Any]
    workers: list[Worker]
    order: list[tuple[int, Chunk]]

    @property
    def transport(self) -> _Transport: ...


class LocalTracing:
    """The trace of a local mesh, and the mesh's one process, for `start_trace`.

    `recorder` clocks the runs of the mesh's steps, where it is not None.
    """

    rank = 0
    num_ranks = 1

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.transport = self  # `start` sets its recorder; `dispatch` records messages
        self._tracing: Tracing | None = None
        self._calls = itertools.count()

    def apply(
        self, function: Any, args: Mapping[int, tuple], *, ordered: bool = True
    ) -> dict[int, Any]:
        """Runs `function(process, *args)`."""
        return {number: function(self, *own) for number, own in args.items()}

    def start(self, directory: str | os.PathLike[str], profiler: bool) -> None:
        """Starts a trace."""
        self._tracing = start_trace(self, directory, profiler, self._tracing)

    def stop(self, homes: Sequence[Any]) -> Trace:
        """Ends the trace, and writes its files."""
        tracing, self._tracing = self._tracing, None
        distinct = list(dict.fromkeys(homes))
        return stop_trace(self, tracing, [distinct.index(home) for home in homes])

    def dispatch(self, step: _Step) -> None:
        """Dispatches a step, and records it."""
        recorder, tracing = self.recorder, self._tracing
        assert recorder is not None and tracing is not None
        call, number = next(self._calls), id(step.bundle)
        tracing.steps[number] = step.bundle  # kept alive, so that no other bundle gets its id
        for worker in step.workers:
            recorder.prepare(worker)
        for rank, chunk in step.order:
            source = step.homes[rank]
            dispatched = clock()
            recorder.execute(step.workers[rank], chunk, call, number, source)
            for instruction in chunk:
                if not isinstance(instruction, Send):
                    continue
                target = step.homes[instruction.message.target]
                if target is not source:
                    arrays = step.transport.arrays_of(instruction.message)
                    link = source, target
                    recorder.copied(call, instruction.message, arrays, dispatched, link)
