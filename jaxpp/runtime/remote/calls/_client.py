"""The RPC client: the driver's end of its connection to a worker, which carries every call.

The worker runs calls of a lane in the order in which they were sent, so that nothing else has to
keep their order. A call over it takes a fraction of the millisecond that Ray takes for one.
"""

import collections
import contextlib
import itertools
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxpp.runtime.remote.calls._interrupts import uninterrupted
from jaxpp.runtime.remote.calls._messages import (
    Kind,
    Lane,
    Message,
    Seal,
    listen,
    pack_code,
)
from jaxpp.runtime.transport import Addresses, Bytes, Hello, connect, send_some, stream_of

#: Called with the answer to a call, as its kind and pieces, on a thread of the client.
Done = Callable[[Kind, Sequence[Bytes]], None]

#: Seconds between two looks at an answer that is waited for.
POLL = 0.2


class Answer:
    """The answer to a call, once it is there.

    It does not use `threading.Condition`, as futures do: where a Ctrl-C interrupts a wait for a
    condition, its lock may stay locked.

    Args:
        kept: what must live until the answer is there.
    """

    def __init__(self, kept: Any = None):
        self._kept = kept
        self._found: tuple[Kind, Sequence[Bytes]] | None = None
        self._coming = threading.Lock()
        self._coming.acquire()

    def set(self, kind: Kind, pieces: Sequence[Bytes]) -> None:
        """Sets the answer, once."""
        self._found = kind, pieces
        self._kept = None
        self._coming.release()

    def done(self) -> bool:
        """Tells whether it is there."""
        return self._found is not None

    def result(self, timeout: float = -1) -> tuple[Kind, Sequence[Bytes]]:
        """Waits for the answer; `Kind.LOST` where it has not come within `timeout` seconds."""
        end = time.monotonic() + timeout
        while self._found is None and (timeout < 0 or time.monotonic() < end):
            # Nobody waits for the lock alone: a Ctrl-C may leave it locked.
            if self._coming.acquire(timeout=POLL if timeout < 0 else min(POLL, timeout)):
                self._coming.release()
        return self._found or (Kind.LOST, ())


class Client:
    """An RPC client: calls methods of a worker, and takes the answers in any order.

    A call is posted, and then flushed. So calls that belong together can be posted to several
    workers in one `uninterrupted` block. What a Ctrl-C leaves unsent, the next flush sends.

    Args:
        hello: says who connects to whom, in which epoch of the mesh.
        addresses: where the worker listens for the driver.
        secret: what both ends know.
        told: called with a text that was printed on the worker, on the client's thread.
        ended: called on that thread with the reason when there will be no more answers, and `close`
            was not called.

    Raises:
        TransportError: there is no way to the worker.
    """

    def __init__(
        self,
        hello: Hello,
        addresses: Addresses,
        secret: bytes,
        told: Callable[[str], None],
        ended: Callable[[str], None],
    ):
        self._told, self._on_end = told, ended
        self._numbers = itertools.count()
        self._calls: dict[int, Done] = {}
        self._outbox: collections.deque[list[Bytes]] = collections.deque()
        self._posting, self._writing = threading.Lock(), threading.Lock()
        self._ended = self._closed = False
        self._connection = connect(hello, addresses, secret)
        self._seal = Seal(secret, hello.epoch, hello.source, self._connection)
        self._heard = Seal(secret, hello.epoch, hello.target, self._connection)
        name = f"jaxpp-client-{hello.target}"
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    # ---- calls ----------------------------------------------------------------------------------

    def call(self, lane: Lane, method: str, *args: Any) -> Answer:
        """Posts a call; the answer comes in any case, as `Kind.LOST` where the worker is gone.

        Raises:
            Exception: an argument cannot be pickled.
        """
        answer = Answer()
        self.post(lane, pack_code((method, args)), answer.set)
        return answer

    def post(self, lane: Lane, pieces: Sequence[Bytes], done: Done) -> None:
        """Posts a call, which `pack` has made of the method's name and its arguments."""
        with self._posting:
            if lost := self._ended:
                pass
            else:
                number = next(self._numbers)
                self._calls[number] = done
                self._outbox.append(Message(lane, number, pieces).to_send(self._seal))
        if lost:
            done(Kind.LOST, ())

    def flush(self, wait: bool = True) -> None:
        """Sends what has been posted.

        Args:
            wait: whether to wait until all is sent; else it sends what the connection takes now.
        """
        while self._outbox:
            with self._writing:
                self._write()
            if not (wait and self._outbox):
                return
            with contextlib.suppress(OSError, ValueError):  # it is closed at this moment
                writable = select.poll()
                writable.register(self._connection, select.POLLOUT)
                writable.poll(1000)

    def _write(self) -> None:
        """Writes as much of the outbox as the connection takes."""
        while self._outbox:
            with uninterrupted():  # the outbox has to say what has been sent
                pieces = self._outbox[0]
                try:
                    send_some(self._connection, pieces)
                except BlockingIOError:
                    return
                except OSError:  # `_listen` notices the end, and answers all calls
                    self._outbox.clear()
                    return
                if not pieces:
                    self._outbox.popleft()

    # ---- answers --------------------------------------------------------------------------------

    def _listen(self) -> None:
        why = "it has closed its connection to the driver"
        try:
            self._take_all()
        except BaseException as error:  # noqa: B036  nobody would hear of the thread's end
            why = f"the driver could not take what it sent: {type(error).__name__}: {error}"
        with self._writing, self._posting:
            self._ended = True
            self._outbox.clear()
            calls, self._calls = self._calls, {}
        for done in calls.values():
            done(Kind.LOST, ())
        if not self._closed:
            self._on_end(why)

    def _take_all(self) -> None:
        """Takes what the worker sends until the connection ends."""
        with stream_of(self._connection) as stream:
            while (message := listen(stream, self._heard)) is not None:
                if message.what == Kind.TOLD:
                    self._told(bytes(message.pieces[0]).decode(errors="replace"))
                else:
                    self._calls.pop(message.number)(Kind(message.what), message.pieces)
                del message  # it would keep arrays alive until the next one

    def close(self) -> None:
        """Ends the connection; calls without an answer get `Kind.LOST`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        self._connection.close()
