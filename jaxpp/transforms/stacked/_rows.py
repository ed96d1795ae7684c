"""Rules for how equations treat the rows of arrays, which lie along the first axis.

A parameter that is stacked over layers is in parts, each of some rows. An equation that treats each
row apart, as elementwise ones do, runs part by part. There is one rule for each kind of primitive,
for all that take rows: the slices of a cut scan, of an initialiser, and of a step.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _compat, _specs, jaxprs
from jaxpp.jaxprs import Atom, Aval, Eqn, Jaxpr, Literal, Var, primitives

#: The starts of the parts of an array along its first axis, and its size at the end: `(0, 2, 4)`.
Bounds = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rule of an equation that runs part by part.

    `operands` tells which of its operands have the rows; the others are whole. `params` gives the
    equation's parameters for a number of rows; None if they are the same for any. `results` tells
    which of its results have the rows; None for all. If `combine` is given, none has: it makes
    whole results of those of the parts.
    """

    operands: tuple[bool, ...]
    params: Callable[[int], dict[str, Any]] | None = None
    combine: Callable[[Any, Any], Any] | None = None
    results: tuple[bool, ...] | None = None

    def having(self, operands: Sequence[Atom]) -> list[Atom]:
        """Returns those operands that have the rows."""
        return list(itertools.compress(operands, self.operands))

    def results_with_rows(self, results: Sequence[Var]) -> list[tuple[Var, bool]]:
        """Returns the results, each with whether it has the rows."""
        flags = self.results or (self.combine is None,) * len(results)
        return list(zip(results, flags, strict=True))

    def members(self, eqn: Eqn) -> list[Var]:
        """Returns the variables of the equation that have the rows."""
        results = [v for v, has_rows in self.results_with_rows(eqn.outvars) if has_rows]
        return jaxprs.variables([*self.having(eqn.invars), *results])


def of_rows(eqn: Eqn, rule: Rows, operands: Sequence[Atom], rows: int) -> Eqn:
    """Makes the equation for some rows of its results, from operands that have these rows."""
    results = rule.results_with_rows(eqn.outvars)
    outvars = [rows_var(v, rows) if has_rows else jaxprs.fresh_var(v) for v, has_rows in results]
    params = eqn.params if rule.params is None else rule.params(rows)
    return eqn.replace(invars=list(operands), outvars=outvars, params=params)


def with_rows(aval: Aval, rows: int) -> Aval:
    """Returns the type of an array with another number of rows."""
    return aval.update(shape=(rows, *aval.shape[1:]))


def rows_var(var: Atom, rows: int) -> Var:
    """Makes a new variable of the same type, but for the number of rows."""
    return Var(with_rows(var.aval, rows))


def part_vars(var: Var, bounds: Bounds) -> list[Var]:
    """Makes a variable for each part of one that is cut."""
    return [rows_var(var, high - low) for low, high in itertools.pairwise(bounds)]


def num_rows(atom: Atom) -> int:
    """Returns the size of the first axis; -1 for a scalar."""
    shape = getattr(atom.aval, "shape", ())
    return shape[0] if shape else -1


# ---- rules --------------------------------------------------------------------------------------

#: They find the first dimension again, but each row of the results depends on several rows: by the
#: parameter that has the axes along which they do so.
_MIXES = {
    **dict.fromkeys("cumlogsumexp cummax cummin cumprod cumsum split".split(), "axis"),
    **dict.fromkeys(("concatenate", "sort"), "dimension"),
    "rev": "dimensions",
}
#: Combines the results of parts where rows are summed, or reduced in another way.
_COMBINES: dict[str, Callable[[Any, Any], Any]] = {
    "dot_general": jax.lax.add,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_or": jax.lax.bitwise_or,
    "reduce_prod": jax.lax.mul,
    "reduce_sum": jax.lax.add,
}
#: The parameter that has the shape of the results.
_SHAPES = {
    "broadcast_in_dim": "shape",
    "iota": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
}
#: Those that run on some rows as they run on all.
_BY_ROWS = (
    primitives.ELEMENTWISE | _MIXES.keys() | _COMBINES.keys() | _SHAPES.keys()
    | frozenset("argmax argmin bitcast_convert_type pad squeeze transpose unstack".split())
    | frozenset("random_bits random_split random_unwrap random_wrap".split())
)  # fmt: skip


