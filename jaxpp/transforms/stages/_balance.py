"""Cuts a sequence of items into stages: by the costs of the items, or by the number of layers.

By costs: the slowest stage as fast as can be, then the idlest as busy as can be, then the fewest
bytes across. The first two are the classic partition of a sequence by parametric search (Pinar and
Aykanat, Fast optimal load balancing algorithms for 1D partitioning, 2004); the third is a dynamic
programme over the cuts that reach both.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np


def balanced_cuts(
    costs: Sequence[float],
    crossing_bytes: Sequence[float],
    num_stages: int,
    layers: Sequence[int] = (),
) -> list[int]:
    """Cuts a sequence of items into stages of equal costs, as far as they can be.

    Args:
        costs: the cost of each of n items, not negative.
        crossing_bytes: for each position 0..n, the bytes that cross a cut before item `position`;
            `math.inf` where no cut is allowed.
        num_stages: the number of stages to make.
        layers: the first items of layers, in order. If there are as many as stages, each stage gets
            one at least, where allowed cuts permit.

    Returns:
        `num_stages - 1` increasing positions; no stage is empty.

    Raises:
        ValueError: if fewer cuts are allowed than are wanted.

    Example:
        >>> balanced_cuts([1, 1, 2, 4], [0, 5, 3, 7, 0], 2)
        [3]
        >>> balanced_cuts([1, 1, 3], [0, 0, 0, 0], 2, layers=[0, 1])
        [1]
    """
    allowed = _allowed(crossing_bytes, num_stages)
    total = np.array([0.0, *itertools.accumulate(float(c) for c in costs)])[allowed]
    # A stage from `start` to `end` has `begun[end] - begun[start]` layers, and an item.
    begun = np.searchsorted(layers, allowed)
    after = np.minimum(np.searchsorted(begun, begun - 1, "right"), np.arange(len(total)))
    if not _reaches_the_end(np.zeros(len(total), int), after, num_stages):
        after = np.arange(len(total))

    def starts(low: float, high: float):
        """Finds for each end of a stage its first start, and the last + 1, with costs in bounds."""
        costs_enough = np.searchsorted(total, total - low, "right")
        return np.searchsorted(total, total - high, "left"), np.minimum(after, costs_enough)

    slack = 1e-9 * total[-1]
    high = _bisect(0.0, total[-1], lambda c: _reaches_the_end(*starts(0.0, c), num_stages))
    high += slack
    low = -_bisect(-high, 0.0, lambda c: _reaches_the_end(*starts(-c, high), num_stages))
    crossing = [crossing_bytes[p] for p in allowed]
    cuts = _fewest_bytes(*starts(low - slack, high), crossing, num_stages)
    return [allowed[c] for c in cuts]


def even_cuts(layers: Sequence[int], crossing_bytes: Sequence[float], num_stages: int) -> list[int]:
    """Cuts a sequence of items so that stages have equally many layers, or the last ones one more.

    Args:
        layers: the first items of layers, in order.
        crossing_bytes: as for `balanced_cuts`.
        num_stages: the number of stages to make.

    Returns:
        `num_stages - 1` increasing positions: each is, of those between two layers, the one that
        the fewest bytes cross.

    Raises:
        ValueError: if there are fewer layers than stages.

    Example:
        >>> even_cuts([1, 2, 3, 4, 5, 6], [0] * 8, 4)
        [2, 3, 5]
    """
    if len(layers) < num_stages:
        raise ValueError(
            f"{num_stages} stages need a layer each, but the program has {len(layers)}; ask for at "
            f"most {max(len(layers), 1)} stages."
        )
    fewest, more = divmod(len(layers), num_stages)
    cuts = []
    for k in range(1, num_stages):
        begun = k * fewest + max(0, k - (num_stages - more))
        places = range(layers[begun], layers[begun - 1], -1)
        cuts.append(min(places, key=crossing_bytes.__getitem__))
    return cuts


def _allowed(crossing_bytes: Sequence[float], num_stages: int) -> list[int]:
    """Finds the positions at which a stage may begin or end."""
    n = len(crossing_bytes) - 1
    allowed = [0, *(p for p in range(1, n) if crossing_bytes[p] != float("inf")), n]
    if len(allowed) - 1 < num_stages or n == 0:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} cuts, but the program has only "
            f"{max(len(allowed) - 2, 0)} places to cut; ask for at most {max(len(allowed) - 1, 1)} "
            f"stages."
        )
    return allowed


def _reaches_the_end(first: np.ndarray, after: np.ndarray, num_stages: int) -> bool:
    """Tells whether `num_stages` stages fill the line, if one starts in `first[end]:after[end]`."""
    reached = np.zeros(len(first), int)
    reached[0] = 1
    for _ in range(num_stages):
        before = np.concatenate([[0], np.cumsum(reached)])
        reached = np.where(after > first, before[after] > before[np.minimum(first, after)], False)
    return bool(reached[-1])


def _bisect(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """Finds the smallest number for which a condition holds, which holds for `high`."""
    exact = 1e-12 * max(abs(low), abs(high))
    while high - low > exact:
        middle = (low + high) / 2
        if not low < middle < high:  # no number is between two that are next to each other
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _fewest_bytes(
    first: np.ndarray, after: np.ndarray, crossing: Sequence[float], num_stages: int
) -> list[int]:
    """Finds the cuts that the fewest bytes cross; a stage starts in `first[end]:after[end]`."""
    n = len(first) - 1
    best = [0.0] + [float("inf")] * n
    back: list[list[int]] = []
    first, after = first.tolist(), after.tolist()
    for _ in range(num_stages):
        window: deque[int] = deque()
        new, source = [float("inf")] * (n + 1), [-1] * (n + 1)
        starts = iter(range(n))
        for end in range(1, n + 1):
            for start in itertools.islice(starts, after[end] - after[end - 1]):
                if best[start] < float("inf"):
                    while window and best[window[-1]] > best[start]:
                        window.pop()
                    window.append(start)
            while window and window[0] < first[end]:
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
