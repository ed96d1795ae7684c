"""Cost models: the time of tasks and of transfers, and the memory that tasks hold."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task

#: A number for all tasks of a kind, one for each stage, or a function of the task.
Cost = float | Sequence[float] | Callable[[Task], float]
#: A number for all pairs of ranks, or a function of the rank that sends and the one that receives.
Link = float | Callable[[int, int], float]

#: A cost is less than this, so that sums of many are numbers, too.
_LARGEST = 1e100

_Model = TypeVar("_Model", "Costs", "Memory")


@dataclass(frozen=True)
class Costs:
    """The time of each task and of each transfer, in any one unit.

    A number is the time of a rank's whole share of a microbatch: where a rank has `v` stages, each
    of their tasks takes 1/v of it. So one value suits schedules with one stage on a rank and with
    several, and all of them do the same work. With `per="stage"` a number is the time of a task of
    one stage, however many stages its rank has. One number for each stage, and a function of the
    task, always give the time of one task. `latency`, `bandwidth` and `edge_bytes` are those of one
    message. `simulate`, `compare`, `plot`, `synthesize` and `predict` all read costs in this way.

    Args:
      forward: the time of an `F`.
      input_grad: the time of an `I`.
      weight_grad: the time of a `W`.
      backward: the time of a `B`; by default that of its two halves.
      overlapped: the time of two tasks that run together; by default the sum of theirs.
      latency: the time that a transfer takes whatever its size.
      bandwidth: the bytes that a link moves in one unit of time.
      edge_bytes: the bytes that a task sends to each rank that reads its result.
      recompute: the time of an `R`; by default that of the `F`.
      offload: the time of an `O`: its bytes over the bandwidth to the host.
      load: the time of an `L`.
      gather: the time of a `G` or an `H`.
      reduce: the time of an `S`; those of a `Machine` come after the last task.
      other: the times of further kinds; by default their `Kind.cost`.
      per: whose time a number is, `"rank"` or `"stage"`.
      unit: the unit of time, such as `"s"`, for pictures.

    >>> from jaxpp.schedules import Interleaved1F1B, Kind, OneFOneB, Task, simulate
    >>> table = Interleaved1F1B(2).table_for_ranks(4, 8)  # two stages on each rank
    >>> simulate(OneFOneB().table_for_ranks(4, 8)).busy[0], simulate(table).busy[0]
    (24.0, 24.0)
    >>> simulate(table, Costs(per="stage")).busy[0]
    48.0
    >>> costs = Costs(forward=2.0, input_grad=(3.0, 4.0))
    >>> costs.of(Task(Kind.F, stage=1, microbatch=0)), costs.of(Task(Kind.B, 1, 0))
    (2.0, 5.0)
    >>> Costs(latency=0.5, bandwidth=100.0, edge_bytes=200.0).transfer(Task(Kind.F, 0, 0), 0, 1)
    2.5
    """

    forward: Cost = Kind.F.cost
    input_grad: Cost = Kind.I.cost
    weight_grad: Cost = Kind.W.cost
    backward: Cost | None = None
    overlapped: Callable[[Task, Task], float] | None = None
    latency: Link = 0.0
    bandwidth: Link = math.inf
    edge_bytes: Cost = 0.0
    recompute: Cost | None = None
    offload: Cost = Kind.O.cost
    load: Cost = Kind.L.cost
    gather: Cost = Kind.G.cost
    reduce: Cost = Kind.S.cost
    other: Mapping[Kind, Cost] = dataclasses.field(default_factory=dict, hash=False)
    per: Literal["rank", "stage"] = "rank"
    unit: str = ""

    def __post_init__(self) -> None:
        _check_per(self)

    @staticmethod
    def measured(
        times: Mapping[tuple[Kind, int], float], *, unit: str = "s", **links: Link | Cost
    ) -> "Costs":
        """Makes costs from the time of each kind of task of each stage.

        Args:
          times: for each kind and stage, seconds, or any unit. A `B` that is missing costs its
            halves, an `R` its `F`; what is missing else costs 0.
          unit: the unit of the times.
          **links: `latency`, `bandwidth` and `edge_bytes`, where transfers count.

        >>> from jaxpp.schedules import Kind, Task
        >>> Costs.measured({(Kind.F, 0): 2.0, (Kind.B, 0): 5.0}).of(Task(Kind.B, 0, 7))
        5.0
        """

        def time(kind: Kind, stage: int) -> float:
            parts = sum(time(Kind(part), stage) for part in kind.parts)
            return float(times.get((kind, stage), parts))

        stages = range(1 + max((stage for _, stage in times), default=-1))
        each = {kind: tuple(time(kind, stage) for stage in stages) for kind in Kind}
        named: dict[str, Any] = {k.field: each.pop(k) for k in Kind if k.field}
        return Costs(**named, other=each, per="stage", unit=unit, **links)  # pyright: ignore

    def of(self, task: Task) -> float:
        """Returns the time of a task; a number counts as it is, see `by_stage`.

        Raises:
          ValueError: the cost is negative, not finite, or has no number for the task's stage.
        """
        return _of(self, task)

    def together(self, first: Task, second: Task) -> float:
        """Returns the time of two tasks that run together.

        >>> Costs().together(Task(Kind.F, 0, 1), Task(Kind.B, 0, 0))
        3.0
        """
        if self.overlapped is None:
            return self.of(first) + self.of(second)
        value = float(self.overlapped(first, second))
        if not 0 <= value < math.inf:
            raise ValueError(
                f"overlapped of {first.describe()} and {second.describe()} is {value}; a cost is a "
                f"finite number of at least 0."
            )
        return value

    def transfer(self, task: Task, source: int, target: int) -> float:
        """Returns the time that a task's result takes to reach another rank."""
        return sum(self.link(task, source, target))

    def link(self, task: Task, source: int, target: int) -> tuple[float, float]:
        """Finds the two parts of `transfer`: the latency, and the time for which the link is busy.

        >>> Costs(latency=0.5, bandwidth=100.0, edge_bytes=200.0).link(Task(Kind.F, 0, 0), 0, 1)
        (0.5, 2.0)
        """
        latency, bandwidth = (
            float(link(source, target)) if callable(link) else link
            for link in (self.latency, self.bandwidth)
        )
        if not (0 <= latency < math.inf and bandwidth > 0):
            raise ValueError(
                f"a link needs a latency of at least 0 and a bandwidth above 0, got {latency} and "
                f"{bandwidth} from rank {source} to rank {target}; correct Costs."
            )
        return latency, _evaluate(self.edge_bytes, task, "edge_bytes") / bandwidth

    @property
    def moves_for_free(self) -> bool:
        """Tells whether no transfer takes any time."""
        return self.latency == 0.0 and (self.bandwidth == math.inf or self.edge_bytes == 0.0)

    def by_stage(self, placement: Sequence[int]) -> "Costs":
        """Returns the costs of tasks, from those of ranks: what `simulate` reckons with.

        Args:
          placement: the rank of each stage.

        >>> Costs(forward=3.0).by_stage((0, 1, 1, 0)).of(Task(Kind.F, 2, 0))
        1.5
        """
        return _by_stage(self, placement)

    def divided(self, stages_per_rank: int) -> "Costs":
        """Returns the costs of one stage, from the costs of a rank with several equal stages.

        This divides functions and the numbers of each stage, too.

        >>> Costs(forward=3.0).divided(2).forward
        1.5
        """
        both = self.overlapped
        return dataclasses.replace(
            _divided(self, stages_per_rank),
            overlapped=None if both is None else lambda a, b: both(a, b) / stages_per_rank,
        )


