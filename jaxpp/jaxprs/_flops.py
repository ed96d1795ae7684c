"""The cost of equations, for cutting a program into stages of equal work."""

import math
from collections.abc import Callable
from typing import Any

from jaxpp.jaxprs import primitives
from jaxpp.jaxprs._equations import sub_jaxprs
from jaxpp.jaxprs._typing import Eqn

Cost = Callable[[Eqn], float]


def flops(eqn: Eqn) -> float:
    """Counts the floating-point operations of an equation, run forward and once.

    A matrix product of an m x k by a k x n array counts 2mkn, also where it is ragged, a
    convolution 2 per output element and kernel element, a loop its body times its length, a
    conditional its dearest branch, a reduction one per input element, and anything else one per
    output element.

    Args:
        eqn: an equation of a jaxpr.

    Returns:
        The number of operations.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((2, 3)), jnp.ones((3, 4)))
        >>> flops(jaxpr.eqns[0])
        48.0
    """
    name = eqn.primitive.name
    operands: list[Any] = [v.aval for v in eqn.invars]
    results: list[Any] = [v.aval for v in eqn.outvars]
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * results[0].size * math.prod(operands[0].shape[d] for d in contract)
    if name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, contract), (_, batch) = numbers.dot_dimension_numbers
        shared = {*contract, *batch, *numbers.rhs_group_dimensions}
        free = [n for d, n in enumerate(operands[1].shape) if d not in shared]
        return 2.0 * operands[0].size * math.prod(free)
    if name == "conv_general_dilated":
        kernel = operands[1]
        out_channels = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * results[0].size * kernel.size / max(out_channels, 1)
    if name == "scan":
        return eqn.params["length"] * _body_flops(eqn)
    if name == "cond":
        return max(sum(map(flops, b.eqns)) for b in eqn.params["branches"])
    if any(True for _ in sub_jaxprs(eqn)):
        return _body_flops(eqn)
    if name.startswith(("reduce_", "arg", "cum")):
        return float(sum(a.size for a in operands if hasattr(a, "size")))
    if name in primitives.FREE:
        return 0.0
    return float(sum(a.size for a in results if hasattr(a, "size")))


def _body_flops(eqn) -> float:
    return float(sum(flops(e) for sub in sub_jaxprs(eqn) for e in sub.eqns))


def nbytes(var) -> int:
    """Counts the bytes of a variable's value (of a random key, those of its words)."""
    aval = var.aval
    if not hasattr(aval, "dtype"):
        return 0
    itemsize = getattr(aval.dtype, "itemsize", 4)
    return int(math.prod(aval.shape)) * itemsize


def cost_function(balance: str | Cost) -> Cost:
    """Finds the cost function that `balance` names, or is itself; layers are balanced by flops."""
    if balance in ("flops", "layers"):
        return flops
    if callable(balance):
        return balance
    raise ValueError(f"balance is 'flops', 'layers' or a function of an equation, got {balance!r}.")
