"""Checks a table before anything runs it, and gives one order in which to run it."""

from collections.abc import Collection

from jaxpp.schedules._costs import Memory
from jaxpp.schedules._execute import Block, Dependencies, number, run
from jaxpp.schedules._table import Kind, Table, Task


class ScheduleError(ValueError):
    """A table that cannot be run as it stands.

    >>> issubclass(ScheduleError, ValueError)
    True
    """


def check(
    table: Table,
    *,
    kinds: Collection[Kind] | None = None,
    dependencies: Dependencies | None = None,
) -> None:
    """Checks that a table is complete, consistent and free of deadlock.

    Each stage has a forward of each microbatch, and a backward, whole (`B`) or in halves (`I` and
    `W`), unless the table is forward only; all on one rank, each task once, after what it depends
    on. Deadlocks are found by executing the ranks' orders against each other.

    Args:
      table: the table.
      kinds: the kinds of task that there must be, and no other; by default what the table has.
      dependencies: the tasks that a task must come after; by default those of a chain of stages.

    Raises:
      ScheduleError: names the task, its rank, the rule it breaks, and the way out.

    >>> from jaxpp.schedules import OneFOneB
    >>> table = OneFOneB().table(num_stages=2, num_microbatches=2)
    >>> check(table)
    >>> check(Table((table.ranks[0][:-1], table.ranks[1]), 2, 2))
    Traceback (most recent call last):
    ...
    jaxpp.schedules._check.ScheduleError: B[stage 0, microbatch 1] is missing: ...
    """
    allowed = frozenset(Kind if kinds is None else kinds)
    owners = _check_each_task(table, allowed)
    backward = not table.forward_only if kinds is None else bool(allowed - {Kind.F})
    _check_complete(table, owners, allowed, backward)
    _check_rank_orders(table)
    _ordered(table, dependencies)


def execution_order(
    table: Table, dependencies: Dependencies | None = None
) -> tuple[tuple[int, Task], ...]:
    """Gives one order of all tasks that respects each rank's order and every dependency.

    The ranks advance together, as they would at unit costs: F, I and W take 1, B takes 2.

    Args:
      table: the table.
      dependencies: the tasks that a task must come after; by default those of a chain of stages.

    Returns:
      The (rank, task) pairs, by the time at which each would start.

    Raises:
      ScheduleError: the table deadlocks, or depends on a task that it does not have.

    >>> from jaxpp.schedules import OneFOneB
    >>> order = execution_order(OneFOneB().table(num_stages=2, num_microbatches=2))
    >>> print(*(task for _, task in order))
    F0.0 F0.1 F1.0 B1.0 B0.0 F1.1 B1.1 B0.1
    """
    return _ordered(table, dependencies)


def _check_each_task(table: Table, allowed: frozenset[Kind]) -> dict[int, int]:
    """Checks tasks one by one, and returns the rank of each stage."""
    for ranks in table.placement:
        if len(ranks) != table.num_stages or not all(0 <= r < table.num_ranks for r in ranks):
            raise ScheduleError(
                f"the table's placement {ranks} is not one of {table.num_ranks} ranks for each of "
                f"its {table.num_stages} stages; correct it, or leave it out."
            )
    seen: dict[Task, int] = {}
    owners: dict[int, int] = {}
    first: dict[int, Task] = {}
    for rank, tasks in enumerate(table.ranks):
        for task in tasks:
            where = f"{task.describe()} of rank {rank}"
            if not 0 <= task.stage < table.num_stages:
                raise ScheduleError(
                    f"{where} is out of range: the table has {table.num_stages} stages, numbered "
                    f"from 0; renumber the stage, or raise num_stages."
                )
            if not 0 <= task.microbatch < table.num_microbatches:
                raise ScheduleError(
                    f"{where} is out of range: the table has {table.num_microbatches} "
                    f"microbatches, numbered from 0; renumber the microbatch, or raise "
                    f"num_microbatches."
                )
            if task.kind not in allowed:
                raise ScheduleError(
                    f"{where} is of a kind that is not wanted: the kinds here are "
                    f"{_join(allowed)}; use a schedule made of these, or differentiate the "
                    f"function as the schedule expects."
                )
            if seen.get(task) == rank:
                raise ScheduleError(
                    f"{where} is repeated: each task runs once; drop it from the rank's order "
                    f"everywhere but the first time."
                )
            if table.placement:
                homes = [ranks[task.stage] for ranks in table.placement]
                if rank not in homes:
                    raise ScheduleError(
                        f"{where} is on the wrong rank: the table's placement puts stage "
                        f"{task.stage} on rank {' or '.join(map(str, dict.fromkeys(homes)))}; move "
                        f"the task there, or correct the placement."
                    )
                home = homes[table.direction_of[task.microbatch]]
                if rank != home:
                    raise ScheduleError(
                        f"{where} is on the wrong rank: microbatch {task.microbatch} goes in "
                        f"direction {table.direction_of[task.microbatch]}, which has stage "
                        f"{task.stage} on rank {home}; keep a microbatch in one direction."
                    )
                owners[task.stage] = rank
            elif owners.setdefault(task.stage, rank) != rank:
                raise ScheduleError(
                    f"{where} is on another rank than {first[task.stage].describe()}, which is on "
                    f"rank {owners[task.stage]}: all tasks of a stage run on one rank, which holds "
                    f"its parameters; move them to one of the two."
                )
            seen[task] = rank
            first.setdefault(task.stage, task)
    return owners


