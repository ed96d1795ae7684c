"""Compares two trainings: their losses, and the parameters at their end."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from experiments.training.rows import Row

# Relative. The training amplifies roundings, and in bfloat16 these are 2^-9 of each parameter.
TOLERANCES = {
    "float32": {"loss": 1e-4, "parameters": 1e-3},
    "bfloat16": {"loss": 2e-2, "parameters": 0.5},
}


def losses(actual: Sequence[Row], expected: Sequence[Row], tolerance: float) -> None:
    """Compares the losses of each step; see `arrays`."""

    def values(rows):
        return [np.asarray(row["loss"]) for row in rows]

    arrays("loss", values(actual), values(expected), tolerance)


def parameters(actual: Any, expected: Any, tolerance: float) -> None:
    """Compares the parameters of two models; see `arrays`."""

    def leaves(model):
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        return [np.asarray(x, np.float64) for x in arrays]

    arrays("parameters", leaves(actual), leaves(expected), tolerance)


def arrays(
    name: str, actual: list[np.ndarray], expected: list[np.ndarray], tolerance: float
) -> None:
    """Prints the largest difference, and how it compares to its array's largest entry.

    An array may be nothing but roundings, as a bias of attention's keys, which no loss depends on:
    it counts as if it had a thousandth of the largest entry of all.

    Raises:
        SystemExit: when a difference is larger than the tolerance, relative to that entry.
    """
    absolute = np.array([np.abs(a - e).max() for a, e in zip(actual, expected, strict=True)])
    largest = np.array([np.abs(e).max() for e in expected])
    relative = absolute / np.maximum(largest, 1e-3 * largest.max())
    found = f"largest difference {absolute.max():.1e}, relative {relative.max():.1e}"
    if not relative.max() <= tolerance:  # written so that NaN fails
        raise SystemExit(f"verify: {name}: FAILED: {found}, above the tolerance {tolerance:.0e}")
    print(f"verify: {name}: {found}, within the tolerance {tolerance:.0e}")
