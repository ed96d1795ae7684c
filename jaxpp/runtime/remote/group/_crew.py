"""Calls of the workers of a mesh: all are monitored, each has an RPC client, all see one order."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp.runtime.remote.calls import PATIENCE, Countdown, Failure, Method, Pending
from jaxpp.runtime.remote.group._gang import Gang
from jaxpp.runtime.remote.group._settings import Settings
from jaxpp.runtime.remote.group._watch import Watch

#: Calls that may be under way before the next one waits for the oldest.
IN_FLIGHT = 4


class Crew:
    """Starts workers, and calls them until they are stopped.

    A caller of `call_in_turn`, `submit`, `restart` or `stop` must hold a lock, so that calls have
    one order for all ranks.

    Args:
        settings: how they are started.
        describe: gives the stage and source line of a task's label, or an empty string.

    Raises:
        ValueError: the cluster cannot hold them, or they differ from the driver in a version.
        RuntimeError: one did not start, or cannot be reached.
    """

    def __init__(self, settings: Settings, describe: Callable[[str], str]):
        self._settings, self._describe = settings, describe
        self._gang = Gang(settings)
        try:
            self._begin()
        except BaseException:
            self._gang.stop()
            raise

    def _begin(self) -> None:
        watch = Watch(self._gang.members, self._settings.heartbeat_timeout, self._describe)
        try:
            lines = self._gang.lines(watch.check, watch.line_ended)
        except BaseException:
            watch.close()
            raise
        self._flying = threading.BoundedSemaphore(IN_FLIGHT)
        # In this order, so that a thread that waits never has old RPC clients and a new monitor.
        self._lines = lines
        self._watch = watch

    def _end(self) -> None:
        self._watch.close()  # the closed monitor stays, and refuses all calls
        for line in self._lines:
            line.close()

    @property
    def hellos(self) -> Sequence[Any]:
        """The workers' descriptions of themselves."""
        return self._gang.hellos

    @property
    def between_devices(self) -> bool:
        """Tells whether arrays go from device to device, and not over sockets."""
        return self._gang.between_devices

    def workers(self, rank: int) -> range:
        """Gives the numbers of a rank's processes, among the processes of all ranks."""
        processes = self._settings.processes_per_rank
        return range(rank * processes, (rank + 1) * processes)

    def restart(self) -> set[int]:
        """Replaces workers that have failed, and makes the others fit for work.

        Returns:
            The ranks that have new workers.

        Raises:
            RuntimeError: a new one did not start; then none is left, and it may be tried again.
        """
        self._end()
        fresh = self._gang.renew()
        self._begin()
        return fresh

    def stop(self) -> None:
        """Ends all workers."""
        self._end()
        self._gang.stop()

    # ---- calls ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises the error of the workers, if one has failed."""
        self._watch.check()

    def call(self, worker: int, method: str, *args: Any) -> Any:
        """Calls a method of a worker at once; returns Ray's reference."""
        return getattr(self._gang.members[worker].actor, method).remote(*args)

    def call_in_turn(self, worker: int, method: str, *args: Any) -> Any:
        """Calls a method of a worker after all earlier calls with a sequence number, steps too."""
        return self._lines[worker].in_turn(lambda turn: self.call(worker, method, turn, *args))

    def value(self, worker: int, reference: Any) -> Any:
        """Waits for the value of a function on a worker; its exception does not fail the worker."""
        return self._watch.value(worker, reference)

    def follow(self, worker: int, reference: Any) -> None:
        """Reports a worker as failed if this call of it fails."""
        self._watch.follow(worker, reference)

    def ask(self, method: Method, numbers: Mapping[int, Sequence[int]]) -> dict[int, Any]:
        """Asks workers about arrays by their ids, and waits for the answers."""
        watch, lines = self._watch, self._lines
        asked = {worker: lines[worker].ask(method, own) for worker, own in numbers.items()}
        return {worker: watch.result(worker, future) for worker, future in asked.items()}

    def apply(
        self,
        function: Callable[..., Any],
        args: Mapping[int, tuple],
        *,
        everywhere: bool,
        ordered: bool,
    ) -> Pending:
        """Starts a function in the first process of some ranks, or in all of them.

        Args:
            function: called with the process, and the arguments of the rank.
            args: the arguments by rank.
            everywhere: whether all processes of a rank run it.
            ordered: whether it takes its turn, or runs beside what is called in turn.
        """
        call = self.call_in_turn if ordered else self.call
        method = "apply" if ordered else "apply_aside"
        references = [
            (rank, worker, call(worker, method, function, *own))
            for rank, own in args.items()
            for worker in (self.workers(rank) if everywhere else self.workers(rank)[:1])
        ]
        return Pending(references, self._watch)

    def submit(self, calls: Sequence[tuple[int, Sequence[Any]]]) -> None:
        """Sends the call of a step to each rank; waits first where too many calls are under way."""
        flying, watch = self._flying, self._watch
        while not flying.acquire(timeout=PATIENCE):
            watch.check()
        landing = Countdown(len(calls) * self._settings.processes_per_rank, flying.release)
        rank, worker = 0, 0
        try:
            for rank, packed in calls:
                for worker in self.workers(rank):
                    done = functools.partial(_land, worker, watch, landing)
                    self._lines[worker].run(packed, done)
        except BaseException as error:
            # The ranks that have the call would wait for ever for the ranks that do not.
            watch.report(worker, Failure.of(error, rank, -1, "the dispatch of a call"))
            raise


def _land(worker: int, watch: Watch, landing: Countdown, failure: Failure | None) -> None:
    """Counts a worker that has dispatched a step, and reports its failure if there is one."""
    if failure is not None:
        watch.report(worker, failure)
    landing.count()
