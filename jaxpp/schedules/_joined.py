"""The table of several delayed steps in one program, whose ranks do not drain between them."""

import dataclasses
import functools
from collections.abc import Sequence

from jaxpp.schedules._costs import Costs, Memory, placement_of
from jaxpp.schedules._execute import number
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._simulation import simulate
from jaxpp.schedules._table import Table
from jaxpp.schedules.simulator import join


def joined(table: Table, steps: int, delay: int = 1, costs: Costs | None = None) -> Table:
    """Returns the table of several steps in one program, as `jaxpp.place` joins their loops.

    The microbatches of the steps are numbered on. A rank begins a step before it has ended the one
    before it, where it then holds no more activations than in one step, and where its weights are
    there: those that the update of `delay + 1` steps before has made (`jaxpp.delay`).

    Args:
      table: the table of a step.
      steps: how many steps there are.
      delay: of which delay they are; without one, 0, a stage waits for its own update.
      costs: the times that decide between orders: the table is then the fastest of the order by
        these times, that of `jaxpp.place`, which knows no times, and that of ranks that end each
        step before the next one. By default that of `jaxpp.place`.

    Raises:
      ValueError: there is no step, the delay is negative, or the table gathers or reduces.

    >>> from jaxpp.schedules import OneFOneB, simulate
    >>> one = OneFOneB().table(4, 8)
    >>> simulate(one).makespan, simulate(joined(one, 8)).makespan / 8
    (33.0, 25.125)
    """
    if steps < 1 or delay < 0:
        raise ValueError(
            f"joined: there is at least 1 step, of a delay of at least 0, got {steps} and {delay}."
        )
    if of_step := sorted(kind for kind in table.kinds if kind.of_stage):
        raise ValueError(
            f"joined: the tasks {', '.join(of_step)} are of a stage in one step, and a table "
            f"cannot say which; join that of the schedule without them. jaxpp.place joins both."
        )
    by_kind, drained = _orders(table, steps, delay, ())
    if costs is None:
        return by_kind
    of = costs.by_stage(placement_of(table)).of
    by_costs, _ = _orders(table, steps, delay, tuple(map(of, number(table).tasks)))
    return min(by_costs, by_kind, drained, key=lambda own: simulate(own, costs).makespan)


@functools.lru_cache(maxsize=64)
def _orders(table: Table, steps: int, delay: int, times: tuple[float, ...]) -> tuple[Table, Table]:
    """Returns two tables of the steps: joined by the times of a step's tasks, and drained.

    Without times, those of the kinds count.
    """
    found, m = number(table), table.num_microbatches
    count, loops = len(found.tasks), [[] for _ in table.ranks]
    updated: dict[int, list[int]] = {}  # for each stage, what its update reads
    for n, task in enumerate(found.tasks):
        if task.kind in (Kind.B, Kind.W):
            updated.setdefault(task.stage, []).append(n)
    behind: list[tuple[int, ...]] = []
    for step in range(steps):
        first, made = step * count, (step - delay - 1) * count
        for n, task in enumerate(found.tasks):
            needs = tuple(first + need for need in found.needs[n])
            if task.kind is Kind.F and made >= 0:
                needs += tuple(made + last for last in updated.get(task.stage, ()))
            behind.append(needs)
            if n == 0 or found.rank_of[n] != found.rank_of[n - 1]:
                loops[found.rank_of[n]].append([])
            loops[found.rank_of[n]][-1].append(first + n)
    memory = Memory(per="stage")
    change = [sum(own) for r in range(table.num_ranks) for own in memory.changes(table, r)]
    time = list(times) or [task.kind.cost for task in found.tasks]
    beside = {n for n in range(steps * count) if found.tasks[n % count].kind.lane != "compute"}
    together = join(loops, behind, change * steps, time * steps, beside)

    def ordered(order: Sequence[int]) -> Table:
        ranks: list[list] = [[] for _ in table.ranks]
        for n in order:
            step, own = divmod(n, count)
            task = found.tasks[own]
            later = dataclasses.replace(task, microbatch=task.microbatch + step * m)
            ranks[found.rank_of[own]].append(later)
        return dataclasses.replace(
            table, ranks=tuple(map(tuple, ranks)), num_microbatches=steps * m,
            overlaps=frozenset(), direction_of=table.direction_of * steps,
        )  # fmt: skip

    drained = ordered(range(steps * count))
    return ordered(together) if together else drained, drained
