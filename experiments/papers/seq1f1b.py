"""Seq1F1B: slices of the sequence.

Source: Sun et al., arXiv 2406.03488, section 3. The schedule runs slices of a microbatch's
sequence. Each slice attends to those before it, so that the slices go forward in order, and
backward in the reverse order. With p ranks and s slices that take equal times, the bubble is
(p-1)(F+B)/s, and the first rank holds s+p-1 slices, (s+p-1)/s microbatches; the documentation of an
implementation (MindSpeed, "Seq1F1B") states these forms. The paper's abstract has the result of a
training: 1.14 times the throughput of 1F1B, with half the memory.
"""

import functools

import jax
import jax.numpy as jnp

import jaxpp
from experiments.papers.laboratory import Paper, Row, peak, run
from jaxpp.schedules import Costs, OneFOneB, Seq1F1B, simulate

_TRAINED = (
    "The abstract does not describe the training. Ours has 8 ranks, 16 microbatches and four "
    "slices, and activations alone: parameters, gradients and optimizer state do not shrink."
)


def rows():
    for p, s, m in ((4, 2, 8), (8, 4, 16), (8, 8, 32)):
        made = run(Seq1F1B(s), p, m)
        size = f"p={p}, s={s}, m={m}"
        yield Row(f"bubble, {size}", "MindSpeed", 3 * (p - 1) / s, made.makespan - 3 * m)
        yield Row(f"most activations, {size}", "MindSpeed", (s + p - 1) / s, max(made.peak_memory))
    for p, m in ((4, 8), (8, 16)):
        yield Row(
            f"bubble of 1F1B, p={p}, m={m}",
            "MindSpeed",
            3 * (p - 1),
            run(OneFOneB(), p, m).makespan - 3 * m,
        )
    ours = run(OneFOneB(), 8, 16).makespan / run(Seq1F1B(4), 8, 16).makespan
    yield Row("throughput against 1F1B", "abstract", 1.14, ours, 2, _TRAINED)
    ours = peak(Seq1F1B(4), 8, 16) / peak(OneFOneB(), 8, 16)
    yield Row("memory against 1F1B", "abstract", 0.5, ours, 2, _TRAINED)


def uneven(ranks, slices, microbatches):
    """Slices of equal length: half of the work is attention, which grows with the place."""
    work = [0.5 / slices + 0.5 * (2 * j + 1) / slices**2 for j in range(slices)]
    each = tuple(time for time in work for _ in range(ranks))
    table = Seq1F1B(slices).table_for_ranks(ranks, microbatches)
    return simulate(table, Costs(each, each, each))


def picture():
    return {
        "1F1B": run(OneFOneB(), 4, 8),
        "Seq1F1B, two slices of equal work": run(Seq1F1B(2), 4, 8),
        "two slices of equal length, when half of the work is attention": uneven(4, 2, 8),
    }


def loss(weights, x, slices):
    """The loss of a causal model, whose layers sum over the past, slice by slice."""
    past, losses = [jnp.zeros(())] * len(weights), []
    for j, hidden in enumerate(jnp.split(x, slices, axis=1)):
        for rank, weight in enumerate(weights):
            hidden = jaxpp.pipeline_enter_stage(hidden, stage_id=j * len(weights) + rank)
            sums = past[rank] + jnp.cumsum(hidden @ weight, axis=1)
            hidden, past[rank] = jnp.tanh(sums), sums[:, -1:]
        losses.append(jnp.mean(hidden**2))
    return jnp.mean(jnp.stack(losses))


def model(schedule, ranks, microbatches):
    weights = [jax.random.normal(jax.random.key(rank), (4, 4)) / 4 for rank in range(ranks)]
    batch = jax.random.normal(jax.random.key(ranks), (2 * microbatches, 8, 4))
    staged = jaxpp.split_stages(functools.partial(loss, slices=schedule.slices))
    return staged, functools.partial(loss, slices=1), weights, batch


PAPER = Paper(
    arxiv="2406.03488",
    rows=rows,
    picture=picture,
    caption="As Figure 1 of the paper: p = 4, m = 8, B = 2F, and what slices of equal length "
    "cost. The second slice has the next shade.",
    differs="measured throughput and memory",
    leaves_open=[
        "Keys and values. The first rank holds those of all slices until the last backward of the "
        "microbatch; the forms count them with their slices.",
        "Where to cut a sequence. The paper cuts for equal work, so that early slices are longer; "
        "the last timeline has slices of equal length, and takes longer than 1F1B. Where slices "
        "are unequal, each has programs of its own.",
        "Its combinations with interleaved stages and with zero bubble, which its repository "
        "draws, are not in our catalogue.",
    ],
    small=[(Seq1F1B(2), 2, 4)],
    model=model,
)
