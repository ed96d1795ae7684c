"""Megatron-LM: interleaved 1F1B.

Source: Narayanan et al., arXiv 2104.04473, sections 2.2 and 3.3. Each of p ranks has v chunks of
layers in place of one, and microbatches go through the chunks in groups of p. The bubble is 1/v of
that of 1F1B: as a fraction of the work, (p-1)/(vm). The paper's fractions are of the ideal time
m(F+B), not of the time of the step.

With n GPUs, d of them along the data axis, and b' microbatches in the global batch, p is n/d and m
is b'/d, so that the fraction is (n-d)/b' (section 3.3.1, Figure 6).
"""

from experiments.papers.laboratory import Paper, Row, peak, run
from jaxpp.schedules import Interleaved1F1B, OneFOneB


def fraction(schedule, ranks, microbatches):
    """The bubble as a fraction of the ideal time, where B = 2F."""
    ideal = 3 * microbatches
    return (run(schedule, ranks, microbatches).makespan - ideal) / ideal


def rows():
    p, m = 4, 8
    yield Row(
        f"bubble, p={p}, m={m}, default", "section 2.2.1", (p - 1) / m, fraction(OneFOneB(), p, m)
    )
    for p, m, v in ((4, 8, 2), (8, 16, 4), (16, 64, 2)):
        ours = fraction(Interleaved1F1B(v), p, m)
        yield Row(f"bubble, p={p}, m={m}, v={v}", "section 2.2.2", (p - 1) / (v * m), ours)
    for n, d, batch in ((32, 4, 128), (32, 8, 512), (128, 16, 512)):
        ours = fraction(OneFOneB(), n // d, batch // d)
        yield Row(f"bubble, n={n}, d={d}, b'={batch}", "section 3.3.1", (n - d) / batch, ours)
    yield Row(
        "most microbatches in flight, p=4, m=8, default", "section 2.2.1", 4,
        peak(OneFOneB(), 4, 8), 0,
    )  # fmt: skip


def picture():
    return {
        "1F1B, the default schedule": run(OneFOneB(), 4, 8),
        "interleaved, two chunks on each rank": run(Interleaved1F1B(2), 4, 8),
    }


PAPER = Paper(
    arxiv="2104.04473",
    rows=rows,
    picture=picture,
    caption="Figure 4 of the paper: p = 4, m = 8, B = 2F. The second chunk of a rank has the "
    "next shade.",
    leaves_open=[
        "The activations of the interleaved schedule: on the first rank those of p + (p-1)/v "
        "microbatches, more than the p of 1F1B. At p = 4 and v = 2 they are 5.5.",
        "Batches that p does not divide. The paper needs m to be a multiple of p; here groups may "
        "be larger than p, and any m is possible.",
        "The transfers, v times as many: `python -m experiments.ablate_schedules --latency=0.1` "
        "shows where more chunks stop paying.",
    ],
    small=[(Interleaved1F1B(2), 2, 4)],
)