def from_dimensions(eqn: Eqn) -> Rows | None:
    """Makes the rule of an equation whose operands have the first dimension of its results."""
    name = eqn.primitive.name
    if name in _SEVERAL:
        has_rows = _SEVERAL[name](eqn, [getattr(v.aval, "shape", ()) for v in eqn.invars])
        sized = "slice_sizes" in eqn.params and has_rows is not None and not all(has_rows[:2])
        params = functools.partial(_with_shape, eqn, "slice_sizes") if sized else None
        return None if has_rows is None else Rows(has_rows, params)
    at = _rows_at(eqn) if name in _BY_ROWS else None
    if at is None or _mixes_rows(eqn):
        return None
    has_rows, gives_rows = tuple(n == 0 for n in at), num_rows(eqn.outvars[0]) >= 0
    if gives_rows and (any(has_rows) or name in _SHAPES) and not any(at):
        shape = _SHAPES.get(name)
        return Rows(has_rows, functools.partial(_with_shape, eqn, shape) if shape else None)
    if name in _COMBINES and any({*pair} == {0} for pair in zip(*_summed(eqn), strict=True)):
        return Rows((True,) * len(at), combine=_COMBINES[name])
    return None


def _rows_at(eqn: Eqn) -> Sequence[int | None] | None:
    """Finds for each operand which of its dimensions is the rows of the results, if one is.

    It is None as a whole for an equation whose results have their rows from nothing else.
    """
    name, params, rows = eqn.primitive.name, eqn.params, num_rows(eqn.outvars[0])
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    if name == "iota":
        return [] if params["dimension"] else None
    if name == "reshape":
        keeps = params.get("dimensions") is None and num_rows(eqn.invars[0]) == rows >= 0
        return [0] if keeps else None
    if name == "dot_general" and params["dimension_numbers"][1][0]:  # a batch of products
        return [dims[0] for dims in params["dimension_numbers"][1]]
    if name in _COMBINES or name in ("argmax", "argmin", "squeeze", "unstack"):
        pairs = zip(shapes, _summed(eqn), strict=True)
        first, *others = [
            next((n for n in range(len(shape)) if n not in axes), None) for shape, axes in pairs
        ]
        return [first, *(n if first is None else None for n in others)]
    if name == "transpose":
        return [*params["permutation"][:1]]
    if name == "broadcast_in_dim" and params["broadcast_dimensions"][:1] != (0,):
        return [None] * len(shapes)
    if name in _MIXES or name in ("pad", "slice"):  # of perhaps another size
        return [0 if shape else None for shape in shapes]
    return [0 if shape[:1] == (rows,) else None for shape in shapes]


def _summed(eqn: Eqn) -> Sequence[Sequence[int]]:
    """Returns for each operand the dimensions that the results do not have."""
    params = eqn.params
    if eqn.primitive.name == "dot_general":
        return params["dimension_numbers"][0]
    if eqn.primitive.name == "unstack":
        return [(params["axis"],)]
    return [params["axes" if "axes" in params else "dimensions"]]


def _mixes_rows(eqn: Eqn) -> bool:
    """Tells whether an equation moves elements between rows."""
    name = eqn.primitive.name
    if name == "slice":
        return slice_interval(eqn) != (0, num_rows(eqn.invars[0]))
    if name == "pad":
        return not eqn.params["padding_config"] or any(eqn.params["padding_config"][0])
    axes = eqn.params[_MIXES[name]] if name in _MIXES else ()
    return 0 in (axes if isinstance(axes, Sequence) else (axes,))


def _with_shape(eqn: Eqn, parameter: str, rows: int) -> dict[str, Any]:
    return {**eqn.params, parameter: (rows, *eqn.params[parameter][1:])}


# ---- rules of what is batched over rows, or indexed in each of them -----------------------------

_Flags = tuple[bool, ...] | None


def _batched(num_dims: int) -> Callable[[Eqn, list[tuple[int, ...]]], _Flags]:
    """Makes the rule of an operation on arrays of some dimensions, and on stacks of such."""
    return lambda eqn, shapes: (True,) * len(shapes) if len(shapes[0]) > num_dims else None


def _dynamic_slice(eqn: Eqn, shapes: list[tuple[int, ...]]) -> _Flags:
    (array, *indices), sizes = shapes, eqn.params["slice_sizes"]
    return (True, *(False for _ in indices)) if array[:1] == tuple(sizes[:1]) else None


def _dynamic_update_slice(eqn: Eqn, shapes: list[tuple[int, ...]]) -> _Flags:
    array, update, *indices = shapes
    return (True, True, *(False for _ in indices)) if array[:1] == update[:1] else None


