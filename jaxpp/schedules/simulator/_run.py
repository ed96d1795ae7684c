"""The clock: rows of numbered tasks, each task after the one before it and after what it needs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

#: For each task, what it waits for beside the task before it: a task, and the time from its end on.
Needs = Sequence[Sequence[tuple[int, float]]]


class RunTimes(NamedTuple):
    """The times of tasks, by number; -1 where a task did not run.

    Args:
      starts: the start of each task.
      ends: the end of each task.
      sequence: the tasks that were run, each after all that it waits for.
      stuck: for each row that did not end, its next task, and what that waits for.
    """

    starts: list[float]
    ends: list[float]
    sequence: list[int]
    stuck: dict[int, tuple[int, int]]


def run(
    time: Sequence[float],
    needs: Needs,
    rows: Sequence[Sequence[int]],
    end_of: Mapping[int, Callable[[float, list[float]], float]] | None = None,
) -> RunTimes:
    """Runs each row in order, each task as soon as the one before it and its needs allow.

    A row is all that runs one task after the other: a rank, its copies, or a link.

    Args:
      time: the time of each task.
      needs: what each task waits for. A task that is in no row never ends.
      rows: the tasks of each row, in order.
      end_of: for tasks that take no fixed time, the function that gives their end from the end of
        the task before them in their row and the ends of all tasks.

    >>> run([1.0, 2.0], [(), ((0, 0.5),)], [[0], [1]]).ends
    [1.0, 3.5]
    """
    starts, ends = [-1.0] * len(time), [-1.0] * len(time)
    at, free = [0] * len(rows), [0.0] * len(rows)
    waiting: dict[int, list[int]] = {}
    sequence: list[int] = []
    runnable = list(range(len(rows)))
    while runnable:
        row = runnable.pop()
        now, cursor = free[row], at[row]
        order = rows[row]
        for n in order[cursor:] if cursor else order:
            since = now
            for need, delay in needs[n]:
                ready = ends[need]
                if ready < 0.0:
                    waiting.setdefault(need, []).append(row)
                    now = since
                    break
                ready += delay
                if ready > now:
                    now = ready
            else:
                starts[n] = now
                now = end_of[n](since, ends) if end_of and n in end_of else now + time[n]
                ends[n] = now
                sequence.append(n)
                cursor += 1
                if n in waiting:
                    runnable += waiting.pop(n)
                continue
            break
        free[row], at[row] = now, cursor
    stuck = {row: (rows[row][at[row]], need) for need, own in waiting.items() for row in own}
    return RunTimes(starts, ends, sequence, stuck)