@dataclass(frozen=True)
class Memory:
    """A memory model: each task adds to its rank's memory (above 0) or frees some (below 0).

    All changes are in any one unit. A task adds at its start, and frees at its end. As in `Costs`,
    a number is that of a rank's whole share of a microbatch, and with `per="stage"` that of one
    stage. The default counts activations, in microbatches of all stages of a rank: from the `F` of
    a stage and microbatch to its `W` or `B`. Where the table has an `R` for them, the `F` frees at
    its end what the `R` adds again.

    Args:
      forward: the change by an `F`.
      input_grad: the change by an `I`.
      weight_grad: the change by a `W`.
      backward: the change by a `B`; by default that of its two halves.
      recompute: the change by an `R`; by default that of the `F`. Less leaves what the stage keeps
        of its inputs.
      offload: the change by an `O`, below 0; by default all that the `F` adds.
      load: the change by an `L`; by default all that the `F` adds.
      gather: what a `G` or an `H` adds, up to the end of the last task that reads it.
      reduce: what an `S` drops at its end, from the start of the first backward since the last one.
      other: the changes by further kinds; by default their `Kind.holds`.
      per: whose memory a number is, `"rank"` or `"stage"`.

    >>> from jaxpp.schedules import Kind, Task
    >>> Memory(forward=3.0, input_grad=-1.0, weight_grad=-2.0).of(Task(Kind.B, 0, 0))
    -3.0
    """

    forward: Cost = Kind.F.holds
    input_grad: Cost = Kind.I.holds
    weight_grad: Cost = Kind.W.holds
    backward: Cost | None = None
    recompute: Cost | None = None
    offload: Cost | None = None
    load: Cost | None = None
    gather: Cost = Kind.G.holds
    reduce: Cost = Kind.S.holds
    other: Mapping[Kind, Cost] = dataclasses.field(default_factory=dict, hash=False)
    per: Literal["rank", "stage"] = "rank"

    def __post_init__(self) -> None:
        _check_per(self)

    def of(self, task: Task) -> float:
        """Returns the change by a task; a number counts as it is, see `by_stage`."""
        return _of(self, task)

    def by_stage(self, placement: Sequence[int]) -> "Memory":
        """Returns the memory of tasks, from that of ranks.

        Args:
          placement: the rank of each stage.

        >>> Memory(forward=3.0).by_stage((0, 1, 1, 0)).of(Task(Kind.F, 2, 0))
        1.5
        """
        return _by_stage(self, placement)

    def divided(self, stages_per_rank: int) -> "Memory":
        """Returns the memory of one stage, from that of a rank with several equal stages.

        >>> Memory().divided(2).forward
        0.5
        """
        return _divided(self, stages_per_rank)

    def peaks(self, table: Table) -> tuple[float, ...]:
        """Returns the most that each rank holds at once, from its order alone, without a clock.

        A table that is forward only drops the result of each task at the task's end.

        >>> from jaxpp.schedules import OneFOneB
        >>> Memory().peaks(OneFOneB().table(num_stages=4, num_microbatches=8))
        (4.0, 3.0, 2.0, 1.0)
        """
        return tuple(max(self.held(table, rank), default=0.0) for rank in range(table.num_ranks))

    def held(self, table: Table, rank: int) -> list[float]:
        """Returns the memory that a rank holds while each of its tasks runs, in order.

        While two tasks overlap, the rank holds what both add.
        """
        order = table.ranks[rank]
        added, freed = zip(*self.changes(table, rank), strict=True) if order else ((), ())
        total, held = 0.0, []
        joined = False
        for n, task in enumerate(order):
            if joined:  # to the task before, which is still running
                joined = False
                held.append(held[-1])
            else:
                joined = task in table.overlaps and n + 1 < len(order)
                held.append(total + added[n] + (added[n + 1] if joined else 0.0))
            total += added[n] + freed[n]
        return held

    def changes(self, table: Table, rank: int) -> list[tuple[float, float]]:
        """Returns what each task of a rank adds at its start, and what it changes at its end.

        >>> tasks = (Task(Kind.F, 0, 0), Task(Kind.R, 0, 0), Task(Kind.B, 0, 0))
        >>> Memory(forward=3.0, recompute=2.0).changes(Table((tasks,), 1, 1), 0)
        [(3.0, -2.0), (2.0, 0.0), (0.0, -1.0)]
        """
        order = table.ranks[rank]
        own = self.by_stage(placement_of(table))
        added, last = (defaultdict[Task, float](float) for _ in range(2))
        for task, window in table.windows.items():
            of_window = (*window, task) if task.kind.takes else (task, *window)
            added[of_window[0]] += own.of(task)
            last[of_window[-1]] += own.of(task)
        changes = []
        for task, change in zip(order, of_each(own, order), strict=True):
            change, dropped = 0.0 if task.kind.of_stage else change, last[task]
            if task in table.dropped:
                again = dataclasses.replace(task, kind=Kind.R)
                dropped += change if table.forward_only else own.of(again)
            changes.append((max(change, 0.0) + added[task], min(change, 0.0) - dropped))
        return changes


