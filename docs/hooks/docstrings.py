"""Makes Markdown of docstrings: examples become blocks of code, sources become links.

Signatures show the values of defaults, not the names that the source has for them.
"""

import ast
import importlib
import inspect
import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^(?P<margin>[ ]*)>>> .*(?:\n(?P=margin)\S.*|\n(?P=margin)[ ]+\S.*)*", re.M)
_ARXIV = re.compile(r"arXiv\s+(\d{4}\.\d{5})")
_SITE = re.compile(r"\b((?:github|hackmd)\.(?:com|io)/[\w@./-]*\w)")


def linked(text: str) -> str:
    """Makes links of the sources that a docstring names."""
    text = _ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return _SITE.sub(r"[\1](https://\1)", text)


def as_markdown(docstring: str) -> str:
    """Fences the examples of a docstring, and links its sources."""

    def fence(found: re.Match[str]) -> str:
        margin = found["margin"]
        return f"{margin}```pycon\n{found[0]}\n{margin}```"

    return _EXAMPLE.sub(fence, linked(docstring))


def default_of(path: str, parameter: str, shown: Any) -> Any:
    """Returns what a signature shows for a default: the value, if it is a plain one.

    Args:
        path: the path of the function, or of the class that has the field.
        parameter: the name of the parameter or the field.
        shown: what the source has.
    """
    try:
        ast.literal_eval(str(shown))
    except (SyntaxError, ValueError):
        pass
    else:
        return shown  # the value already
    found: Any = inspect.Parameter.empty
    try:
        found = inspect.signature(_resolved(path)).parameters[parameter].default
    except (AttributeError, ImportError, KeyError, TypeError, ValueError):
        pass
    parts = found if isinstance(found, tuple) else (found,)
    plain = all(isinstance(part, str | int | float | None) for part in parts)
    return repr(found) if plain else shown


def _resolved(path: str) -> Any:
    """Finds the object of a path: a module, and then its attributes."""
    names = path.split(".")
    for count in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:count]))
        except ImportError:
            continue
        for name in names[count:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed, and the defaults of functions and fields."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrites the docstring of an object, and its defaults."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Function):
            for parameter in obj.parameters:
                if parameter.default is not None:
                    shown = default_of(obj.path, parameter.name, parameter.default)
                    parameter.default = shown
        elif isinstance(obj, griffe.Attribute) and obj.value is not None and obj.parent:
            if obj.parent.is_class:  # a field of a dataclass, and so a parameter of the class
                obj.value = default_of(obj.parent.path, obj.name, obj.value)
