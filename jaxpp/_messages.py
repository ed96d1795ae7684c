"""Warnings at the line of the user, bars, errors of extras and arguments, tables in notebooks."""

import contextlib
import difflib
import html
import importlib.util
import inspect
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


@contextlib.contextmanager
def progress(what: str, total: int, delay: float = 0.0) -> Iterator[Callable[[], object]]:
    """Shows a bar of `tqdm` on a terminal, if it is installed; gives what ends one of the steps.

    Args:
        what: what is under way.
        total: the number of steps.
        delay: the seconds after which the bar is shown.
    """
    try:
        import tqdm
    except ImportError:
        yield lambda: None
        return
    name = f"jaxpp: {what}"
    with tqdm.tqdm(total=total, desc=name, delay=delay, leave=False, disable=None) as bar:
        yield bar.update


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


def need(extra: str, purpose: str, *modules: str) -> None:
    """Checks that what an extra installs is there, without importing it.

    Args:
        extra: the extra of this package that installs the modules.
        purpose: what needs them, for the error.
        modules: names of top-level modules.

    Raises:
        ModuleNotFoundError: if one of them is not installed.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"{purpose} needs {' and '.join(missing)}, not installed here; install the extra "
            f"`{extra}`: pip install 'jaxpp[{extra}]'.",
            name=missing[0],
        )


#: The kinds of number, and the test of each.
_NUMBERS: Mapping[str, Callable[[Any], bool]] = {
    "an integer": lambda x: isinstance(x, numbers.Integral),
    "an integer of at least 0": lambda x: isinstance(x, numbers.Integral) and int(x) >= 0,
    "an integer of at least 1": lambda x: isinstance(x, numbers.Integral) and int(x) >= 1,
    "a number": lambda x: x == x,
    "a number of at least 0": lambda x: x >= 0,
    "a finite number of at least 0": lambda x: 0 <= x < math.inf,
    "a positive number": lambda x: x > 0,
    "a share from 0 to 0.5": lambda x: 0 <= x <= 0.5,
}


def check_number(call: str, name: str, value: Any, kind: str) -> None:
    """Checks that an argument is a number of a kind.

    Args:
        call: what was called, for the error.
        name: the name of the argument.
        value: what was given.
        kind: what it has to be, one of `_NUMBERS`.

    Raises:
        ValueError: it is none.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not _NUMBERS[kind](value):
        raise ValueError(f"{call}: {name} is {kind}, got {value!r}; give one.")


def check_options(call: Callable[..., Any], given: Iterable[str], options: Any) -> None:
    """Checks that a call has the options that it was given.

    Args:
        call: the function that was called.
        given: their names.
        options: the `TypedDict` of all that it has.

    Raises:
        TypeError: it lacks one of them.
    """
    known = [*options.__annotations__]
    for name in (name for name in given if name not in known):
        near = difflib.get_close_matches(name, [*inspect.signature(call).parameters, *known], 1)
        hint = f"did you mean {near[0]}=?" if near else f"it has {', '.join(known)}."
        raise TypeError(f"{call.__name__} has no option {name!r}; {hint}")


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    r"""Writes a table, and a note under it.

    >>> html_table(["rank"], [["1\n<2>"]])
    '<table><tr><th>rank</th></tr>\n<tr><td>1<br/>&lt;2&gt;</td></tr></table>'
    """

    def row(cells: Iterable[str], tag: str) -> str:
        texts = (html.escape(cell).replace("\n", "<br/>") for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    lines = [row(header, "th"), *(row(cells, "td") for cells in rows)]
    text = "\n".join(lines)
    return f"<table>{text}</table>" + (f"<p>{html.escape(note)}</p>" if note else "")