def _divided(model: _Model, count: int) -> _Model:
    """Divides the cost of each kind of task."""

    def part(cost: Cost | None) -> Any:
        if cost is None or isinstance(cost, (int, float)):
            return None if cost is None else cost / count
        if callable(cost):
            return lambda task: cost(task) / count
        return tuple(each / count for each in cost)

    return _with_parts(model, part)


def _by_stage(model: _Model, placement: Sequence[int]) -> _Model:
    """Divides the numbers of a model among the stages of each rank."""
    if model.per == "stage":
        return model
    stages = Counter(placement)
    counts = [stages[rank] for rank in placement]

    def part(cost: Cost | None) -> Any:
        if not hasattr(cost, "__float__") or getattr(cost, "ndim", 0):  # no number
            return cost
        value: Any = cost
        if len(set(counts)) <= 1:
            return value / counts[0] if counts else value
        return tuple(value / count for count in counts)

    return _with_parts(model, part)


def _with_parts(model: _Model, part: Callable[[Cost | None], Any]) -> _Model:
    """Makes the costs of a stage, from those of each kind."""
    each = {kind.field: part(getattr(model, kind.field)) for kind in Kind if kind.field}
    other = {kind: part(_given(model, kind)) for kind in Kind if not kind.field}
    other = {kind: cost for kind, cost in other.items() if cost is not None}
    return dataclasses.replace(model, **each, other=other, per="stage")


