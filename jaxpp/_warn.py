"""Warns at the user's line."""

import sys
import warnings

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


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in _BETWEEN
