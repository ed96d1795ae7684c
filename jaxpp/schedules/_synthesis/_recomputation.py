"""Makes a table fit a memory limit: recomputes the activations that are held longest."""

import dataclasses
from collections.abc import Sequence

from jaxpp.schedules._costs import Memory
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task


def recompute_to_fit(table: Table, memory: Memory, limits: Sequence[float]) -> Table | None:
    """Adds recomputations until no rank holds more than its limit; None if that is not enough.

    Where a rank first holds too much, it is the activations with the latest backward that are
    recomputed next.

    >>> from jaxpp.schedules import GPipe
    >>> table = recompute_to_fit(GPipe().table(1, 3), Memory(recompute=0.75), [2.5])
    >>> print(*(table.ranks[0] if table else ()))
    F0.0 F0.1 F0.2 B0.0 R0.1 B0.1 B0.2
    """
    chosen: set[Task] = set()
    for rank, limit in enumerate(limits):
        alone = dataclasses.replace(table, ranks=(table.ranks[rank],))
        while True:
            own = alone.with_recomputation(chosen.__contains__)
            order, held = own.ranks[0], memory.held(own, 0)
            over = (n for n, now in enumerate(held) if now > limit + 1e-9 * abs(limit))
            place = next(over, None)
            if place is None:
                break
            before = {task for task in order[:place] if task.kind is Kind.F} - chosen
            ends = [
                dataclasses.replace(task, kind=Kind.F)
                for task in order[place + 1 :]
                if task.kind in (Kind.B, Kind.I)
            ]
            longest = next((task for task in reversed(ends) if task in before), None)
            if longest is None:
                return None
            chosen.add(longest)
    return table.with_recomputation(chosen.__contains__)
