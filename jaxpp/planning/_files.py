"""Records as JSON files with a version: profiles, and plans of both kinds."""

import dataclasses
import json
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxpp.schedules import Table, from_csv, to_csv


class JsonFile:
    """A dataclass that can be a JSON file; a table in it is CSV."""

    #: The kind of the file, and its version; other versions are refused.
    KIND: ClassVar[str]
    VERSION: ClassVar[int]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record as JSON."""
        whole = {f"jaxpp_{self.KIND}": self.VERSION, **_fields(self)}
        pathlib.Path(path).write_text(json.dumps(whole, indent=2))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a record that `save` has written.

        Raises:
            ValueError: the file is of another kind or version.
        """
        kind = cls.KIND
        call = f"jaxpp.{'plan_layers(...)' if kind == 'layers_plan' else f'{kind}(f, *args)'}"
        try:
            found = json.loads(pathlib.Path(path).read_text())
            version = found.pop(f"jaxpp_{kind}")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{path} is no {kind}; make one: {call}.") from None
        if version != cls.VERSION:
            raise ValueError(
                f"{path} is a {kind} of version {version}, and this jaxpp reads version "
                f"{cls.VERSION}; make it anew: {call}."
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
