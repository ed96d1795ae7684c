"""Mixed precision: casts of a pytree, and dynamic loss scaling around an optimizer of optax.

Parameters and optimizer state stay float32; the model computes in bfloat16 or float16 (Micikevicius
et al., Mixed Precision Training, arXiv 1710.03740, section 3.1). float16 has few exponents, so that
the loss is scaled before it is differentiated, and a step whose gradients are not finite is skipped
(section 3.2).
"""

import functools
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

Tree = TypeVar("Tree")


def cast(tree: Tree, dtype: Any) -> Tree:
    """Casts the floating-point arrays of a pytree; every other leaf stays as it is.

    Args:
        tree: a pytree, such as an Equinox model; its arrays may have any shape.
        dtype: a floating-point dtype.

    Returns:
        A tree of the same structure.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpp import precision
        >>> precision.cast({"w": jnp.ones(2), "count": 3}, jnp.bfloat16)
        {'count': 3, 'w': Array([1, 1], dtype=bfloat16)}
    """
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


class LossScaleState(NamedTuple):
    """The state of `dynamic_loss_scale`.

    Attributes:
        inner: the state of the optimizer.
        scale: what the next loss is multiplied by, a float32 scalar.
        steps: the number of finite steps in a row since the scale last changed, an int32 scalar.
        finite: whether the last gradients were finite, so that their step was taken; a bool scalar.

    Example:
        >>> import optax
        >>> from jaxpp import precision
        >>> state = precision.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> float(state.scale), int(state.steps), bool(state.finite)
        (32768.0, 0, True)
    """

    inner: Any
    scale: jax.Array
    steps: jax.Array
    finite: jax.Array


def dynamic_loss_scale(
    optimizer: optax.GradientTransformation,
    initial: float = 2.0**15,
    *,
    period: int = 2000,
    factor: float = 2.0,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer that takes the gradients of a scaled loss, and chooses the scale.

    Multiply the loss by `opt_state.scale` before it is differentiated. An update divides the
    gradients by the scale, in float32 at least. Where one of them is not finite, the update is
    zero, and the state of the optimizer stays as it is.

    The scale shrinks by `factor`, to 1 at least, after a step that is not finite, and grows by it
    after `period` finite steps in a row. The defaults are those of PyTorch's `GradScaler`, but for
    the first value.

    Args:
        optimizer: an optimizer of optax, for the gradients of the loss itself.
        initial: the scale of the first step.
        period: the number of finite steps after which the scale grows.
        factor: what it grows and shrinks by.

    Returns:
        An optimizer whose state is a `LossScaleState`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from jaxpp import precision
        >>> optimizer = precision.dynamic_loss_scale(optax.sgd(0.5), 4.0, period=2)
        >>> w = jnp.float16(1.0)
        >>> state = optimizer.init(w)
        >>> for x in jnp.array([1.0, jnp.inf, 1.0, 1.0], jnp.float16):
        ...     grad = jax.grad(lambda w: state.scale * w * x)(w)
        ...     update, state = optimizer.update(grad, state)
        ...     print(update, state.scale, state.steps)
        -0.5 4.0 1
        0.0 2.0 0
        -0.5 2.0 1
        -0.5 4.0 0
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(
            optimizer.init(params), jnp.float32(initial), jnp.int32(0), jnp.array(True)
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        inverse = 1.0 / state.scale
        gradients = jax.tree.map(lambda g: g * inverse, updates)
        checks = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]
        finite = functools.reduce(jnp.logical_and, checks, jnp.array(True))
        updates, inner = optimizer.update(gradients, state.inner, params, **extra)
        updates = optax.tree.where(finite, updates, optax.tree.zeros_like(updates))
        inner = optax.tree.where(finite, inner, state.inner)
        grown, shrunk = state.scale * factor, jnp.maximum(state.scale / factor, 1.0)
        grows = finite & (state.steps + 1 >= period)
        scale = jnp.where(grows & jnp.isfinite(grown), grown, state.scale)
        scale = jnp.where(finite, scale, shrunk)
        steps = jnp.where(finite & ~grows, state.steps + 1, 0)
        return updates, LossScaleState(inner, scale, steps, finite)

    return optax.GradientTransformationExtraArgs(init, update)
