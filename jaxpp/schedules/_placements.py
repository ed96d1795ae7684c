"""Placements that schedules share: for each stage its rank."""


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
