"""What meshes over several processes have in common: steps, arrays, traces, functions on ranks."""

import dataclasses
import os
import types
from collections.abc import Callable, Mapping
from typing import Any

from jaxpp._program import Bundle
from jaxpp._specs import Spec
from jaxpp.runtime import trace
from jaxpp.runtime.arrays import StackedStep
from jaxpp.runtime.site._array import RemoteArray
from jaxpp.runtime.site._arrays import Arrays
from jaxpp.runtime.site._call import Applied
from jaxpp.runtime.site._feed import Feeds, describe_batch
from jaxpp.runtime.site._group import Group
from jaxpp.runtime.site._interrupts import keep_interrupts
from jaxpp.runtime.site._programs import Library
from jaxpp.runtime.site._step import Steps


class SiteMesh:
    """A mesh whose ranks are in several processes; subclasses start these, and end them.

    A placed function on it returns `RemoteArray`s at once; their values stay on the ranks.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    num_ranks: int
    processes_per_rank: int
    inside: Any
    #: A rank of each process, by which traces reach it.
    first_ranks: Any
    _group: Any

    def _begin(self, group: Group, library: Library) -> None:
        """Begins to call the processes of a group."""
        keep_interrupts()
        feeds = Feeds(self._types_of, group.put, group.carrier.of)
        self._arrays = Arrays(self, group)
        self._steps = Steps(self._arrays, group, library, feeds)

    def __repr__(self):
        return f"{type(self).__name__}({self.shape}, {self.axis_names})"

    # ---- steps ----------------------------------------------------------------------------------

    def load(self, bundle: Bundle) -> Any:
        """Compiles a step where it runs; returns the function that calls the step."""
        return StackedStep(self._steps.load(bundle), bundle)

    def feed(self, load: Callable[[Any], Any], value: Any) -> Any:
        """Returns placeholders of `load(value)` for the arguments of a call; the ranks load it."""
        return self._steps.feeds(load, value)

    # ---- traces ---------------------------------------------------------------------------------

    def start_trace(
        self, directory: str | os.PathLike[str], *, times: trace.Times = "profile"
    ) -> None:
        """Starts to record, as `MpmdMesh.start_trace`, in the first process of each rank.

        The files are written on this host; JAX's profile of each process, into
        `<directory>/profile-<rank>` on the host of the process, by its first rank.
        """
        steps = self._steps

        def start() -> Any:
            return trace.start_trace(self, directory, times, steps.tracing)

        steps.tracing = self.lead("starts a trace", start)

    def stop_trace(self) -> trace.Trace:
        """Ends the trace, and writes its files, as `MpmdMesh.stop_trace`; all is on one clock.

        Raises:
            RuntimeError: the mesh is not traced.
            RankError: a rank has failed; its part of the trace is lost.
        """
        session, self._steps.tracing = self._steps.tracing, None

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
        return self._arrays.new_array(aval, ranks, spec)

    def check_array(self, array: RemoteArray) -> None:
        """Checks that an array exists, and that no rank has failed; see `Arrays.check`."""
        self._arrays.check(array)

    def flush(self) -> None:
        """Tells the ranks at once which arrays they may drop; else the next call tells them."""
        self._group.check_open()
        self._steps.flush()

    # ---- what one process does for all ----------------------------------------------------------

    def lead(self, what: str, function: Callable[[], Any]) -> Any:
        """Runs a function in one process, which reaches all ranks; all get what it returns.

        Args:
            what: what it does, in words.
            function: the function.
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
        found = self._start(function, args, ordered, 1).results()
        return {rank: own[0] for rank, own in found.items()}

    def apply_everywhere(
        self, function: Callable[..., Any], args: Mapping[int, tuple], *, ordered: bool = True
    ) -> Applied:
        """Starts a function as `apply` does, in all processes of each rank, and does not wait.

        `.results()` waits; it returns, by rank, a list of what each process gave.
        """
        return self._start(function, args, ordered, self.processes_per_rank)

    def _start(
        self, function: Callable[..., Any], args: Mapping[int, tuple], ordered: bool, processes: int
    ) -> Applied:
        """Starts a function in the first processes of some ranks."""
        packed = {rank: self._group.carrier.of((function, *own)) for rank, own in args.items()}
        with self._group.order:
            self._group.check()
            self.flush()
            return Applied(self._group.apply(function.__name__, packed, ordered, processes))

    def _types_of(self, load: Callable[[Any], Any], value: Any) -> Any:
        """Returns the types of the arrays that a function loads, in a rank."""
        return self.apply(describe_batch, {0: (load, value)}, ordered=False)[0]

    def _describe(self, call: int, task: str) -> str:
        """Gives the stage and source line of a task, from its call's number and its label."""
        return self._steps.library.describe(call, task)