def placement_of(table: Table) -> tuple[int, ...]:
    """Returns the rank of each stage, in the first direction; a stage without a task has none.

    >>> from jaxpp.schedules import GPipe
    >>> placement_of(GPipe(stages_per_rank=2).table(num_stages=4, num_microbatches=1))
    (0, 1, 0, 1)
    """
    if table.placement:
        return table.placement[0]
    owners = {task.stage: rank for rank, tasks in enumerate(table.ranks) for task in tasks}
    return tuple(owners.get(stage, -1 - stage) for stage in range(table.num_stages))


def _check_per(model: Costs | Memory) -> None:
    if model.per not in ("rank", "stage"):
        raise ValueError(
            f"{type(model).__name__}: per is 'rank', where a number is of all stages of a rank, or "
            f"'stage', where it is of one, got {model.per!r}."
        )


def of_each(model: Costs | Memory, tasks: Sequence[Task]) -> list[float]:
    """Returns the value of a model for each task; asks once where all microbatches have the same.

    >>> of_each(Memory(), [Task(Kind.F, 0, 0), Task(Kind.B, 0, 0)])
    [1.0, -1.0]
    """
    if any(callable(_given(model, kind)) for kind in Kind):
        return [model.of(task) for task in tasks]
    known: dict[tuple[Kind, int], float] = {}
    values = []
    for task in tasks:
        key = (task.kind, task.stage)
        value = known.get(key)
        if value is None:
            value = known[key] = model.of(task)
        values.append(value)
    return values


def _of(model: Costs | Memory, task: Task) -> float:
    """Evaluates a model for a task: what it has of its kind, or of the parts of the kind."""
    kind = task.kind
    cost = _given(model, kind)
    if cost is not None:
        name = kind.field or f"the cost of {kind.title}"
        return _evaluate(cost, task, name if isinstance(model, Costs) else "")
    if not kind.parts:  # it moves what the forward keeps
        return kind.holds * _of(model, dataclasses.replace(task, kind=Kind.F))
    return sum(_of(model, dataclasses.replace(task, kind=Kind(part))) for part in kind.parts)


def _given(model: Costs | Memory, kind: Kind) -> Cost | None:
    """Returns what a model has of a kind; None where the parts of the kind count."""
    if kind.field:
        return getattr(model, kind.field)
    default = kind.cost if isinstance(model, Costs) else kind.holds
    return model.other.get(kind, None if kind.parts else default)


def _evaluate(cost: Cost, task: Task, name: str = "") -> float:
    """Evaluates a cost for a task; a named cost must be a time or a size: finite, not negative."""
    if isinstance(cost, (int, float)):
        value = float(cost)
    elif callable(cost):
        value = float(cost(task))
    elif not hasattr(cost, "__len__"):
        value = float(cost)  # another number, such as those of numpy  # pyright: ignore
    elif task.stage < len(cost):
        value = float(cost[task.stage])
    else:
        raise ValueError(
            f"{name or 'the memory'} has {len(cost)} numbers, one for each stage, but there is a "
            f"task {task.describe()}; give a number for each stage."
        )
    if not abs(value) < _LARGEST or (name and value < 0):
        raise ValueError(
            f"{name or 'the memory'} of {task.describe()} is {value}; a cost is a finite number"
            f"{' of at least 0' if name else ''}, and less than {_LARGEST:g}."
        )
    return value
