"""Writes a loop of tasks as equations; each direction of its schedule has its own accumulators."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp import jaxprs, schedules
from jaxpp.jaxprs import Eqn
from jaxpp.transforms.tasks import _accumulators
from jaxpp.transforms.tasks._loop import ScheduledLoop, loop_p


def write(
    loop: ScheduledLoop, source: Eqn, join_rows: Callable[..., Any] | None = None
) -> list[Eqn]:
    """Writes a loop of tasks as equations: what is before it, its own, and what is after it.

    Each of several directions has accumulators of its own, and the results of these are joined.

    Args:
        loop: the loop.
        source: an equation whose source line is that of the loop's own.
        join_rows: makes a result with a row for each slice from those of the directions; None for
            what takes each row from its slice's direction.

    Raises:
        jaxpp.schedules.ScheduleError: if a value is carried through all microbatches in order,
            which a loop of two directions does not have.
    """
    before, operands = list(loop.before), []
    for v, direction in loop.operands:
        eqns, start = [], loop.outside[v]
        if direction:
            eqns, start = _accumulators.neutral(loop.folds.get(v), start)
        before += eqns
        operands.append(start)
    results, after = list(loop.outvars), []
    if loop.num_directions > 1:
        _check_unordered(loop)
        parts = [[jaxprs.fresh_var(v) for _ in range(loop.num_directions)] for v in results]
        joins = [
            _accumulators.folded(f) if f else first_of for f in map(loop.folds.get, loop.carries)
        ]
        joins += [join_rows or row_by_direction(loop)] * len(loop.ys)
        for terms, join, result in zip(parts, joins, results, strict=True):
            after += jaxprs.splice(join, terms, [result])
        results = list(itertools.chain(*parts))
    bind = functools.partial(loop_p.bind, **loop.params)
    return [*before, *jaxprs.splice(bind, operands, results, source), *after, *loop.after]


def _check_unordered(loop: ScheduledLoop) -> None:
    for (kind, stage), line in loop.ordered.items():
        raise schedules.ScheduleError(
            f"the schedule sends microbatches through the ranks in {loop.num_directions} "
            f"directions, but the loop carries a value{line} through {kind}[stage {stage}] from "
            f"each microbatch to the next in order; combine it by 'mean', 'sum', 'max', 'stack' or "
            f"'concat', or use a schedule of one direction."
        )


def first_of(first, *_):
    """Joins what is the same in all directions, as what no task changes is."""
    return first


def row_by_direction(loop: ScheduledLoop) -> Callable[..., Any]:
    """Returns the function that takes each microbatch's row from its direction's result.

    Where there are several replicas, it gives the rows of one after those of the other.
    """
    taken = loop.table.direction_of[::-1] if loop.reverse else loop.table.direction_of

    def join(*results):
        if loop.replicas > 1:
            results = [rows.reshape(-1, *rows.shape[2:]) for rows in results]
        first, *others = results
        for direction, rows in enumerate(others, 1):
            is_here = np.array(taken * loop.replicas) == direction
            first = jnp.where(is_here.reshape((-1, *(1,) * (rows.ndim - 1))), rows, first)
        return first

    return join
