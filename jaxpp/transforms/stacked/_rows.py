"""Rules for how equations treat the rows of arrays, which lie along the first axis.

A parameter that is stacked over layers is in parts, each of some rows. An equation that treats each
row apart, as elementwise ones do, runs part by part.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
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

    `operands` and `results` tell which of its arrays have the rows; the others are whole. `params`
    gives the equation's parameters for a number of rows; None if they are the same for any. If
    `combine` is given, the results are whole, and `combine` makes them of the results of parts.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    params: Callable[[int], dict[str, Any]] | None = None
    combine: Callable[[Any, Any], Any] | None = None

    def members(self, eqn) -> list[Any]:
        """Gives the variables of the equation that have the rows."""
        flags = zip([*eqn.invars, *eqn.outvars], [*self.operands, *self.results], strict=True)
        return _jaxprs.variables(v for v, has_rows in flags if has_rows)


def rows_of(eqn) -> Rows | None:
    """Gives the rule of an equation; None where all rows have to be in one place."""
    name = eqn.primitive.name
    if name in _primitives.ELEMENTWISE:
        return _elementwise(eqn)
    rule = _RULES.get(name)
    return rule(eqn) if rule is not None else None


def row_by_row(eqn) -> Rows | None:
    """Gives the rule of an equation if no row's bits depend on the number of rows; else None."""
    rule = None if eqn.primitive.name in _primitives.CONTRACTIONS else rows_of(eqn)
    return rule if rule is not None and rule.combine is None else None


def of_rows(eqn, rule: Rows, operands: Sequence[Any], rows: int) -> Any:
    """Makes the equation for some rows of its results, from operands that have these rows."""
    outvars = [
        jex.Var(with_rows(v.aval, rows) if has_rows else v.aval)
        for v, has_rows in zip(eqn.outvars, rule.results, strict=True)
    ]
    params = eqn.params if rule.params is None else rule.params(rows)
    return eqn.replace(invars=list(operands), outvars=outvars, params=params)


def with_rows(aval: Any, rows: int) -> Any:
    """Gives the type of an array with another number of rows."""
    return aval.update(shape=(rows, *aval.shape[1:]))


def num_rows(atom) -> int:
    """Gives the size of the first axis; -1 for a scalar."""
    shape = getattr(atom.aval, "shape", ())
    return shape[0] if shape else -1


# ---- rules --------------------------------------------------------------------------------------


def _same(eqn) -> Rows:
    """Makes the rule that all arrays but scalars have the rows."""
    return Rows(
        tuple(num_rows(v) >= 0 for v in eqn.invars), tuple(num_rows(v) >= 0 for v in eqn.outvars)
    )


def _elementwise(eqn) -> Rows | None:
    """Makes the rule that all operands but scalars, and those of one row for all, have the rows."""
    rows = num_rows(eqn.outvars[0])
    sizes = [num_rows(v) for v in eqn.invars]
    if rows < 0 or any(n not in (rows, 1, -1) for n in sizes):
        return None
    return Rows(tuple(n == rows for n in sizes), tuple(True for _ in eqn.outvars))


def _keys(eqn) -> Rows | None:
    """Makes the rule of an equation that makes rows of keys, or keys of rows."""
    return _same(eqn) if num_rows(eqn.invars[0]) == num_rows(eqn.outvars[0]) >= 0 else None


def _data_of_keys(eqn) -> Rows | None:
    return _same(eqn) if min(eqn.invars[0].aval.ndim, eqn.outvars[0].aval.ndim) > 0 else None


def _first_operand(eqn) -> Rows:
    return Rows(
        tuple(i == 0 for i in range(len(eqn.invars))), tuple(True for _ in eqn.outvars)
    )  # fmt: skip


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
            return Rows((True,), (False,), combine=combine)
        return _same(eqn)

    return rule


def _with_shape(eqn, parameter: str, operands: tuple[bool, ...]) -> Rows:
    shape = eqn.params[parameter]
    return Rows(operands, (True,), lambda n: {**eqn.params, parameter: (n, *shape[1:])})


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
    limits = eqn.params["limit_indices"]
    return Rows((True,), (True,), lambda n: {**eqn.params, "limit_indices": (n, *limits[1:])})


