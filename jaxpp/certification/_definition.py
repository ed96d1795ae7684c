"""The definitions of the transforms, which stand for them in the function to compute."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpp import _jaxprs

#: The name of values whose rows are microbatches.
SLICES = "slices"


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
        slices = [checkpoint_name(x, SLICES) for x in slices]

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
        return _combined(operators, outputs, last, count)

    return loop


def _combined(
    operators: Sequence[Any], outputs: Sequence[Any], last: Sequence[Any], count: int
) -> list[Any]:
    """Combines the outputs of all slices, which are stacked along a new first axis."""
    carries, folds, results = iter(last), {}, []
    for n, (operator, rows) in enumerate(zip(operators, outputs, strict=True)):
        name, result = getattr(operator, "name", None), rows
        if name in _FOLDS:
            combine, start = _FOLDS[name]
            dtype = getattr(operator, "accumulator", None) or rows.dtype
            first = jnp.full(rows.shape[1:], start(dtype), dtype)
            folds[n] = combine, first, rows
        elif name == "carry":
            result = next(carries)
        elif name == "concat":
            result = rows.reshape(count * rows.shape[1], *rows.shape[2:])
        elif name == "last":
            result = rows[count - 1]
        elif name != "stack":
            acc = operator.init(jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype))
            for i in range(count):
                acc = operator.combine(acc, rows[i])
            result = operator.finish(acc, count)
        results.append(result)
    for n, total in _folded(folds).items():
        operator = operators[n]
        total = total / count if operator.name == "mean" else total
        results[n] = total.astype(getattr(operator, "result", None) or outputs[n].dtype)
    return results


def _folded(folds: Mapping[int, tuple[Callable, Any, Any]]) -> dict[int, Any]:
    """Folds rows from the first to the last."""
    combine, first, rows = ({n: fold[k] for n, fold in folds.items()} for k in range(3))

    def body(acc, row):
        return {n: combine[n](acc[n], x.astype(acc[n].dtype)) for n, x in row.items()}, None

    return jax.lax.scan(body, first, rows)[0] if folds else {}


def _lowest(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


#: The reductions that fold slices: by what, and from what, of a dtype.
_FOLDS = {
    "max": (jnp.maximum, _lowest),
    "mean": (jnp.add, lambda _: 0),
    "sum": (jnp.add, lambda _: 0),
}

#: The tasks and the ranks of a loop are those of the loop.
UNSCHEDULED = {"schedule": _itself}
#: Stages are pieces of the function, and a microbatch loop is a loop over slices.
PLAIN = {"schedule": _itself, "stages": _itself, "microbatch": _microbatch}
