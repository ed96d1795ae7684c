"""Mixed precision as plain functions: casts of a pytree, and dynamic loss scaling.

Parameters and optimizer state stay float32; the model computes in bfloat16 or float16 (Micikevicius
et al., Mixed Precision Training, arXiv 1710.03740, section 3.1). float16 has few exponents, so that
the loss is scaled before it is differentiated, and a step whose gradients are not finite is skipped
(section 3.2).
"""

import dataclasses
import functools
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Tree = TypeVar("Tree")


def cast(tree: Tree, dtype: Any) -> Tree:
    """The tree with its floating-point arrays in another dtype; every other leaf as it is.

    Args:
        tree: a pytree, such as an Equinox model.
        dtype: a floating-point dtype.

    Returns:
        A tree of the same structure.

    Example:
        >>> cast({"w": jnp.ones(2), "count": 3}, jnp.bfloat16)
        {'count': 3, 'w': Array([1, 1], dtype=bfloat16)}
    """
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "steps"],
    meta_fields=["period", "factor"],
)
@dataclasses.dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by, and how many steps in a row have been finite.

    It grows by `factor` after `period` finite steps, and shrinks by it after a step that is not.
    These are the defaults of PyTorch's `GradScaler`, but for the first value.

    Example:
        >>> scale = LossScale(jnp.float32(4.0), jnp.int32(0), period=2)
        >>> for finite in (True, False, True, True):
        ...     scale = scale.updated(jnp.array(finite))
        ...     print(float(scale.value), int(scale.steps))
        4.0 1
        2.0 0
        2.0 1
        4.0 0
    """

    value: Float[Array, ""]
    steps: Int[Array, ""]
    period: int = 2000
    factor: float = 2.0

    def updated(self, finite: Bool[Array, ""]) -> "LossScale":
        """The scale of the next step, given whether the gradients of this one were finite."""
        grows = finite & (self.steps + 1 >= self.period)
        grown = self.value * self.factor
        value = jnp.where(grows & jnp.isfinite(grown), grown, self.value)
        value = jnp.where(finite, value, jnp.maximum(self.value / self.factor, 1.0))
        steps = jnp.where(finite & ~grows, self.steps + 1, 0)
        return dataclasses.replace(self, value=value, steps=steps)


def initial_scale(value: float = 2.0**15, period: int = 2000, factor: float = 2.0) -> LossScale:
    """A loss scale before the first step.

    Example:
        >>> float(initial_scale().value)
        32768.0
    """
    return LossScale(jnp.float32(value), jnp.int32(0), period, factor)


def unscale(gradients: Tree, scale: LossScale) -> Tree:
    """Gradients of a scaled loss as float32 gradients of the loss.

    Example:
        >>> unscale(jnp.ones(2, jnp.float16), initial_scale(4.0))
        Array([0.25, 0.25], dtype=float32)
    """
    inverse = 1.0 / scale.value
    return jax.tree.map(lambda g: g * inverse, cast(gradients, jnp.float32))


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether no floating-point array of a tree holds an infinity or a NaN.

    Example:
        >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf])}))
        False
    """
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    finite = [jnp.all(jnp.isfinite(x)) for x in arrays]
    return functools.reduce(jnp.logical_and, finite, jnp.array(True))


def select(keep_new: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """The arrays of one of two trees, by a condition; `new` gives every other leaf.

    Example:
        >>> select(jnp.array(False), {"w": jnp.ones(1)}, {"w": jnp.zeros(1)})
        {'w': Array([0.], dtype=float32)}
    """
    return jax.tree.map(lambda x, y: jnp.where(keep_new, x, y) if eqx.is_array(x) else x, new, old)
