"""The fields of a `Config` as flags."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments.training.config import Config, type_of

#: Names that other systems have for fields.
ALIASES = {"pp": "ranks", "num_pipeline_microbatches": "microbatches"}
_KINDS = {bool: "bool", int: "integer", float: "float", str: "string", tuple: "list"}

flags.disclaim_key_flags()  # so that --help shows them with the script that defines them


def define(flag_values: flags.FlagValues = flags.FLAGS) -> Callable[[], Config]:
    """Defines a flag for each field, and those of other systems.

    Args:
        flag_values: where; by default the flags of the program.

    Returns:
        a function that makes a `Config` of the flags that were given. It raises a ValueError where
        two of them are names of one thing, and where `Config` does.
    """
    fields = {field.name: field for field in dataclasses.fields(Config)}
    given: dict[str, flags.FlagHolder[Any]] = {}

    def define(name: str, field: dataclasses.Field[Any], text: str) -> None:
        define_flag = getattr(flags, f"DEFINE_{_KINDS[type_of(field)]}")
        given[name] = define_flag(name, None, text, flag_values=flag_values)

    for name, field in fields.items():
        define(name, field, _text(field))
    for alias, name in ALIASES.items():
        define(alias, fields[name], f"The same as --{name}.")
    per_device = "--batch_size over the number of devices, dp * ranks * mp."
    define("batch_size_per_device", fields["batch_size"], per_device)

    def read() -> Config:
        values = {name: flag.value for name, flag in given.items() if flag.value is not None}
        for alias, name in ALIASES.items():
            _replace(values, alias, name, lambda value: value)
        devices = math.prod(
            values.get(name, getattr(Config, name)) for name in ("dp", "ranks", "mp")
        )
        _replace(values, "batch_size_per_device", "batch_size", lambda value: value * devices)
        if "worker_environment" in values:
            values["worker_environment"] = tuple(values["worker_environment"])
        return Config(**values)

    return read


def _text(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["text"]
    if "choices" in field.metadata:
        text += f" One of {', '.join(field.metadata['choices'])}."
    return text if field.default in (None, ()) else f"{text} By default {field.default}."


def _replace(values: dict[str, Any], alias: str, name: str, meaning: Callable[[Any], Any]) -> None:
    """Gives the value of an alias to the field that it means."""
    if alias not in values:
        return
    if name in values:
        raise ValueError(
            f"{name}={values[name]} and {alias}={values[alias]} are two values for one thing; give "
            f"one of them."
        )
    values[name] = meaning(values.pop(alias))
