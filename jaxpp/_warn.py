"""Warns at the user's line."""

import sys
import warnings
from typing import Any

#: The packages whose functions lie between the user's line and the place that warns.
_BETWEEN = frozenset({"contextlib", "equinox", "jax", "jaxpp"})


def warn(message: str) -> None:
    """Warns at the innermost line that is neither jaxpp's nor of a library that calls it.

    Args:
        message: what the user should know; the text begins with the name of the function.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def is_called_by_jaxpp() -> bool:
    """Tells whether a function of jaxpp, further out than the caller's object, is under way."""
    frame = sys._getframe(1)
    module = frame.f_globals.get("__name__", "")
    caller: Any = frame
    while caller is not None and caller.f_globals.get("__name__", "") in (module, __name__):
        caller = caller.f_back
    while caller is not None:
        if caller.f_globals.get("__name__", "").partition(".")[0] == "jaxpp":
            return True
        caller = caller.f_back
    return False


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in _BETWEEN
