"""Gives each direction of a loop's microbatches accumulators of its own.

Where a table sends its microbatches through the ranks in two directions, a stage is on two ranks.
Each rank accumulates what its own microbatches add. The two accumulators are combined once, after
the loop, as for a parameter that two stages share.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp import _jaxprs, schedules
from jaxpp.transforms.tasks import _loop
from jaxpp.transforms.tasks._accumulators import folded, neutral
from jaxpp.transforms.tasks._microbatch_loop import MicrobatchLoop


def separate(
    loop: MicrobatchLoop,
    scheduled: _loop.ScheduledLoop,
    join_rows: Callable[..., Any] | None = None,
) -> MicrobatchLoop:
    """Gives each direction of a loop accumulators of its own.

    Args:
        loop: the loop.
        scheduled: its tasks.
        join_rows: makes a result with a row for each slice from those of the directions; None for
            what takes each row from its slice's direction.

    Returns:
        The loop with a carry and a result of each direction in place of each.

    Raises:
        jaxpp.schedules.ScheduleError: if a value is carried through all microbatches in order,
            which a loop of two directions does not have.
    """
    count = scheduled.num_directions
    if count == 1:
        return loop
    for (kind, stage), line in _loop.ordered_carries(scheduled).items():
        raise schedules.ScheduleError(
            f"the schedule sends microbatches through the ranks in {count} directions, but "
            f"the loop carries a value{line} through {kind}[stage {stage}] from each microbatch to "
            f"the next in order; combine it by 'mean', 'sum', 'max', 'stack' or 'concat', or use a "
            f"schedule of one direction."
        )
    operands, before, parts = dict(loop.operands), list(loop.before), []
    for fold, carry in zip(scheduled.folds, loop.carries, strict=True):
        own = [carry, *(_jaxprs.fresh_var(carry) for _ in range(count - 1))]
        for v in own[1:]:
            eqns, operands[v] = neutral(fold, operands[carry])
            before += eqns
        parts.append(own)
    joins = [folded(fold) if fold else first_of for fold in scheduled.folds]
    joins += [join_rows or rows_of(scheduled)] * len(scheduled.ys)
    parts += [[v] * count for v in loop.results[len(parts) :]]
    return loop.divided(parts, joins, operands=operands, before=tuple(before))


def first_of(first, *_):
    """Joins what is the same in all directions, as what no task changes is."""
    return first


def rows_of(loop: _loop.ScheduledLoop, repeats: int = 1) -> Callable[..., Any]:
    """Returns the function that takes each microbatch's row from its direction's result.

    The rows are those of the loop's slices, perhaps for each of several replicas.
    """
    taken = loop.table.direction_of[::-1] if loop.reverse else loop.table.direction_of

    def join(first, *others):
        for direction, rows in enumerate(others, 1):
            own = np.array(taken * repeats) == direction
            first = jnp.where(own.reshape((-1, *(1,) * (rows.ndim - 1))), rows, first)
        return first

    return join
