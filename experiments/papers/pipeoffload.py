"""PipeOffload: interleaved schedules with less memory.

Source: Wan et al., arXiv 2503.01328, sections 3.1 and 3.2, Table 1. Before it offloads anything,
the paper mends interleaved 1F1B: with the backward split and one warm-up forward less for each hop
(GIS), the first of d ranks with v stages each holds dv stage activations in place of dv+d-1. With
groups of g microbatches, d/2 <= g < d, it holds g(v-1)+d, and the bubble grows by (d-g)(v-1); at g
= d/2 this is GIS-H, with about half the activations of interleaved 1F1B.

GIS is in our catalogue. GIS-H is written in the file of this paper, of two building blocks. Times
are those of one stage, F = I = W = 1.
"""

import dataclasses

from experiments.papers.laboratory import Paper, Row
from jaxpp.schedules import GIS, Interleaved1F1B, Offload, OneFOneB, Schedule, check, simulate
from jaxpp.schedules.building_blocks import interleave, split_one_forward_one_backward


@dataclasses.dataclass(frozen=True)
class GISH(Schedule):
    """GIS with groups of fewer microbatches than ranks; `group` divides the microbatches."""

    stages_per_rank: int = 2
    group: int = 2

    def broken_rule(self, num_ranks, num_microbatches):
        if not num_ranks <= 2 * self.group <= 2 * num_ranks or num_microbatches % self.group:
            return f"groups of {self.group} to be between half the ranks and all, and to divide"

    def orders(self, num_ranks, num_microbatches):
        v, g = self.stages_per_rank, self.group
        groups = [range(first, first + g) for first in range(0, num_microbatches, g)]
        for rank in range(num_ranks):
            forwards, backwards = interleave(rank, num_ranks, v, groups)
            warmup = (v - 1) * g + num_ranks - 1 - rank
            yield split_one_forward_one_backward(forwards, backwards, warmup, lag=0)


#: The microbatches of each rank's tasks, in the order of Figures 5 and 6, there from 1 on.
_FIGURES = {
    GIS(2): (
        "123412341152263374481152263374485566778855667788",
        "123412311422533644711822533644755866778855667788",
        "123412113224335446117228335446557668778855667788",
        "123411122233344451162273384455566677788855667788",
    ),
    GISH(2, 2): (
        "121234113224115226335446337448557668556677887788",
        "121231142231142253364453364475586675586677887788",
        "121211322411322433544633544655766855766877887788",
        "121112223114223334445336445556667558667778887788",
    ),
}


def in_order(schedule):
    """How many of the tasks are of the microbatch that the paper's figure has in their place."""
    ours = (str(task.microbatch + 1) for own in schedule.table(8, 8).ranks for task in own)
    return sum(a == b for a, b in zip(ours, "".join(_FIGURES[schedule]), strict=True))


def timeline(schedule, ranks, microbatches):
    """A step at the costs of one stage."""
    table = schedule.table_for_ranks(ranks, microbatches)
    check(table)
    return simulate(table)


def rows():
    for d, v, g in ((4, 2, 2), (8, 4, 4), (8, 4, 6)):
        m, hops = 6 * d, d - 1
        name = "GIS-H" if 2 * g == d else f"g={g}"
        each: dict[str, tuple[Schedule, int, int]] = {
            name: (GISH(v, g), g * (v - 1) + d, 2 * hops + (d - g) * (v - 1))
        }
        if 2 * g == d:
            each["1F1B-I"] = Interleaved1F1B(v), d * v + d - 1, 3 * hops
            each["GIS"] = GIS(v), d * v, 2 * hops
        for name, (schedule, held, bubble) in each.items():
            made = timeline(schedule, d, m)
            what = f"{name}, d={d}, v={v}"
            where = "Table 1" if 2 * g == d else "section 3.2"
            yield Row(f"stage activations, {what}", where, held, max(made.peak_memory), 0)
            yield Row(f"bubble, {what}", where, bubble, made.makespan - 3 * m * v, 0)
    made = timeline(OneFOneB(), 8, 32)
    yield Row("bubble, 1F1B, d=8, v=4", "Table 1", 4 * 7 * 3, 4 * (made.makespan - 3 * 32), 0)
    half, full = (max(timeline(s, 16, 32).peak_memory) for s in (GISH(8, 8), Interleaved1F1B(8)))
    yield Row("activations of GIS-H over 1F1B-I's, d=16, v=8", "Table 1", 0.5, half / full, 2)
    for name, schedule, where in (("GIS", GIS(2), "Figure 5"), ("GIS-H", GISH(2, 2), "Figure 6")):
        yield Row(f"tasks in the figure's order, {name}", where, 192, in_order(schedule), 0)


def picture():
    return {
        "interleaved 1F1B": timeline(Interleaved1F1B(2), 4, 8),
        "GIS": timeline(GIS(2), 4, 8),
        "GIS-H": timeline(GISH(2, 2), 4, 8),
        "GIS with Offload, a copy as long as a forward": timeline(Offload(GIS(2)), 4, 8),
    }


PAPER = Paper(
    arxiv="2503.01328",
    rows=rows,
    picture=picture,
    caption="Figures 5 and 6 of the paper: d = 4, v = 2, 8 microbatches, F = I = W, with the stage "
    "activations that the ranks hold. The second stage of a rank is lighter.",
    leaves_open=[
        "The weight gradients. The paper runs each W right after its I, to keep its offloading "
        "simple; late ones, as `InterleavedZeroBubble` has them, take (d-1)(F+I-W) in place of "
        "(d-1)(F+I) in the memory of GIS.",
        "PO-H's and PO-F's uniform repeating. With `Offload`, copies as long as a forward, "
        "4 ranks and 16 microbatches, GIS and both 1F1B hold two stage activations at no cost.",
        "Microbatches that d or g does not divide.",
    ],
    small=[(GIS(2), 2, 4), (GISH(2, 1), 2, 4)],
    memory=True,
)
