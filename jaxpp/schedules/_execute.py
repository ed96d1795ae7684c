"""Runs a table as its ranks would: each in its own order, each task after its inputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task

#: For a kind of task of a stage, the kinds and stages that it reads from, of the same microbatch.
Dependencies = Mapping[tuple[Kind, int], Sequence[tuple[Kind, int]]]


@dataclass(frozen=True, slots=True)
class Block:
    """A rank that is stuck: `task` is its next task; its input `needs` has not been run."""

    rank: int
    task: Task
    needs: Task


def stage_dependencies(
    table: Table, edges: Iterable[tuple[int, int]] | None = None
) -> Dependencies:
    """Returns the dependencies of a table's tasks from the graph of its stages.

    Each task needs the kinds of its own stage that come `before` its own: `B` and `I` need the `F`,
    or its `R`, which needs that `F`, and `W` needs the `I`. `F` also needs the `F` of each stage
    that it reads from, and `B` and `I` the backward of each stage that reads from theirs: its `B`,
    or its `I` where it is split. Where some microbatches have a `B` and others an `I`, or some an
    `R` and others none, the form that the table does not have for a microbatch is no dependency.

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
    backwards = [kind for kind in (Kind.B, Kind.I) if kind in table.kinds]
    before = {
        kind: [k for k in kind.before if k in kind.after or k in table.kinds] for kind in Kind
    }
    needs: dict[tuple[Kind, int], tuple[tuple[Kind, int], ...]] = {}
    for stage in range(table.num_stages):
        across = {
            Kind.F: [(Kind.F, s) for s in producers.get(stage, ())],
            Kind.B: [(kind, s) for s in consumers.get(stage, ()) for kind in backwards],
        }
        for kind, own in before.items():
            form = Kind.B if kind is Kind.I else kind
            needs[kind, stage] = (*((k, stage) for k in own), *across.get(form, ()))
    return needs


