"""A balanced cut of a sequence: the slowest stage as fast as can be, then the fewest bytes across.

The first goal is the classic partition of a sequence by parametric search (Pinar and Aykanat, Fast
optimal load balancing algorithms for 1D partitioning, 2004); the second a dynamic programme over
the cuts that reach it.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Sequence


def balanced_cuts(
    costs: Sequence[float], crossing_bytes: Sequence[float], num_stages: int
) -> list[int]:
    """Where to cut a sequence of items into stages.

    Args:
        costs: the cost of each of n items, not negative.
        crossing_bytes: for each position 0..n, the bytes that cross a cut before item `position`;
            `math.inf` where no cut is allowed.
        num_stages: how many stages to make.

    Returns:
        `num_stages - 1` increasing positions; no stage is empty.

    Raises:
        ValueError: if fewer cuts are allowed than are wanted.

    Example:
        >>> balanced_cuts([1, 1, 2, 4], [0, 5, 3, 7, 0], 2)
        [3]
    """
    n = len(costs)
    allowed = [0, *(p for p in range(1, n) if crossing_bytes[p] != float("inf")), n]
    if len(allowed) - 1 < num_stages or n == 0:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} cuts, but the program has only "
            f"{max(len(allowed) - 2, 0)} places to cut; ask for at most {max(len(allowed) - 1, 1)} "
            f"stages."
        )
    prefix = [0.0, *itertools.accumulate(float(c) for c in costs)]
    total = [prefix[p] for p in allowed]
    crossing = [crossing_bytes[p] for p in allowed]
    limit = _smallest_bottleneck(total, num_stages)
    cuts = _fewest_bytes(total, crossing, num_stages, limit)
    return [allowed[c] for c in cuts]


def _smallest_bottleneck(total: Sequence[float], num_stages: int) -> float:
    """The smallest cost that bounds every stage; stages need not be empty.

    Bisection over the candidate bounds, which are the sums of runs of items.
    """
    low, high = 0.0, total[-1]
    best = _greedy_bound(total, num_stages, high)
    while high - low > 1e-12 * total[-1]:
        middle = (low + high) / 2
        if not low < middle < high:  # no number is between two that are next to each other
            break
        bound = _greedy_bound(total, num_stages, middle)
        if bound is None:
            low = middle
        else:
            best, high = bound, min(bound, middle)
    return best if best is not None else total[-1]


def _greedy_bound(total: Sequence[float], num_stages: int, limit: float) -> float | None:
    """The largest stage of a partition within `limit`, or None; each stage takes an item at least.

    Each stage takes as many items as fit, but leaves one for each stage after it.
    """
    n, start, largest = len(total) - 1, 0, 0.0
    for k in range(num_stages):
        last = n - (num_stages - 1 - k)
        if k == num_stages - 1:
            end = n
        else:
            end = min(bisect.bisect_right(total, total[start] + limit) - 1, last)
            end = max(end, start + 1)
        largest = max(largest, total[end] - total[start])
        start = end
    return largest if largest <= limit else None


def _fewest_bytes(total, crossing, num_stages: int, limit: float) -> list[int]:
    """The cuts with the fewest crossing bytes among those with every stage within the limit."""
    n = len(total) - 1
    slack = limit + 1e-9 * total[-1]
    best = [0.0] + [float("inf")] * n
    back: list[list[int]] = []
    for _ in range(num_stages):
        window: deque[int] = deque()
        new, source = [float("inf")] * (n + 1), [-1] * (n + 1)
        for end in range(1, n + 1):
            start = end - 1
            if best[start] < float("inf"):
                while window and best[window[-1]] > best[start]:
                    window.pop()
                window.append(start)
            while window and total[end] - total[window[0]] > slack:
                window.popleft()
            if window:
                new[end] = best[window[0]] + (crossing[end] if end < n else 0.0)
                source[end] = window[0]
        best = new
        back.append(source)
    cuts, end = [], n
    for source in reversed(back):
        end = source[end]
        cuts.append(end)
    return list(reversed(cuts))[1:]
