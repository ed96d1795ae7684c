"""Profiles and plans as JSON files with a version."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

Path = str | os.PathLike[str]


def write(path: Path, kind: str, version: int, fields: Mapping[str, Any]) -> None:
    """Writes the fields of a `"plan"` or `"profile"`."""
    whole = {f"jaxpp_{kind}": version, **fields}
    pathlib.Path(path).write_text(json.dumps(whole, indent=2))


def read(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Reads the fields that `write` has written; lists are tuples.

    Raises:
        ValueError: the file is of another kind or version.
    """
    call = f"jaxpp.{kind}(f, *args)"
    try:
        found = json.loads(pathlib.Path(path).read_text())
        given = found.pop(f"jaxpp_{kind}")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path} is no {kind}; make one: {call}.") from None
    if given != version:
        raise ValueError(
            f"{path} is a {kind} of version {given}, and this jaxpp reads version {version}; make "
            f"it anew: {call}."
        )
    return tuples(found)


def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same fields with tuples for lists, and for lists in them."""

    def made(x: Any) -> Any:
        return tuple(map(made, x)) if isinstance(x, list) else x

    return {name: made(x) for name, x in fields.items()}
