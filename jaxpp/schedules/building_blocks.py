"""The building blocks of schedules: placements of stages, and orders of tasks.

The schedules of the catalogue are built of these; so may yours be.
"""

from collections.abc import Iterator, Sequence

from jaxpp.schedules._kinds import Kind
from jaxpp.schedules._table import Task

# ---- placements: for each stage its rank --------------------------------------------------------


def loop(num_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Places the stages round the ranks: stage `s` is on rank `s % num_ranks`.

    >>> loop(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * stages_per_rank


def waves(num_ranks: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """Places the stages down the ranks and up again, so that a turn needs no transfer: a V for 2.

    >>> waves(3), waves(2, 4)
    ((0, 1, 2, 2, 1, 0), (0, 1, 1, 0, 0, 1, 1, 0))
    """
    down = tuple(range(num_ranks))
    return tuple(rank for c in range(stages_per_rank) for rank in (down[::-1] if c % 2 else down))


# ---- the order of a rank ------------------------------------------------------------------------


def one_forward_one_backward(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], warmup: int
) -> list[Task]:
    """Runs `warmup` forwards, then a forward and a backward in turn, then the backwards left.

    Args:
      forwards: the (stage, microbatch) pairs of a rank's forwards, in order.
      backwards: those of as many backwards, in order.
      warmup: the forwards before the first pair; all of them where there are fewer.

    Returns:
      The order of the rank.

    >>> passes = [(0, 0), (0, 1), (0, 2)]
    >>> print(*one_forward_one_backward(passes, passes, warmup=1))
    F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    """
    ahead = [Task(Kind.F, stage, i) for stage, i in forwards]
    back = [Task(Kind.B, stage, i) for stage, i in backwards]
    warmup = min(warmup, len(ahead))
    steady = [task for pair in zip(ahead[warmup:], back, strict=False) for task in pair]
    return [*ahead[:warmup], *steady, *back[len(ahead) - warmup :]]


def split_one_forward_one_backward(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    warmup: int,
    lag: int,
) -> list[Task]:
    """Runs `warmup` forwards, then F, I and W in turn, each `W` behind its `I` by `lag` others.

    Args:
      forwards: the (stage, microbatch) pairs of a rank's forwards, in order.
      backwards: those of its backwards, in order.
      warmup: the forwards before the first `I`, less the one that goes with it.
      lag: how many `I` later than its own a `W` runs.

    Returns:
      The order of the rank.

    >>> passes = [(0, 0), (0, 1), (0, 2)]
    >>> print(*split_one_forward_one_backward(passes, passes, warmup=1, lag=1))
    F0.0 F0.1 I0.0 F0.2 I0.1 W0.0 I0.2 W0.1 W0.2
    """
    ahead = [Task(Kind.F, stage, i) for stage, i in forwards]
    weights = [Task(Kind.W, stage, i) for stage, i in backwards]
    order = ahead[:warmup]
    for n, (stage, i) in enumerate(backwards):
        order += ahead[warmup + n : warmup + n + 1]
        order.append(Task(Kind.I, stage, i))
        if n >= lag:
            order.append(weights[n - lag])
    return order + weights[max(len(weights) - lag, 0) :]


def split_in_groups(num_microbatches: int, least: int) -> list[range]:
    """Cuts the microbatches into runs of no fewer than `least`, or one run if there are fewer.

    Their lengths differ by one at most, longer ones first.

    >>> split_in_groups(11, 4), split_in_groups(3, 4)
    ([range(0, 6), range(6, 11)], [range(0, 3)])
    """
    number = max(num_microbatches // least, 1)
    bounds = [-(-num_microbatches * group // number) for group in range(number + 1)]
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


def interleave(
    rank: int, num_ranks: int, stages_per_rank: int, groups: Sequence[range]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the (stage, microbatch) pairs of a rank's forwards and of its backwards, in order.

    Each group of microbatches goes through all stages of the rank before the next one begins.

    >>> forwards, backwards = interleave(1, num_ranks=2, stages_per_rank=2, groups=[range(2)])
    >>> forwards, backwards
    ([(1, 0), (1, 1), (3, 0), (3, 1)], [(3, 0), (3, 1), (1, 0), (1, 1)])
    """
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    forwards = [(s, i) for group in groups for s in stages for i in group]
    backwards = [(s, i) for group in groups for s in reversed(stages) for i in group]
    return forwards, backwards


# ---- the orders of all ranks --------------------------------------------------------------------


def merge_pipelines(placement: Sequence[Sequence[int]], num_microbatches: int) -> list[list[Task]]:
    """Merges pipelines that share the ranks, as Chimera and Hanayo do, slot by slot.

    A slot is the time of one task, forward or backward. A microbatch goes forward one stage a slot,
    then backward one stage a slot. The next one of its direction follows two slots later. A unit is
    as many microbatches as there are ranks, shared out among the directions. The next unit starts
    after as many slots as a rank has tasks in this one. Then no rank has two tasks in a slot: in
    the slots of one parity, each stage of a rank begins where another stage has ended, from one
    unit to the next.

    Args:
      placement: for each direction, the rank of each stage.
      num_microbatches: the number of microbatches.

    Returns:
      For each rank, its tasks by slot.

    >>> for tasks in merge_pipelines([(0, 1, 1, 0)], 2):
    ...     print(*tasks)
    F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1
    F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1
    """
    num_stages, num_ranks = len(placement[0]), 1 + max(placement[0])
    slots: list[list[tuple[int, Task]]] = [[] for _ in range(num_ranks)]
    order = turns(len(placement), num_ranks, num_microbatches)
    for microbatch, (direction, unit, place) in enumerate(order):
        start = 2 * num_stages * unit + 2 * place
        for stage, rank in enumerate(placement[direction]):
            slots[rank].append((start + stage, Task(Kind.F, stage, microbatch)))
            turn = start + 2 * num_stages - 1
            slots[rank].append((turn - stage, Task(Kind.B, stage, microbatch)))
    return [[task for _, task in sorted(own, key=lambda entry: entry[0])] for own in slots]


def turns(
    num_directions: int, num_ranks: int, num_microbatches: int
) -> Iterator[tuple[int, int, int]]:
    """Returns for each microbatch its direction, its unit, and its place: see `merge_pipelines`.

    >>> list(turns(2, num_ranks=4, num_microbatches=3))
    [(0, 0, 0), (0, 0, 1), (1, 0, 0)]
    """
    for microbatch in range(num_microbatches):
        unit, place = divmod(microbatch, num_ranks)
        size = min(num_ranks, num_microbatches - unit * num_ranks)
        direction, place = divmod(place, -(-size // num_directions))
        yield direction, unit, place
