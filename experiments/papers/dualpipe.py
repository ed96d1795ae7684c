"""DualPipe: forwards and backwards that run together.

Source: DeepSeek-AI, arXiv 2412.19437, section 3.2.1 and Table 2, and the authors' README
(github.com/deepseek-ai/DualPipe). Microbatches come from both ends of the pipeline, and a forward
and a backward of different microbatches run together, so that one computes while the other
communicates. With PP ranks, the bubble is (PP/2-1)(F&B + B - 3W), where F&B is the time of the two
together and B that of a whole backward; a rank holds the activations of PP+1 microbatches, and two
stages' parameters. The table beside it has (PP-1)(F+B) for 1F1B and (PP-1)(F+B-2W) for ZB1P
(ZB-H1), with PP each.
"""

from experiments.papers.laboratory import Paper, Row, peak, run
from jaxpp.schedules import (
    Costs,
    DualPipe,
    DualPipeV,
    Memory,
    OneFOneB,
    ZeroBubbleH1,
    check,
    simulate,
)

_UNEQUAL = (
    "The form holds where F = I >= W. In our simulations, where a pair takes the time of its "
    "tasks, the bubble is (PP/2-1)(2F + max(I-W, 0)) for F >= I. For I > F and I >= W it is less "
    "than the form, by no more than one F for any PP."
)


def overlapped(together, forward=1.0, input_grad=1.0, weight_grad=1.0, ranks=8, microbatches=20):
    """A step whose overlapping pairs take some time."""
    table = DualPipe().table_for_ranks(ranks, microbatches)
    check(table)
    costs = Costs(forward, input_grad, weight_grad, overlapped=lambda first, second: together)
    return simulate(table, costs)


def idle(timeline):
    """The time for which the rank that idles most does nothing."""
    return timeline.makespan - min(timeline.busy)


def rows():
    yield Row("bubble of 1F1B, PP=8", "Table 2", 7 * 3, idle(run(OneFOneB(), 8, 20)), 1)
    yield Row(
        "bubble of ZB1P, PP=8", "Table 2", 7 * (1 + 2 - 2), idle(run(ZeroBubbleH1(), 8, 20)), 1
    )
    for together in (3.0, 2.5, 2.0):
        ours = idle(overlapped(together))
        yield Row(f"bubble, PP=8, F&B={together}", "Table 2", 3 * (together + 2 - 3), ours, 1)
    yield Row(
        "bubble, PP=16, F&B=3",
        "Table 2",
        7 * 2,
        idle(overlapped(3.0, ranks=16, microbatches=40)),
        1,
    )
    ours = idle(overlapped(2.5, weight_grad=0.5))
    yield Row("bubble, PP=8, W=0.5, F&B=2.5", "Table 2", 3 * (2.5 + 1.5 - 1.5), ours, 1)
    ours = idle(overlapped(3.5, forward=1.5))
    yield Row("bubble, PP=8, F=1.5, F&B=3.5", "Table 2", 3 * (3.5 + 2 - 3), ours, 1, _UNEQUAL)
    ours = idle(overlapped(3.5, input_grad=1.5))
    yield Row("bubble, PP=8, I=1.5, F&B=3.5", "Table 2", 3 * (3.5 + 2.5 - 3), ours, 1, _UNEQUAL)
    for name, schedule, held in (
        ("1F1B", OneFOneB(), 8),
        ("ZB1P", ZeroBubbleH1(), 8),
        ("DualPipe", DualPipe(), 9),
    ):
        yield Row(f"most activations, {name}, PP=8", "Table 2", held, peak(schedule, 8, 20), 0)
    copies = len(DualPipe().table_for_ranks(8, 20).directions)
    yield Row("parameters, DualPipe", "Table 2", 2, copies, 0)
    half = simulate(
        DualPipeV().table_for_ranks(4, 10), Costs(per="stage"), memory=Memory(per="stage")
    )
    yield Row("most activations, DualPipeV", "README", 9, max(half.peak_memory), 0)
    yield Row("bubble, DualPipeV, 8 stages on 4 ranks", "README", 3 * (3 + 2 - 3), idle(half), 1)


def picture():
    return {
        "DualPipe, a pair takes as long as its two tasks": overlapped(3.0),
        "a pair takes two thirds of that": overlapped(2.0),
    }


PAPER = Paper(
    arxiv="2412.19437",
    rows=rows,
    picture=picture,
    caption="Figure 5 of the report: 8 ranks, 20 microbatches. Tasks that run together share the "
    "height of their row; microbatches that go up the ranks have the next shade.",
    differs="times other than F = I >= W",
    leaves_open=[
        "How long a pair takes. It depends on what a model sends inside a layer; F&B is an "
        "argument of our simulator (`Costs(overlapped=...)`), and `measure` finds it for a model.",
        "Which rank the bubble is of. The ranks in the middle run more pairs than those at the "
        "ends. Where pairs save time, the ends work longer, and the form is that of the middle.",
        "Other times than F = I >= W, and other numbers of microbatches than even ones of at "
        "least 2 PP.",
        "The second copy of the parameters. DualPipeV has none (the last row of the bubbles).",
    ],
    small=[(DualPipe(), 2, 4), (DualPipeV(), 2, 4)],
)