def _gather(eqn: Eqn, shapes: list[tuple[int, ...]]) -> _Flags:
    numbers, (array, _) = eqn.params["dimension_numbers"], shapes
    batch = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    if batch.get(0) == 0 and 0 not in numbers.offset_dims:
        return True, True
    is_window = numbers.offset_dims[:1] == (0,) and 0 not in numbers.collapsed_slice_dims
    is_whole = tuple(eqn.params["slice_sizes"][:1]) == array[:1] and 0 not in batch
    return (True, False) if is_window and is_whole and 0 not in numbers.start_index_map else None


def _scatter(eqn: Eqn, shapes: list[tuple[int, ...]]) -> _Flags:
    numbers, (array, _, updates) = eqn.params["dimension_numbers"], shapes
    batch = dict(
        zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    )
    if batch.get(0) == 0 and 0 not in numbers.update_window_dims:
        return True, True, True
    is_window = numbers.update_window_dims[:1] == (0,) and 0 not in numbers.inserted_window_dims
    is_whole = updates[:1] == array[:1] and 0 not in batch
    indexed = numbers.scatter_dims_to_operand_dims
    return (True, False, True) if is_window and is_whole and 0 not in indexed else None


def _top_k(eqn: Eqn, shapes: list[tuple[int, ...]]) -> _Flags:
    return (True,) if eqn.params.get("axis", -1) % len(shapes[0]) else None


_MATRICES = """
    cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd triangular_solve
    tridiagonal
""".split()
_SCATTERS = "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub".split()
#: For operations of several dimensions, by their names: which operands have the rows of the
#: results, by the shapes of the operands.
_SEVERAL: dict[str, Callable[[Eqn, list[tuple[int, ...]]], _Flags]] = {
    **dict.fromkeys(_MATRICES, _batched(2)),
    **dict.fromkeys(("lu_pivots_to_permutation", "tridiagonal_solve"), _batched(1)),
    **dict.fromkeys(_SCATTERS, _scatter),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "fft": lambda eqn, shapes: _batched(len(eqn.params["fft_lengths"]))(eqn, shapes),
    "gather": _gather,
    "top_k": _top_k,
}


# ---- slices, pads and concatenations of rows ----------------------------------------------------


def slice_interval(eqn: Eqn) -> tuple[int, int] | None:
    """Returns the rows that a `slice` takes; None for another equation, or one that skips rows."""
    if eqn.primitive.name != "slice" or num_rows(eqn.invars[0]) < 0:
        return None
    if eqn.params["strides"] and eqn.params["strides"][0] != 1:
        return None
    return int(eqn.params["start_indices"][0]), int(eqn.params["limit_indices"][0])


def takes_some_rows(eqn: Eqn) -> bool:
    """Tells whether an equation is a `slice` that takes some rows, and not all."""
    interval = slice_interval(eqn)
    return interval is not None and interval != (0, num_rows(eqn.invars[0]))


def slice_columns(eqn: Eqn, rows: Atom) -> Eqn | None:
    """Makes the `slice` of the columns of rows that have been taken; None if it takes them all."""
    if rows.aval.shape[1:] == eqn.outvars[0].aval.shape[1:]:
        return None
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    params = {
        **eqn.params,
        "start_indices": (0, *starts[1:]),
        "limit_indices": (num_rows(rows), *limits[1:]),
    }
    result = rows_var(eqn.outvars[0], num_rows(rows))
    return eqn.replace(invars=[rows], outvars=[result], params=params)


def pad_interval(eqn: Eqn) -> tuple[int, int] | None:
    """Returns the rows of the result of a `pad` with zeros that hold its operand, or None."""
    if eqn.primitive.name != "pad":
        return None
    config, value = eqn.params["padding_config"], eqn.invars[1]
    if not config or any(any(c) for c in config[1:]) or config[0][2] or min(config[0][:2]) < 0:
        return None
    if not (jaxprs.is_literal(value) and value.val == 0):
        return None
    low = int(config[0][0])
    return low, low + num_rows(eqn.invars[0])


def concatenation_intervals(eqn: Eqn) -> list[tuple[int, int]] | None:
    """Returns the rows of each operand of a `concatenate` of rows; None for another equation."""
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


def slice_rows(source: Eqn | None, array: Atom, low: int, high: int) -> Eqn:
    """Makes an equation that takes rows, with the names and source line of another one, if any."""
    columns = array.aval.shape[1:]
    params = {
        "start_indices": (low, *(0 for _ in columns)),
        "limit_indices": (high, *columns),
        "strides": None,
    }
    return _equation(source, [array], rows_var(array, high - low), jax.lax.slice_p, params)


