"""PipeOffload: interleaved schedules with less memory.

Source: Wan et al., arXiv 2503.01328, section 3, Table 1, Figure 2. Before it offloads anything,
the paper mends interleaved 1F1B: with the backward split and one warm-up forward less for each hop
(GIS), the first of d ranks with v stages each holds dv stage activations in place of dv+d-1. With
groups of g microbatches, d/2 <= g < d, it holds g(v-1)+d, and the bubble grows by (d-g)(v-1); at g
= d/2 this is GIS-H, with about half the activations of interleaved 1F1B.

What it offloads are the first stages of each rank, whose activations live longest. With uniform
repeating, each stage holds as many microbatches as it lives for, and half of the stages leave about
a quarter (PO-H). All of them cost nothing (PO-F) while k, the time of a copy there and back over
that of a stage's forward and backward, is at most 1.

GIS is in our catalogue. GIS-H and uniform repeating, by the authors' published code, are written in
the file of this paper; `Offload` makes PO-H and PO-F of any schedule. Times are those of one stage,
F = I = W = 1.
"""

import dataclasses
import math

from experiments.papers.laboratory import Paper, Row
from jaxpp.schedules import (
    GIS,
    Costs,
    Interleaved1F1B,
    Kind,
    Memory,
    Offload,
    OneFOneB,
    Schedule,
    Task,
    check,
    simulate,
)
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


@dataclasses.dataclass(frozen=True)
class Uniform(Schedule):
    """GIS whose microbatches begin one after the other, as far apart as a rank has work for one."""

    stages_per_rank: int = 2

    def orders(self, num_ranks, num_microbatches):
        v, group = self.stages_per_rank, -(-num_ranks // 2)
        # The slot in which each stage of the first rank begins; turns aside where slots collide.
        begin = [3 * (group * c + c // (v // math.gcd(v, group))) for c in range(v)]
        for rank in range(num_ranks):
            back = begin[-1] + 3 * num_ranks - 2 * rank - 2
            slots = [
                (slot + 3 * v * i, Task(Kind(kind), c * num_ranks + rank, i))
                for i in range(num_microbatches)
                for c in range(v)
                for own in [back + begin[v - 1 - c]]
                for kind, slot in (("F", begin[c] + rank), ("I", own), ("W", own + 1))
            ]
            yield [task for _, task in sorted(slots, key=lambda pair: pair[0])]


_WHY = "The text has a share, and no setting; activations count until their copy has ended."
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


def timeline(schedule, ranks, microbatches, k=2 / 3):
    """A step at the costs of one stage; a copy takes half of k forwards and backwards."""
    table = schedule.table_for_ranks(ranks, microbatches)
    check(table)
    costs = Costs(offload=3 * k / 2, load=3 * k / 2, per="stage")
    return simulate(table, costs, memory=Memory(per="stage"))


def half(schedule, ranks):
    """The schedule with the first half of the stages of each rank offloaded."""
    return Offload(schedule, stages=range(ranks * schedule.stages_per_rank // 2), ahead=2)


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
    yield from rows_of_offload()
    for name, schedule, where in (("GIS", GIS(2), "Figure 5"), ("GIS-H", GISH(2, 2), "Figure 6")):
        yield Row(f"tasks in the figure's order, {name}", where, 192, in_order(schedule), 0)


def rows_of_offload():
    """What is left where half of the stages are offloaded, and what it costs where all are."""
    whole = {s: max(timeline(s, 8, 48).peak_memory) for s in (Interleaved1F1B(4), GIS(4))}
    for schedule, base, where, left, why in (
        (Interleaved1F1B(4), Interleaved1F1B(4), "Figure 2", 0.5, _WHY),
        (Uniform(4), GIS(4), "section 3", 0.25, ""),
    ):
        name, of = (type(own).__name__ for own in (schedule, base))
        ours = max(timeline(half(schedule, 8), 8, 48).peak_memory) / whole[base]
        what = f"{name}'s activations, half of the stages offloaded, over {of}'s, d=8, v=4"
        yield Row(what, where, left, ours, 2, why)
    for d, v in ((4, 2), (8, 4)):
        away, kept = (
            timeline(own, d, 6 * d, k=1).makespan
            for own in (Offload(Uniform(v), ahead=4), Uniform(v))
        )
        what = f"step with all stages offloaded over one without, k=1, d={d}, v={v}"
        yield Row(what, "section 3", 1, away / kept, 3)


def picture():
    return {
        "interleaved 1F1B": timeline(Interleaved1F1B(2), 4, 8),
        "GIS": timeline(GIS(2), 4, 8),
        "GIS-H": timeline(GISH(2, 2), 4, 8),
        "uniform, half of the stages offloaded (PO-H)": timeline(half(Uniform(2), 4), 4, 8),
    }


PAPER = Paper(
    arxiv="2503.01328",
    rows=rows,
    picture=picture,
    caption="Figures 5 and 6 of the paper: d = 4, v = 2, 8 microbatches, F = I = W, with the stage "
    "activations that the ranks hold. The second stage of a rank has the next shade.",
    leaves_open=[
        "The weight gradients. The paper runs each W right after its I, to keep its offloading "
        "simple; late ones, as `InterleavedZeroBubble` has them, take (d-1)(F+I-W) in place of "
        "(d-1)(F+I) in the memory of GIS.",
        "What half of the stages leave a quarter of. It is so of what GIS holds; uniform repeating "
        "itself holds less, 23 stage activations at d=8 and v=4, and 8 with half of them away.",
        "How much PO-F holds. At no cost it is 3 to 5 stage activations for d=4 to 8 with k=1, "
        "where loads are four tasks ahead, and 2 for any d with k=1/2.",
        "Figure 15, the utilisation and the memory of up to 32 A100s. They are measured, and we "
        "have no text with the numbers; `benchmarks/offload.py` measures steps of ours.",
        "Microbatches that d or g does not divide.",
    ],
    small=[(GIS(2), 2, 4), (GISH(2, 1), 2, 4), (half(Uniform(2), 2), 2, 4)],
    differs="a share, by activations that are on their way",
    memory=True,
)
