"""Records as JSON files with a version: profiles, and plans of both kinds."""

import dataclasses
import json
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxpp.schedules import Table, from_csv, to_csv

Path = str | os.PathLike[str]
_Record = TypeVar("_Record")


def write(path: Path, kind: str, version: int, record: Any) -> None:
    """Writes a dataclass, such as a `"plan"`; a table is written as CSV."""
    whole = {f"jaxpp_{kind}": version, **_fields(record)}
    pathlib.Path(path).write_text(json.dumps(whole, indent=2))


def read(path: Path, kind: str, version: int, cls: type[_Record]) -> _Record:
    """Reads the record that `write` has written.

    Raises:
        ValueError: the file is of another kind or version.
    """
    call = f"jaxpp.{'plan_layers(...)' if kind == 'layers_plan' else f'{kind}(f, *args)'}"
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
    return _made(cls, found)


def _fields(value: Any) -> Any:
    """Returns what JSON takes for a value: dictionaries for records, lists for tuples."""
    if isinstance(value, Table):
        more = {"placement": value.placement, "direction_of": value.direction_of}
        return {"csv": to_csv(value), **more}
    if dataclasses.is_dataclass(value):
        return {f.name: _fields(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [*map(_fields, value)]
    return {k: _fields(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _made(cls: Any, value: Any) -> Any:
    """Makes a value of a type from what `_fields` returned for it."""
    inside = [own for own in typing.get_args(cls) if own not in (..., type(None))]
    if value is None or (isinstance(cls, types.UnionType) and len(inside) > 1):
        return tuple(value) if isinstance(value, list) else value
    if isinstance(cls, types.UnionType):
        return _made(inside[0], value)
    if isinstance(value, list):
        return tuple(_made(inside[0] if inside else None, own) for own in value)
    if cls is Table:
        placement, turns = (_made(None, value[key]) for key in ("placement", "direction_of"))
        return from_csv(value["csv"], placement=placement, direction_of=turns)
    if dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls)
        return cls(**{name: _made(hints[name], own) for name, own in value.items()})  # pyright: ignore
    if isinstance(value, dict):
        return {inside[0](key): _made(inside[1], own) for key, own in value.items()}
    return value
