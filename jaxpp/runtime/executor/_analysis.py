"""XLA's own analysis of a compiled computation: its memory, its work, and its collectives."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp.runtime.executor._collectives import collectives


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What XLA says of a compiled computation, on one of its devices.

    Args:
        temporary_bytes: what it needs while it runs, beside its arguments and results.
        flops: the floating-point operations that it runs; 0 where XLA does not tell.
        accessed_bytes: the bytes that it reads and writes; 0 where XLA does not tell.
        collectives: for each kind and the axes it goes over, how many it runs.
    """

    temporary_bytes: int
    flops: float
    accessed_bytes: float
    collectives: Counter[tuple[str, str]]


def analyse(executables: Sequence[Any], axes: Mapping[str, int]) -> dict[int, Analysis]:
    """Analyses the computations that a rank runs, by their numbers.

    Args:
        executables: for each computation its executable, or None where the rank does not run it.
        axes: the axes inside the rank, and their sizes.
    """
    return {n: _analyse(own, axes) for n, own in enumerate(executables) if own is not None}


def _analyse(executable: Any, axes: Mapping[str, int]) -> Analysis:
    memory, costs = executable.memory_analysis(), executable.cost_analysis() or {}
    if isinstance(costs, list):  # a dictionary for each program of an executable
        costs = costs[0] if costs else {}
    found = collectives(executable.as_text() or "", tuple(axes.values()), tuple(axes))
    return Analysis(
        0 if memory is None else int(memory.temp_size_in_bytes),
        max(0.0, float(costs.get("flops", 0.0))),
        max(0.0, float(costs.get("bytes accessed", 0.0))),
        found if axes else Counter(),
    )
