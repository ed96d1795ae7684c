"""Checks a table before it is run, and gives one order in which to run it."""

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Sequence

from jaxpp.schedules._costs import Memory
from jaxpp.schedules._excerpt import excerpt
from jaxpp.schedules._execute import Block, Dependencies, execute, number
from jaxpp.schedules._kinds import Kind, listed
from jaxpp.schedules._table import Table, Task

#: For each kind and stage, the number of each microbatch's task, counted rank after rank; or -1.
_Rows = dict[tuple[Kind, int], list[int]]


class ScheduleError(ValueError):
    """A table that cannot be run as it stands.

    >>> issubclass(ScheduleError, ValueError)
    True
    """

    __module__ = "jaxpp.schedules"  # as it is imported, and printed


def check(
    table: Table,
    *,
    kinds: Collection[Kind] | None = None,
    dependencies: Dependencies | None = None,
    memory: Memory | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> None:
    """Checks that a table is complete, consistent, free of deadlock, and fits in memory.

    Each stage has a forward of each microbatch, and a backward, whole (`B`) or in halves (`I` and
    `W`), unless the table is forward only; it may have a recomputation (`R`) between the two. All
    tasks of a stage are on one rank, or on one for each direction. What an `O` takes away, an `L`
    brings back before anything reads it; what a `G` or an `H` gathers, a later task reads. Each
    task appears once, after the tasks that it depends on. A task that overlaps is followed by one
    of another stage or microbatch, which does not wait for it. To find deadlocks, `check` runs the
    orders of all ranks against each other.

    Args:
      table: the table.
      kinds: the kinds of task that there must be, and no other; by default what the table has.
      dependencies: for each kind and stage what it must come after; by default as the table's
        stages are connected.
      memory: what tasks hold; by default activations.
      memory_limit: the most that a rank may hold, one number for all ranks or one for each, in the
        units of `memory`; by default without limit.

    Raises:
      ScheduleError: names the task, its rank, the rule it breaks, and the way out, and shows the
        orders around it.

    >>> from jaxpp.schedules import OneFOneB
    >>> table = OneFOneB().table(num_stages=2, num_microbatches=2)
    >>> check(table, memory_limit=2)
    >>> check(Table((table.ranks[0][:-1], table.ranks[1]), 2, 2))
    Traceback (most recent call last):
    ...
    jaxpp.schedules.ScheduleError: B[stage 0, microbatch 1] is missing: ...
      rank 0 |  F0.0  F0.1  B0.0 [B0.1?]
      rank 1 |  F1.0  B1.0  F1.1  B1.1
    """
    allowed = frozenset(Kind if kinds is None else kinds)
    _check_placement(table)
    rows = _check_each_task(table, allowed)
    _check_directions(table)
    backward = not table.forward_only if kinds is None else bool(allowed - {Kind.F})
    _check_complete(table, rows, allowed, backward)
    _check_rank_orders(table, rows)
    _check_copies(table, rows)
    _check_windows(table, rows)
    _check_overlaps(table, rows)
    _check_execution(table, dependencies)
    if memory_limit is not None:
        _check_memory(table, memory or Memory(), memory_limit)


def execution_order(
    table: Table, dependencies: Dependencies | None = None
) -> tuple[tuple[int, Task], ...]:
    """Returns one order of all tasks that respects each rank's order and every dependency.

    The ranks advance together, as they would at unit costs: F, I and W take 1, B, which has two
    parts, takes 2.

    Args:
      table: the table.
      dependencies: for each kind and stage what it must come after; by default as the table's
        stages are connected.

    Returns:
      The (rank, task) pairs, by the time at which each would start.

    Raises:
      ScheduleError: the table deadlocks, or depends on a task that it does not have.

    >>> from jaxpp.schedules import OneFOneB
    >>> order = execution_order(OneFOneB().table(num_stages=2, num_microbatches=2))
    >>> print(*(task for _, task in order))
    F0.0 F0.1 F1.0 B1.0 B0.0 F1.1 B1.1 B0.1
    """
    numbered = number(table, dependencies)
    result = execute(numbered, [float(max(1, len(task.kind.parts))) for task in numbered.tasks])
    if result.blocks:
        raise explain_blocks(table, result.blocks)
    # Every cost is positive, so a task starts after the start of all that it depends on.
    order = sorted(range(len(numbered.tasks)), key=lambda n: (result.starts[n], n))
    return tuple((numbered.rank_of[n], numbered.tasks[n]) for n in order)


def explain_blocks(table: Table, blocks: Sequence[Block]) -> ScheduleError:
    """Makes the error of stuck ranks: for a dependency that no rank runs, or a cycle of ranks."""
    places = {task: (r, n) for r, tasks in enumerate(table.ranks) for n, task in enumerate(tasks)}
    for block in blocks:
        if block.needs not in places:
            return ScheduleError(
                f"{block.task.describe()} of rank {block.rank} depends on "
                f"{block.needs.describe()}, which no rank runs; add it to the table, or correct "
                f"the dependencies." + excerpt(table, {block.rank: [places[block.task][1]]})
            )
    stuck = {block.rank: block for block in blocks}
    path = [blocks[0].rank]
    while (rank := places[stuck[path[-1]].needs][0]) not in path:
        path.append(rank)
    cycle = [*path[path.index(rank) :], rank]
    notes = {b.rank: f"needs {b.needs} of rank {places[b.needs][0]}" for b in blocks}
    overlap = ", or leave out an overlap" if table.overlaps else ""
    return ScheduleError(
        f"the table deadlocks: rank {' -> rank '.join(map(str, cycle))} is a cycle, in which each "
        f"waits for a task that the next has further down its order; move one of these up{overlap}."
        f" Each rank is stuck at the task in brackets:"
        + excerpt(table, {b.rank: [places[b.task][1]] for b in blocks}, notes=notes)
    )


def _check_placement(table: Table) -> None:
    for ranks in table.placement:
        if len(ranks) != table.num_stages or not all(0 <= r < table.num_ranks for r in ranks):
            raise ScheduleError(
                f"the table's placement {ranks} is not one of {table.num_ranks} ranks for each of "
                f"its {table.num_stages} stages; correct it, or leave it out."
            )


def _check_each_task(table: Table, allowed: frozenset[Kind]) -> _Rows:
    """Checks each task: its kind is wanted, it is in range, on a rank of its stage, there once."""
    count = table.num_microbatches
    rows: _Rows = {}
    owners: dict[int, tuple[int, Task]] = {}
    n = 0
    for rank, tasks in enumerate(table.ranks):
        known: _Rows = {}  # this rank's
        for place, task in enumerate(tasks):
            key = (task.kind, task.stage)
            row = known.get(key)
            if row is None:
                if fault := _wrong_place(table, allowed, owners, rank, task):
                    raise ScheduleError(fault + excerpt(table, {rank: [place]}))
                row = known[key] = rows.setdefault(key, [-1] * count)
            if not 0 <= task.microbatch < count:
                raise ScheduleError(
                    f"{task.describe()} of rank {rank} is out of range: the table has {count} "
                    f"microbatches, numbered from 0; renumber the microbatch, or raise "
                    f"num_microbatches." + excerpt(table, {rank: [place]})
                )
            if row[task.microbatch] >= 0:
                first_rank, first = _locate(table, row[task.microbatch])
                raise ScheduleError(
                    f"{task.describe()} of rank {rank} is repeated: each task runs once, and this "
                    f"one is both number {first} of rank {first_rank} and number {place} of rank "
                    f"{rank}, counted from 0; drop one of the two."
                    + excerpt(table, {rank: [place, first] if rank == first_rank else [place]})
                )
            row[task.microbatch] = n
            n += 1
    return rows


def _wrong_place(
    table: Table,
    allowed: frozenset[Kind],
    owners: dict[int, tuple[int, Task]],
    rank: int,
    task: Task,
) -> str | None:
    """Tells the reason why a rank may not run a task, or None; `owners` collects stages' ranks."""
    where = f"{task.describe()} of rank {rank}"
    if not 0 <= task.stage < table.num_stages:
        return (
            f"{where} is out of range: the table has {table.num_stages} stages, numbered from 0; "
            f"renumber the stage, or raise num_stages."
        )
    if task.kind not in allowed:
        return (
            f"{where} is of a kind that is not wanted: the kinds here are {listed(allowed)}; use a "
            f"schedule made of these, or differentiate the function as the schedule expects."
        )
    homes = dict.fromkeys(ranks[task.stage] for ranks in table.placement)
    if homes and rank not in homes:
        return (
            f"{where} is on the wrong rank: the table's placement puts stage {task.stage} on rank "
            f"{' or '.join(map(str, homes))}; move the task there, or correct the placement."
        )
    owner, first = owners.setdefault(task.stage, (rank, task))
    if not homes and owner != rank:
        return (
            f"{where} is on another rank than {first.describe()}, which is on rank {owner}: all "
            f"tasks of a stage run on one rank, which holds its parameters; move them to one of "
            f"the two."
        )
    return None


def _check_directions(table: Table) -> None:
    """Checks that all tasks of a microbatch go through the ranks in one direction."""
    if len(table.placement) < 2:
        return
    taken = [table.placement[direction] for direction in table.direction_of]
    for rank, tasks in enumerate(table.ranks):
        for place, task in enumerate(tasks):
            if taken[task.microbatch][task.stage] != rank:
                raise ScheduleError(
                    f"{task.describe()} of rank {rank} is on the wrong rank: microbatch "
                    f"{task.microbatch} goes in direction {table.direction_of[task.microbatch]}, "
                    f"which has stage {task.stage} on rank {taken[task.microbatch][task.stage]}; "
                    f"keep a microbatch in one direction." + excerpt(table, {rank: [place]})
                )


def _check_complete(table: Table, rows: _Rows, allowed: frozenset[Kind], backward: bool) -> None:
    none = [-1] * table.num_microbatches
    for stage in range(table.num_stages):
        each = [rows.get((kind, stage), none) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
        for microbatch, (f, b, i, w) in enumerate(zip(*each, strict=True)):
            whole, split = b >= 0 > max(i, w), b < 0 <= min(i, w)
            if f < 0 or (backward and not (whole or split)):
                halves = Kind.B not in allowed or (each[1] is none and each[2] is not none)
                raise _incomplete(table, stage, microbatch, backward, halves)


def _incomplete(
    table: Table, stage: int, microbatch: int, backward: bool, halves: bool
) -> ScheduleError:
    """Makes the error of an incomplete microbatch; with `halves`, other backwards are split."""
    has = {kind for kind in Kind if Task(kind, stage, microbatch) in table.tasks}
    home = _home(table, stage, microbatch)
    rank = "a rank" if home is None else f"rank {home}"
    if Kind.B in has and has & {Kind.I, Kind.W}:
        pair = [Task(kind, stage, microbatch) for kind in (Kind.B, min(has & {Kind.I, Kind.W}))]
        assert home is not None
        places = [table.ranks[home].index(task) for task in pair]
        return ScheduleError(
            f"{pair[0].describe()} and {pair[1].describe()} of {rank} are the same work: a "
            f"backward is either whole (B) or split (I and W); keep one of the two forms."
            + excerpt(table, {home: places})
        )
    wanted = {Kind.F}
    if backward:
        split = bool(has & {Kind.I, Kind.W}) or (halves and Kind.B not in has)
        wanted |= {Kind.I, Kind.W} if split else {Kind.B}
    missing = Task(next(k for k in Kind if k in wanted - has), stage, microbatch)
    text = (
        f"{missing.describe()} is missing: with {listed(wanted)}, every stage runs each of them "
        f"once for every microbatch; add it to the order of {rank}."
    )
    if home is None:
        return ScheduleError(text)
    place = _place_for(table.ranks[home], missing)
    return ScheduleError(text + excerpt(table, {home: [place]}, missing=missing))


def _home(table: Table, stage: int, microbatch: int) -> int | None:
    if table.placement:
        return table.placement[table.direction_of[microbatch]][stage]
    ranks = enumerate(table.ranks)
    return next((r for r, tasks in ranks if any(task.stage == stage for task in tasks)), None)


def _place_for(order: Sequence[Task], missing: Task) -> int:
    """Finds the place for a missing task: next to its kind's task of a neighbouring microbatch."""
    for neighbour, after in ((missing.microbatch - 1, 1), (missing.microbatch + 1, 0)):
        task = dataclasses.replace(missing, microbatch=neighbour)
        if task in order:
            return order.index(task) + after
    return len(order)


def _check_rank_orders(table: Table, rows: _Rows) -> None:
    """Checks the tasks of one stage and microbatch against each other, on their rank."""
    pairs = [
        (row, rows[need, stage])
        for (kind, stage), row in rows.items()
        for need in kind.before
        if (need, stage) in rows and (need in kind.after or need is not Kind.L)
    ]
    for row, needs in pairs:
        for n, need in zip(row, needs, strict=True):
            if 0 <= n < need:
                (rank, place), (_, other) = _locate(table, n), _locate(table, need)
                task, needed = table.ranks[rank][place], table.ranks[rank][other]
                raise ScheduleError(
                    f"{task.describe()} of rank {rank} comes before {needed.describe()}: it reads "
                    f"what that one makes; swap them in the rank's order."
                    + excerpt(table, {rank: [place, other]})
                )


def _check_copies(table: Table, rows: _Rows) -> None:
    """Checks that what is offloaded is loaded again, and that nothing reads it meanwhile."""
    none = [-1] * table.num_microbatches
    for stage in {stage for kind, stage in rows if kind is Kind.O}:
        each = [rows.get((kind, stage), none) for kind in map(Kind, "OLRBIW")]
        for o, back, again, *readers in zip(*each, strict=True):
            late = [n for n in readers if o < n]
            if o < 0 or (again < 0 <= back <= max(late, default=-1) and back <= min(late)):
                continue
            rank, place = _locate(table, o)
            away, places = table.ranks[rank][place], [place]
            load = dataclasses.replace(away, kind=Kind.L).describe()
            if again >= 0:
                fault = "an R computes what it is to offload again; drop one of the two"
            elif back < 0:
                fault = f"nothing loads what it takes away; add {load} before that is read"
            elif not late or max(late) < back:
                fault = f"nothing reads what {load} brings back; drop both, or move them up"
            else:
                places.append(_locate(table, min(late))[1])
                reader = table.ranks[rank][places[1]].describe()
                fault = f"{reader} reads what is away until {load}; move that one up"
            raise ScheduleError(
                f"{away.describe()} of rank {rank}: {fault}." + excerpt(table, {rank: places})
            )


def _check_windows(table: Table, rows: _Rows) -> None:
    """Checks that what is made for the tasks of a stage is read, and that all sums are taken."""
    left: dict[tuple[int, int], Task] = {}  # of each rank and stage the last task of a window
    for task, window in table.windows.items():
        rank, place = _locate(table, rows[task.kind, task.stage][task.microbatch])
        if not window:
            where, way = ("before it, since the last", "down") if task.kind.takes else (
                "after it, before the next", "up"
            )  # fmt: skip
            raise ScheduleError(
                f"{task.describe()} of rank {rank} ({task.kind.title}): no task that it is for "
                f"comes {where} of its stage; drop it, or move it {way}."
                + excerpt(table, {rank: [place]})
            )
        if task.kind.takes:
            if (other := left.setdefault((rank, task.stage), task)).kind is not task.kind:
                raise ScheduleError(
                    f"{other.describe()} and {task.describe()} of rank {rank} take the sums of one "
                    f"stage; give it tasks of the kind {other.kind} or {task.kind} alone."
                )
            left[rank, task.stage] = task
    for (rank, stage), task in left.items():
        order = table.ranks[rank]
        late = [n for n, t in enumerate(order) if t.stage == stage and t.kind in "FBIW"]
        if order.index(task) < late[-1]:
            raise ScheduleError(
                f"{task.describe()} of rank {rank} is the last {task.kind} of its stage, but comes "
                f"before {order[late[-1]].describe()}, whose gradients nothing reduces then; add "
                f"one after that." + excerpt(table, {rank: [order.index(task), late[-1]]})
            )


def _check_overlaps(table: Table, rows: _Rows) -> None:
    """Checks that each task that overlaps has another one to run with."""
    if strangers := [str(task) for task in table.overlaps if task not in table.tasks]:
        raise ScheduleError(
            f"{min(strangers)} is to overlap with the task after it, but the table has no such "
            f"task; correct the table's overlaps."
        )
    for task in sorted(table.overlaps, key=str):
        rank, place = _locate(table, rows[task.kind, task.stage][task.microbatch])
        order = table.ranks[rank]
        after = order[place + 1] if place + 1 < len(order) else None
        if after is None:
            fault = "no task comes after it"
        elif after in table.overlaps:
            fault = f"{after.describe()}, which comes after it, is to overlap with the next, too"
        elif (after.stage, after.microbatch) == (task.stage, task.microbatch):
            fault = f"{after.describe()}, which comes after it, needs it first"
        else:
            continue
        raise ScheduleError(_cannot_overlap(table, rank, place, fault))


def _cannot_overlap(table: Table, rank: int, place: int, fault: str) -> str:
    task = table.ranks[rank][place]
    return (
        f"{task.describe()} of rank {rank} cannot overlap with the task after it: {fault}. Tasks "
        f"overlap in pairs, of two stages or microbatches, and neither waits for the other; drop "
        f"the task from the table's overlaps." + excerpt(table, {rank: [place]})
    )


def _check_execution(table: Table, dependencies: Dependencies | None) -> None:
    numbered = number(table, dependencies, join=True)
    for rank, units in enumerate(numbered.ranks):
        for first, *second in units if table.overlaps else ():
            if second and first in numbered.needs[second[0]]:
                needs = f"{numbered.tasks[second[0]].describe()}, which comes after it, needs it"
                place = _locate(table, first)[1]
                raise ScheduleError(_cannot_overlap(table, rank, place, f"{needs} first"))
    result = execute(numbered, [1.0] * len(numbered.tasks))
    if result.blocks:
        raise explain_blocks(table, result.blocks)


def _check_memory(table: Table, memory: Memory, limit: float | Sequence[float]) -> None:
    limits = [float(limit)] * table.num_ranks if isinstance(limit, (int, float)) else list(limit)
    if len(limits) != table.num_ranks:
        raise ValueError(
            f"memory_limit has {len(limits)} numbers, but the table has {table.num_ranks} ranks; "
            f"give one for each rank, or one number for all."
        )
    for rank, most in enumerate(limits):
        held = memory.held(table, rank)
        # Sums of shares such as 1/3 may be above the limit by a rounding error.
        place = next((n for n, now in enumerate(held) if now > most + 1e-9 * abs(most)), None)
        if place is not None:
            raise ScheduleError(
                f"{table.ranks[rank][place].describe()} of rank {rank} exceeds its memory: the "
                f"rank then holds {held[place]:g}, {max(held):g} at its peak, and its limit is "
                f"{most:g}; run backwards earlier, or raise memory_limit."
                + excerpt(table, {rank: [place]})
            )


def _locate(table: Table, n: int) -> tuple[int, int]:
    """Finds the rank of a task, and its place there, from its number."""
    firsts = [0, *itertools.accumulate(len(order) for order in table.ranks)]
    rank = bisect.bisect_right(firsts, n) - 1
    return rank, n - firsts[rank]
