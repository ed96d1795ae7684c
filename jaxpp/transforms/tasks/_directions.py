"""Gives each direction of a loop's microbatches tasks and accumulators of its own.

Where a table sends its microbatches through the ranks in two directions, a stage is on two ranks.
Each rank accumulates what its own microbatches add. The two accumulators are combined once, after
the loop, as for a parameter that two stages share.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp import _primitives, schedules
from jaxpp.transforms.tasks import _loop


@dataclasses.dataclass(frozen=True)
class Directed:
    """A loop's tasks with a copy for each direction.

    `carries` are its first accumulators. After the loop's own come those of the further directions,
    one direction after the other; `parts` has for each the carry of the loop that it is a part of.
    """

    tasks: _loop.LoopTasks
    carries: tuple[Any, ...]
    parts: tuple[int, ...]
    num_ys: int

    def together(self, results: Sequence[Any], direction_of: Sequence[int]) -> list[Any]:
        """Combines the results of the directions to those of the loop.

        Args:
            results: the results of the loop with these tasks.
            direction_of: the direction of each slice of the loop.
        """
        if self.tasks.num_directions == 1:
            return list(results)
        num_carry = len(self.carries) - len(self.parts)
        carries, ys = list(results[:num_carry]), results[len(self.carries) :]
        more = results[num_carry : len(self.carries)]
        for part, j in zip(more, self.parts, strict=True):
            carries[j] = self.tasks.folds[j].bind(carries[j], part)
        stacked = list(ys[: self.num_ys])
        for n, rows in enumerate(ys[self.num_ys :]):
            direction, i = divmod(n + self.num_ys, self.num_ys)
            own = np.array(direction_of) == direction
            shape = (-1, *(1,) * (rows.ndim - 1))
            stacked[i] = jnp.where(own.reshape(shape), rows, stacked[i])
        return [*carries, *stacked]


def separate(tasks: _loop.LoopTasks, directions: int, carries: Sequence[Any]) -> Directed:
    """Copies the tasks of a loop for each direction, with accumulators of its own.

    Args:
        tasks: the tasks of one direction.
        directions: the number of directions.
        carries: the loop's first accumulators.

    Raises:
        jaxpp.schedules.ScheduleError: if a value is carried through all microbatches in order,
            which a loop of two directions does not have.
    """
    if directions == 1:
        return Directed(tasks, tuple(carries), (), tasks.num_ys)
    written = sorted({r.index for b in tasks.bodies for r in b.outputs if r.source == "carry"})
    for (kind, stage), line in _loop.ordered_carries(tasks).items():
        raise schedules.ScheduleError(
            f"the schedule sends microbatches through the ranks in {directions} directions, but "
            f"the loop carries a value{line} through {kind}[stage {stage}] from each microbatch to "
            f"the next in order; combine it by 'mean', 'sum', 'max', 'stack' or 'concat', or use a "
            f"schedule of one direction."
        )
    bodies, parts, firsts = list(tasks.bodies), [], list(carries)
    for direction in range(1, directions):
        number = {j: len(firsts) + n for n, j in enumerate(written)}
        parts += written
        firsts += [_neutral(tasks.folds[j], carries[j]) for j in written]
        for body in tasks.bodies:
            bodies.append(_moved(body, direction, tasks, number))
    folds = {**tasks.folds, **{len(carries) + n: tasks.folds[j] for n, j in enumerate(parts)}}
    copies = dataclasses.replace(
        tasks,
        bodies=tuple(bodies),
        num_carry=len(firsts),
        num_ys=directions * tasks.num_ys,
        folds=folds,
        num_directions=directions,
    )
    return Directed(copies, tuple(firsts), tuple(parts), tasks.num_ys)


def _neutral(fold: Any, carry: Any) -> Any:
    """Gives the start of a further accumulator of a carry: zeros for a sum, else the carry's."""
    adds = fold.name in _primitives.ADDS
    return jnp.zeros(carry.shape, carry.dtype) if adds else carry


def _moved(
    body: _loop.TaskBody, direction: int, tasks: _loop.LoopTasks, number: dict[int, int]
) -> _loop.TaskBody:
    """Copies a task for another direction: it has another stage number, and other accumulators."""

    def move(ref: _loop.Ref) -> _loop.Ref:
        if ref.source == "carry":
            return _loop.Ref("carry", number[ref.index])
        if ref.source == "y":
            return _loop.Ref("y", direction * tasks.num_ys + ref.index)
        return ref

    return dataclasses.replace(
        body,
        stage=direction * tasks.num_stages + body.stage,
        inputs=tuple(map(move, body.inputs)),
        outputs=tuple(map(move, body.outputs)),
    )
