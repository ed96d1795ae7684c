"""XLA's own analysis of a compiled computation: its memory and its work."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp.runtime.executor._copies import Copier


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The figures that XLA gives of a compiled computation, on one of its devices.

    Args:
        temporary_bytes: what it needs while it runs, beside its arguments and results.
        flops: the floating-point operations that it runs; 0 where XLA does not tell.
        accessed_bytes: the bytes that it reads and writes; 0 where XLA does not tell.
    """

    temporary_bytes: int
    flops: float
    accessed_bytes: float


@dataclasses.dataclass(frozen=True)
class Inspected:
    """A rank of a step on a mesh.

    Args:
        devices: its devices, as JAX writes them.
        axes: the axes inside it, and their sizes.
        analyses: XLA's analysis of each computation that it runs, by the computation's number.
        run_ahead: of how many messages, those received last, it holds the first array.
    """

    devices: tuple[str, ...]
    axes: Mapping[str, int]
    analyses: Mapping[int, Analysis]
    run_ahead: int = 0

    @classmethod
    def of(
        cls,
        devices: Sequence[Any],
        axes: Mapping[str, int],
        executables: Sequence[Any],
        run_ahead: int = 0,
    ) -> "Inspected":
        """Inspects a rank; where it does not run a computation, its executable is None."""
        analyses = {n: _analyse(own) for n, own in enumerate(executables) if own is not None}
        return cls(tuple(map(str, devices)), axes, analyses, run_ahead)


def _analyse(executable: Any) -> Analysis:
    if isinstance(executable, Copier):
        return Analysis(0, 0.0, 0.0)
    memory, costs = executable.memory_analysis(), executable.cost_analysis() or {}
    if isinstance(costs, list):  # a dictionary for each program of an executable
        costs = costs[0] if costs else {}
    return Analysis(
        0 if memory is None else int(memory.temp_size_in_bytes),
        max(0.0, float(costs.get("flops", 0.0))),
        max(0.0, float(costs.get("bytes accessed", 0.0))),
    )