@dataclass(frozen=True)
class Numbered:
    """A table with its tasks numbered, rank after rank, each with the numbers of its inputs.

    A unit of a rank is one task, or two that overlap.
    """

    tasks: tuple[Task, ...]
    rank_of: tuple[int, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    needs: tuple[tuple[int, ...], ...]
    #: For a task, an input that no rank makes in any form, if it has such an input.
    absent: Mapping[int, Task]


def number(table: Table, dependencies: Dependencies | None = None, join: bool = False) -> Numbered:
    """Numbers the tasks of a table, and finds what each of them needs.

    Args:
      table: the table.
      dependencies: what a task must come after; by default as the table's stages are connected.
      join: whether tasks that overlap are one unit.

    Raises:
      ValueError: a task is there twice, or is of a microbatch that the table does not have.
    """
    if dependencies is None:
        dependencies = stage_dependencies(table)
    tasks = tuple(task for order in table.ranks for task in order)
    rows = _rows(tasks, table.num_microbatches)
    needs: list[tuple[int, ...]] = [()] * len(tasks)
    absent: dict[int, Task] = {}
    for key, row in rows.items():
        choices = _choices(dependencies.get(key, ()))
        columns = [_made(choice, rows, row) for choice in choices]
        for n, own in zip(row, zip(*columns, strict=True), strict=False):
            if n >= 0:
                needs[n] = own
                if -1 in own:
                    needs[n] = tuple(need for need in own if need >= 0)
                    absent[n] = Task(*choices[own.index(-1)][0], tasks[n].microbatch)
    rank_of: list[int] = []
    units: list[tuple[tuple[int, ...], ...]] = []
    for rank, order in enumerate(table.ranks):
        units.append(_units(order, len(rank_of), table.overlaps if join else frozenset()))
        rank_of += [rank] * len(order)
    return Numbered(tasks, tuple(rank_of), tuple(units), tuple(needs), absent)


def _rows(tasks: Sequence[Task], num_microbatches: int) -> dict[tuple[Kind, int], list[int]]:
    """Returns for each kind and stage the number of each microbatch's task; -1 if there is none."""
    rows: dict[tuple[Kind, int], list[int]] = {}
    for n, task in enumerate(tasks):
        key = (task.kind, task.stage)
        row = rows.get(key)
        if row is None:
            row = rows[key] = [-1] * num_microbatches
        if not 0 <= task.microbatch < num_microbatches or row[task.microbatch] >= 0:
            raise ValueError(
                f"{task.describe()} is there twice, or is of a microbatch that the table does not "
                f"have; check(table) says where."
            )
        row[task.microbatch] = n
    return rows


def _choices(needs: Sequence[tuple[Kind, int]]) -> list[list[tuple[Kind, int]]]:
    """Groups the needs of a task by input: those that make the same are forms of one input.

    Of a stage's `F`, `R` and `L` the last one before the reader counts.
    """
    choices: dict[tuple[Kind, int], list[tuple[Kind, int]]] = {}
    for kind, stage in needs:
        choices.setdefault((Kind(kind.makes or kind), stage), []).append((kind, stage))
    return list(choices.values())


def _made(
    choice: Sequence[tuple[Kind, int]],
    rows: Mapping[tuple[Kind, int], list[int]],
    readers: Sequence[int],
) -> list[int]:
    """Returns for each microbatch the number of the task that makes an input; -1 if none does.

    Of several it is the last one before the reader, where one is.
    """
    made = [rows[form] for form in choice if form in rows] or [[-1] * len(readers)]
    if len(made) == 1:
        return made[0]
    return [
        max([n for n in forms if 0 <= n < reader] or forms)
        for reader, *forms in zip(readers, *made, strict=True)
    ]


def _units(
    order: Sequence[Task], first: int, overlaps: frozenset[Task]
) -> tuple[tuple[int, ...], ...]:
    numbers = range(first, first + len(order))
    if not overlaps:
        return tuple(zip(numbers, strict=True))
    units: list[tuple[int, ...]] = []
    joined = False
    for n, task in zip(numbers, order, strict=True):
        if joined:
            units[-1] += (n,)
        else:
            units.append((n,))
        joined = not joined and task in overlaps
    return tuple(units)


@dataclass(frozen=True)
class Sends:
    """Transfers that ranks or links wait for.

    Args:
      link: gives for a task and the rank that reads it the latency, and the time for which their
        link is busy.
      share: whether the transfers of a link take turns.
      block: whether a rank waits until what it has sent has arrived.
    """

    link: Callable[[int, int], tuple[float, float]]
    share: bool
    block: bool


@dataclass(frozen=True)
class Run:
    """The times of tasks, by number; `gates` are the tasks that each waited for last, or -1.

    The gate of a task is the task before it on its rank, or an input; -1 where it starts at once.
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
    sends: Sends | None = None,
    lanes: bool = False,
) -> Run:
    """Runs each rank's units in order, each as soon as the rank is free and its inputs are there.

    With lanes, a copy starts once the computing task before it has ended, the copies before it have
    ended, and its inputs are there; the rank goes on beside it.

    Args:
      numbered: the table.
      costs: the time of each task.
      delay: the time for what a task makes to reach a rank, by their numbers; none by default.
      together: the time of two tasks that overlap; by default the sum.
      wait_for_both: whether of two such tasks neither starts before the inputs of both are there.
      sends: how ranks and links wait for transfers, in the place of `delay`.
      lanes: whether tasks of the copy lane run beside those that compute.

    Returns:
      The times, and the ranks left stuck: none where the table is sound.
    """
    nothing = len(costs)  # the number of no task, which never ends
    absent, rank_of, needs = numbered.absent, numbered.rank_of, numbered.needs
    if absent:
        needs = [(*own, nothing) if n in absent else own for n, own in enumerate(needs)]
    starts, ends, gates = [0.0] * nothing, [-1.0] * (nothing + 1), [-1] * nothing
    decides: dict[int, int] = {}  # for two tasks that end together, the one that decides the end
    arrivals: dict[tuple[int, int], float] = {}  # for a task and a rank that reads it
    send = None if sends is None else _sender(numbered, sends, ends, arrivals)

    def earliest(n: int, rank: int, start: float, gate: int) -> tuple[float, int]:
        """Returns the start and the gate of a task; or -1, and an input that is not there yet."""
        for need in needs[n]:
            ready = ends[need]
            if ready < 0:
                return -1.0, need
            if rank_of[need] != rank:
                if sends is not None:
                    ready = arrivals[need, rank]
                elif delay is not None:
                    ready += delay(need, rank)
            if ready > start:
                start, gate = ready, need
        return start, gate

    def run_both(a: int, b: int, first: tuple[float, int], second: tuple[float, int]) -> float:
        """Runs two tasks that overlap; returns the end of both."""
        if wait_for_both:
            first = second = max(first, second)
        (starts[a], gates[a]), (starts[b], gates[b]) = first, second
        both = costs[a] + costs[b] if together is None else together(a, b)
        if wait_for_both:
            ends[a] = ends[b] = starts[a] + both
        else:
            joint = (first[0] + both, a) if first <= second else (second[0] + both, b)
            end, late = max(joint, (first[0] + costs[a], a), (second[0] + costs[b], b))
            ends[a] = ends[b] = end
            decides[a] = decides[b] = late
        return ends[a]

    cursors = [0] * len(numbered.ranks)
    # When the lanes of each rank are free: that of tasks that compute, and that of copies; and
    # since what task.
    free: list[tuple[float, int]] = [(0.0, -1)] * len(numbered.ranks)
    copied = list(free)
    waiting: dict[int, list[tuple[int, int]]] = {}  # for a task, the ranks and tasks that need it
    runnable = list(range(len(numbered.ranks)))
    while runnable:
        rank = runnable.pop()
        units, cursor, (now, before) = numbered.ranks[rank], cursors[rank], free[rank]
        while cursor < len(units):
            n, last = units[cursor][0], units[cursor][-1]
            copies = lanes and numbered.tasks[n].kind.lane == "copy"
            since = max(copied[rank], (now, before)) if copies else (now, before)
            start, gate = first = earliest(n, rank, *since)
            second = first if n == last else earliest(last, rank, now, before)
            if start < 0 or second[0] < 0:
                stuck, need = (n, gate) if start < 0 else (last, second[1])
                waiting.setdefault(need, []).append((rank, stuck))
                break
            if n == last:
                starts[n], gates[n] = start, gate
                ends[n] = start + costs[n]
                if copies:
                    copied[rank] = ends[n], n
                else:
                    now = ends[n]
            else:
                now = run_both(n, last, first, second)
                runnable += [rank for rank, _ in waiting.pop(n, ())]
            if send is not None:
                now = send(units[cursor], now)
            if last in waiting:
                runnable += [rank for rank, _ in waiting.pop(last)]
            before = before if copies else last
            cursor += 1
        cursors[rank], free[rank] = cursor, (now, before)
    if decides:
        gates = [decides.get(gate, gate) for gate in gates]
    blocks = [
        Block(rank, numbered.tasks[n], absent[n] if need == nothing else numbered.tasks[need])
        for need, stuck in waiting.items()
        for rank, n in stuck
    ]
    return Run(starts, ends[:-1], gates, sorted(blocks, key=lambda block: block.rank))


def _sender(
    numbered: Numbered,
    sends: Sends,
    ends: Sequence[float],
    arrivals: dict[tuple[int, int], float],
) -> Callable[[Sequence[int], float], float]:
    """Makes the function that sends what a unit has made; gives when its rank goes on."""
    targets: list[dict[int, None]] = [{} for _ in numbered.tasks]
    for n, needs in enumerate(numbered.needs):
        for need in needs:
            if numbered.rank_of[need] != numbered.rank_of[n]:
                targets[need][numbered.rank_of[n]] = None
    free: dict[tuple[int, int], float] = {}  # for each link, when it has sent what it was given

    def send(unit: Sequence[int], now: float) -> float:
        for n in unit:
            for target in targets[n]:
                latency, busy = sends.link(n, target)
                way = numbered.rank_of[n], target
                start = max(ends[n], free.get(way, 0.0)) if sends.share else ends[n]
                free[way] = start + busy
                arrivals[n, target] = start + busy + latency
                if sends.block:
                    now = max(now, arrivals[n, target])
        return now

    return send
