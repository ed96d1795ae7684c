"""The base of meshes over several processes: steps, arrays, traces, functions on ranks."""

import atexit
import contextlib
import dataclasses
import os
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from jaxpp._program import Bundle
from jaxpp._specs import Spec
from jaxpp.runtime import trace
from jaxpp.runtime.arrays import StackedStep
from jaxpp.runtime.site._array import Handles, RemoteArray
from jaxpp.runtime.site._carried import unpacked
from jaxpp.runtime.site._feed import Feeds
from jaxpp.runtime.site._group import Group
from jaxpp.runtime.site._interrupts import keep_interrupts, uninterrupted
from jaxpp.runtime.site._process import Process
from jaxpp.runtime.site._step import RemoteStep


class SiteMesh:
    """A mesh whose ranks are in several processes; subclasses start these, and end them.

    A placed function on it returns `RemoteArray`s at once; their values stay on the ranks.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    num_ranks: int
    processes_per_rank: int
    inside: Any
    #: The trace that is being recorded, if there is one.
    tracing: Any = None
    _group: Any

    def _begin(self, group: Group) -> None:
        """Begins to call the processes of a group."""
        keep_interrupts()
        self._feeds = Feeds(self, group)
        self._arrays = Handles(self, group)
        #: Checkpoints that ranks may still be writing: futures, each with a `result`.
        self.saves: weakref.WeakSet[Any] = weakref.WeakSet()
        self._owner = os.getpid()
        atexit.register(self._at_exit)

    def __repr__(self):
        return f"{type(self).__name__}({self.shape}, {self.axis_names})"

    def __enter__(self):
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any):
        self.shutdown()

    def shutdown(self) -> None:
        """Ends the mesh; may be repeated, and does nothing in a process that is a fork.

        First it waits for checkpoints that are being written, whose errors their manager raises,
        and for the callbacks that are left, if steps have some. Worker processes end, and so does a
        Ray session that was started for them. A launched process waits for the others to come to
        their end, too, and leaves them.

        Raises:
            RankError: another launched process has failed.
        """
        if os.getpid() != self._owner or self._group.stopped:
            return
        try:
            self._wait_for_saves()
            if self._group.library.has_effects and self._group.is_well:
                with contextlib.suppress(RuntimeError):  # a rank fails now
                    self._group.settle()
        finally:
            atexit.unregister(self._at_exit)
            self._group.stop()

    def _wait_for_saves(self, timeout: float | None = None) -> None:
        """Waits for checkpoints that are being written, each for some seconds at most."""
        for save in list(self.saves) if self._group.is_well else ():
            with contextlib.suppress(Exception):
                save.result(timeout)

    def _at_exit(self) -> None:
        """Ends the mesh with the script; where another process has failed, so has this one."""
        try:
            self.shutdown()
        except Exception:
            try:
                traceback.print_exc()
                sys.stderr.flush()
                sys.stdout.flush()
            finally:  # one of them may be closed
                os._exit(1)  # Python leaves the code as it is after an error at its end

    @property
    def first_ranks(self) -> list[int]:
        """A rank of each process, by which traces reach it; of a rank's first process alone."""
        return list(dict.fromkeys(ranks[0] for ranks, _ in self._group.hellos()))

    # ---- steps ----------------------------------------------------------------------------------

    def load(self, bundle: Bundle) -> Any:
        """Compiles a step where it runs; returns the function that calls the step."""
        group, library = self._group, self._group.library
        with group.order:
            group.check()
            number = library.add(bundle, group.transfers_of(bundle))
            step = RemoteStep(bundle, number, self._arrays, group)
            weakref.finalize(step, library.remove, number)
            group.agree(number, bundle)
            group.install(number)
        return StackedStep(step, bundle)

    def feed(self, load: Callable[[Any], Any], value: Any) -> Any:
        """Returns placeholders of `load(value)` for the arguments of a call; the ranks load it."""
        return self._feeds(load, value)

    # ---- traces ---------------------------------------------------------------------------------

    def start_trace(
        self, directory: str | os.PathLike[str], *, times: trace.Times = "profile"
    ) -> None:
        """Starts to record, as `MpmdMesh.start_trace`, in the first process of each rank.

        The files are written on this host; JAX's profile of each process, into
        `<directory>/profile-<rank>` on the host of the process, by its first rank.
        """

        def start() -> Any:
            return trace.start_trace(self, directory, times, self.tracing)

        self.tracing = self.lead("starts a trace", start)

    def stop_trace(self) -> trace.Trace:
        """Ends the trace, and writes its files, as `MpmdMesh.stop_trace`; all is on one clock.

        Raises:
            RuntimeError: the mesh is not traced.
            RankError: a rank has failed; its part of the trace is lost.
        """
        session, self.tracing = self.tracing, None

        def stop() -> trace.Trace:
            found = trace.stop_trace(self, session, range(self.num_ranks))
            numbers = {id(bundle): number for number, bundle in session.steps.items()}
            steps: Any = {call: numbers[id(bundle)] for call, bundle in found.steps.items()}
            return dataclasses.replace(found, steps=steps)

        found: Any = self.lead("stops a trace", stop)
        steps = {call: session.steps[number] for call, number in found.steps.items()}
        return dataclasses.replace(found, steps=types.MappingProxyType(steps))

    # ---- arrays ---------------------------------------------------------------------------------

    def new_array(self, aval: Any, ranks: tuple[int, ...], spec: Spec = ()) -> RemoteArray:
        """Makes a handle with an id of its own, for an array that ranks are going to hold."""
        with uninterrupted():
            return RemoteArray(self._arrays, self._arrays.new_ids(1), aval, ranks, spec)

    def check_array(self, array: RemoteArray) -> None:
        """Checks that an array exists, and that no rank has failed; see `Handles.check`."""
        self._arrays.check(array)

    def flush(self) -> None:
        """Tells the ranks at once which arrays they may drop; else the next call tells them."""
        self._group.check_open()
        with self._group.order, uninterrupted():
            released = {r: own for r, own in enumerate(self._arrays.releases()) if own}
            self._group.send_by_rank(Process.drop, released)

    # ---- what one process does for all ----------------------------------------------------------

    def lead(self, what: str, function: Callable[[], Any]) -> Any:
        """Runs a function, which does `what`, in one process that reaches all ranks.

        All processes get what it returns.
        """
        return self._group.lead(what, function, self._arrays)

    # ---- functions on the ranks -----------------------------------------------------------------

    def apply(
        self, function: Callable[..., Any], args: Mapping[int, tuple], *, ordered: bool = True
    ) -> dict[int, Any]:
        """Runs `function(process, *args)` on ranks, and waits for the results.

        Where a rank has several processes, the function runs in the first one.

        Args:
            function: a function that the ranks' processes can import, or that can be taken there.
            args: the arguments by rank; other ranks do not run it.
            ordered: whether it runs after the steps that were called before, and before those that
                are called later; else at once, beside them.

        Returns:
            The results by rank.

        Raises:
            Exception: what the function raised on a rank.
            RankError: a rank has failed.
        """
        found = self.apply_everywhere(function, args, ordered=ordered, processes=1)()
        return {rank: own[0] for rank, own in found.items()}

    def apply_everywhere(
        self,
        function: Callable[..., Any],
        args: Mapping[int, tuple],
        *,
        ordered: bool = True,
        processes: int | None = None,
    ) -> Callable[[], dict[int, list[Any]]]:
        """Starts a function as `apply` does, and does not wait.

        It runs in the first `processes` of each rank, by default in all.

        Returns:
            What waits, and gives by rank what each process gave; it raises as `apply` does.
        """
        processes = processes or self.processes_per_rank
        packed = {rank: self._group.pack((function, *own)) for rank, own in args.items()}
        with self._group.order:
            self._group.check()
            self.flush()
            call = self._group.apply(function.__name__, packed, ordered, processes)

        def results() -> dict[int, list[Any]]:
            found: dict[int, list[Any]] = {}
            for own in call.values().values():
                for rank, carried in own.items():
                    found.setdefault(rank, []).append(unpacked(carried))
            return found

        return results
