"""Which rank has which stage: the maps that schedules share."""


def loop(num_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Stage `s` is on rank `s % num_ranks`: the stages go round the ranks.

    >>> loop(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * stages_per_rank


def waves(num_ranks: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """The stages go down the ranks and up again, so that a turn needs no transfer: a V for 2.

    >>> waves(3), waves(2, 4)
    ((0, 1, 2, 2, 1, 0), (0, 1, 1, 0, 0, 1, 1, 0))
    """
    down = tuple(range(num_ranks))
    return tuple(rank for c in range(stages_per_rank) for rank in (down[::-1] if c % 2 else down))