def join(source: Eqn | None, parts: Sequence[Atom], var: Atom) -> Eqn:
    """Makes an equation that concatenates rows of a variable, likewise."""
    rows = sum(map(num_rows, parts))
    return _equation(source, parts, rows_var(var, rows), jax.lax.concatenate_p, {"dimension": 0})


def typed(source: Eqn | None, array: Atom, is_weak: bool) -> Eqn:
    """Makes an equation that gives an array a weak type, or a strong one, likewise."""
    params = {"new_dtype": array.aval.dtype, "weak_type": is_weak, "sharding": None}
    result = Var(array.aval.update(weak_type=is_weak))
    return _equation(source, [array], result, jax.lax.convert_element_type_p, params)


def _equation(
    source: Eqn | None, invars: Sequence[Atom], result: Var, primitive: jex.Primitive, params: dict
) -> Eqn:
    eqn: Any = jex.new_jaxpr_eqn(list(invars), [result], primitive, params, set())
    return eqn if source is None else eqn.replace(source_info=source.source_info)


def literal_rows(literal: Literal, low: int, high: int) -> Literal:
    """Makes a literal of rows of a literal."""
    x = literal.val
    with jax.ensure_compile_time_eval():  # so that it is an array even where JAX traces
        rows = jax.lax.slice_in_dim(x, low, high) if isinstance(x, jax.Array) else x[low:high]
    return jaxprs.literal(rows, with_rows(literal.aval, high - low))


def zeros(aval: Aval, rows: int) -> jax.Array:
    """Makes rows of zeros."""
    return _specs.filled(with_rows(aval, rows), 0)


# ---- scans over parts of the rows ----------------------------------------------------------------


def scanned(eqn: Eqn) -> list[Atom]:
    """Returns the operands and results that a `scan` reads and makes row by row."""
    if eqn.primitive.name != "scan":
        return []
    num_consts, num_carry = _compat.scan_parts(eqn)
    return [*eqn.invars[num_consts + num_carry :], *eqn.outvars[num_carry:]]


def scan_params(eqn: Eqn, length: int) -> dict[str, Any]:
    """Returns the parameters of a `scan` for another number of iterations."""
    return {**eqn.params, "length": length, "unroll": min(eqn.params["unroll"], length)}


def cut_scan(
    scan: Eqn, bounds: Sequence[int], whole: Sequence[Atom], slices: Sequence[Sequence[Atom]]
) -> tuple[list[Eqn], list[Atom], list[list[Var]]]:
    """Makes a scan for each part of the rows that a scan goes over.

    Args:
        scan: the equation.
        bounds: where the rows are cut.
        whole: the constants of each new scan, and the carries of the first.
        slices: for each part its rows of the xs.

    Returns:
        The new scans, in the order in which they run; the final carries, of which one that no
        iteration changes is as it was before the first; and the parts of each stacked result.
    """
    num_consts, num_carry = _compat.scan_parts(scan)
    body = scan.params["jaxpr"].jaxpr
    ends = zip(body.invars[num_consts : len(whole)], body.outvars[:num_carry], strict=True)
    changes = [_handed_on(body, out) is not inside for inside, out in ends]
    order = -1 if scan.params["reverse"] else 1
    consts, carry = whole[:num_consts], list(whole[num_consts:])
    scans = []
    for (low, high), xs in list(zip(itertools.pairwise(bounds), slices, strict=True))[::order]:
        results = [jaxprs.fresh_var(v) for v in scan.outvars[:num_carry]]
        results += [rows_var(v, high - low) for v in scan.outvars[num_carry:]]
        params = scan_params(scan, high - low)
        scans.append(scan.replace(invars=[*consts, *carry, *xs], outvars=results, params=params))
        flags = zip(carry, results, changes, strict=False)
        carry = [after if changed else before for before, after, changed in flags]
    stacks = zip(*(part.outvars[num_carry:] for part in scans[::order]), strict=True)
    return scans, carry, list(map(list, stacks))


def _handed_on(jaxpr: Jaxpr, atom: Atom) -> Atom:
    """Finds the atom that an atom of an open jaxpr is a copy of, through calls that hand it on."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    while not jaxprs.is_literal(atom) and atom in maker:
        eqn = maker[atom]
        body = None if eqn.primitive.name in primitives.CUSTOM_RULES else jaxprs.called_jaxpr(eqn)
        if body is None:
            break
        opened = jaxprs.opened(body)
        inner = _handed_on(opened, opened.outvars[eqn.outvars.index(atom)])
        if inner not in opened.invars:
            break
        atom = eqn.invars[opened.invars.index(inner)]
    return atom
