"""The watch over the workers of a mesh, by Ray."""

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxpp.runtime.remote._session import ANSWER_TIMEOUT
from jaxpp.runtime.remote._worker import Worker
from jaxpp.runtime.site import Death, Failed, Member, Process, Watch, end_stopped

#: The most lines of a dead worker's output that its error has.
LINES = 8


class WorkerWatch(Watch):
    """Watches the workers of a mesh until one fails.

    A call of `Worker.live` on each ends with the worker's failure, or by Ray with its death. A
    silent worker is looked at on its host, and killed if it is stopped.
    """

    def start(self) -> None:
        """Starts to watch."""
        #: For each worker the heartbeat that it has to answer.
        self._asked: dict[int, Any] = {}
        for member in self.members:
            living = member.call(Worker.live).future()
            living.add_done_callback(functools.partial(self._ended, member.worker))
        super().start()

    def check(self) -> None:
        """Raises the error of the workers, if one has failed, or the session has gone."""
        if not self.watches:
            gone = ray.exceptions.RaySystemError("the Ray session has been shut down")
            self.report(0, Death.of(gone))
        super().check()

    def _ended(self, worker: int, living: Any) -> None:
        """Takes the end of a worker's `live`, on a thread of Ray's."""
        error = None if living.cancelled() else living.exception()
        if error is None or isinstance(error, concurrent.futures.CancelledError):
            return  # the session ends
        own = getattr(error, "cause", None)
        self.report(worker, own.failure if isinstance(own, Failed) else Death.of(error))

    @property
    def watches(self) -> bool:
        """Tells whether there is a session."""
        return ray.is_initialized()

    def has_beaten(self, member: Any) -> bool:
        """Tells whether a worker has answered the last heartbeat, and sends the next one."""
        worker = member.worker
        if worker in self._asked and not self._asked[worker].done():
            return False
        self._asked[worker] = member.call(Worker.pulse).future()
        return True

    def why_dead(self, member: Member, silence: float) -> str:
        """Looks at a silent worker on its host."""
        self._silent[member.worker] = 0.0
        try:
            stopped = _on_node(member.hello.node, end_stopped, member.hello.pid)
            return "its process is stopped" if stopped else ""
        except ray.exceptions.RayError:
            return "its host does not answer"

    def end_others(self, member: Any) -> None:
        """Aborts all workers but one."""
        for other in self.members:
            if other is not member:
                other.call(Process.abort, f"{member} has failed")

    def last_words(self, member: Member) -> str:
        """Returns the last lines of a dead worker's output; none where its host is not there."""
        if member.hello is None or not ray.is_initialized():
            return ""
        with contextlib.suppress(ray.exceptions.RayError):
            return _on_node(member.hello.node, last_lines, member.hello.output)
        return ""


def _on_node(node: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on a node of Ray.

    Raises:
        RayError: the node does not answer.
    """
    if node == ray.get_runtime_context().get_node_id():
        return function(*args)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(function)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
    return ray.get(task.options(**options).remote(*args), timeout=ANSWER_TIMEOUT)


def last_lines(path: str) -> str:
    """Reads the last lines of a worker's output: what Python says of a crash, if it does."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(errors="replace")
        _, crash, told = text.rpartition("Fatal Python error: ")
        lines = [n for n in f"{crash}{told}".splitlines() if n and not n.startswith(":")]
        return "\n".join(lines[:LINES] if crash else lines[-LINES:])
    return ""