def _check_complete(
    table: Table, owners: dict[int, int], allowed: frozenset[Kind], backward: bool
) -> None:
    for stage in range(table.num_stages):
        rank = f"rank {owners[stage]}" if stage in owners else "a rank"
        for microbatch in range(table.num_microbatches):
            has = {kind for kind in Kind if Task(kind, stage, microbatch) in table.tasks}
            halves = has & {Kind.I, Kind.W}
            if Kind.B in has and halves:
                whole, half = (Task(k, stage, microbatch) for k in (Kind.B, min(halves)))
                raise ScheduleError(
                    f"{whole.describe()} and {half.describe()} of {rank} are the same work: a "
                    f"backward is either whole (B) or split (I and W); keep one of the two forms."
                )
            wanted = {Kind.F} & allowed
            if backward:
                split = halves or Kind.B not in allowed
                wanted |= {Kind.I, Kind.W} if split else {Kind.B}
            for kind in (kind for kind in Kind if kind in wanted - has):
                raise ScheduleError(
                    f"{Task(kind, stage, microbatch).describe()} is missing: with "
                    f"{_join(wanted)}, every stage runs each of them once for every "
                    f"microbatch; add it to the order of {rank}."
                )


def _check_rank_orders(table: Table) -> None:
    """Checks the tasks of one stage and microbatch against each other, on their rank."""
    for rank, tasks in enumerate(table.ranks):
        seen: set[Task] = set()
        for task in tasks:
            needs = {Kind.F: None, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}[task.kind]
            if needs and (need := Task(needs, task.stage, task.microbatch)) not in seen:
                raise ScheduleError(
                    f"{task.describe()} of rank {rank} comes before {need.describe()}: it reads "
                    f"what that one makes; swap them in the rank's order."
                )
            seen.add(task)


def _ordered(table: Table, dependencies: Dependencies | None) -> tuple[tuple[int, Task], ...]:
    numbered = number(table, dependencies)
    result = run(numbered, [2.0 if task.kind is Kind.B else 1.0 for task in numbered.tasks])
    if result.blocks:
        raise explain_blocks(table, result.blocks)
    # Every cost is positive, so what a task depends on starts before it.
    order = sorted(range(len(numbered.tasks)), key=lambda n: (result.starts[n], n))
    return tuple((numbered.rank_of[n], numbered.tasks[n]) for n in order)


def explain_blocks(table: Table, blocks: list[Block]) -> ScheduleError:
    """Says why ranks are stuck: a dependency that nothing runs, or a cycle between them."""
    for block in blocks:
        if block.needs not in table.tasks:
            return ScheduleError(
                f"{block.task.describe()} of rank {block.rank} depends on "
                f"{block.needs.describe()}, which no rank runs; add it to the table, or correct "
                f"the dependencies."
            )
    rank_of = {task: rank for rank, tasks in enumerate(table.ranks) for task in tasks}
    stuck = {block.rank: block for block in blocks}
    path = [blocks[0].rank]
    while (rank := rank_of[stuck[path[-1]].needs]) not in path:
        path.append(rank)
    cycle = [*path[path.index(rank) :], rank]
    waits = "; ".join(
        f"rank {b.rank} is at {b.task.describe()}, which needs {b.needs.describe()} of rank "
        f"{rank_of[b.needs]}"
        for b in blocks
    )
    return ScheduleError(
        f"the table deadlocks: {waits}. The cycle is rank {' -> rank '.join(map(str, cycle))}: "
        f"each waits for a task that the next has further down its order; move one of these up."
    )


def _join(kinds: Collection[Kind]) -> str:
    names = [kind for kind in Kind if kind in kinds]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
