"""Rules for how equations treat the rows of arrays, which lie along the first axis.

A parameter that is stacked over layers is in parts, each of some rows. An equation that treats each
row apart, as elementwise ones do, runs part by part. There is one rule for each kind of primitive,
for all that take rows: the slices of a cut scan, of an initialiser, and of a step.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _primitives

#: Where the parts of an array begin along its first axis, and its size at the end: `(0, 2, 4)`.
Bounds = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rule of an equation that runs part by part.

    `operands` tells which of its operands have the rows; the others are whole. `params` gives the
    equation's parameters for a number of rows; None if they are the same for any. The results have
    the rows, unless `combine` is given: it makes whole results of those of the parts.
    """

    operands: tuple[bool, ...]
    params: Callable[[int], dict[str, Any]] | None = None
    combine: Callable[[Any, Any], Any] | None = None

    def members(self, eqn) -> list[Any]:
        """Gives the variables of the equation that have the rows."""
        results = eqn.outvars if self.combine is None else []
        return _jaxprs.variables([*itertools.compress(eqn.invars, self.operands), *results])


def rows_of(eqn) -> Rows | None:
    """Gives the rule of an equation; None where all rows have to be in one place."""
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn)


def row_by_row(eqn) -> Rows | None:
    """Gives the rule of an equation if no row's bits depend on the number of rows; else None."""
    rule = None if eqn.primitive.name in _primitives.CONTRACTIONS else rows_of(eqn)
    return rule if rule is not None and rule.combine is None else None


def of_rows(eqn, rule: Rows, operands: Sequence[Any], rows: int) -> Any:
    """Makes the equation for some rows of its results, from operands that have these rows."""
    has_rows = rule.combine is None
    outvars = [rows_var(v, rows) if has_rows else _jaxprs.fresh_var(v) for v in eqn.outvars]
    params = eqn.params if rule.params is None else rule.params(rows)
    return eqn.replace(invars=list(operands), outvars=outvars, params=params)


def with_rows(aval: Any, rows: int) -> Any:
    """Gives the type of an array with another number of rows."""
    return aval.update(shape=(rows, *aval.shape[1:]))


def rows_var(var: Any, rows: int) -> Any:
    """Makes a new variable of the same type, but for the number of rows."""
    return jex.Var(with_rows(var.aval, rows))


def num_rows(atom) -> int:
    """Gives the size of the first axis; -1 for a scalar."""
    shape = getattr(atom.aval, "shape", ())
    return shape[0] if shape else -1


# ---- rules --------------------------------------------------------------------------------------


def _same(eqn) -> Rows:
    """Makes the rule that all arrays but scalars have the rows."""
    return Rows(tuple(num_rows(v) >= 0 for v in eqn.invars))


def _elementwise(eqn) -> Rows | None:
    """Makes the rule that all operands but scalars, and those of one row for all, have the rows."""
    rows = num_rows(eqn.outvars[0])
    sizes = [num_rows(v) for v in eqn.invars]
    if rows < 0 or any(n not in (rows, 1, -1) for n in sizes):
        return None
    return Rows(tuple(n == rows for n in sizes))


def _leading(eqn) -> Rows | None:
    """Makes the rule of an equation that adds or takes away last axes, such as bits of keys."""
    return _same(eqn) if num_rows(eqn.invars[0]) == num_rows(eqn.outvars[0]) >= 0 else None


def _along(parameter: str) -> Callable[[Any], Rows | None]:
    """Makes the rules of equations along the axes of a parameter: row by row unless 0 is one."""

    def rule(eqn) -> Rows | None:
        axes = eqn.params[parameter]
        axes = axes if isinstance(axes, Sequence) else (axes,)
        return None if 0 in axes or num_rows(eqn.outvars[0]) < 0 else _same(eqn)

    return rule


def _reduction(combine: Callable[[Any, Any], Any]) -> Callable[[Any], Rows]:
    def rule(eqn) -> Rows:
        if 0 in eqn.params["axes"]:
            return Rows((True,), combine=combine)
        return _same(eqn)

    return rule


def _with_shape(eqn, parameter: str, operands: tuple[bool, ...]) -> Rows:
    shape = eqn.params[parameter]
    return Rows(operands, lambda n: {**eqn.params, parameter: (n, *shape[1:])})


