"""Gives each direction of a loop's microbatches tasks and accumulators of its own.

Where a table sends its microbatches through the ranks in two directions, a stage is on two ranks.
Each rank accumulates what its own microbatches add. The two accumulators are combined once, after
the loop, as for a parameter that two stages share.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp import schedules
from jaxpp.transforms.tasks import _loop
from jaxpp.transforms.tasks._accumulators import folded, neutral
from jaxpp.transforms.tasks._body import WHOLE, Join


def separate(
    tasks: _loop.LoopTasks, carries: Sequence[Any], direction_of: Sequence[int]
) -> tuple[_loop.LoopTasks, list[Any], list[Join]]:
    """Copies the tasks of a loop for each direction, with accumulators of its own.

    Args:
        tasks: the tasks of one direction.
        carries: the loop's first accumulators.
        direction_of: the direction of each slice of the loop.

    Returns:
        The tasks, the first accumulators, and how each result of the loop is joined.

    Raises:
        jaxpp.schedules.ScheduleError: if a value is carried through all microbatches in order,
            which a loop of two directions does not have.
    """
    count = max(direction_of) + 1
    if count == 1:
        return tasks, list(carries), []
    for (kind, stage), line in _loop.ordered_carries(tasks).items():
        raise schedules.ScheduleError(
            f"the schedule sends microbatches through the ranks in {count} directions, but "
            f"the loop carries a value{line} through {kind}[stage {stage}] from each microbatch to "
            f"the next in order; combine it by 'mean', 'sum', 'max', 'stack' or 'concat', or use a "
            f"schedule of one direction."
        )
    written = {r.index for b in tasks.bodies for r in b.outputs if r.source == "carry"}
    firsts, joins, folds = [], [], {}
    #: The first of the accumulators that stand for each carry.
    number: dict[int, int] = {}
    for j, carry in enumerate(carries):
        number[j], fold = len(firsts), tasks.folds.get(j)
        more = count - 1 if j in written else 0
        firsts += [carry, *(neutral(fold, carry) for _ in range(more))]
        joins.append((count, folded(fold)) if more else WHOLE)
        folds.update(dict.fromkeys(range(number[j], len(firsts)), fold) if fold else {})
    joins += [(count, _rows_of(direction_of))] * tasks.num_ys

    def moved(body: _loop.TaskBody, direction: int) -> _loop.TaskBody:
        """Copies a task for a direction: it has another stage, and its own accumulators."""

        def move(ref: _loop.Ref) -> _loop.Ref:
            if ref.source == "carry":
                own = direction if ref.index in written else 0
                return _loop.Ref("carry", number[ref.index] + own)
            return _loop.Ref("y", ref.index * count + direction) if ref.source == "y" else ref

        return dataclasses.replace(
            body,
            stage=direction * tasks.num_stages + body.stage,
            inputs=tuple(map(move, body.inputs)),
            outputs=tuple(map(move, body.outputs)),
        )

    copies = dataclasses.replace(
        tasks,
        bodies=tuple(moved(body, d) for d in range(count) for body in tasks.bodies),
        num_carry=len(firsts),
        num_ys=count * tasks.num_ys,
        folds=folds,
        num_directions=count,
    )
    return copies, firsts, joins


def _rows_of(direction_of: Sequence[int]) -> Callable[..., Any]:
    """Gives the function that takes each microbatch's row from its direction's result."""

    def join(first, *others):
        for direction, rows in enumerate(others, 1):
            own = np.array(direction_of) == direction
            first = jnp.where(own.reshape((-1, *(1,) * (rows.ndim - 1))), rows, first)
        return first

    return join
