"""Hanayo: waves.

Source: Liu et al., arXiv 2308.15762, section 3. The two directions of Chimera fold into a wave: the
2PW stages go down the P ranks and up again, W times, and no stage has a second copy. The paper has
a closed form for P microbatches, backwards that take twice as long as forwards, and no transfers: a
bubble ratio of (2P-2)/(3PW+P-1).
"""

from experiments.papers.laboratory import Paper, Row, run
from jaxpp.schedules import Chimera, Costs, Hanayo

_RATIO = (
    "We take the ratio for the idle time over the whole. Its numerator is ours, too: 2P-2, in "
    "units in which a rank works for 3PW. Then the whole is 3PW+2P-2. The 3PW+P-1 in its "
    "denominator is less than any order of these stages takes: before the last rank begins, a "
    "microbatch has gone forward through the P-1 stages before it, and after it has ended, one "
    "must go back through them, which makes 3PW+1.5(P-1) at the least. So the denominator misses a "
    "part of the idle time."
)


def rows():
    for p, w in ((4, 1), (4, 2), (8, 1), (8, 2), (8, 4)):
        ours = run(Hanayo(w), p, p).bubble_fraction
        paper = (2 * p - 2) / (3 * p * w + p - 1)
        yield Row(f"bubble ratio, P={p}, W={w}", "its closed form", paper, ours, 4, _RATIO)
    for p, w in ((4, 1), (4, 2), (8, 2)):
        ours = w * (run(Hanayo(w), p, p).makespan - 3 * p)
        yield Row(f"idle time, P={p}, W={w}", "its numerator", 2 * p - 2, ours, 0)
    for p, w in ((4, 1), (4, 2)):
        hops = (
            p - 1
        ) * 1.5  # a stage has 1/(2W) of a rank's F and B, here 1 and 2, in units of 1/W
        ours = 3 * p * w + hops
        yield Row(
            f"least time, P={p}, W={w}", "its denominator", 3 * p * w + p - 1, ours, 1, _RATIO
        )
    equal = Costs(forward=1.0, backward=1.0)
    for p in (4, 8):
        chimera = run(Chimera(), p, p, equal).makespan - 2 * p
        ours = run(Hanayo(1), p, p, equal).makespan - 2 * p
        yield Row(
            f"bubble, P={p}, W=1, B=F, beside Chimera's", "Chimera, Table 2", chimera, ours, 0,
            "In Chimera the rank that begins last is P/2-1 hops from an end, each of a whole "
            "stage; in a wave it is P-1 hops of half a stage. That is half a stage more, forward "
            "and backward: P-1 in place of P-2.",
        )  # fmt: skip


def picture():
    return {
        "one wave": run(Hanayo(1), 4, 4),
        "two waves": run(Hanayo(2), 4, 4),
    }


PAPER = Paper(
    arxiv="2308.15762",
    rows=rows,
    picture=picture,
    caption="As the paper's figures of one and of two waves: P = 4, B = 2F. Later stages of a "
    "rank have the next shade.",
    differs="the bubble ratio, whose denominator is below any possible time",
    leaves_open=[
        "More microbatches than ranks. We run units of P, one after the other, so that the bubble "
        "is (P-1)(min(F, B) + |B-F| m/P)/W. Where B = 2F it grows with m; that of interleaved 1F1B "
        "does not.",
        "The activations. Our last rank holds P microbatches, the first P - (P-1)/(2W): as much as "
        "GPipe for m = P.",
        "The transfers, 2W times those of 1F1B, but none at the turns of a wave.",
    ],
    small=[(Hanayo(1), 2, 4), (Hanayo(2), 2, 2)],
)
