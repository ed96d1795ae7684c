"""Chimera: two pipelines in opposite directions.

Source: Li and Hoefler, arXiv 2107.06925, section 3 and Table 2. Two 1F1B pipelines run through the
D ranks in opposite directions, one in the bubbles of the other; every stage is on two ranks. Where
F and B take the same time, D-2 slots of a step are bubbles, against 2(D-1) of GPipe and DAPPLE
(1F1B). As a fraction of the time, that is (D-2)/(2N+D-2) for N microbatches. A rank holds the
activations of D/2+1 to D microbatches.
"""

from experiments.papers.laboratory import Paper, Row, run
from jaxpp.schedules import Chimera, Costs, OneFOneB

_EQUAL = Costs(forward=1.0, backward=1.0)


def slots(schedule, depth, microbatches, costs):
    """The bubble of a step, in forwards."""
    made = run(schedule, depth, microbatches, costs)
    return made.makespan - max(made.busy)


def rows():
    for depth in (4, 8, 16):
        where = "section 2"
        ours = slots(Chimera(), depth, depth, _EQUAL)
        yield Row(f"bubbles, D=N={depth}", where, depth - 2, ours, 0)
        ours = slots(OneFOneB(), depth, depth, _EQUAL)
        yield Row(f"bubbles of DAPPLE, D=N={depth}", where, 2 * (depth - 1), ours, 0)
    for depth, n in ((4, 4), (8, 8), (8, 32)):
        ours = run(Chimera(), depth, n, _EQUAL).bubble_fraction
        yield Row(
            f"bubble ratio, D={depth}, N={n}", "Table 2", (depth - 2) / (2 * n + depth - 2), ours
        )
    held = run(Chimera(), 8, 8, _EQUAL).peak_memory
    yield Row("fewest activations of a rank, D=8", "Table 2", 5, min(held), 0)
    yield Row("most activations of a rank, D=8", "Table 2", 8, max(held), 0)


def picture():
    return {
        "1F1B": run(OneFOneB(), 4, 4, _EQUAL),
        "Chimera": run(Chimera(), 4, 4, _EQUAL),
        "Chimera with B = 2F and two units of four microbatches": run(Chimera(), 4, 8),
    }


PAPER = Paper(
    arxiv="2107.06925",
    rows=rows,
    picture=picture,
    caption="Figures 2 and 3 of the paper: D = N = 4 and B = F; below, what B = 2F makes of two "
    "units. Microbatches that go up the ranks have the next shade.",
    leaves_open=[
        "A backward that takes twice as long as a forward. Our closed form of the bubble is "
        "(D-2)(min(F, B) + |B-F| N/D): it grows with N, and beyond N = D(2D-1)/(D-2) 1F1B's is "
        "smaller. With D = 4 and B = 2F that is 14 microbatches.",
        "More than D microbatches. The paper concatenates units of D directly, as here. Where B = "
        "2F, each further unit then adds bubbles between its forwards and its backwards. Forward "
        "doubling and backward halving, which the paper has to remove them, take twice the "
        "activations or microbatches of half the size; they are not in our catalogue.",
        "More than two pipelines (section 3.6), and where to reduce the gradients of the two "
        "copies. `place` reduces them once, at the end of a step.",
    ],
    small=[(Chimera(), 2, 4)],
)
