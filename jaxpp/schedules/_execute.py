"""Runs a table as its ranks would: each in its own order, each task after its inputs.

A table becomes rows of numbered tasks for the simulator's clock: a rank is a row, and so are its
copies, its collectives, and each link whose transfers take turns. Two tasks that overlap are one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task, chain
from jaxpp.schedules.simulator._run import RunTimes, run

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
        inputs = table.stage_inputs or chain(table.num_stages)
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
    for task, window in table.windows.items():
        for other in window:
            reader, maker = (task, other) if task.kind.takes else (other, task)
            n = rows[reader.kind, reader.stage][reader.microbatch]
            needs[n] = (*needs[n], rows[maker.kind, maker.stage][maker.microbatch])
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
class Executed:
    """The times of tasks, by number; `gates` are the tasks that each waited for last, or -1.

    The gate of a task is the task before it on its rank, or an input; -1 where it starts at once.
    """

    starts: list[float]
    ends: list[float]
    gates: list[int]
    blocks: list[Block]


def execute(
    numbered: Numbered,
    costs: Sequence[float],
    delay: Callable[[int, int], float] | None = None,
    together: Callable[[int, int], float] | None = None,
    wait_for_both: bool = True,
    sends: Sends | None = None,
    lanes: Sequence[str] = (),
) -> Executed:
    """Runs each rank's units in order, each as soon as the rank is free and its inputs are there.

    With lanes, a copy or a collective starts once the computing task before it has ended, those
    before it in its lane have ended, and its inputs are there; the rank goes on beside it.

    Args:
      numbered: the table.
      costs: the time of each task.
      delay: the time for what a task makes to reach a rank, by their numbers; none by default.
      together: the time of two tasks that overlap; by default the sum.
      wait_for_both: whether of two such tasks neither starts before the inputs of both are there.
      sends: how ranks and links wait for transfers, in the place of `delay`.
      lanes: the lanes whose tasks run beside those that compute.

    Returns:
      The times, and the ranks left stuck: none where the table is sound.
    """
    rows = _TimedRows(numbered, costs, lanes)
    arrivals = rows.send(sends) if sends is not None else {}
    rows.connect(delay, arrivals)
    rows.join(together or (lambda a, b: costs[a] + costs[b]), wait_for_both)
    found = run(rows.time, rows.needs, rows.rows, rows.end_of)
    return rows.executed(found)


class _TimedRows:
    """The rows of a table.

    Numbers of tasks are those of the table; then comes that of no task, which never ends, and those
    of the transfers of links. Of two tasks that overlap the first stands for both.
    """

    def __init__(self, numbered: Numbered, costs: Sequence[float], lanes: Sequence[str]):
        self.numbered, self.costs = numbered, costs
        self.nothing = len(costs)
        self.time = [*costs, 0.0]
        self.inputs: list[list[tuple[int, float]]] = []
        self.needs: list[list[tuple[int, float]]] = []
        self.end_of: dict[int, Callable[[float, list[float]], float]] = {}
        # Waits of a unit because of the computing unit before it, in the place of a need.
        self.behind: dict[int, list[tuple[int, float]]] = {}
        self.before: dict[int, tuple[int, ...]] = {}  # of each unit, those before it in its lanes
        self.first: dict[int, int] = {}  # of two that overlap, by the second
        self.starts: dict[int, float] = {}  # of those that overlap, but do not start together
        self.late: dict[int, int] = {}  # of two that end together, the one that decides the end
        self.source: dict[int, int] = {}  # of a transfer, the task that made it
        self.rows: list[list[int]] = [[] for _ in numbered.ranks]
        beside: dict[str, list[list[int]]] = {lane: [[] for _ in numbered.ranks] for lane in lanes}
        for rank, units in enumerate(numbered.ranks):
            last = dict.fromkeys(("compute", *lanes), -1)  # of each lane
            for unit in units:
                lane = numbered.tasks[unit[0]].kind.lane
                lane, computed = lane if lane in beside else "compute", last["compute"]
                since = dict.fromkeys((computed, last[lane]))
                self.before[unit[0]] = tuple(n for n in since if n >= 0)
                beside.get(lane, self.rows)[rank].append(unit[0])
                if lane in beside and computed >= 0:
                    self.behind[unit[0]] = [(computed, 0.0)]
                last[lane] = unit[0] if lane in beside else unit[-1]
                if len(unit) > 1:
                    self.first[unit[1]] = unit[0]
        for rows in beside.values():
            self.rows += rows
        self.num_rows = len(self.rows)  # without those of links

    def send(self, sends: Sends) -> dict[tuple[int, int], tuple[int, float]]:
        """Gives transfers rows of their own; returns what each reader of a task waits for."""
        numbered = self.numbered
        targets: list[dict[int, None]] = [{} for _ in numbered.tasks]
        for n, needs in enumerate(numbered.needs):
            for need in needs:
                if numbered.rank_of[need] != numbered.rank_of[n]:
                    targets[need][numbered.rank_of[n]] = None
        links: dict[tuple[int, int], list[int]] = {}
        arrivals: dict[tuple[int, int], tuple[int, float]] = {}
        for rank, units in enumerate(numbered.ranks):
            sent: list[tuple[int, float]] = []
            for unit in units:
                if sends.block and sent:
                    self.behind.setdefault(unit[0], []).extend(sent)
                if numbered.tasks[unit[0]].kind.lane == "compute":
                    sent = []
                for n in unit:
                    for target in targets[n]:
                        latency, busy = sends.link(n, target)
                        arrivals[n, target] = n, latency + busy
                        if sends.share:
                            arrivals[n, target] = len(self.time), latency
                            links.setdefault((rank, target), []).append(len(self.time))
                            self.source[len(self.time)] = n
                            self.time.append(busy)
                        sent.append(arrivals[n, target])
        self.rows += links.values()
        return arrivals

    def connect(
        self,
        delay: Callable[[int, int], float] | None,
        arrivals: Mapping[tuple[int, int], tuple[int, float]],
    ) -> None:
        """Collects what tasks and transfers wait for."""
        rank_of, absent = self.numbered.rank_of, self.numbered.absent
        for n, needs in enumerate(self.numbered.needs):
            rank = rank_of[n]
            own = [
                (need, 0.0) if rank_of[need] == rank
                else arrivals[need, rank] if arrivals
                else (need, delay(need, rank) if delay else 0.0)
                for need in needs
            ]  # fmt: skip
            self.inputs.append([*own, (self.nothing, 0.0)] if n in absent else own)
        self.needs = [*self.inputs, [], *([(n, 0.0)] for n in self.source.values())]
        for n, extra in self.behind.items():
            self.needs[n] = [*self.needs[n], *extra]

    def join(self, together: Callable[[int, int], float], wait_for_both: bool) -> None:
        """Makes one of tasks that overlap."""
        for b, a in self.first.items():
            self.time[a] = together(a, b)
            self.needs[a] = [*self.needs[a], *self.needs[b]]
            if not wait_for_both:
                self.end_of[a] = self._end_of_both(a, b)
        if self.first:
            first = self.first
            self.needs = [[(first.get(n, n), d) for n, d in own] for own in self.needs]
            self.inputs = [[(first.get(n, n), d) for n, d in own] for own in self.inputs]

    def _end_of_both(self, a: int, b: int) -> Callable[[float, list[float]], float]:
        def end(since: float, ends: list[float]) -> float:
            first, second = (
                max([since, *(ends[need] + delay for need, delay in self.inputs[n])])
                for n in (a, b)
            )
            both = self.time[a]
            joint = (first + both, a) if first <= second else (second + both, b)
            end, late = max(joint, (first + self.costs[a], a), (second + self.costs[b], b))
            self.starts[a], self.starts[b] = first, second
            self.late[a] = self.late[b] = late
            return end

        return end

    def executed(self, found: RunTimes) -> Executed:
        """Returns the times of the tasks, what each waited for, and the ranks left stuck."""
        count = self.nothing
        starts, ends = found.starts[:count], found.ends[:count]
        for b, a in self.first.items():
            starts[b], ends[b] = starts[a], ends[a]
        for n, start in self.starts.items():
            starts[n] = start
        second = {} if self.starts else {a: b for b, a in self.first.items()}
        gates = [-1] * count
        for n in range(count):
            unit = self.first.get(n, n)
            pair = (unit, second[unit]) if unit in second else (n,)
            gates[n] = self._gate(pair, starts[n], ends, found.ends)
        return Executed(starts, ends, gates, self._blocks(found))

    def _gate(
        self, tasks: Sequence[int], start: float, ends: Sequence[float], all_ends: Sequence[float]
    ) -> int:
        """Finds what tasks that start together have waited for."""
        unit = self.first.get(tasks[0], tasks[0])
        since, gate = 0.0, -1
        for before in self.before[unit]:
            since, gate = max((since, gate), (ends[before], before))
        since = max([since, *(all_ends[m] + delay for m, delay in self.behind.get(unit, ()))])
        if since < start:
            for n in tasks:
                needs = zip(self.numbered.needs[n], self.inputs[n], strict=False)
                ready = (need for need, (m, delay) in needs if all_ends[m] + delay == start)
                if (need := next(ready, -1)) >= 0:
                    return self.late.get(need, need)
        return self.late.get(gate, gate)

    def _blocks(self, found: RunTimes) -> list[Block]:
        numbered, blocks = self.numbered, {}
        for row, (n, need) in sorted(found.stuck.items(), reverse=True):
            if row >= self.num_rows:
                continue  # a link: the rank that reads from it is stuck, too
            rank, need = row % len(numbered.ranks), self.source.get(need, need)
            for m in (n, *(b for b, a in self.first.items() if a == n)):
                if need == self.nothing and m in numbered.absent:
                    blocks[rank] = Block(rank, numbered.tasks[m], numbered.absent[m])
                for own in numbered.needs[m]:
                    if self.first.get(own, own) == need:
                        blocks[rank] = Block(rank, numbered.tasks[m], numbered.tasks[own])
        return [blocks[rank] for rank in sorted(blocks)]
