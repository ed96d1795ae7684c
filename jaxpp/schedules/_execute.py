"""Runs a table as its ranks would: each in its own order, each task after what it depends on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpp.schedules._table import Kind, Table, Task

#: For a kind of task of a stage, those it reads from, of the same microbatch.
Dependencies = Mapping[tuple[Kind, int], Sequence[tuple[Kind, int]]]


@dataclass(frozen=True, slots=True)
class Block:
    """A rank that cannot go on: `task` is its next one, and `needs` has not been run."""

    rank: int
    task: Task
    needs: Task


def stage_dependencies(
    table: Table, edges: Iterable[tuple[int, int]] | None = None
) -> Dependencies:
    """Gives the dependencies of a table's tasks from the graph of its stages.

    `F` needs the `F` of each stage that it reads from; `B` and `I` need the `F` of their own stage
    and the `B`, or the `I` where the backward is split, of each stage that reads from it; `W` needs
    the `I` of its own stage. A stage whose backward is split for some microbatches only is read
    from in either form: what the table does not have is no dependency.

    Args:
      table: the table.
      edges: (producer, consumer) pairs of stages; by default those of the table's `stage_inputs`.

    Returns:
      For each kind and stage, the kinds and stages that it must come after.

    >>> from jaxpp.schedules import OneFOneB
    >>> needs = stage_dependencies(OneFOneB().table(num_stages=4, num_microbatches=2))
    >>> print(*(f"{kind}{stage}" for kind, stage in needs[Kind.B, 1]))
    F1 B2
    """
    if edges is None:
        inputs = table.stage_inputs or [(s - 1,) if s else () for s in range(table.num_stages)]
        edges = [(producer, stage) for stage, own in enumerate(inputs) for producer in own]
    producers: dict[int, list[int]] = {}
    consumers: dict[int, list[int]] = {}
    for producer, consumer in dict.fromkeys(edges):
        producers.setdefault(consumer, []).append(producer)
        consumers.setdefault(producer, []).append(consumer)
    kinds = {task.kind for task in table.tasks}
    backwards = [kind for kind in (Kind.B, Kind.I) if kind in kinds]
    needs: dict[tuple[Kind, int], tuple[tuple[Kind, int], ...]] = {}
    for stage in range(table.num_stages):
        needs[Kind.F, stage] = tuple((Kind.F, s) for s in producers.get(stage, ()))
        after = tuple((kind, s) for s in consumers.get(stage, ()) for kind in backwards)
        needs[Kind.B, stage] = needs[Kind.I, stage] = ((Kind.F, stage), *after)
        needs[Kind.W, stage] = ((Kind.I, stage),)
    return needs


@dataclass(frozen=True)
class Numbered:
    """A table with its tasks numbered, rank after rank, each with the numbers of its inputs.

    A unit is what a rank runs at once: one task, or two that overlap.
    """

    tasks: tuple[Task, ...]
    rank_of: tuple[int, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    needs: tuple[tuple[int, ...], ...]
    #: Inputs that no rank makes, though the dependencies ask for them in every form they may have.
    absent: Mapping[int, Task]


def number(table: Table, dependencies: Dependencies | None = None, join: bool = False) -> Numbered:
    """Numbers the tasks of a table, and finds what each of them needs.

    Args:
      table: the table.
      dependencies: what a task must come after; by default as the table's stages are connected.
      join: whether tasks that overlap are one unit.
    """
    if dependencies is None:
        dependencies = stage_dependencies(table)
    tasks = tuple(task for order in table.ranks for task in order)
    rank_of = tuple(rank for rank, order in enumerate(table.ranks) for _ in order)
    m = table.num_microbatches
    # A number for each kind and stage; a task's place is that times m, plus its microbatch.
    rows: dict[tuple[Kind, int], int] = {}
    places = [rows.setdefault((t.kind, t.stage), len(rows)) * m + t.microbatch for t in tasks]
    number_at = [-1] * (len(rows) * m)
    for n, place in enumerate(places):
        number_at[place] = n
    forms = _forms(rows, dependencies)
    needs: list[tuple[int, ...]] = []
    absent: dict[int, Task] = {}
    for n, (task, place) in enumerate(zip(tasks, places, strict=True)):
        own: list[int] = []
        for alternatives in forms[place // m]:
            found = [
                at
                for row in alternatives
                if isinstance(row, int) and (at := number_at[row * m + task.microbatch]) >= 0
            ]
            if found:
                own += found
            elif n not in absent:
                kind, stage = _named(alternatives, rows)
                absent[n] = Task(kind, stage, task.microbatch)
        needs.append(tuple(own))
    units = []
    first = 0
    for order in table.ranks:
        units.append(_units(order, first, table.overlaps if join else frozenset()))
        first += len(order)
    return Numbered(tasks, rank_of, tuple(units), tuple(needs), absent)


Row = int | tuple[Kind, int]


def _forms(rows: Mapping[tuple[Kind, int], int], dependencies: Dependencies) -> list[list[tuple[Row, ...]]]:
    """For each row, what it needs: each a choice of rows, as a backward may be whole or split."""
    forms: list[list[tuple[Row, ...]]] = []
    for kind, stage in rows:
        choices: dict[object, list[Row]] = {}
        for need in dependencies.get((kind, stage), ()):
            group = ("backward", need[1]) if need[0] in (Kind.B, Kind.I) else need
            choices.setdefault(group, []).append(rows.get(need, need))
        forms.append([tuple(choice) for choice in choices.values()])
    return forms


def _named(alternatives: tuple[Row, ...], rows: Mapping[tuple[Kind, int], int]) -> tuple[Kind, int]:
    row = alternatives[0]
    return row if isinstance(row, tuple) else next(key for key, at in rows.items() if at == row)


def _units(
    order: Sequence[Task], first: int, overlaps: frozenset[Task]
) -> tuple[tuple[int, ...], ...]:
    if not overlaps:
        return tuple((n,) for n in range(first, first + len(order)))
    units: list[tuple[int, ...]] = []
    skip = False
    for n, task in enumerate(order, first):
        if skip:
            skip = False
            continue
        skip = task in overlaps and n + 1 < first + len(order)
        units.append((n, n + 1) if skip else (n,))
    return tuple(units)


@dataclass(frozen=True)
class Run:
    """When each task ran, by number; `gates` are the tasks that each waited for last, or -1.

    The gate of a task is the one before it on its rank, or an input; none where it starts at once.
    """

    starts: list[float]
    ends: list[float]
    gates: list[int]
    blocks: list[Block]


def run(
    numbered: Numbered,
    costs: Sequence[float],
    delay: Callable[[int, int], float] | None = None,
    together: Callable[[int, int], float] | None = None,
    wait_for_both: bool = True,
) -> Run:
    """Runs each rank's units in order, each as soon as the rank is free and its inputs are there.

    Args:
      numbered: the table.
      costs: the time of each task.
      delay: the time for what a task makes to reach a rank, by their numbers; none by default.
      together: the time of two tasks that overlap; by default the sum.
      wait_for_both: whether of two such tasks neither starts before the inputs of both are there.

    Returns:
      The times, and the ranks left stuck: none where the table is sound.
    """
    ranks, needs, rank_of = numbered.ranks, numbered.needs, numbered.rank_of
    starts, ends = [0.0] * len(costs), [-1.0] * len(costs)
    gates = [-1] * len(costs)
    cursors, free, last = [0] * len(ranks), [0.0] * len(ranks), [-1] * len(ranks)
    waiting: dict[int, list[int]] = {}
    blocks: list[Block] = []
    runnable = list(range(len(ranks)))
    while runnable:
        rank = runnable.pop()
        units, cursor = ranks[rank], cursors[rank]
        now, gate_here = free[rank], last[rank]
        while cursor < len(units):
            unit = units[cursor]
            missing = -1
            begin = []
            for n in unit:
                if n in numbered.absent:
                    blocks.append(Block(rank, numbered.tasks[n], numbered.absent[n]))
                    missing = -2
                    break
                start, gate = now, gate_here
                for need in needs[n]:
                    ready = ends[need]
                    if ready < 0:
                        missing = need
                        break
                    if delay is not None and rank_of[need] != rank:
                        ready += delay(need, rank)
                    if ready > start:
                        start, gate = ready, need
                if missing != -1:
                    break
                begin.append((start, gate))
            if missing != -1:
                if missing >= 0:
                    waiting.setdefault(missing, []).append(rank)
                break
            if len(unit) == 1:
                (n,), ((start, gate),) = unit, begin
                now = start + costs[n]
                starts[n], ends[n], gates[n] = start, now, gate
            else:
                if wait_for_both:
                    begin = [max(begin)] * 2
                a, b = unit
                whole = costs[a] + costs[b] if together is None else together(a, b)
                (start_a, _), (start_b, _) = begin
                now = max(min(begin)[0] + whole, start_a + costs[a], start_b + costs[b])
                if wait_for_both:
                    now = start_a + whole
                for n, (start, gate) in zip(unit, begin, strict=True):
                    starts[n], ends[n], gates[n] = start, now, gate
            gate_here = unit[-1]
            cursor += 1
            for n in unit:
                if n in waiting:
                    runnable += waiting.pop(n)
        cursors[rank], free[rank], last[rank] = cursor, now, gate_here
    for need, stuck in waiting.items():
        for rank in stuck:
            n = next(n for n in ranks[rank][cursors[rank]] if need in needs[n])
            blocks.append(Block(rank, numbered.tasks[n], numbered.tasks[need]))
    return Run(starts, ends, gates, sorted(blocks, key=lambda block: block.rank))
