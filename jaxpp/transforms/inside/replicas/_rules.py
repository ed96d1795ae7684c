"""Which equations sum over examples, and which can be applied to each replica's share of a sum.

An equation is *additive* in some of its operands if the sum of what it gives for several values of
them is what it gives for their sum: `f(a, b) + f(c, d) = f(a + c, b + d)`. A sum over the examples
of all replicas that goes through nothing else can be finished later. The equations are those of
the transposition of linear programs: Frostig, Johnson, Maclaurin, Paszke, Radul, "Decomposing
reverse-mode automatic differentiation" (2021), section 4.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpp import _jaxprs
from jaxpp._specs import Spec, axes_of


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The devices that have examples of their own: along `axes`, of the given sizes.

    Where ranks differ, `sizes` are multiples of those of each, for what all have to decide alike,
    and `own` those of the rank.
    """

    axes: tuple[str, ...]
    sizes: Mapping[str, int]
    own: Mapping[str, int] | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        sizes = self.sizes if self.own is None else self.own
        return math.prod(sizes[axis] for axis in self.axes)

    def split(self, spec: Spec | None) -> bool:
        """Whether an array of this spec is split over any of the axes."""
        return spec is not None and not set(self.axes).isdisjoint(axes_of(spec))

    def split_first(self, spec: Spec | None, dimension: int) -> bool:
        """Whether a dimension is split over the axes, and over others only within a replica."""
        return spec is not None and spec[dimension][: len(self.axes)] == self.axes


# ---- additive equations -------------------------------------------------------------------------

_ALL = slice(None)
#: For each primitive the operands that it is additive in, all together.
_TOGETHER = {
    "add": _ALL,
    "add_any": _ALL,
    "broadcast_in_dim": slice(1),
    "concatenate": _ALL,
    "copy": _ALL,
    "copy_p": _ALL,
    "cumsum": _ALL,
    "dynamic_slice": slice(1),
    "dynamic_update_slice": slice(2),
    "expand_dims": _ALL,
    "gather": slice(1),
    "imag": _ALL,
    "name": _ALL,
    "neg": _ALL,
    "pad": _ALL,
    "real": _ALL,
    "reduce_precision": _ALL,
    "reduce_sum": _ALL,
    "reduce_window_sum": _ALL,
    "reshape": slice(1),
    "rev": _ALL,
    "scatter-add": slice(0, None, 2),
    "select_n": slice(1, None),
    "sharding_constraint": _ALL,
    "slice": _ALL,
    "squeeze": _ALL,
    "sub": _ALL,
    "transpose": _ALL,
}
#: Those that are additive in each of their first two operands, if the other stays the same.
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "mul"})


def additive_operands(eqn: Any, apart: Collection[Any]) -> range:
    """The operands that an equation is additive in, all together.

    Args:
        eqn: the equation.
        apart: the variables that are shares of sums; it says which factor of a product to take.
    """
    name, operands = eqn.primitive.name, range(len(eqn.invars))
    if name in _TOGETHER:
        return operands[_TOGETHER[name]]
    if name in _PRODUCTS:
        second = _is_in(eqn.invars[1], apart) and not _is_in(eqn.invars[0], apart)
        return operands[1:2] if second else operands[:1]
    if name == "div" and _is_inexact(eqn.outvars[0]):
        return operands[:1]
    if name == "convert_element_type" and _is_additive_cast(eqn):
        return operands
    if name == "optimization_barrier" and len(operands) == 1:
        return operands
    return operands[:0]


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    return not _jaxprs.is_literal(atom) and atom in variables


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _is_additive_cast(eqn: Any) -> bool:
    """Whether a cast is additive, but for rounding: not to integers, and not of truth values."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return old == new or (jnp.issubdtype(old, jnp.number) and jnp.issubdtype(new, jnp.inexact))


# ---- sums over examples -------------------------------------------------------------------------


def summed_dimensions(
    eqn: Any, specs: Mapping[Any, Spec | None], replicas: Replicas
) -> dict[int, int]:
    """For each operand that an equation sums over the examples of, their dimension.

    Empty where it does not, or where replicas do not have equally many.
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
    """The input features, which are the examples in the gradient of the weights."""
    if eqn.params["feature_group_count"] != 1:
        return []
    numbers = eqn.params["dimension_numbers"]
    return [{0: numbers.lhs_spec[1], 1: numbers.rhs_spec[1]}]


def _summed_by_scatter(eqn) -> Sequence[dict[int, int]]:
    """The dimensions of the indices, which the updates have too and the result does not."""
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
