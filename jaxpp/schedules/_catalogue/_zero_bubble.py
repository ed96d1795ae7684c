"""Zero bubble: weight gradients, which nothing waits for, fill the bubble."""

import dataclasses
from collections.abc import Iterator

from jaxpp.schedules import building_blocks
from jaxpp.schedules._base import Schedule
from jaxpp.schedules._table import Task


@dataclasses.dataclass(frozen=True)
class ZeroBubbleH1(Schedule):
    """1F1B with the backward split, so that weight gradients fill a part of the bubble.

    Source: Qi et al., arXiv 2401.10241, section 2 (ZB-H1), published for m >= 2p; the order here
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
        """Returns the tasks of each rank: see `Schedule.orders`."""
        return _orders(num_ranks, num_microbatches, multiplier=1)


@dataclasses.dataclass(frozen=True)
class ZeroBubbleH2(Schedule):
    """ZB-H1 with twice the warm-up and the lag, so that no rank waits once it has started.

    Source: Qi et al., arXiv 2401.10241, section 2 (ZB-H2), published for m >= 2p; the order here
    takes any m.

    With p ranks, m >= 2p-1 microbatches, and costs F, I and W of a stage for one microbatch, where
    W <= F and W <= I: from its first task to its last no rank idles for more than (p-1)(F+I-2W).
    That is nothing where they are equal; but the ranks start one after the other, so the bubble in
    the makespan is (p-1)max(F, F+I-2W). With a barrier between steps that is no gain over ZB-H1
    where F = I = W. Each rank holds the activations of no more than min(2p-1, m) microbatches.

    >>> for tasks in ZeroBubbleH2().table(num_stages=2, num_microbatches=3).ranks:
    ...     print(*tasks)
    F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2
    F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 W1.1 W1.2
    """

    def orders(self, num_ranks: int, num_microbatches: int) -> Iterator[list[Task]]:
        """Returns the tasks of each rank: see `Schedule.orders`."""
        return _orders(num_ranks, num_microbatches, multiplier=2)


def _orders(num_ranks: int, num_microbatches: int, multiplier: int) -> Iterator[list[Task]]:
    """Returns orders for a multiplier c: warm-up (p-1-r)c, lag rc, (p-1)c+1 activations."""
    for rank in range(num_ranks):
        passes = [(rank, i) for i in range(num_microbatches)]
        warmup, lag = (num_ranks - 1 - rank) * multiplier, rank * multiplier
        yield building_blocks.split_one_forward_one_backward(passes, passes, warmup, lag)
