"""Operations that make each row of their result of the same rows of their operands."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp.certification._table import Op, Term

#: For an operation with its parameters and its operands: whether each operand has the rows of the
#: result, or serves all of them; None if the operation is not one of rows.
_Rule = Callable[[Mapping[str, Any], Sequence[Term]], Sequence[bool] | None]


#: The key of the size of a slice that has all of a dimension.
ALL = "all"


def operands_with_rows(op: Op, args: Sequence[Term]) -> Sequence[bool] | None:
    """Tells which operands have the rows of the result; None for an operation on whole arrays."""
    rule = _RULES.get(op.name)
    if rule is None or not op.shape:
        return None
    found = rule(dict(op.params), args)
    if found is None:
        return None
    fits = all(a.shape[:1] == op.shape[:1] for a, own in zip(args, found, strict=True) if own)
    return found if fits and any(found) else None


def _number(key: Any) -> int:
    """The number that the key of a parameter stands for."""
    return int(key[1])


def _numbers(key: Any) -> list[int]:
    return [_number(k) for k in key]


def _all_if(is_apart: Callable[[Mapping[str, Any]], bool]) -> _Rule:
    """Each operand has the rows, if the parameters do not say that rows are mixed."""
    return lambda params, args: [True] * len(args) if is_apart(params) else None


def _of_matrices(dimensions: int) -> _Rule:
    """An operation on stacks of arrays with that many dimensions, or more."""
    return lambda params, args: [True] * len(args) if len(args[0].shape) > dimensions else None


def _of_dot(params: Mapping[str, Any], args: Sequence[Term]) -> Sequence[bool] | None:
    (contracted, _), (left, right) = params["dimension_numbers"]
    if not left and 0 not in _numbers(contracted):
        return [True, False]
    return [True, True] if [_numbers(own)[:1] for own in (left, right)] == [[0], [0]] else None


def _of_pad(params: Mapping[str, Any], args: Sequence[Term]) -> Sequence[bool] | None:
    return [True, False] if not any(_numbers(params["padding_config"][0])) else None


def _of_keys(params: Mapping[str, Any], args: Sequence[Term]) -> Sequence[bool] | None:
    """An operation on random keys: other implementations than Threefry mix those of an array."""
    return [True] * len(args) if args[0].shape and args[0].dtype == "key<fry>" else None


def _of_gather(params: Mapping[str, Any], args: Sequence[Term]) -> Sequence[bool] | None:
    """An index in each row, or the same in all of them; a size that is all is `ALL`."""
    offset, collapsed, indexed, *batch = map(_numbers, params["dimension_numbers"])
    if (0, 0) in zip(*batch, strict=True):
        return [True, True] if 0 not in offset else None
    apart = offset[:1] == [0] and not {0} & {*collapsed, *indexed, *batch[0]}
    return [True, False] if apart and params["slice_sizes"][0] == ALL else None


def _of_scatter(params: Mapping[str, Any], args: Sequence[Term]) -> Sequence[bool] | None:
    window, inserted, indexed, *batch = map(_numbers, params["dimension_numbers"])
    if (0, 0) in zip(*batch, strict=True):
        return [True, True, True] if 0 not in window else None
    apart = window[:1] == [0] and not {0} & {*inserted, *indexed, *batch[0]}
    return [True, False, True] if apart and args[2].shape[0] == args[0].shape[0] else None


def _along(name: str) -> _Rule:
    """An operation along one dimension, or several, that are named by a parameter."""

    def is_apart(params):
        key = params[name]
        return 0 not in (_numbers(key) if isinstance(key[0], tuple) else [_number(key)])

    return _all_if(is_apart)


_RULES: dict[str, _Rule] = {
    "argmax": _along("axes"),
    "argmin": _along("axes"),
    "concatenate": _along("dimension"),
    "dot_general": _of_dot,
    "fft": lambda params, args: [True] if len(params["fft_lengths"]) < len(args[0].shape) else None,
    "gather": _of_gather,
    "pad": _of_pad,
    "reduce_prod": _along("axes"),
    "reduce_xor": _along("axes"),
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
    "split": _along("axis"),
    "top_k": lambda params, args: (
        [True] if len(args[0].shape) > 1 and _number(params.get("axis", (int, "-1"))) != 0 else None
    ),
    **dict.fromkeys("cumlogsumexp cummax cummin cumprod cumsum".split(), _along("axis")),
    **dict.fromkeys(
        """
        cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd triangular_solve
        tridiagonal tridiagonal_solve
        """.split(),
        _of_matrices(2),
    ),
    **dict.fromkeys(
        "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub".split(), _of_scatter
    ),
    **dict.fromkeys("lu_pivots_to_permutation random_wrap".split(), _of_matrices(1)),
    **dict.fromkeys("random_bits random_gamma random_split".split(), _of_keys),
    "random_unwrap": _of_matrices(0),
}