def _broadcast_in_dim(eqn) -> Rows | None:
    operand, shape = eqn.invars[0], eqn.params["shape"]
    if not shape:
        return None
    dims = eqn.params["broadcast_dimensions"]
    kept = bool(dims) and dims[0] == 0 and num_rows(operand) == shape[0]
    return _with_shape(eqn, "shape", (kept, *(False for _ in eqn.invars[1:])))


def _iota(eqn) -> Rows | None:
    return _with_shape(eqn, "shape", ()) if eqn.params["dimension"] != 0 else None


def _reshape(eqn) -> Rows | None:
    operand, result = eqn.invars[0], eqn.outvars[0]
    if eqn.params.get("dimensions") is not None or num_rows(operand) < 0:
        return None
    return _with_shape(eqn, "new_sizes", (True,)) if num_rows(operand) == num_rows(result) else None


def _matrices(eqn) -> Rows | None:
    return _same(eqn) if all(v.aval.ndim > 2 for v in eqn.invars) else None


def _transpose(eqn) -> Rows | None:
    permutation = eqn.params["permutation"]
    return _same(eqn) if permutation and permutation[0] == 0 else None


def _slice(eqn) -> Rows | None:
    interval = slice_interval(eqn)
    if interval != (0, num_rows(eqn.invars[0])):
        return None
    return _with_shape(eqn, "limit_indices", (True,))


def _pad(eqn) -> Rows | None:
    config = eqn.params["padding_config"]
    return Rows((True, False)) if config and not any(config[0]) else None


