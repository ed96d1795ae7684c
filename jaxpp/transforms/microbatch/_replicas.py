"""Replicas: each runs the loop over slices of its own, and what the loops give is combined once.

On one device it is a loop over the replicas, in order. The loop of a replica, and each combination
of the values of replicas, is a call with a name, by which `schedule` and `place` know them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import _specs
from jaxpp.transforms.microbatch import _reductions
from jaxpp.transforms.stages import call_merge, call_replica


def run_each(loop: Callable[..., Any], slices: Sequence[Any], replicas: int) -> Any:
    """Runs a loop for each replica.

    Args:
        loop: a function of slices, along the first axis of arrays; it gives a pytree.
        slices: those of all replicas: replica d has the d-th run of them.
        replicas: the number of replicas, which divides that of the slices.

    Returns:
        What the loop gives, its arrays with a new first axis of a row for each replica.
    """

    def one(_, own):
        return None, call_replica(loop, own)

    rows = [_by_replica(x, replicas) for x in slices]
    return jax.lax.scan(one, None, rows, length=replicas)[1]


def _by_replica(x: Any, replicas: int) -> Any:
    shape = (replicas, x.shape[0] // replicas, *x.shape[1:])
    split = _specs.in_type(x)
    if split is not None:
        split = _specs.partition_spec((split[0], (), *split[1:]))
    return jax.lax.reshape(x, shape, out_sharding=split)


def merged(operator: Any, rows: Any) -> Any:
    """Combines the values of the replicas, in order, as an operator says.

    Args:
        operator: the operator that made the values.
        rows: a pytree of arrays; the first axis has a row for each replica.
    """
    if isinstance(operator, _reductions.Custom):
        return call_merge(functools.partial(_folded, operator.merge), "other", (rows,))
    how = operator.merge if isinstance(operator, _reductions.Carry) else operator.name
    if callable(how):
        return call_merge(how, "other", (rows,))
    if how == "last":
        return call_merge(_last, "last", (rows,))
    if how == "max":
        return call_merge(_maximum, "max", (rows,))
    total = call_merge(_sum, "sum", (rows,))
    is_carried = isinstance(operator, _reductions.Carry)
    return (total / rows.shape[0]).astype(rows.dtype) if is_carried and how == "mean" else total


def _folded(combine: Any, rows: Any) -> Any:
    """Combines rows, the second with the first, the third with both, and so on."""
    count = jax.tree.leaves(rows)[0].shape[0]
    each = (jax.tree.map(lambda x, d=d: x[d], rows) for d in range(count))
    return functools.reduce(combine, each)


_sum, _maximum = (functools.partial(_folded, combine) for combine in (jnp.add, jnp.maximum))


def _last(rows: Any) -> Any:
    return rows[-1]


def in_order(rows: Any) -> Any:
    """Puts the slices of all replicas, which have a row each, along one axis."""
    return call_merge(_slices_in_order, "slices", (rows,))


def _slices_in_order(rows: Any) -> Any:
    shape = (rows.shape[0] * rows.shape[1], *rows.shape[2:])
    split = _specs.in_type(rows)
    if split is not None:
        split = _specs.partition_spec((split[0], *split[2:]))
    return jax.lax.reshape(rows, shape, out_sharding=split)