def _pad(eqn) -> Rows | None:
    config = eqn.params["padding_config"]
    return Rows((True, False), (True,)) if config and not any(config[0]) else None


def _dot_general(eqn) -> Rows | None:
    (left, right), (batch_left, batch_right) = eqn.params["dimension_numbers"]
    if batch_left:
        return _same(eqn) if (batch_left[0], batch_right[0]) == (0, 0) else None
    if (0, 0) in zip(left, right, strict=True):
        return Rows((True, True), (False,), combine=jax.lax.add)
    if 0 not in left and num_rows(eqn.invars[0]) >= 0:
        return Rows((True, False), (True,))
    return None


_RULES: dict[str, Callable[[Any], Rows | None]] = {
    "argmax": _along("axes"),
    "argmin": _along("axes"),
    "bitcast_convert_type": _data_of_keys,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _along("dimension"),
    "cumlogsumexp": _along("axis"),
    "cummax": _along("axis"),
    "cummin": _along("axis"),
    "cumprod": _along("axis"),
    "cumsum": _along("axis"),
    "dot_general": _dot_general,
    "iota": _iota,
    "pad": _pad,
    "qr": _matrices,
    "random_bits": _keys,
    "random_split": _keys,
    "random_unwrap": _data_of_keys,
    "random_wrap": _data_of_keys,
    "reduce_and": _reduction(jax.lax.bitwise_and),
    "reduce_max": _reduction(jax.lax.max),
    "reduce_min": _reduction(jax.lax.min),
    "reduce_or": _reduction(jax.lax.bitwise_or),
    "reduce_prod": _reduction(jax.lax.mul),
    "reduce_sum": _reduction(jax.lax.add),
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "squeeze": _along("dimensions"),
    "transpose": _transpose,
    "unstack": _along("axis"),
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


def slice_of_rows(eqn, rows: Any, result: Any) -> Any | None:
    """Makes the `slice` of the columns of rows that have been taken; None if it takes them all."""
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    if rows.aval.shape == result.aval.shape:
        return None
    params = {
        **eqn.params,
        "start_indices": (0, *starts[1:]),
        "limit_indices": (num_rows(rows), *limits[1:]),
    }
    return eqn.replace(invars=[rows], outvars=[result], params=params)


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
    intervals, start = [], 0
    for v in eqn.invars:
        intervals.append((start, start + num_rows(v)))
        start += num_rows(v)
    return intervals


# ---- arrays that have the same parts ------------------------------------------------------------


class Classes:
    """The variables in classes; equations join those of a class, so their rows are cut alike."""

    def __init__(self, eqns: Sequence[Any], pairs: Iterable[tuple[Any, Any]] = ()):
        self._above: dict[Any, Any] = {}
        self.rules: list[Rows | None] = [rows_of(e) for e in eqns]
        for eqn, rule in zip(eqns, self.rules, strict=True):
            self._join(_jaxprs.variables(scanned(eqn)) if rule is None else rule.members(eqn))
        for pair in pairs:
            if len({v.aval.shape for v in pair}) == 1 and num_rows(pair[0]) >= 0:
                self._join(_jaxprs.variables(pair))

    def _join(self, members: Sequence[Any]) -> None:
        for v in members[1:]:
            first, other = self.of(members[0]), self.of(v)
            if first is not other:
                self._above[other] = first

    def of(self, var) -> Any:
        """Gives the variable that stands for the class of a variable."""
        path = []
        while var in self._above:
            path.append(var)
            var = self._above[var]
        for v in path:
            self._above[v] = var
        return var


def scanned(eqn) -> list[Any]:
    """Gives the operands and results that a `scan` reads and makes row by row."""
    if eqn.primitive.name != "scan":
        return []
    num_consts, num_carry = _compat.scan_parts(eqn)
    return [*eqn.invars[num_consts + num_carry :], *eqn.outvars[num_carry:]]


def slice_rows(x: Any, start: int, stop: int) -> Any:
    """Takes rows of an array of NumPy or JAX."""
    return jax.lax.slice_in_dim(x, start, stop) if isinstance(x, jax.Array) else x[start:stop]


def zeros(aval: Any, rows: int) -> Any:
    """Makes rows of zeros."""
    return jnp.zeros((rows, *aval.shape[1:]), aval.dtype)
