"""The attributes of the package that are imported when a program first asks for one of them."""

import importlib
import importlib.util
import sys
from typing import Any

from jaxpp._spellings import ours_for


def __getattr__(name: str) -> Any:
    package = sys.modules["jaxpp"]
    if not name.startswith("_"):
        if importlib.util.find_spec(f"jaxpp.{name}"):
            return importlib.import_module(f"jaxpp.{name}")
        vars(package).update(_public())
        if name in vars(package):
            return vars(package)[name]
    hint = f"; use {ours}." if (ours := ours_for(name)) else "."
    raise AttributeError(f"module 'jaxpp' has no attribute {name!r}{hint}", name=name, obj=package)


def __dir__() -> list[str]:
    return sorted({*vars(sys.modules["jaxpp"]), *_public()} - {"TYPE_CHECKING"})


def _public() -> dict[str, Any]:
    from jaxpp import _names  # it takes a second, which a worker process does without

    return {name: value for name, value in vars(_names).items() if not name.startswith("_")}
