"""A site: the ranks of one process, and what may be called there, by Ray or in the process itself.

A method runs in its lane, which has threads of its own. Who calls names it as the attribute of the
class, as in `group.send(Process.run, ...)`.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jaxpp._program import Receive, Run, Send
from jaxpp.runtime.arrays import spans
from jaxpp.runtime.executor import Dispatcher
from jaxpp.runtime.site._call import StepCall
from jaxpp.runtime.site._carried import Packed, WithSettings, unpacked
from jaxpp.runtime.site._failure import Failed, Failure, Lost
from jaxpp.runtime.site._feed import Batch
from jaxpp.runtime.site._programs import Loading
from jaxpp.runtime.site._rank import Rank
from jaxpp.runtime.transport import Aborted, NotComputed, PeerLost, leave_processes

#: The threads of each lane. A fetch waits for its arrays, and more fetches wait for a thread.
LANES = {"steps": 1, "batches": 1, "fetches": 4, "aside": 2, "control": 2}
#: Seconds that an error of no known task waits for the same error with its task.
GRACE = 0.5

Method = TypeVar("Method", bound=Callable[..., Any])


def lane(name: str) -> Callable[[Method], Method]:
    """Says in which lane a method runs."""

    def mark(method: Any) -> Any:
        method.lane = name
        return method

    return mark


def in_order(method: Method) -> Method:
    """Says that a method runs in one order with the steps; its turn is sent before its arguments.

    Ray keeps the order of a lane of one thread. The turn proves that it has.
    """

    def checked(self: "Process", turn: int, *args: Any) -> Any:
        if turn != self.turn:
            told = (
                f"call {turn} of the driver, of {method.__name__}, came when call {self.turn} was"
            )
            self.fail(RuntimeError(f"{told} due: one was lost, or the order of two was changed"))
        self.turn = turn + 1
        return method(self, *args)

    functools.update_wrapper(checked, method)
    del checked.__dict__["__wrapped__"]  # Ray would look there for the arguments
    return lane("steps")(checked)  # pyright: ignore


class Process:
    """The ranks of a process, whose failure is one: a site.

    It is the `process` of that number among the `processes` of its rank.
    """

    def __init__(self, ranks: Sequence[int], process: int = 0, processes: int = 1):
        self.ranks: dict[int, Rank] = {}
        self.numbers, self.process = tuple(ranks), process
        #: The way of the ranks to others, and what gives the value of a reference.
        self.transport: Any = None
        self.get: Callable[[Any], Any]
        #: Called with each array that a rank has loaded: the rank, the batch, which one, its value.
        self.took: Callable[[int, int, int, Any], None] = lambda *_: None
        #: The programs of the ranks, by number.
        self.computations: dict[int, WithSettings] = {}
        self._name = "rank" + "s" * (len(ranks) > 1) + " " + " and ".join(map(str, ranks))
        if processes > 1:
            self._name += f", process {process}"
        #: Held where arrays come, or a rank fails.
        self.changed = threading.Condition()
        #: The failure, once there is one.
        self.end: concurrent.futures.Future[Failure] = concurrent.futures.Future()
        #: The turn of the next call in order, and how many calls of `apply` are under way.
        self.turn = self.applying = 0
        #: The steps by number, each with its `Loading.lines`; the step that runs, the number of the
        #: last call, and the lines of its step.
        self._steps: dict[int, tuple[Dispatcher, Mapping[str, str]]] = {}
        self._running: Dispatcher | None = None
        self._call, self._lines = -1, {}

    def __repr__(self):
        return self._name  # Ray writes it before each line that is printed here

    @property
    def failure(self) -> Failure | None:
        """Why the process does no more work; None while it is well."""
        return self.end.result() if self.end.done() else None

    # ---- its start ------------------------------------------------------------------------------

    def have(self, transport: Any, get: Callable[[Any], Any]) -> None:
        """Makes the ranks, which have a way to others; `get` gives the value of a reference."""
        self.transport, transport.on_failure = transport, self._transport_failed
        self.get = lambda reference: unpacked(get(reference))
        self._steps, self._running, self._call, self._lines = {}, None, -1, {}
        self.end = concurrent.futures.Future()
        self.ranks = {rank: Rank(self, rank, home) for rank, home in transport.homes.items()}

    @lane("control")
    def connect(self, peers: Mapping[int, Any]) -> None:
        """Notes the addresses of all ranks."""
        self.transport.connect(peers)

    # ---- in one order ---------------------------------------------------------------------------

    @in_order
    def run(self, call: StepCall) -> None:
        """Dispatches a step; `end` tells of a failure."""
        if self.failure is not None:
            return
        dispatcher, self._lines = self._steps[call.step]
        self._running, self._call = dispatcher, call.number
        try:
            self.transport.begin(call.number, call.step)
            for rank, part in call.parts.items():
                self.ranks[rank].send(part)
            for rank, part in call.parts.items():
                self.ranks[rank].feed(call.step, part)
            with contextlib.ExitStack() as settings:
                for name in call.checks:
                    settings.enter_context(getattr(jax, name)(True))
                if (recorder := self.transport.recorder) is None:
                    dispatcher.run()
                else:
                    recorder.run(dispatcher, call.number, call.step)
            for rank in call.parts:
                self.ranks[rank].take_results(call.step, call.results)
            self._running = None
        except BaseException as error:  # noqa: B036  the driver has to know of every exception
            self.fail(error)

    @in_order
    def load(self, loadings: Mapping[int, Loading]) -> None:
        """Registers a step for all ranks."""
        found = [self._told(rank, self.ranks[rank].load, own) for rank, own in loadings.items()]
        first = next(iter(loadings.values()))
        dispatcher, lines = Dispatcher(found, first.turns), {}
        for own in loadings.values():
            lines |= own.lines
        self._steps[first.step] = dispatcher, lines
        self.transport.expect(dispatcher.messages, first.step, dispatcher.late, first.transfers)

    @in_order
    def unload(self, step: int, computations: Iterable[int]) -> None:
        """Forgets a step, and computations that no other step has."""
        self._steps.pop(step, None)
        self.transport.forget(step)
        for rank in self.ranks.values():
            rank.unload(step)
        for number in computations:
            self.computations.pop(number, None)

    @in_order
    def drop(self, numbers: Mapping[int, Sequence[int]]) -> None:
        """Forgets arrays of each rank."""
        for rank, own in numbers.items():
            self.ranks[rank].drop(own)

    @in_order
    def apply_in_order(self, functions: Mapping[int, Any]) -> dict[int, Any]:
        """Runs a function for each rank, as `apply` does."""
        return self.apply(functions)

    @in_order
    def reach(self) -> bool | None:
        """Tells that all calls before have been dispatched; None where the process has failed."""
        return True if self.failure is None else None

    @in_order
    def settle(self) -> None:
        """Waits until the callbacks of all calls have been made."""
        self._noting(None, jax.effects_barrier)

    # ---- at any time ----------------------------------------------------------------------------

    @lane("batches")
    def load_batch(self, batch: Batch, ranks: Iterable[int]) -> None:
        """Loads a batch for some ranks, unless the process has failed."""
        for rank in ranks:
            if self.failure is None:
                self.ranks[rank].loader.load(batch)

    @lane("fetches")
    def fetch(self, rank: int, numbers: Sequence[int]) -> Any:
        """Waits until arrays have been computed; returns what `Rank.fetch` gives of each.

        Each is None where the process has failed. Ray wants one value where there is but one.
        """
        fetch = self.ranks[rank].fetch
        found = self._noting(rank, lambda: fetch(numbers)) or [None] * len(numbers)
        return found if len(numbers) > 1 else found[0]

    @lane("fetches")
    def wait(self, rank: int, numbers: Sequence[int]) -> bool | None:
        """Waits until arrays have been computed; None where the process has failed."""
        own = self.ranks[rank]
        found = self._noting(rank, lambda: jax.block_until_ready(own.wait_for(numbers)))
        return None if found is None else True

    @lane("aside")
    def apply(self, functions: Mapping[int, Any]) -> dict[int, Any]:
        """Runs `function(rank, *args)` for each rank, of what is packed; returns the results."""

        def run(rank: int, packed: Any) -> Any:
            function, *args = unpacked(packed)
            result = function(self.ranks[rank], *args)
            return Packed.of(result) if isinstance(packed, Packed) else result

        with self.changed:
            self.applying += 1
        try:
            return {rank: self._told(rank, run, rank, packed) for rank, packed in functions.items()}
        finally:
            with self.changed:
                self.applying -= 1
                self.changed.notify_all()

    def _told(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the user's; raises `Failed` for whatever it raises."""
        end = self.end
        if end.done():
            raise Failed(end.result(), ends=True)
        try:
            return function(*args)
        except BaseException as error:  # noqa: B036  the driver has to know of every exception
            interrupts = isinstance(error, KeyboardInterrupt | SystemExit)
            if interrupts and self.end is end:  # it would end the driver
                self.fail(error, rank)
            failure = end.result() if end.done() else Failure.of(error, rank, -1, "")
            raise Failed(failure, ends=end.done()) from None

    def _noting(self, rank: int | None, wait: Callable[[], Any]) -> Any:
        """Waits for what earlier tasks make; None where the process has failed."""
        end = self.end
        if end.done():
            return None
        try:
            return wait()
        except Lost:
            return None
        except Exception as error:
            # The rank meets the same error where it dispatches or sends, and knows the task there.
            with self.changed:
                self.changed.wait_for(end.done, GRACE)
            if self.end is end:  # else the ranks that made it have ended with a restart
                self.fail(error, rank)
            return None

    # ---- life and death -------------------------------------------------------------------------

    @lane("control")
    def abort(self, reason: str) -> None:
        """Ends all work here, because another rank has failed."""
        self.fail(Aborted(reason))

    def fail(
        self, error: BaseException, rank: int | None = None, task: str | None = None
    ) -> Failure:
        """Notes an error, and wakes all threads that wait here; the first one counts.

        It is that of the rank that is dispatched, at what that is at, unless they are given.
        """
        with self.changed:
            if not self.end.done():
                self.end.set_result(self._describe(error, rank, task))
            self.changed.notify_all()
        failure = self.end.result()
        for own in self.ranks.values():
            own.loader.stop(Lost("The rank has ended the step."))
        self.transport.abort(error)
        return failure

    def _describe(self, error: BaseException, rank: int | None, task: str | None) -> Failure:
        """Describes an error."""
        at, what, source = self._doing()
        if task is not None:
            at, what, source = self._rank_of(task), task, None
        elif rank not in (None, at):
            at, what, source = rank, "", None
        failure = Failure.of(error, at, self._call, what, source, self._lines.get(what, ""))
        if self.transport.is_echo(error):
            failure = dataclasses.replace(failure, is_echo=True)
        return failure

    def _transport_failed(self, error: BaseException) -> None:
        # The loss of a rank is an error only for threads that wait for it. Others come from a
        # thread of the transport: an array that was to be sent could not be computed.
        if isinstance(error, NotComputed):
            self.fail(error.__cause__ or error, task=error.task)
        elif not isinstance(error, PeerLost) and self.failure is None:
            self.fail(error)

    def _doing(self) -> tuple[int, str, int | None]:
        """Returns the rank that is dispatched, its instruction in words, and whom it waits for."""
        for rank, own in self.ranks.items():
            if own.feeds:
                return rank, "the function that feeds the step", None
        at = self._running.at if self._running else None
        match at:
            case (rank, Run(label=label)):
                return rank, label, None
            case (rank, Send(message=message)):
                return rank, f"send of {message.names[0]} to rank {message.target}", message.target
            case (rank, Receive(message=message)):
                source = message.source
                return rank, f"receive of {message.names[0]} from rank {source}", source
        return next(iter(self.ranks)), "", None

    def _rank_of(self, task: str) -> int:
        """Finds the rank that runs a task, which may be of an earlier step."""
        for dispatcher, _ in self._steps.values():
            for rank, executor in dispatcher.executors.items():
                if task in (getattr(i, "label", "") for i in executor.program.instructions):
                    return rank
        return next(iter(self.ranks))

    @lane("control")
    def close(self) -> None:
        """Ends all threads, and closes all connections."""
        self.transport.close()
        if any(spans(rank.home) for rank in self.ranks.values()):
            leave_processes()
