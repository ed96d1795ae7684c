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

from jaxpp import _jaxprs, schedules
from jaxpp.transforms.tasks import _loop
from jaxpp.transforms.tasks._accumulators import folded, neutral
from jaxpp.transforms.tasks._microbatch_loop import MicrobatchLoop


def separate(
    tasks: _loop.LoopTasks,
    loop: MicrobatchLoop,
    direction_of: Sequence[int],
    join_rows: Callable[..., Any] | None = None,
) -> tuple[_loop.LoopTasks, MicrobatchLoop]:
    """Copies the tasks of a loop for each direction, with accumulators of its own.

    Args:
        tasks: the tasks of one direction.
        loop: the loop that they are the tasks of.
        direction_of: the direction of each slice of the loop.
        join_rows: makes a result with a row for each slice from those of the directions; None for
            what takes each row from its slice's direction.

    Returns:
        The tasks, and the loop with a carry and a result of each direction in place of each.

    Raises:
        jaxpp.schedules.ScheduleError: if a value is carried through all microbatches in order,
            which a loop of two directions does not have.
    """
    count = max(direction_of) + 1
    if count == 1:
        return tasks, loop
    for (kind, stage), line in _loop.ordered_carries(tasks).items():
        raise schedules.ScheduleError(
            f"the schedule sends microbatches through the ranks in {count} directions, but "
            f"the loop carries a value{line} through {kind}[stage {stage}] from each microbatch to "
            f"the next in order; combine it by 'mean', 'sum', 'max', 'stack' or 'concat', or use a "
            f"schedule of one direction."
        )
    folds = [tasks.folds.get(j) for j in range(tasks.num_carry)]
    operands, before, parts = dict(loop.operands), list(loop.before), []
    for fold, carry in zip(folds, loop.carries, strict=True):
        own = [carry, *(_jaxprs.fresh_var(carry) for _ in range(count - 1))]
        for v in own[1:]:
            eqns, operands[v] = neutral(fold, operands[carry])
            before += eqns
        parts.append(own)
    joins = [folded(fold) if fold else first_of for fold in folds]
    joins += [join_rows or rows_of(direction_of)] * tasks.num_ys
    parts += [[v] * count for v in loop.results[len(parts) :]]
    loop = loop.divided(parts, joins, operands=operands, before=tuple(before))
    return copied(tasks, count), loop


def copied(tasks: _loop.LoopTasks, count: int) -> _loop.LoopTasks:
    """Copies the tasks of one direction for each of several."""
    if count == 1:
        return tasks
    return dataclasses.replace(
        tasks,
        bodies=tuple(_moved(body, d, count, tasks) for d in range(count) for body in tasks.bodies),
        num_carry=count * tasks.num_carry,
        num_ys=count * tasks.num_ys,
        folds={j * count + d: fold for j, fold in tasks.folds.items() for d in range(count)},
        num_directions=count,
    )


def together(tasks: _loop.LoopTasks) -> _loop.LoopTasks:
    """The tasks of one direction, of which `copied` makes those of each."""
    count = tasks.num_directions
    if count == 1:
        return tasks

    def back(ref: _loop.Ref) -> _loop.Ref:
        divided = ref.source in ("carry", "y")
        return _loop.Ref(ref.source, ref.index // count) if divided else ref

    bodies = [
        dataclasses.replace(
            b, inputs=tuple(map(back, b.inputs)), outputs=tuple(map(back, b.outputs))
        )
        for b in tasks.of_direction(0)
    ]
    return dataclasses.replace(
        tasks,
        bodies=tuple(bodies),
        num_carry=tasks.num_carry // count,
        num_ys=tasks.num_ys // count,
        folds={j // count: fold for j, fold in tasks.folds.items()},
        num_directions=1,
    )


def _moved(
    body: _loop.TaskBody, direction: int, count: int, tasks: _loop.LoopTasks
) -> _loop.TaskBody:
    """Copies a task for a direction: it has another stage number, and other accumulators."""

    def move(ref: _loop.Ref) -> _loop.Ref:
        if ref.source in ("carry", "y"):
            return _loop.Ref(ref.source, ref.index * count + direction)
        return ref

    return dataclasses.replace(
        body,
        stage=direction * tasks.num_stages + body.stage,
        inputs=tuple(map(move, body.inputs)),
        outputs=tuple(map(move, body.outputs)),
    )


def first_of(first, *_):
    """Joins what is the same in all directions, as what no task changes is."""
    return first


def rows_of(direction_of: Sequence[int]) -> Callable[..., Any]:
    """Returns the function that takes each microbatch's row from its direction's result."""

    def join(first, *others):
        for direction, rows in enumerate(others, 1):
            own = np.array(direction_of) == direction
            first = jnp.where(own.reshape((-1, *(1,) * (rows.ndim - 1))), rows, first)
        return first

    return join
