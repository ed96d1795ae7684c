"""Tasks and tables: the tasks of each rank, in order, without a clock."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp.schedules._kinds import Kind

_TASK = re.compile(r"([A-Z])(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work: `kind` of `microbatch` on `stage`.

    >>> str(Task(Kind.F, stage=2, microbatch=5))
    'F2.5'
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @staticmethod
    def from_text(text: str) -> "Task | None":
        """Reads a task as it prints; gives None where the text is no task.

        >>> Task.from_text("F2.5"), Task.from_text("update")
        (Task(kind=Kind('F'), stage=2, microbatch=5), None)
        """
        match = _TASK.fullmatch(text)
        if match is None or match[1] not in Kind:
            return None
        return Task(Kind(match[1]), int(match[2]), int(match[3]))

    def describe(self) -> str:
        """Names the task in full, for an error message.

        >>> Task(Kind.F, stage=2, microbatch=5).describe()
        'F[stage 2, microbatch 5]'
        """
        return f"{self.kind}[stage {self.stage}, microbatch {self.microbatch}]"


def chain(num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Returns the stage inputs of a chain: each stage reads from the one before."""
    return tuple((stage - 1,) if stage else () for stage in range(num_stages))


@dataclass(frozen=True)
class Table:
    """For each rank, the tasks that it runs, in order.

    A table has no clock: `simulate` gives it one. It is not checked when it is made: `check` does.

    Args:
      ranks: for each rank, its tasks in order.
      num_stages: the number of stages.
      num_microbatches: the number of microbatches.
      placement: for each direction in which microbatches go through the ranks, the rank of each
        stage. By default there is one direction, read off the tasks. With two, as in DualPipe, a
        stage is on two ranks, each with a copy of its parameters, and each microbatch takes one
        direction.
      stage_inputs: for each stage, the stages whose results it reads; None where that is the one
        before. In the table of a scheduled function they are those that its stages read.
      overlaps: tasks that run together with the one after them on their rank, as far as the
        hardware can. `simulate` says what that means for time; the order is theirs without it.
      direction_of: for each microbatch, the number of the direction that it takes. With one
        direction it may be left out.

    Raises:
      ValueError: there are several directions, and `direction_of` does not say for each microbatch
        which of them it takes.

    >>> from jaxpp.schedules import OneFOneB
    >>> for tasks in OneFOneB().table(num_stages=2, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 B0.0 B0.1
    F1.0 B1.0 F1.1 B1.1
    """

    ranks: tuple[tuple[Task, ...], ...]
    num_stages: int
    num_microbatches: int
    placement: tuple[tuple[int, ...], ...] = ()
    stage_inputs: tuple[tuple[int, ...], ...] | None = None
    overlaps: frozenset[Task] = frozenset()
    direction_of: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = max(1, len(self.placement))
        if count == 1 and not self.direction_of:
            object.__setattr__(self, "direction_of", (0,) * self.num_microbatches)
        if self.stage_inputs == chain(self.num_stages):
            object.__setattr__(self, "stage_inputs", None)
        known = set(self.direction_of) <= set(range(count))
        if len(self.direction_of) != self.num_microbatches or not known:
            raise ValueError(
                f"a table of {self.num_microbatches} microbatches and {count} directions needs "
                f"direction_of to give each microbatch the number of its direction, from 0 to "
                f"{count - 1}, got {self.direction_of}."
            )

    def __repr__(self) -> str:
        return (
            f"Table({self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} "
            f"microbatches)"
        )

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @functools.cached_property
    def tasks(self) -> frozenset[Task]:
        """Every task of every rank."""
        return frozenset(task for tasks in self.ranks for task in tasks)

    @functools.cached_property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of the table's tasks."""
        return frozenset({task.kind for tasks in self.ranks for task in tasks})

    @functools.cached_property
    def directions(self) -> tuple[tuple[int, ...], ...]:
        """For each direction, the rank of each stage: `placement`, or one read off the tasks.

        Raises:
          ValueError: a stage has no task, so no rank.

        >>> from jaxpp.schedules import GPipe
        >>> GPipe(stages_per_rank=2).table(num_stages=6, num_microbatches=1).directions
        ((0, 1, 2, 0, 1, 2),)
        """
        if self.placement:
            return self.placement
        owners = {task.stage: rank for rank, tasks in enumerate(self.ranks) for task in tasks}
        if absent := [stage for stage in range(self.num_stages) if stage not in owners]:
            raise ValueError(
                f"the table has {self.num_stages} stages, but no rank has a task of stage "
                f"{absent[0]}; give that stage its tasks, or lower num_stages."
            )
        return (tuple(owners[stage] for stage in range(self.num_stages)),)

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Tells whether any backward is run as its two halves, `I` and `W`."""
        return not self.kinds.isdisjoint((Kind.I, Kind.W))

    def with_halves(self) -> "Table":
        """Returns the same table with every `B` written as `I`, then `W`.

        A table that splits some of its backwards is run so: the halves are computations of their
        own, and a `B` is one after the other. What overlaps with a `B` overlaps with the half that
        is next to it.

        >>> tasks = (Task(Kind.F, 0, 0), Task(Kind.B, 0, 0))
        >>> print(*Table((tasks,), num_stages=1, num_microbatches=1).with_halves().ranks[0])
        F0.0 I0.0 W0.0
        """
        halves = {Kind.B: (Kind.I, Kind.W)}
        ranks = tuple(
            tuple(
                Task(kind, task.stage, task.microbatch)
                for task in tasks
                for kind in halves.get(task.kind, (task.kind,))
            )
            for tasks in self.ranks
        )
        overlaps = frozenset(
            dataclasses.replace(task, kind=halves.get(task.kind, (task.kind,))[-1])
            for task in self.overlaps
        )
        return dataclasses.replace(self, ranks=ranks, overlaps=overlaps)

    def with_recomputation(self, which: Callable[[Task], bool]) -> "Table":
        """Returns the same table with an `R` right before the backward of some forwards.

        Of two tasks that overlap, the `R` of the second comes before both. Activations that are
        offloaded are not computed again.

        Args:
          which: tells for an `F` whether its activations are dropped and computed again.

        >>> tasks = (Task(Kind.F, 0, 0), Task(Kind.F, 0, 1), Task(Kind.B, 0, 0), Task(Kind.B, 0, 1))
        >>> table = Table((tasks,), num_stages=1, num_microbatches=2)
        >>> print(*table.with_recomputation(lambda task: task.microbatch == 0).ranks[0])
        F0.0 F0.1 R0.0 B0.0 B0.1
        """
        ranks = []
        for order in self.ranks:
            tasks: list[Task] = []
            for task in order:
                if task.kind in (Kind.B, Kind.I):
                    own = [Task(k, task.stage, task.microbatch) for k in map(Kind, "FRO")]
                    first, again, away = own
                    if self.tasks.isdisjoint((again, away)) and which(first):
                        joined = bool(tasks) and tasks[-1] in self.overlaps
                        tasks.insert(len(tasks) - joined, again)
                tasks.append(task)
            ranks.append(tuple(tasks))
        return dataclasses.replace(self, ranks=tuple(ranks))

    def with_offload(self, which: Callable[[Task], bool], ahead: int = 1) -> "Table":
        """Returns the same table with an `O` and an `L` for the activations of some forwards.

        They are away in the longest time in which nothing reads them: between the `F` and the `B`
        or `I`, or between the `I` and the `W`. The `O` comes right after the first of these, the
        `L` so many tasks before the second. Where that is no later than the `O`, or an `R` computes
        the activations again, there is nothing to gain: neither is added. Nor do they come between
        two tasks that overlap.

        Args:
          which: tells for an `F` whether its activations are offloaded.
          ahead: the number of computing tasks that the rank runs between an `L` and its reader.

        >>> tasks = [Task(Kind(kind), 0, i) for kind in "FB" for i in range(3)]
        >>> table = Table((tuple(tasks),), num_stages=1, num_microbatches=3)
        >>> print(*table.with_offload(lambda task: task.microbatch < 2).ranks[0])
        F0.0 O0.0 F0.1 O0.1 L0.0 F0.2 L0.1 B0.0 B0.1 B0.2
        """
        ranks = []
        for order in self.ranks:
            # The places between computing tasks: before task n is place n.
            computing = [task for task in order if task.kind.lane == "compute"]
            place = {task: n for n, task in enumerate(computing)}
            joined = [False, *(task in self.overlaps for task in computing)]
            added: dict[int, list[Task]] = {}
            for first in (task for task in computing if task.kind is Kind.F and which(task)):
                own = {k: Task(k, first.stage, first.microbatch) for k in map(Kind, "FBIWROL")}
                uses = [place[own[kind]] for kind in map(Kind, "FBIW") if own[kind] in place]
                _, start, end = max((b - a, a + 1, b - ahead) for a, b in itertools.pairwise(uses))
                start, end = start + joined[start], end - joined[max(end, 0)]
                if start < end and self.tasks.isdisjoint((own[Kind.R], own[Kind.O])):
                    added.setdefault(start, []).append(own[Kind.O])
                    added.setdefault(end, []).append(own[Kind.L])
            for own in added.values():
                own.sort(key=lambda task: task.kind is Kind.L)
            ranks.append(_with_added(order, added))
        return dataclasses.replace(self, ranks=tuple(ranks))

    def with_gathers(
        self, which: Callable[[int], bool], held: int | None = None, ahead: int = 0
    ) -> "Table":
        """Returns the same table with a `G` or an `H` before tasks of some stages.

        A rank holds the gathered parameters of so many of its stages at once: before it gathers
        those of a further one it drops those that it reads again last (Belady's rule). A `G` comes
        before an `F`, an `H` before any other task; none comes twice for a microbatch. A stage that
        has gathers keeps those.

        Args:
          which: tells for a stage whether its parameters are gathered.
          held: how many stages' parameters a rank holds at once; None for all of its stages, 0
            where each task drops them.
          ahead: the number of computing tasks that the rank runs between a gather and its reader.

        >>> tasks = [Task(Kind(kind), s, i) for kind in "FB" for s in (0, 1) for i in (0, 1)]
        >>> table = Table((tuple(tasks),), num_stages=2, num_microbatches=2)
        >>> print(*table.with_gathers(lambda stage: stage == 0, held=1).ranks[0])
        G0.0 F0.0 F0.1 F1.0 F1.1 B0.0 B0.1 B1.0 B1.1
        >>> print(*table.with_gathers(lambda stage: True, held=1).ranks[0])
        G0.0 F0.0 F0.1 G1.0 F1.0 F1.1 H0.0 B0.0 B0.1 H1.0 B1.0 B1.1
        """
        ranks, has = [], {t.stage for t in self.tasks if Kind.G in (t.kind, t.kind.makes)}
        for order in self.ranks:
            computing = [task for task in order if task.kind.lane == "compute"]
            joined = [False, *(task in self.overlaps for task in computing)]
            again = _next_places(computing)
            added: dict[int, list[Task]] = {}
            done: set[Task] = set()
            last: dict[int, int] = {}  # for each stage the place of its last reader so far
            known: dict[int, int] = {}  # for each gathered stage the place of its next reader
            for n, task in enumerate(computing):
                if (stage := task.stage) in has or not which(stage):
                    continue
                own = Task(Kind.G if task.kind is Kind.F else Kind.H, stage, task.microbatch)
                since = last.get(stage, -1)
                # Two tasks that overlap have nothing between them, and one gather.
                if stage not in known and own not in done and not (joined[n] and since == n - 1):
                    start = max(n - ahead, since + 1)
                    if joined[start]:
                        start += 1 if since == start - 1 else -1
                    added.setdefault(start, []).append(own)
                    done.add(own)
                known.pop(stage, None)
                while held is not None and len(known) >= max(held, 1):
                    del known[max(known, key=known.__getitem__)]
                last[stage] = n
                if held != 0:
                    known[stage] = again[n]
            ranks.append(_with_added(order, added))
        return dataclasses.replace(self, ranks=tuple(ranks))

    def with_reductions(self, which: Callable[[int], bool], every: int | None = None) -> "Table":
        """Returns the same table with an `S` after the last backward of some stages.

        A stage that has reductions keeps those.

        Args:
          which: tells for a stage whether its gradients are reduced so.
          every: the number of backwards after which there is an `S`, too; None for none of these.

        >>> tasks = [Task(Kind(kind), s, i) for kind in "FB" for s in (0, 1) for i in (0, 1)]
        >>> table = Table((tuple(tasks),), num_stages=2, num_microbatches=2)
        >>> print(*table.with_reductions(lambda stage: stage == 0).ranks[0])
        F0.0 F0.1 F1.0 F1.1 B0.0 B0.1 S0.1 B1.0 B1.1
        """
        ranks, has = [], {task.stage for task in self.tasks if task.kind is Kind.S}
        for order in self.ranks:
            computing = [task for task in order if task.kind.lane == "compute"]
            done, added = dict[int, int](), dict[int, list[Task]]()
            last = {task.stage: n for n, task in enumerate(computing) if task.kind in Kind.S.takes}
            for n, task in enumerate(computing):
                if task.kind in (Kind.B, Kind.W) and task.stage not in has and which(task.stage):
                    done[task.stage] = done.get(task.stage, 0) + 1
                    if n == last[task.stage] or (every and done[task.stage] % every == 0):
                        own = Task(Kind.S, task.stage, task.microbatch)
                        added.setdefault(n + 1 + (task in self.overlaps), []).append(own)
            ranks.append(_with_added(order, added))
        return dataclasses.replace(self, ranks=tuple(ranks))

    @functools.cached_property
    def windows(self) -> dict[Task, tuple[Task, ...]]:
        """For each task that is of its stage, the computing tasks that read or make its values.

        >>> tasks = (Task(Kind.G, 0, 0), Task(Kind.F, 0, 0), Task(Kind.H, 0, 0), Task(Kind.B, 0, 0))
        >>> for task, readers in Table((tasks,), num_stages=1, num_microbatches=1).windows.items():
        ...     print(task, "->", *readers)
        G0.0 -> F0.0
        H0.0 -> B0.0
        """
        found: dict[Task, list[Task]] = {}
        for order in self.ranks if any(kind.of_stage for kind in self.kinds) else ():
            now: dict[tuple[int, str], Task] = {}
            for n, task in enumerate(order):
                if task.kind.takes:
                    own = [t for t in order[:n] if t.stage == task.stage]
                    since = max((n for n, t in enumerate(own) if t.kind is task.kind), default=-1)
                    found[task] = [t for t in own[since + 1 :] if t.kind in task.kind.takes]
                elif task.kind.of_stage:
                    now[task.stage, task.kind.makes or task.kind] = task
                    found[task] = []
                elif task.kind.lane == "compute":
                    for (stage, _), maker in now.items():
                        if stage == task.stage:
                            found[maker].append(task)
        return {task: tuple(readers) for task, readers in found.items()}

    def fused(self, which: str) -> frozenset[Task]:
        """Returns the tasks that `jaxpp.place(fuse=)` joins with the one before them on their rank.

        It is told from the table alone: `place` leaves two tasks apart with work between them, and
        has no halves of a backward without a gradient of its input. The text of a step is exact.

        Args:
          which: `"none"`, `"pairs"`, those that overlap, or `"chains"`, also those that have no
            message between them.

        >>> from jaxpp.schedules import OneFOneB
        >>> print(*sorted(map(str, OneFOneB().table(2, 2).fused("chains"))))
        B1.0 B1.1
        """
        reads = self.stage_inputs or chain(self.num_stages)
        read_by = [[s for s, own in enumerate(reads) if n in own] for n in range(len(reads))]

        def is_remote(task: Task, forward: Any, backward: Any) -> bool:
            stages = {Kind.F: forward, Kind.B: backward, Kind.I: backward}.get(task.kind)
            ranks = self.directions[self.direction_of[task.microbatch]]
            there = stages[task.stage] if stages else ()
            return any(ranks[stage] != ranks[task.stage] for stage in there)

        pairs = itertools.chain(*map(itertools.pairwise, self.ranks if which != "none" else ()))
        return frozenset(
            task
            for before, task in pairs
            if before in self.overlaps
            or (which == "chains" and before.kind.lane == task.kind.lane == "compute"
                and not is_remote(before, read_by, reads) and not is_remote(task, reads, read_by))
        )  # fmt: skip

    @functools.cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes on which tasks run beside those that compute: of `"copy"`, `"collective"`."""
        return tuple(sorted({kind.lane for kind in self.kinds} - {"compute"}))

    @functools.cached_property
    def forward_only(self) -> bool:
        """Tells whether the table has no backward at all."""
        return self.kinds.isdisjoint((Kind.B, Kind.I, Kind.W, Kind.R))

    @functools.cached_property
    def dropped(self) -> frozenset[Task]:
        """Every `F` whose activations are dropped at its end.

        An `R` computes them again, or, in a table that is forward only, nothing reads them.

        >>> tasks = (Task(Kind.F, 0, 0), Task(Kind.R, 0, 0), Task(Kind.B, 0, 0))
        >>> print(*Table((tasks,), num_stages=1, num_microbatches=1).dropped)
        F0.0
        """
        if self.forward_only:
            return frozenset(task for task in self.tasks if task.kind is Kind.F)
        again = (task for task in self.tasks if task.kind is Kind.R)
        return frozenset(Task(Kind.F, task.stage, task.microbatch) for task in again)

    def peak_in_flight(self) -> tuple[int, ...]:
        """Counts the activations that each rank holds at its peak.

        An activation is all that one stage keeps of one microbatch, from its `F` to its `B` or `W`.
        One that is dropped counts during the `F`, and again from the `R` on. Where a rank has `v`
        stages, the activations of each count: divide by `v` for whole microbatches.

        Returns:
          For each rank, the largest number of (stage, microbatch) pairs held at once.

        >>> from jaxpp.schedules import OneFOneB
        >>> OneFOneB().table(num_stages=4, num_microbatches=8).peak_in_flight()
        (4, 3, 2, 1)
        """
        return tuple(int(_peak(tasks, self.dropped)) for tasks in self.ranks)


def _with_added(order: Sequence[Task], added: Mapping[int, Sequence[Task]]) -> tuple[Task, ...]:
    """Adds tasks to an order: those of place n before the computing task of that number."""
    tasks: list[Task] = []
    n = 0
    for task in (*order, None):
        if task is None or task.kind.lane == "compute":
            tasks += added.get(n, ())
            n += 1
        tasks += [task] if task else []
    return tuple(tasks)


def _next_places(tasks: Sequence[Task]) -> list[int]:
    """Returns for each task the place of the next one of its stage, or the number of all tasks."""
    places, following = [len(tasks)] * len(tasks), dict[int, int]()
    for n in reversed(range(len(tasks))):
        places[n] = following.get(tasks[n].stage, len(tasks))
        following[tasks[n].stage] = n
    return places


def _peak(tasks: tuple[Task, ...], dropped: frozenset[Task]) -> float:
    held = peak = 0.0
    for task in tasks:
        held += task.kind.holds
        peak = max(peak, held)
        held -= task in dropped
    return peak
