"""A Ctrl-C waits for the end of a change that must be whole, and is never lost."""

import dataclasses
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

#: Seconds after which a Ctrl-C that Python has dropped comes again.
AGAIN = 0.05


def keep_interrupts() -> None:
    """Lets a Ctrl-C come again that Python has dropped; may be repeated.

    Python drops what is raised while it collects garbage, where JAX has a callback of its own.
    """
    if not isinstance(sys.unraisablehook, _ComeAgain):
        sys.unraisablehook = _ComeAgain(sys.unraisablehook)


@dataclasses.dataclass(frozen=True)
class _ComeAgain:
    """Interrupts the main thread again where a Ctrl-C was dropped; shows other errors as before."""

    before: Callable[[Any], Any]

    def __call__(self, dropped: Any) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            return self.before(dropped)
        # Not at once: this would be dropped, too, as all that is raised here.
        main: Any = threading.main_thread().ident
        timer = threading.Timer(AGAIN, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        timer.start()


class uninterrupted:  # noqa: N801  read as a word of the `with` statement
    """A block that a Ctrl-C does not interrupt: the signal's handler runs when the block ends.

    The block should be short.
    """

    #: Tells whether the main thread is in such a block; Python runs handlers on this thread only.
    _inside = False

    def __enter__(self):
        self._came: tuple[Any, ...] | None = None
        self._handler = None
        if not uninterrupted._inside and threading.current_thread() is threading.main_thread():
            if callable(handler := signal.getsignal(signal.SIGINT)):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)
                uninterrupted._inside = True

    def _note(self, *what: Any) -> None:
        self._came = what

    def __exit__(self, *_):
        if self._handler is not None:
            uninterrupted._inside = False
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)
