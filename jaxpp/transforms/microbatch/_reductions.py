"""The operators by which `microbatch` combines an output over the microbatches."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _specs

#: The entry of `in_axes`, and the reduction, of what each slice hands on to the next one.
CARRY = "carry"
#: The dtype of sums unless the user gives one: float32 for narrower floats, else the value's own.
AUTO = "auto"


@runtime_checkable
class Operator(Protocol):
    """Combines an output over microbatches, one after the other.

    `init(x)` makes the first accumulator from the output's shape and dtype
    (`jax.ShapeDtypeStruct`), `combine(acc, x)` folds one microbatch's value in, and
    `finish(acc, num_microbatches)` makes the result. Accumulators are pytrees of arrays. With
    `replicas` it also has `merge(acc, other)`, which combines the accumulators of two replicas.

    Example:
        >>> import jax.numpy as jnp, jaxpp
        >>> class Product:
        ...     def init(self, x):
        ...         return jnp.ones(x.shape, x.dtype)
        ...     def combine(self, acc, x):
        ...         return acc * x
        ...     def finish(self, acc, num_microbatches):
        ...         return acc
        >>> product = jaxpp.microbatch(jnp.prod, 2, in_axes=0, reduce=Product())
        >>> float(product(jnp.array([1.0, 2.0, 3.0, 4.0])))
        24.0
    """

    def init(self, x: jax.ShapeDtypeStruct) -> Any: ...
    def combine(self, acc: Any, x: Any) -> Any: ...
    def finish(self, acc: Any, num_microbatches: int) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Fold:
    """An operator, built in or the user's, whose name is then `"custom"`.

    `accepts` tells whether it takes a dtype, `sums` whether it adds. `dtype` is the
    `accumulator_dtype` that gradients through it have. `merge` is that of a user's operator.
    """

    name: str
    init: Callable[[Any], Any]
    combine: Callable[[Any, Any], Any]
    finish: Callable[[Any, int], Any]
    accepts: Callable[[Any], bool] = lambda dtype: True
    sums: bool = False
    dtype: Any = AUTO
    merge: Callable[[Any, Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Collect:
    """Keeps every microbatch's value, stacked along a new first axis."""

    name: str
    finish: Callable[[Any], Any]
    dtype: Any = AUTO


@dataclasses.dataclass(frozen=True)
class Carry:
    """Hands each microbatch's value to the next one; the last value is the result.

    With replicas, `merge` combines their last values: a name, or a function of their rows.
    """

    name: str
    dtype: Any = AUTO
    merge: Any = None


#: A name or an object that says how an output is combined.
Reduction = Fold | Collect | Carry


def _zeros(x):
    return _specs.filled(x, 0)  # of a key type too