def _dot_general(eqn) -> Rows | None:
    (left, right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    if batch_left:
        return _same(eqn) if (batch_left[0], batch_right[0]) == (0, 0) else None
    if (0, 0) in zip(left, right, strict=True):
        return Rows((True, True), combine=jax.lax.add)
    if 0 not in left and num_rows(eqn.invars[0]) >= 0:
        return Rows((True, False))
    return None


def _scan(eqn) -> Rows | None:
    """Makes the rule of a scan without carries, each iteration of which makes its own row."""
    num_consts, num_carry = _compat.scan_parts(eqn)
    operands = tuple(i >= num_consts for i in range(len(eqn.invars)))
    return None if num_carry else Rows(operands, lambda n: scan_params(eqn, n))


def scanned(eqn) -> list[Any]:
    """Gives the operands and results that a `scan` reads and makes row by row."""
    if eqn.primitive.name != "scan":
        return []
    num_consts, num_carry = _compat.scan_parts(eqn)
    return [*eqn.invars[num_consts + num_carry :], *eqn.outvars[num_carry:]]


def scan_params(eqn, length: int) -> dict[str, Any]:
    """Gives the parameters of a `scan` for another number of iterations."""
    return {**eqn.params, "length": length, "unroll": min(eqn.params["unroll"], length)}


_ALONG_AXIS = "cumlogsumexp cummax cummin cumprod cumsum split unstack".split()
_LEADING = "bitcast_convert_type random_bits random_split random_unwrap random_wrap".split()

_RULES: dict[str, Callable[[Any], Rows | None]] = {
    **dict.fromkeys(_primitives.ELEMENTWISE, _elementwise),
    **dict.fromkeys(("argmax", "argmin"), _along("axes")),
    **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    **dict.fromkeys(("rev", "squeeze"), _along("dimensions")),
    **dict.fromkeys(_ALONG_AXIS, _along("axis")),
    **dict.fromkeys(_LEADING, _leading),
    "broadcast_in_dim": _broadcast_in_dim,
    "dot_general": _dot_general,
    "iota": _iota,
    "pad": _pad,
    "qr": _matrices,
    "reduce_and": _reduction(jax.lax.bitwise_and),
    "reduce_max": _reduction(jax.lax.max),
    "reduce_min": _reduction(jax.lax.min),
    "reduce_or": _reduction(jax.lax.bitwise_or),
    "reduce_prod": _reduction(jax.lax.mul),
    "reduce_sum": _reduction(jax.lax.add),
    "reshape": _reshape,
    "scan": _scan,
    "slice": _slice,
    "transpose": _transpose,
}

# ---- slices, pads and concatenations of rows ----------------------------------------------------


def slice_interval(eqn) -> tuple[int, int] | None:
    """Gives the rows that a `slice` takes; None for another equation, or one that skips rows."""
    if eqn.primitive.name != "slice" or num_rows(eqn.invars[0]) < 0:
        return None
    if eqn.params["strides"] and eqn.params["strides"][0] != 1:
        return None
    return int(eqn.params["start_indices"][0]), int(eqn.params["limit_indices"][0])


def takes_some_rows(eqn) -> bool:
    """Tells whether an equation is a `slice` that takes some rows, and not all."""
    interval = slice_interval(eqn)
    return interval is not None and interval != (0, num_rows(eqn.invars[0]))


def slice_columns(eqn, rows: Any) -> Any | None:
    """Makes the `slice` of the columns of rows that have been taken; None if it takes them all."""
    if rows.aval.shape[1:] == eqn.outvars[0].aval.shape[1:]:
        return None
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    params = {
        **eqn.params,
        "start_indices": (0, *starts[1:]),
        "limit_indices": (num_rows(rows), *limits[1:]),
    }
    own = rows_var(eqn.outvars[0], num_rows(rows))
    return eqn.replace(invars=[rows], outvars=[own], params=params)


def pad_interval(eqn) -> tuple[int, int] | None:
    """Gives the rows of the result of a `pad` with zeros that hold its operand, or None."""
    if eqn.primitive.name != "pad":
        return None
    config, value = eqn.params["padding_config"], eqn.invars[1]
    if not config or any(any(c) for c in config[1:]) or config[0][2] or min(config[0][:2]) < 0:
        return None
    if not (_jaxprs.is_literal(value) and value.val == 0):
        return None
    low = int(config[0][0])
    return low, low + num_rows(eqn.invars[0])


def concatenation_intervals(eqn) -> list[tuple[int, int]] | None:
    """Gives the rows of each operand of a `concatenate` of rows; None for another equation."""
    if eqn.primitive.name != "concatenate" or eqn.params["dimension"] != 0:
        return None
    stops = list(itertools.accumulate(map(num_rows, eqn.invars)))
    return list(zip([0, *stops], stops, strict=False))


def pieces(
    operands: Iterable[tuple[tuple[int, int], Any]], low: int, high: int
) -> Iterator[tuple[Any, int, int]]:
    """Finds what rows of an array consist of.

    Args:
        operands: what the array consists of, each with its rows in the array; zeros elsewhere.
        low: the first of the rows wanted.
        high: the end of the rows wanted.

    Yields:
        An operand, or None for zeros, and the rows wanted of it.

    Example:
        >>> list(pieces([((0, 2), "a"), ((2, 5), "b")], 1, 6))
        [('a', 1, 2), ('b', 0, 3), (None, 0, 1)]
    """
    for (start, stop), operand in operands:
        first, end = max(start, low), min(stop, high)
        if first < end:
            if low < first:
                yield None, 0, first - low
            yield operand, first - start, end - start
            low = end
    if low < high:
        yield None, 0, high - low


def slice_rows(source: Any, array: Any, low: int, high: int) -> Any:
    """Makes an equation that takes rows, with the names and source line of another one, if any."""
    columns = array.aval.shape[1:]
    params = {
        "start_indices": (low, *(0 for _ in columns)),
        "limit_indices": (high, *columns),
        "strides": None,
    }
    return _equation(source, [array], rows_var(array, high - low), jax.lax.slice_p, params)


def join(source: Any, parts: Sequence[Any], var: Any) -> Any:
    """Makes an equation that concatenates rows of a variable, likewise."""
    rows = sum(map(num_rows, parts))
    return _equation(source, parts, rows_var(var, rows), jax.lax.concatenate_p, {"dimension": 0})


def _equation(source: Any, invars: Sequence[Any], result: Any, primitive, params: dict) -> Any:
    eqn = jex.new_jaxpr_eqn(list(invars), [result], primitive, params, set())
    return eqn if source is None else eqn.replace(source_info=source.source_info)


def literal_rows(literal: Any, low: int, high: int) -> Any:
    """Makes a literal of rows of a literal."""
    x = literal.val
    with jax.ensure_compile_time_eval():  # so that it is an array even where JAX traces
        rows = jax.lax.slice_in_dim(x, low, high) if isinstance(x, jax.Array) else x[low:high]
    return _jaxprs.literal(rows, with_rows(literal.aval, high - low))


def zeros(aval: Any, rows: int) -> Any:
    """Makes rows of zeros."""
    return jnp.zeros((rows, *aval.shape[1:]), aval.dtype)
