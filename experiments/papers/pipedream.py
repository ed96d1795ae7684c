"""PipeDream: one forward, one backward.

Sources: Narayanan et al., arXiv 1806.03377 (PipeDream), section 3.2, with the flush of arXiv
2006.09503, section 3.2. A backward runs as soon as it can. The first rank admits as many
microbatches as there are ranks, and a new one whenever one is done. With the flush at the end of a
batch the bubble is that of GPipe, (p-1)(F+B); arXiv 2104.04473, section 2.2.1, says so, and that at
most p microbatches are in flight.

The picture has AlexNet, whose 20 layers and their times are in the code of the paper
(github.com/msr-fiddle/pipedream, at 7db6a1c3), cut as there for four machines: 3, 3, 6 and 8
layers.
"""

import itertools

from experiments.papers.laboratory import Paper, Row, peak, run
from jaxpp.schedules import Costs, GPipe, OneFOneB

_FORWARD = (
    22.316, 0.813, 0.756, 3.128, 0.811, 0.579, 3.26, 0.427, 4.423, 0.539,
    2.815, 0.524, 0.391, 0.0, 1.737, 0.471, 0.0, 1.075, 0.283, 0.453,
)  # fmt: skip
_BACKWARD = (
    6.405, 0.733, 1.148, 5.612, 0.524, 0.861, 6.61, 0.269, 7.197, 0.188,
    5.497, 0.176, 0.306, 0.0, 3.072, 0.039, 0.0, 1.366, 0.043, 0.474,
)  # fmt: skip
_PUBLISHED = (3, 3, 6, 8)
_TRANSFERS = (
    "By times alone the best cut is after the first convolution. But 198 MB of activations leave "
    "it for each microbatch, and only 48 MB leave the pooling two layers later. The paper cuts "
    "there, because its planner counts transfers."
)


def stages(times, cut):
    """The times of stages of so many layers each."""
    bounds = (0, *itertools.accumulate(cut))
    return tuple(sum(times[a:b]) for a, b in itertools.pairwise(bounds))


def slowest(cut):
    """The time of the slowest stage for a microbatch, in ms."""
    return max(f + b for f, b in zip(stages(_FORWARD, cut), stages(_BACKWARD, cut), strict=True))


def alexnet(cut, schedule):
    """A step of 8 microbatches."""
    costs = Costs(forward=stages(_FORWARD, cut), backward=stages(_BACKWARD, cut))
    return run(schedule, len(cut), 8, costs)


def rows():
    for p, m in ((4, 8), (8, 32)):
        yield Row(
            f"most microbatches in flight, p={p}, m={m}", "1806.03377, section 3.2", p,
            peak(OneFOneB(), p, m), 0,
        )  # fmt: skip
        made = run(OneFOneB(), p, m)
        ours = (made.makespan - 3 * m) / (3 * m)
        where = "2104.04473, section 2.2.1"
        yield Row(f"bubble over work, p={p}, m={m}", where, (p - 1) / m, ours)
    cuts = ((a, b - a, c - b, 20 - c) for a, b, c in itertools.combinations(range(1, 20), 3))
    yield Row(
        "slowest stage of AlexNet at the best cut, ms", "its code", slowest(_PUBLISHED),
        min(map(slowest, cuts)), 3, _TRANSFERS,
    )  # fmt: skip


def picture():
    return {
        "GPipe": alexnet(_PUBLISHED, GPipe()),
        "1F1B": alexnet(_PUBLISHED, OneFOneB()),
    }


PAPER = Paper(
    arxiv="1806.03377",
    rows=rows,
    picture=picture,
    caption="AlexNet at the published cut, in ms, with the activations that the ranks hold, in "
    "microbatches. Ranks 0 and 2 decide the time. Since their forwards and backwards are not in "
    "proportion, 1F1B takes less time than GPipe; at equal stages both take the same.",
    differs="the best cut, where transfers cost nothing",
    leaves_open=[
        "PipeDream itself has no flush: each rank updates its weights after each backward, keeps "
        "up to p versions of them, and has no bubble. The gradients are then those of older "
        "weights. jaxpp's steps are synchronous, and have no such mode.",
        "PipeDream runs a slow stage on several machines. Here a rank may have several devices "
        "instead, each with a part of every microbatch.",
    ],
    small=[(OneFOneB(), 2, 4)],
    memory=True,
)