def _lowest(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        infinity = np.array(-np.inf, np.float32).astype(x.dtype)  # some narrow types have none
        lowest = -jnp.inf if np.isinf(infinity) else float(jnp.finfo(x.dtype).min)
        return _specs.filled(x, lowest)
    if x.dtype == jnp.bool_:
        return _specs.filled(x, False)
    return _specs.filled(x, jnp.iinfo(x.dtype).min)


def _is_number(dtype):
    return jnp.issubdtype(dtype, jnp.number)


def _is_ordered(dtype):
    return dtype == jnp.bool_ or (
        _is_number(dtype) and not jnp.issubdtype(dtype, jnp.complexfloating)
    )


def _concatenate(stacked):
    return stacked.reshape(stacked.shape[0] * stacked.shape[1], *stacked.shape[2:])


REDUCTIONS: dict[str, Fold | Collect | Carry] = {
    "mean": Fold(
        "mean",
        _zeros,
        lambda acc, x: acc + x,
        lambda acc, m: acc / m,
        lambda d: jnp.issubdtype(d, jnp.inexact),
        sums=True,
    ),
    "sum": Fold("sum", _zeros, lambda acc, x: acc + x, lambda acc, m: acc, _is_number, sums=True),
    "max": Fold("max", _lowest, jnp.maximum, lambda acc, m: acc, _is_ordered),
    "last": Fold("last", _zeros, lambda acc, x: x, lambda acc, m: acc),
    "stack": Collect("stack", lambda stacked: stacked),
    "concat": Collect("concat", _concatenate),
    CARRY: Carry(CARRY),
}


def is_sum(operator: Reduction) -> bool:
    """Tells whether an operator adds up the values of microbatches."""
    return isinstance(operator, Fold) and operator.sums


def is_chain(operator: Reduction) -> bool:
    """Tells whether the cotangents of microbatches depend on the values that were combined."""
    if isinstance(operator, Fold):
        return operator.name in ("max", "custom")
    return not isinstance(operator, Collect)


def cotangent_of_slices(
    operator: Reduction, ct: jax.Array, num_microbatches: int
) -> tuple[str, jax.Array]:
    """Returns the cotangent of each microbatch's output from that of the combined output.

    It is `"whole"` and the cotangent that all microbatches have, or `"slice"` and their cotangents
    along a new first axis. The operator is none that `is_chain`.
    """
    if is_sum(operator):
        return "whole", ct / num_microbatches if operator.name == "mean" else ct
    if isinstance(operator, Collect):
        if operator.name == "concat":
            ct = ct.reshape(num_microbatches, len(ct) // num_microbatches, *ct.shape[1:])
        return "slice", ct
    is_last = jnp.arange(num_microbatches) == num_microbatches - 1
    return "slice", jnp.where(is_last.reshape(-1, *(1,) * ct.ndim), ct, jnp.zeros_like(ct))


def dtype_of_sum(dtype: Any, x: Any) -> Any:
    """Returns the dtype in which values like `x` are added up, for an `accumulator_dtype`."""
    if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x.dtype
    if not _is_auto(dtype):
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x.dtype


def dtype_of_gradient(operators: Sequence[Reduction], x: Any) -> Any:
    """Returns the widest dtype in which the operators of outputs add up gradients by `x`."""
    dtypes = [dtype_of_sum(op.dtype, x) for op in operators]
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=x.dtype)


def of_gradient(name: str, operators: Sequence[Reduction], x: Any) -> Reduction:
    """Finds the built-in operator of a gradient by `x`, which comes in its accumulator's dtype."""
    dtype = dtype_of_gradient(operators, x)
    return accumulate_in(REDUCTIONS[name], None if dtype == x.dtype else dtype, x)


def accumulate_in(operator: Reduction, dtype: Any, x: Any) -> Reduction:
    """Makes an operator, for outputs like `x`, keep its sums in an `accumulator_dtype`.

    Raises:
        ValueError: if `dtype` is no floating-point dtype.
    """
    if dtype is not None and not _is_auto(dtype) and not _is_floating(dtype):
        raise ValueError(
            f"microbatch: accumulator_dtype holds {dtype!r}, which is no floating-point dtype; "
            f"give one, such as jnp.float32, None for an output's own, or {AUTO!r}."
        )
    sum_dtype = dtype_of_sum(dtype, x)
    if not isinstance(operator, Fold) or not operator.sums or sum_dtype == x.dtype:
        return dataclasses.replace(operator, dtype=dtype)
    result, finish = x.dtype if _is_auto(dtype) else sum_dtype, operator.finish
    return dataclasses.replace(
        operator,
        init=lambda x: _specs.filled(x, 0, sum_dtype),
        combine=lambda acc, x: acc + x.astype(sum_dtype),
        finish=lambda acc, m: finish(acc, m).astype(result),
        dtype=dtype,
    )


def _is_auto(dtype: Any) -> bool:
    return isinstance(dtype, str) and dtype == AUTO


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def resolve(reduce: Any, path: str, x: jax.ShapeDtypeStruct) -> Reduction:
    """Finds the operator for an output, and checks it against the output's shape and dtype.

    Raises:
        ValueError: if there is no such reduction, or not for this output.
    """
    where = f"microbatch: output{path or ''} ({x.dtype}{list(x.shape)})"
    if isinstance(reduce, str):
        if reduce not in REDUCTIONS:
            raise ValueError(
                f"{where} has the unknown reduction {reduce!r}; there are "
                f"{', '.join(map(repr, REDUCTIONS))}, or an object with init, combine and finish."
            )
        operator = REDUCTIONS[reduce]
        if isinstance(operator, Fold) and not operator.accepts(x.dtype):
            others = [
                n for n, o in REDUCTIONS.items()
                if isinstance(o, Collect) or (isinstance(o, Fold) and o.accepts(x.dtype))
            ]  # fmt: skip
            if not x.shape:
                others.remove("concat")
            raise ValueError(
                f"{where} has no {reduce!r}; give reduce= for it: one of "
                f"{', '.join(map(repr, others))}."
            )
        if reduce == "concat" and not x.shape:
            raise ValueError(f"{where} is a scalar and has no axis to concatenate; use 'stack'.")
        return operator
    if isinstance(reduce, Operator):
        merge, typed = getattr(reduce, "merge", None), functools.partial(_specs.as_weak_as, x)

        def finish(acc: Any, num_microbatches: int) -> Any:
            return jax.tree.map(typed, reduce.finish(acc, num_microbatches))

        return Fold("custom", reduce.init, reduce.combine, finish, merge=merge)
    raise ValueError(
        f"{where}: {reduce!r} is no reduction; give one of {', '.join(map(repr, REDUCTIONS))}, or "
        f"an object with init, combine and finish."
    )


def with_merge(operator: Reduction, merge: Any, path: str, x: jax.ShapeDtypeStruct) -> Reduction:
    """Finds how the values of replicas are combined, for an output of one slice like `x`.

    Raises:
        ValueError: if it is not known, or no such output is merged.
    """
    where = f"microbatch: output{path or ''} ({x.dtype}{list(x.shape)})"
    if isinstance(operator, Fold) and operator.name == "custom" and operator.merge is None:
        raise ValueError(
            f"{where} is combined by an object without merge(acc, other), so that it is not known "
            f"how the accumulators of two replicas become one; give it that method."
        )
    if not isinstance(operator, Carry):
        return operator
    how = "mean" if merge is None and is_inexact(x) else merge
    names = [n for n, o in REDUCTIONS.items() if isinstance(o, Fold) and o.accepts(x.dtype)]
    if how not in names and not callable(how):
        is_given = "" if merge is None else f"has no merge {merge!r}: it "
        raise ValueError(
            f"{where} {is_given}is carried, in each replica for itself, and is no float, of which "
            f"the mean over the replicas would be taken. Say what the result is: merge= one of "
            f"{', '.join(map(repr, names))}, or a function of the values of all replicas, stacked "
            f"along a new first axis."
        )
    return dataclasses.replace(operator, merge=how)


def is_inexact(x: Any) -> bool:
    """Tells whether an array, or a type, is of floats or complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
