"""The definitions of the transforms, which stand for them in the function to compute."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import _jaxprs


def _itself(fun: Callable, *_: Any) -> Callable:
    return fun


def _microbatch(jaxpr: Any, roles: Sequence[str], operators: Sequence[Any], count: int) -> Callable:
    """The loop of `microbatch`, as a function of the inputs of its body.

    Each slice's outputs are kept, and combined after the last one.

    Args:
        jaxpr: the body.
        roles: the role of each input: whole, a slice (they are stacked), or a carry.
        operators: the operator of each output.
        count: the number of slices.
    """
    carried = [getattr(op, "name", None) == "carry" for op in operators]

    def loop(*inputs):
        first, slices = (
            [x for x, role in zip(inputs, roles, strict=True) if role == own]
            for own in ("carry", "slice")
        )

        def body(carry, one):
            given = {"carry": iter(carry), "slice": iter(one)}
            own = [
                x if role == "whole" else next(given[role])
                for x, role in zip(inputs, roles, strict=True)
            ]
            outputs = _jaxprs.run(jaxpr, *own)
            return [y for y, c in zip(outputs, carried, strict=True) if c], outputs

        if jaxpr.effects:  # the derivative of a scan would drop some
            last, made = first, []
            for i in range(count):
                last, outputs = body(last, [x[i] for x in slices])
                made.append(outputs)
            outputs = [jnp.stack(rows) for rows in zip(*made, strict=True)]
        else:
            last, outputs = jax.lax.scan(body, first, slices, length=count)
        carry = iter(last)
        return [
            next(carry) if c else _combine(op, rows, count)
            for op, rows, c in zip(operators, outputs, carried, strict=True)
        ]

    return loop


def _combine(operator: Any, rows: Any, count: int) -> Any:
    """Combines an output of all slices, which are stacked along a new first axis."""
    name = getattr(operator, "name", None)
    if name == "stack":
        return rows
    if name == "concat":
        return jnp.concatenate(list(rows))
    if name == "last":
        return rows[count - 1]
    if name == "max":
        lowest = jnp.full(rows.shape[1:], _lowest(rows.dtype), rows.dtype)
        return functools.reduce(jnp.maximum, list(rows), lowest)
    if name in ("mean", "sum"):
        dtype = operator.accumulator or rows.dtype
        parts = [row.astype(dtype) for row in rows]
        total = functools.reduce(jnp.add, parts, jnp.zeros(rows.shape[1:], dtype))
        total = total / count if name == "mean" else total
        return total.astype(operator.result or rows.dtype)
    acc = operator.init(jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype))
    for i in range(count):
        acc = operator.combine(acc, rows[i])
    return operator.finish(acc, count)


def _lowest(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


class Edited(Exception):
    """An edit of loops adds results, so that the function has no definition without it."""


def unedited(rules: list[str]) -> Callable[..., Callable]:
    """The definition of `edit_loops`: an edit changes no value. `rules` collects who edits.

    Raises:
        Edited: when the edit adds results.
    """

    def define(fun: Callable, rule: str, has_aux: bool) -> Callable:
        if rule not in rules:
            rules.append(rule)
        if has_aux:
            raise Edited
        return fun

    return define


#: The tasks and the ranks of a loop are those of the loop.
UNSCHEDULED = {"schedule": _itself}
#: Stages are pieces of the function, and a microbatch loop is a loop over slices.
PLAIN = {"schedule": _itself, "stages": _itself, "microbatch": _microbatch}
