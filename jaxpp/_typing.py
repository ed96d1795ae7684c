"""The parameters and the result of a function, for the signatures of its transforms."""

from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
