"""The outputs of a slice: the operator of each, and whether it fits."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from jaxpp import _jaxprs
from jaxpp._specs import type_of
from jaxpp.transforms.microbatch import _reductions
from jaxpp.transforms.microbatch._arguments import broadcast, is_none
from jaxpp.transforms.microbatch._slices import CARRY


def resolve_outputs(
    reduce: Any, dtype: Any, traced: _jaxprs.Traced, replicas: int = 1, merge: Any = None
) -> list[Any]:
    """Finds the operator of each array in the result, of its reduction and accumulator's dtype.

    With more than one of `replicas`, also how it merges their values.
    """
    paths = traced.output_paths()
    avals = [type_of(v.aval) for v in traced.jaxpr.jaxpr.outvars]
    outputs = traced.rebuild(avals)
    leaves = jtu.tree_leaves(outputs)

    def of_arrays(prefix: Any, what: str, is_leaf: Callable[[Any], bool]) -> list[Any]:
        named = broadcast(prefix, outputs, what, is_leaf)
        return [
            n for n, x in zip(named, leaves, strict=True) if isinstance(x, jax.ShapeDtypeStruct)
        ]

    named = of_arrays(reduce, "reduce", _is_reduction)
    dtypes = of_arrays(dtype, "accumulator_dtype", is_none)
    operators = [
        _reductions.accumulate_in(_reductions.resolve(r, p, x), d, x)
        for r, d, p, x in zip(named, dtypes, paths, avals, strict=True)
    ]
    if replicas == 1:
        return operators
    merges = of_arrays(merge, "merge", is_none)
    return list(map(_reductions.with_merge, operators, merges, paths, avals))


def _is_reduction(x: Any) -> bool:
    return x is None or isinstance(x, _reductions.Operator)


def check_carried(inputs: Sequence[tuple[str, Any]], operators, traced: _jaxprs.Traced) -> None:
    """Checks that a slice carries out the arrays that the next one takes."""
    outputs = [
        (path, v.aval)
        for path, op, v in zip(
            traced.output_paths(), operators, traced.jaxpr.jaxpr.outvars, strict=True
        )
        if isinstance(op, _reductions.Carry)
    ]
    if len(inputs) != len(outputs):
        raise ValueError(
            f"microbatch: in_axes carries {len(inputs)} arrays in, but reduce carries "
            f"{len(outputs)} out; what one microbatch carries out the next one takes, so give "
            f"{CARRY!r} in both for the same state."
        )
    for (path, x), (out_path, y) in zip(inputs, outputs, strict=True):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"microbatch: output{out_path} ({y.dtype}{list(y.shape)}) of a microbatch is "
                f"carried to args{path} ({x.dtype}{list(x.shape)}) of the next; give back what was "
                f"taken, with its shape and dtype."
            )


#: The reductions that give one value that all microbatches have; None is for what has no arrays.
_KEEPING = (None, "mean", "max", "last")


def check_static(reduce: Any, handed_on: Sequence[Any], traced: _jaxprs.Traced) -> None:
    """Checks the outputs that are no arrays: they are the same in each slice, and in the result.

    Raises:
        ValueError: if a number among them would be another one, reduced.
    """
    outputs = traced.rebuild(np.zeros(()) for _ in traced.jaxpr.jaxpr.outvars)
    given_back = []
    for (path, x), how in zip(
        jtu.tree_flatten_with_path(outputs)[0],
        broadcast(reduce, outputs, "reduce", _is_reduction),
        strict=True,
    ):
        if _jaxprs.is_array(x):
            continue
        if how == CARRY:
            given_back.append(x)
        elif isinstance(x, bool | int | float | complex) and how not in _KEEPING:
            raise ValueError(
                f"microbatch: output{jtu.keystr(path)} is {x!r}, a bool of Python or a number in "
                f"an Equinox module, which stays as it is, and has no {how!r}; return an array, "
                f"such as jnp.asarray({x!r})."
            )
    if len(handed_on) != len(given_back):
        raise ValueError(
            f"microbatch: {len(handed_on)} leaves that are no arrays are carried in, but "
            f"{len(given_back)} out; give them back as they were."
        )
    for x, y in zip(handed_on, given_back, strict=True):
        if not _is_same(x, y):
            raise ValueError(
                f"microbatch: {x!r} is carried in, and {y!r} out; they are no arrays, so that each "
                f"microbatch would get what the first one got. Give it back as it was, or carry an "
                f"array, such as jnp.asarray(0)."
            )


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and bool(x == y))
