"""Finds the equations that sum over examples, and the dimensions that they sum over."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxpp import _jaxprs, _primitives
from jaxpp._dimensions import found_again
from jaxpp._specs import Spec, axes_of


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The devices that have examples of their own: along `axes`, of the given sizes."""

    axes: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def count(self) -> int:
        """The number of replicas."""
        return math.prod(self.sizes[axis] for axis in self.axes)

    def split(self, spec: Spec | None) -> bool:
        """Tells whether an array of this spec is split over any of the axes."""
        return spec is not None and not set(self.axes).isdisjoint(axes_of(spec))

    def split_first(self, spec: Spec | None, dimension: int) -> bool:
        """Tells whether a dimension is split over the axes first, and only then over others."""
        return spec is not None and spec[dimension][: len(self.axes)] == self.axes


def summed_dimensions(
    eqn: Any, specs: Mapping[Any, Spec | None], replicas: Replicas
) -> dict[int, int]:
    """Finds the operands whose examples an equation sums over, with the dimension of the examples.

    Gives nothing if the equation does not sum so, or if replicas would not have equally many.
    """
    if eqn.primitive.name not in _primitives.SUMS:
        return {}
    found = found_again(eqn) or []
    own = [None if _jaxprs.is_literal(v) else specs.get(v) for v in eqn.invars]
    summed = {n for dims in found for n in dims if n is not None and n >= eqn.outvars[0].aval.ndim}
    for number in sorted(summed):
        dimensions = {i: dims.index(number) for i, dims in enumerate(found) if number in dims}
        split = [replicas.split_first(own[i], d) for i, d in dimensions.items()]
        whole = [not replicas.split(own[i]) for i in dimensions]
        sizes = [eqn.invars[i].aval.shape[d] for i, d in dimensions.items()]
        if any(split) and all(s or w for s, w in zip(split, whole, strict=True)):
            return dimensions if all(n % replicas.count == 0 for n in sizes) else {}
    return {}
