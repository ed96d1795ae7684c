"""Makes a table fit a memory limit: recomputes or offloads what is held longest."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

from jaxpp.schedules._costs import Memory
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task

#: How many tasks ahead loads are, where activations are offloaded.
AHEAD = (1, 2, 4, 0)


def fitted(
    table: Table,
    memory: Memory,
    limits: Sequence[float],
    vary: Callable[[Table, Callable[[Task], bool]], Table],
) -> Table | None:
    """Varies a table until no rank holds more than its limit; None if that is not enough.

    Where a rank first holds too much, it is the activations with the latest backward that are
    recomputed or offloaded next.

    Args:
      table: the table.
      memory: what tasks hold.
      limits: the most that each rank may hold.
      vary: adds tasks for those forwards whose activations are not kept.

    >>> from jaxpp.schedules import GPipe
    >>> table = GPipe().table(1, 3)
    >>> table = fitted(table, Memory(recompute=0.75), [2.5], Table.with_recomputation)
    >>> print(*(table.ranks[0] if table else ()))
    F0.0 F0.1 F0.2 B0.0 R0.1 B0.1 B0.2
    """
    chosen: set[Task] = set()
    for rank, limit in enumerate(limits):
        alone = dataclasses.replace(table, ranks=(table.ranks[rank],))
        while True:
            own = vary(alone, chosen.__contains__)
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
    return vary(table, chosen.__contains__)


def offloads_to_fit(table: Table, memory: Memory, limits: Sequence[float]) -> Iterator[Table]:
    """Returns tables with offload that may fit: a copy takes its time, and holds memory meanwhile.

    These offload all activations, or as many as leave room for one more on its way.
    """
    forwards = ([task for task in order if task.kind is Kind.F] for order in table.ranks)
    room = [
        limit - max(map(memory.of, own), default=0.0)
        for limit, own in zip(limits, forwards, strict=True)
    ]
    for ahead in AHEAD:
        vary = functools.partial(Table.with_offload, ahead=ahead)
        yield vary(table, lambda _: True)
        if some := fitted(table, memory, room, vary):
            yield some
