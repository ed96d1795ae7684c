"""The loss that is planned for: what it returns, and what of its arguments a microbatch has."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jaxpp.transforms import microbatch
from jaxpp.transforms.microbatch import broadcast_axes


def axes_of_leaves(in_axes: Any, args: Sequence[Any]) -> list[int | None]:
    """Finds the axis by which each leaf of the arguments is sliced; None for those given whole.

    Args:
        in_axes: as in `microbatch`; None where every argument but the first is part of the batch.
        args: the arguments. A carried state is whole in each microbatch.
    """
    axes = (None, *(0 for _ in args[1:])) if in_axes is None else in_axes
    entries = broadcast_axes(axes, tuple(args))
    return [entry.axis if isinstance(entry.axis, int) else None for entry in entries]


def map_sliced(change: Callable[[Any, int], Any], in_axes: Any, args: Sequence[Any]) -> list[Any]:
    """Maps `change(array, axis)` over the arrays that are sliced; all else stays."""
    leaves, tree = jtu.tree_flatten(list(args))
    pairs = zip(leaves, axes_of_leaves(in_axes, args), strict=True)
    return tree.unflatten(
        [x if axis is None or not eqx.is_array_like(x) else change(x, axis) for x, axis in pairs]
    )


def returns_aux(fun: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Tells whether a loss function returns `(loss, aux)`, and not the loss alone.

    Raises:
        ValueError: it returns neither.
    """
    found: Any = eqx.filter_eval_shape(fun, *args)
    has_aux = isinstance(found, tuple) and len(found) == 2
    loss: Any = found[0] if has_aux else found
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        shown = jax.tree.map(_shown, found)
        raise ValueError(
            f"profile: the function is a loss: it returns a floating-point scalar, or a pair "
            f"(loss, aux) of it and anything else, such as metrics or a new state; got {shown}."
        )
    return has_aux


def gradient(
    fun: Callable[..., Any], args: Sequence[Any], microbatches: int, in_axes: Any
) -> Callable[..., Any]:
    """Makes the gradient function of a loss over so many microbatches, as a step would have it.

    What the loss returns beside its value is that of the last microbatch.

    Args:
        fun: the loss function, cut into stages.
        args: its arguments, with a batch of the size of a microbatch.
        microbatches: their number.
        in_axes: as for `axes_of_leaves`.
    """
    if not any(map(eqx.is_inexact_array, jax.tree.leaves(args[:1]))):
        raise ValueError(
            f"profile: the first argument has the parameters, and there is no array of floats in "
            f"{args[:1]!r}; give them first."
        )
    has_aux = returns_aux(fun, args)
    tree = jtu.tree_structure(tuple(args))
    axes = tree.unflatten(axes_of_leaves(in_axes, args))
    value: Any = ("mean", "last") if has_aux else "mean"
    return microbatch(
        eqx.filter_value_and_grad(fun, has_aux=has_aux),
        microbatches,
        in_axes=axes,
        reduce=(value, "mean"),
    )


def _shown(x: Any) -> Any:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else x
