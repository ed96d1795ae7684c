"""Finds the equations that sum over examples, and the dimensions that they sum over."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp import _jaxprs
from jaxpp._specs import Spec, axes_of


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The devices that have examples of their own: along `axes`, of the given sizes.

    Where ranks differ, `sizes` are multiples of the sizes of each, by which all ranks decide alike,
    and `own` are the sizes of the rank that the step is for.
    """

    axes: tuple[str, ...]
    sizes: Mapping[str, int]
    own: Mapping[str, int] | None = None

    @property
    def count(self) -> int:
        """The number of replicas."""
        sizes = self.sizes if self.own is None else self.own
        return math.prod(sizes[axis] for axis in self.axes)

    def split(self, spec: Spec | None) -> bool:
        """Tells whether an array of this spec is split over any of the axes."""
        return spec is not None and not set(self.axes).isdisjoint(axes_of(spec))

    def split_first(self, spec: Spec | None, dimension: int) -> bool:
        """Tells whether a dimension is split over the axes first, and only then over others."""
        return spec is not None and spec[dimension][: len(self.axes)] == self.axes


# ---- sums over examples -------------------------------------------------------------------------


def summed_dimensions(
    eqn: Any, specs: Mapping[Any, Spec | None], replicas: Replicas
) -> dict[int, int]:
    """Finds the operands whose examples an equation sums over, with the dimension of the examples.

    Gives nothing if the equation does not sum so, or if replicas would not have equally many.
    """
    find = _SUMS.get(eqn.primitive.name)
    if find is None:
        return {}
    own = [None if _jaxprs.is_literal(v) else specs.get(v) for v in eqn.invars]
    for dimensions in find(eqn):
        split = [replicas.split_first(own[i], d) for i, d in dimensions.items()]
        whole = [not replicas.split(own[i]) for i in dimensions]
        sizes = [eqn.invars[i].aval.shape[d] for i, d in dimensions.items()]
        if any(split) and all(s or w for s, w in zip(split, whole, strict=True)):
            return dimensions if all(n % replicas.count == 0 for n in sizes) else {}
    return {}


def _summed_by_reduction(eqn) -> Sequence[dict[int, int]]:
    return [{0: d} for d in eqn.params["axes"]]


def _summed_by_product(eqn) -> Sequence[dict[int, int]]:
    (left, right), _ = eqn.params["dimension_numbers"]
    return [{0: a, 1: b} for a, b in zip(left, right, strict=True)]


def _summed_by_convolution(eqn) -> Sequence[dict[int, int]]:
    """Finds the input features, which are the examples in the gradient of the weights."""
    if eqn.params["feature_group_count"] != 1:
        return []
    numbers = eqn.params["dimension_numbers"]
    return [{0: numbers.lhs_spec[1], 1: numbers.rhs_spec[1]}]


def _summed_by_scatter(eqn) -> Sequence[dict[int, int]]:
    """Finds the dimensions of the indices that the updates have too and the result does not."""
    numbers = eqn.params["dimension_numbers"]
    updates = range(eqn.invars[2].aval.ndim)
    scattered = [d for d in updates if d not in numbers.update_window_dims]
    together = numbers.scatter_indices_batching_dims
    return [{1: i, 2: d} for i, d in enumerate(scattered) if i not in together]


_SUMS: dict[str, Callable[[Any], Sequence[dict[int, int]]]] = {
    "reduce_sum": _summed_by_reduction,
    "dot_general": _summed_by_product,
    "conv_general_dilated": _summed_by_convolution,
    "scatter-add": _summed_by_scatter,
}
