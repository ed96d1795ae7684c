"""GPipe: every forward, then every backward.

Source: Huang et al., arXiv 1811.06965, section 2.3 and Table 2. A model is cut into K partitions,
and a batch into M microbatches. All forwards run, then all backwards. The bubble is (K-1)/(M+K-1)
of the time; the paper finds it negligible from M = 4K on. Each partition keeps only its inputs, and
recomputes the rest in the backward. The recomputation needs no gradient, so that a partition can
run it while it waits.

Table 2 has the measured throughput of a Transformer with 48 layers on K TPUs, as a multiple of that
with K = 2 and M = 1. We simulate the same: a partition's work is 1/K of the model's, the times of
F, recomputation, I and W are equal, and nothing else takes time.
"""

from experiments.papers.laboratory import Paper, Row, run
from jaxpp.schedules import Costs, GPipe, Recompute, Timeline

_TABLE_2 = {1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)}  # by M, for K = 2, 4, 8
_BASE = (
    "All of Table 2 is in multiples of the throughput at K = 2 and M = 1. Were that 5 % lower, "
    "ours at M = 32 would be 1.80, 3.43 and 6.31, as published. The speed-ups below do not depend "
    "on it."
)
_ADJUSTED = (
    "GPipe's order alone does not explain these: for batches of one size it gives 1.5, 2.2 and 3.0 "
    "at M = 4, and 1.6, 2.3 and 2.9 without recomputation. The paper notes under Table 2 that the "
    "size of the batch was adjusted where it did not fit; it does not say where."
)


def recomputed(partitions: int, microbatches: int) -> Timeline:
    """A step in which each partition recomputes its forward, as early as it can."""
    schedule = Recompute(schedule="gpipe", stages=tuple(range(partitions)))
    share = 1 / (partitions * microbatches)
    return run(schedule, partitions, microbatches, Costs(share, share, share))


def rows():
    for k, m in ((4, 4), (4, 16), (8, 32)):
        bubble = run(GPipe(), k, m).bubble_fraction
        yield Row(f"bubble, K={k}, M={m}", "section 2.3", (k - 1) / (m + k - 1), bubble)
    base = recomputed(2, 1).makespan
    for m, published in _TABLE_2.items():
        for k, throughput in zip((2, 4, 8), published, strict=True):
            ours = base / recomputed(k, m).makespan
            why = _ADJUSTED if m < 32 and abs(ours / throughput - 1) > 0.02 else _BASE
            why = "" if f"{ours:.2f}" == f"{throughput:.2f}" else why
            yield Row(f"throughput, K={k}, M={m}", "Table 2, Transformer", throughput, ours, 2, why)
    for k, published in ((4, 3.4 / 1.8), (8, 3.5)):
        ours = recomputed(2, 32).makespan / recomputed(k, 32).makespan
        where = "section 3" if k == 8 else "Table 2"
        why = "It is within the rounding of Table 2." if k == 4 else ""
        yield Row(
            f"speed-up from K=2 to K={k}, M=32", where, published, ours, 2 if k == 4 else 1, why
        )


def picture():
    return {
        "F and B, M=4": run(GPipe(), 4, 4),
        "the forward recomputed while a rank waits, M=4": run(
            Recompute(schedule="gpipe", stages=(0, 1, 2, 3)), 4, 4
        ),
        "four times as many microbatches as ranks, M=16": run(GPipe(), 4, 16),
    }


PAPER = Paper(
    arxiv="1811.06965",
    rows=rows,
    picture=picture,
    caption="Figure 2c of the paper, its recomputation, and M = 4K; K = 4, and B = 2F.",
    differs="measured throughput, of batches whose size varies",
    leaves_open=[
        "What is negligible: at M = 4K the bubble is 16 % of the time for K = 4, and 18 % for K = "
        "8.",
        "The memory: without recomputation a partition keeps the activations of all M "
        "microbatches. 1F1B keeps those of K (`--paper=pipedream`).",
        "Where to cut: the paper cuts for equal estimated work. Its AmoebaNet, whose layers are "
        "unequal, gains about half as much as the Transformer.",
    ],
    small=[(GPipe(), 2, 4), (Recompute(schedule="gpipe", stages=(0, 1)), 2, 4)],
)
