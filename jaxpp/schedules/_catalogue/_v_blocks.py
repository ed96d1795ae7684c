"""Schedules on a V made of building blocks: V-Half, V-Min and 1F1B-V.

The method is that of Qi et al., arXiv 2405.15362 (building blocks, and to repeat, squeeze and
reorder them). A block has the tasks of one microbatch, each in a time slot. The time for which it
holds activations gives the schedule's peak. Here a rank has 6 slots' work for a microbatch: F, I
and W of two stages.

1. Repeat: the block of the next microbatch starts 6 slots after that of the one before. Weight
   gradients go in the first slots left free.
2. Reorder: before and after the steady phase there are free slots. Later tasks move into them as
   far as their inputs and the same peak allow.
3. Squeeze: each rank keeps its order and waits for nothing but its inputs.
4. Once a rank has no forward left, its I go as early as they can, and W where there is room.
"""

import abc
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._execute import execute, number
from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Table, Task

#: For each rank, the slot in which each of its tasks begins.
Slots = list[dict[Task, int]]

_PERIOD = 6
_LENGTH = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}
_CHANGE = {Kind.F: 1, Kind.I: 0, Kind.W: -1, Kind.B: -1}


@dataclasses.dataclass(frozen=True)
class VBuildingBlock(Schedule):
    """A schedule that repeats one block on a V: rank r has the stages r and 2p-1-r.

    A subclass gives the block with `offsets`, for any m.

    Args:
      reorder_steady: whether tasks of the steady phase move into free slots too.

    >>> class Spread(VBuildingBlock):
    ...     def offsets(self, num_ranks):
    ...         return [(r, 3 * num_ranks - r, 12 + 2 * r, 26 - r) for r in range(num_ranks)]
    >>> print(*Spread().table_for_ranks(2, num_microbatches=1).ranks[0])
    F0.0 F3.0 I3.0 W3.0 I0.0 W0.0
    """

    stages_per_rank: int = dataclasses.field(default=2, init=False, repr=False)
    reorder_steady: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def backward(self) -> Kind:
        """The kind of the block's backward tasks: `I`, or `B` for two slots in one."""
        return Kind.I

    @abc.abstractmethod
    def offsets(self, num_ranks: int) -> list[tuple[int, int, int, int]]:
        """Returns for each rank the slots in which a block's tasks begin.

        The tasks are the forward of the rank's stage on the way down, the forward of its stage on
        the way up, the backward of the second of these stages, and the backward of the first. On
        each rank no two may overlap modulo 6.
        """

    def placement(self, num_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the rank of each stage: see `Schedule.placement`."""
        return (building_blocks.waves(num_ranks),)

    def orders(self, num_ranks: int, num_microbatches: int) -> list[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        slots = _repeat(self.offsets(num_ranks), num_microbatches, self.backward)
        _add_weight_gradients(slots)
        steady = _steady_phase(slots[0], num_microbatches, self.backward)
        slots = _squeeze(_reorder(slots, lambda _, slot: self.reorder_steady or slot not in steady))
        if self.backward is Kind.I:
            # After its last F a rank does not need memory that a W frees; others wait for its I.
            without = _drop_late_weight_gradients(slots)
            slots = _reorder(without, lambda task, _: task.kind is Kind.I)
            _add_weight_gradients(slots)
        return _orders(slots)


@dataclasses.dataclass(frozen=True)
class VHalf(VBuildingBlock):
    """About half the activations of 1F1B, for a longer bubble than ZB-V.

    Source: Qi et al., arXiv 2405.15362 (V-Half): the forwards of a block are 2 slots apart on the
    way down and 1 on the way up, and so are the backwards.

    With p ranks and m microbatches, each rank holds no more than min((p+2)//2, m) microbatches'
    activations. Where F = I = W, and 1 each for a rank's share of one microbatch, the bubble is
    (3p-7)/2 for even p >= 4 and (3p-4)/2 for odd p >= 3, whatever m >= p (by simulation; the paper
    has no closed form): 2.5 at p=4, 8.5 at p=8.

    Args:
      reorder_steady: whether tasks of the steady phase move into free slots too; not in the paper.

    >>> for tasks in VHalf().table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F3.0 I3.0 W3.0 F3.1 I3.1 I0.0 W3.1 I0.1 W0.0 W0.1
    F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 W2.0 I2.1 I1.1 W1.0 W2.1 W1.1
    """

    def offsets(self, num_ranks: int) -> list[tuple[int, int, int, int]]:
        """Returns the slots of a block: see `VBuildingBlock.offsets`."""
        p, delay = num_ranks, 0 if num_ranks % 2 else 3  # apart from the forwards, modulo 6
        return [
            (2 * r, 3 * p - 2 - r, 3 * p - 1 + delay + 2 * r, 6 * p - 2 + delay - r)
            for r in range(p)
        ]


@dataclasses.dataclass(frozen=True)
class VMin(VBuildingBlock):
    """About a third of the activations of 1F1B, the fewest that keep the ranks busy.

    Source: Qi et al., arXiv 2405.15362 (V-Min): the tasks of a block follow each other without a
    pause.

    With p ranks and m microbatches, each rank holds no more than min((p+4)//3, m) microbatches'
    activations. Where F = I = W, and 1 each for a rank's share of one microbatch, the bubble is
    (4p-7)/2 where 3 divides p, and else (4p-5)/2 for p >= 4, whatever m >= p (by simulation; the
    paper has no closed form): 5.5 at p=4, 13.5 at p=8.

    Args:
      reorder_steady: whether tasks of the steady phase move into free slots too; not in the paper.
        The bubble at p=8 is 13 then.

    >>> for tasks in VMin().table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F3.0 I3.0 W3.0 F3.1 I0.0 I3.1 W0.0 W3.1 I0.1 W0.1
    F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 W2.0 W1.0 I2.1 I1.1 W2.1 W1.1
    """

    def offsets(self, num_ranks: int) -> list[tuple[int, int, int, int]]:
        """Returns the slots of a block: see `VBuildingBlock.offsets`."""
        p, delay = num_ranks, 0 if num_ranks % 3 else 2  # apart from the forwards, modulo 6
        return [(r, 2 * p - 1 - r, 2 * p + delay + r, 4 * p - 1 + delay - r) for r in range(p)]


@dataclasses.dataclass(frozen=True)
class OneFOneBV(VBuildingBlock):
    """V-Min with the backward whole: about two thirds of the activations of 1F1B.

    Source: Qi et al., arXiv 2405.15362 (1F1B-V).

    With p ranks, m microbatches and B = 2F, F being 1 for a rank's share of one microbatch, the
    bubble is 7.5 at p=4 and 16.5 at p=8, whatever m >= p, and each rank holds no more than
    min((2p+3)//3, m) microbatches' activations.

    Args:
      reorder_steady: whether tasks of the steady phase move into free slots too, as by default.

    >>> for tasks in OneFOneBV().table(num_stages=4, num_microbatches=2).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1
    F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1
    """

    reorder_steady: bool = dataclasses.field(default=True, kw_only=True)

    @property
    def backward(self) -> Kind:
        """The kind of the block's backward tasks."""
        return Kind.B

    def offsets(self, num_ranks: int) -> list[tuple[int, int, int, int]]:
        """Returns the slots of a block: see `VBuildingBlock.offsets`."""
        p = num_ranks
        first = 2 * p + (0 if p % 3 else 3)

        def backward(hop: int) -> int:
            # Pauses of three slots, one after every third hop, keep a block clear of its
            # repetitions; where the first one must be depends on p modulo 3.
            return first + 2 * hop + 3 * ((hop + -(p + 2) % 3) // 3)

        return [(r, 2 * p - 1 - r, backward(r), backward(2 * p - 1 - r)) for r in range(p)]


def _repeat(
    offsets: Sequence[tuple[int, int, int, int]], num_microbatches: int, backward: Kind
) -> Slots:
    """Puts a block into its slots for each microbatch."""
    p = len(offsets)
    slots: Slots = []
    for rank, (down, up, back_down, back_up) in enumerate(offsets):
        stages = (rank, 2 * p - 1 - rank)
        block = {
            (Kind.F, stages[0]): down,
            (Kind.F, stages[1]): up,
            (backward, stages[1]): back_down,
            (backward, stages[0]): back_up,
        }
        slots.append(
            {
                Task(kind, stage, i): slot + _PERIOD * i
                for (kind, stage), slot in block.items()
                for i in range(num_microbatches)
            }
        )
    return slots


def _steady_phase(first_rank: dict[Task, int], num_microbatches: int, backward: Kind) -> range:
    """Finds the slots from the first microbatch's last backward to the last one's first forward."""
    end_of_first = first_rank[Task(backward, 0, 0)]
    return range(end_of_first, first_rank[Task(Kind.F, 0, num_microbatches - 1)] + 1)


def _add_weight_gradients(slots: Slots) -> None:
    """Puts each missing `W` into the first free slot after its `I`."""
    for own in slots:
        there = {task for task in own if task.kind is Kind.W}
        at = {slot: task for task, slot in own.items()}
        pending: deque[Task] = deque()
        slot, last = 0, max(at)
        while slot <= last or pending:
            task = at.get(slot)
            if task is None and pending:
                own[pending.popleft()] = slot
            elif task is not None and task.kind is Kind.I:
                weight = Task(Kind.W, task.stage, task.microbatch)
                if weight not in there:
                    pending.append(weight)
            slot += 1


def _drop_late_weight_gradients(slots: Slots) -> Slots:
    """Leaves out each `W` that comes after its rank's last `F`."""
    kept: Slots = []
    for own in slots:
        last = max(slot for task, slot in own.items() if task.kind is Kind.F)
        kept.append({t: slot for t, slot in own.items() if t.kind is not Kind.W or slot < last})
    return kept


def _reorder(slots: Slots, moves: Callable[[Task, int], bool]) -> Slots:
    """Moves each task, one after the other, to the first slot that its inputs and the peak allow.

    Args:
      slots: the tasks of each rank.
      moves: says of a task and its slot whether it may move.
    """
    held = [_held(own) for own in slots]
    peak = max(max(line) for line in held)
    busy = [bytearray(len(line)) for line in held]
    at: dict[Task, int] = {}
    for rank, own in enumerate(slots):
        at |= own
        for task, slot in own.items():
            _mark(busy[rank], slot, task, 1)
    rank_of = {task: rank for rank, own in enumerate(slots) for task in own}
    last_stage = 2 * len(slots) - 1
    for task in sorted(at, key=lambda task: (at[task], rank_of[task])):
        rank, old = rank_of[task], at[task]
        if not moves(task, old):
            continue
        ends = [at[n] + _LENGTH[n.kind] for n in _inputs(task, last_stage) if n in at]
        earliest = max(ends, default=0)
        _mark(busy[rank], old, task, 0)
        new = busy[rank].find(bytes(_LENGTH[task.kind]), earliest, old + _LENGTH[task.kind])
        while new < old and task.kind is Kind.F and max(held[rank][new:old]) == peak:
            new = busy[rank].find(b"\0", new + 1, old + 1)
        _mark(busy[rank], new, task, 1)
        at[task] = new
        if change := _CHANGE[task.kind]:
            shift = 0 if change > 0 else _LENGTH[task.kind]
            for slot in range(new + shift, old + shift):
                held[rank][slot] += change
    return [{task: at[task] for task in own} for own in slots]


def _held(own: dict[Task, int]) -> list[int]:
    """Counts a rank's activations in each slot and one more: `F` adds; `W`'s or `B`'s end frees."""
    length = max(slot + _LENGTH[task.kind] for task, slot in own.items())
    change = [0] * (length + 1)
    for task, slot in own.items():
        change[slot + (0 if task.kind is Kind.F else _LENGTH[task.kind])] += _CHANGE[task.kind]
    return list(itertools.accumulate(change))


def _mark(busy: bytearray, slot: int, task: Task, value: int) -> None:
    for n in range(slot, slot + _LENGTH[task.kind]):
        busy[n] = value


def _inputs(task: Task, last_stage: int) -> Iterator[Task]:
    """Returns the tasks before a task: its inputs, and its like of the microbatch before."""
    kind, stage, i = task.kind, task.stage, task.microbatch
    if i > 0:
        yield Task(kind, stage, i - 1)
    if kind is Kind.F and stage > 0:
        yield Task(kind, stage - 1, i)
    if kind is Kind.W:
        yield Task(Kind.I, stage, i)
    if kind in (Kind.I, Kind.B):
        yield Task(Kind.F, stage, i)
        if stage < last_stage:
            yield Task(kind, stage + 1, i)


def _squeeze(slots: Slots) -> Slots:
    """Starts each task as soon as its rank, in an unchanged order, and its inputs allow."""
    ranks = tuple(map(tuple, _orders(slots)))
    microbatches = 1 + max(task.microbatch for task in ranks[0])
    numbered = number(Table(ranks, 2 * len(slots), microbatches))
    starts = execute(numbered, [float(_LENGTH[task.kind]) for task in numbered.tasks]).starts
    squeezed: Slots = [{} for _ in slots]
    for task, rank, start in zip(numbered.tasks, numbered.rank_of, starts, strict=True):
        squeezed[rank][task] = int(start)
    return squeezed


def _orders(slots: Slots) -> list[list[Task]]:
    return [sorted(own, key=own.__getitem__) for own in slots]
