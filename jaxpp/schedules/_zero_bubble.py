"""Zero bubble: weight gradients, which nothing waits for, fill the bubble."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Kind, Task


@dataclasses.dataclass(frozen=True)
class ZeroBubbleH1(Schedule):
    """1F1B with the backward split, so that weight gradients fill a part of the bubble.

    Source: Qi et al., arXiv 2401.10241, section 2.1 (ZB-H1), published for m >= 2p; the order here
    is that one, and takes any m.

    With p ranks, m >= p microbatches, and costs F, I and W of a stage for one microbatch: the
    bubble is (p-1)(F+I-W) where W <= F and W <= I, and each rank holds the activations of no more
    than min(p, m) microbatches, as much as the first rank of 1F1B.

    >>> for tasks in ZeroBubbleH1().table(num_stages=2, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2
    F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2
    """

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Gives the tasks of each rank: see `Schedule.orders`."""
        for rank in range(num_ranks):
            yield _stage_order(rank, num_ranks, num_microbatches)


def _stage_order(rank: int, num_ranks: int, num_microbatches: int) -> list[Task]:
    # Rank r may lag r weight gradients behind its input gradients: with the p-1-r forwards of the
    # warm-up and the one in hand, that makes p activations on every rank.
    warmup, lag = num_ranks - 1 - rank, rank
    forwards = [Task(Kind.F, rank, i) for i in range(num_microbatches)]
    weights = [Task(Kind.W, rank, i) for i in range(num_microbatches)]
    order = forwards[:warmup]
    for i in range(num_microbatches):
        order += forwards[warmup + i : warmup + i + 1]
        order.append(Task(Kind.I, rank, i))
        if i >= lag:
            order.append(weights[i - lag])
    return order + weights[max(num_microbatches - lag, 0) :]
