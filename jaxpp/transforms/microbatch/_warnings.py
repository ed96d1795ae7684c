"""Warnings of reductions that were hardly meant."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jaxpp import _jaxprs, _primitives
from jaxpp._warn import warn
from jaxpp.transforms.microbatch import _reductions

#: Where flax and others keep what its "gradient" overwrites: the scales of float8, and maxima.
_OVERWRITTEN = "_overwrite_with_gradient"


def warn_of_averages(
    traced: _jaxprs.Traced, small: Sequence[Any], axes: Sequence[Any], count: int
) -> None:
    """Warns of outputs that the default reduction averages: entries of examples, and sums."""
    pairs = list(zip(small, axes, strict=True))
    sizes = {x.shape[axis] for x, axis in pairs if isinstance(axis, int)} - {1}
    whole = [x for x, axis in pairs if not isinstance(axis, int) and _jaxprs.is_array(x)]
    # An output with the shape of a parameter counts as its gradient.
    parameters = {x.shape for x in [*whole, *traced.inputs[: traced.num_closed_over]]}

    def of_examples(v: Any) -> bool:
        shape = v.aval.shape
        return bool(shape) and shape[0] in sizes and shape not in parameters

    def sums_examples(eqn: Any) -> bool:
        return 0 in _summed_axes(eqn) and of_examples(eqn.invars[0])

    def keeps_sum(factor: float) -> bool:
        """Tells whether a sum over examples, times a number, is one still, and no mean of them."""
        if not factor or not math.isfinite(factor):
            return True
        shares = [1 / abs(factor * size) for size in sizes]
        return all(round(n) < 1 or abs(n / round(n) - 1) > 1e-3 for n in shares)

    jaxpr = traced.jaxpr.jaxpr
    for path, v in zip(traced.output_paths(), jaxpr.outvars, strict=True):
        where = f"microbatch: output{path} ({v.aval.dtype}{list(v.aval.shape)})"
        if of_examples(v):
            warn(
                f"{where} seems to have an entry for each of the {v.aval.shape[0]} examples of a "
                f"microbatch, and is averaged over the {count} microbatches. Give reduce= for it: "
                f"'concat' keeps those of all examples, 'mean' says that the average is meant."
            )
        elif () not in parameters and any(map(sums_examples, _sums(v, jaxpr, keeps_sum))):
            warn(
                f"{where} seems to be a sum over the examples of a microbatch, and is averaged "
                f"over the {count} microbatches: it, and each gradient of it, is {count} times "
                f"smaller than that of the batch. Give reduce='sum' for them; 'mean' says that the "
                f"average is meant."
            )


#: The primitives that a sum may go through before it is an output: it is a sum still.
_PASSED = _primitives.FREE | _primitives.ADDS | {"convert_element_type", "neg", "sub"}


def _summed_axes(eqn: Any) -> Sequence[int]:
    """Returns the axes of its first operand that an equation sums up, if its result is a number."""
    if eqn.primitive.name == "dot_general":
        return () if eqn.outvars[0].aval.shape else eqn.params["dimension_numbers"][0][0]
    return eqn.params["axes"] if eqn.primitive.name == "reduce_sum" else ()


def _factor(eqn: Any) -> tuple[Any, float] | None:
    """Returns what an equation multiplies by a number, or divides by one, and the factor."""
    if eqn.primitive.name not in ("mul", "div") or jnp.iscomplexobj(eqn.outvars[0].aval):
        return None
    a, b = eqn.invars
    if eqn.primitive.name == "div":
        return (a, 1 / float(b.val)) if _jaxprs.is_literal(b) and b.val else None
    a, b = (b, a) if _jaxprs.is_literal(a) else (a, b)
    return (a, float(b.val)) if _jaxprs.is_literal(b) else None


def _sums(output: Any, jaxpr: Any, keeps_sum: Callable[[float], bool]) -> list[Any]:
    """Finds the equations that sum up the terms of a scalar over axes of an array.

    Args:
        output: the scalar.
        jaxpr: what makes it.
        keeps_sum: whether a sum, times a number, is still one.
    """

    def enter(body: Any, operands: Sequence[Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
        makers = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        return makers, dict(zip(body.invars, operands, strict=True))

    found: list[Any] = []
    seen, rest = set(), [(output, enter(jaxpr, [None] * len(jaxpr.invars)))]
    while rest:
        v, (makers, operands) = rest.pop()
        if _jaxprs.is_literal(v) or (v, id(makers)) in seen or v.aval.shape:
            continue
        seen.add((v, id(makers)))
        eqn, operand = makers.get(v), operands.get(v)
        if operand is not None:
            rest.append(operand)
        elif eqn is None or not jnp.issubdtype(v.aval.dtype, jnp.inexact):
            continue
        elif (called := _jaxprs.called_jaxpr(eqn)) is not None:
            body = _jaxprs.opened(called)
            inside = enter(body, [(x, (makers, operands)) for x in eqn.invars])
            rest.append((body.outvars[eqn.outvars.index(v)], inside))
        elif _summed_axes(eqn):
            found.append(eqn)
        elif (scaled := _factor(eqn)) is not None:
            rest += [(scaled[0], (makers, operands))] if keeps_sum(scaled[1]) else []
        elif eqn.primitive.name in _PASSED:
            rest += [(x, (makers, operands)) for x in eqn.invars]
    return found


def warn_of_overwritten(traced: _jaxprs.Traced, operators: Sequence[Any]) -> None:
    """Warns of gradients that are added up, although they are the new values of a state."""
    for path, operator in zip(traced.output_paths(), operators, strict=True):
        if _OVERWRITTEN in path and isinstance(operator, _reductions.Fold) and operator.sums:
            warn(
                f"microbatch: output{path} overwrites a state, as its name says, and has the "
                f"reduction {operator.name!r}. Give reduce= for what is in "
                f"{_OVERWRITTEN!r}: 'max' for the maxima and scales of float8."
            )
            return


def watched(x: Any, path: str) -> Any:
    """Finds an argument; if it is overwritten by its gradient, a derivative by it is warned of."""
    if _OVERWRITTEN not in path or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    same = jax.custom_jvp(lambda x: x)

    def along(primals, tangents):
        if not isinstance(tangents[0], SymbolicZero):
            warn(
                f"microbatch: the gradient by args{path} overwrites it, as its name says, but one "
                f"that is taken of the loop is a sum over the microbatches. Differentiate first: "
                f"microbatch(value_and_grad(f), M, reduce=...), with 'max' for it."
            )
        return primals[0], tangents[0]

    same.defjvp(along, symbolic_zeros=True)
    return same(x)
