"""The values that debug callbacks read, on their way from a worker to the driver."""

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp.runtime.arrays import to_host
from jaxpp.runtime.transport import Bytes


class Teller:
    """Sends the values that debug callbacks read, in the order in which they were dispatched.

    Args:
        send: sends the number of a computation, and the bytes of values, to the driver.
        failed: called with the error of a value that could not be computed.
    """

    def __init__(
        self,
        send: Callable[[int, Sequence[Bytes]], None],
        failed: Callable[[Exception], Any],
    ):
        self._send, self._failed = send, failed
        self._results = 0
        self._waiting: collections.deque[tuple[int, int, Sequence[Any]]] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, results: int) -> None:
        """Notes that a call has begun; the ids of its results start at `results`."""
        self._results = results

    def tell(self, computation: int, values: Sequence[Any]) -> None:
        """Sends values once they have been computed; does not wait."""
        with self._changed:
            self._waiting.append((self._results, computation, values))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="jaxpp-tell", daemon=True)
                self._thread.start()

    def wait(self, array: float = math.inf) -> None:
        """Waits until the values are sent of the call that made an array, and of earlier calls."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._waiting[0][0] > array)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                _, computation, values = self._waiting[0]
            try:
                self._send(computation, [to_host(value).data for value in values])
            except Exception as error:
                self._failed(error)
            del values  # they would be kept until the next ones come
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class Telling:
    """An executable whose last results, `told` of them, are for the driver.

    It stands for the executable `call` in all else.
    """

    call: Any
    computation: int
    told: int
    tell: Callable[[int, Sequence[Any]], None]

    def __call__(self, *args: Any) -> Sequence[Any]:
        outputs = self.call(*args)
        kept = len(outputs) - self.told
        self.tell(self.computation, outputs[kept:])
        return outputs[:kept]

    @property
    def out_info(self) -> Sequence[Any]:
        """The types of the results, as `jax.stages.Compiled.out_info` has them."""
        types = jax.tree.leaves(self.call.out_info)
        return types[: len(types) - self.told]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)
