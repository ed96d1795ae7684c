"""Cuts a sequence of items into stages: by the costs of the items, or by the number of layers.

By costs: the slowest stage as fast as can be, and the idlest as busy, both up to a share; of these
cuts the ones at borders, then those that the fewest bytes cross, then the most equal stages. The
first two are the classic partition of a sequence by parametric search (Pinar and Aykanat, Fast
optimal load balancing algorithms for 1D partitioning, 2004); the rest is a dynamic programme over
the cuts that reach both.
"""

import bisect
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np


def balanced_cuts(
    costs: Sequence[float],
    crossing_bytes: Sequence[float],
    num_stages: int,
    layers: Sequence[int] = (),
    *,
    borders: Collection[int] = (),
    shared_bytes: Sequence[float] = (),
    tolerance: float = 0.0,
) -> list[int]:
    """Cuts a sequence of items into stages of equal costs, as far as they can be.

    Args:
        costs: the cost of each of n items, not negative.
        crossing_bytes: for each position 0..n, the bytes that cross a cut before item `position`;
            `math.inf` where no cut is allowed.
        num_stages: the number of stages to make.
        layers: the first items of layers, in order. If there are as many as stages, each stage gets
            one at least, where allowed cuts permit.
        borders: the positions at which a cut is best; other cuts are made where they are needed.
        shared_bytes: for each position 0..n, the bytes that items before and behind it read.
        tolerance: the share by which the slowest stage may be slower than it could be, and the
            idlest less busy, for the sake of cuts at borders, fewer bytes and more equal stages.

    Returns:
        `num_stages - 1` increasing positions; no stage is empty.

    Raises:
        ValueError: if fewer cuts are allowed than are wanted.

    Example:
        >>> balanced_cuts([1, 1, 2, 4], [0, 5, 3, 7, 0], 2)
        [3]
        >>> balanced_cuts([1, 1, 3], [0, 0, 0, 0], 2, layers=[0, 1])
        [1]
        >>> balanced_cuts([10, 10, 1], [0, 8, 8, 0], 2, borders=[1], tolerance=0.1)
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
    high = high * (1 + tolerance) + slack
    low = -_bisect(-high, 0.0, lambda c: _reaches_the_end(*starts(-c, high), num_stages))
    first, after = starts(low * (1 - tolerance) - slack, high)
    shared = [shared_bytes[p] if shared_bytes else 0 for p in allowed]
    weights = _in_order(
        [p not in borders for p in allowed], [crossing_bytes[p] for p in allowed], shared
    )
    return [allowed[c] for c in _Ways(first, after, weights, total, num_stages).best()]


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


def _in_order(*weights: Sequence[float]) -> list[int]:
    """Makes one weight of several a position: sums are compared by the first, then by the next."""
    joined = [0] * len(weights[0])
    for level in weights:
        whole = [int(w) for w in level[1:-1]]  # the ends are no cuts
        scale = sum(whole) + 1
        joined = [0, *(j * scale + w for j, w in zip(joined[1:-1], whole, strict=True)), 0]
    return joined


#: Of the cuts that weigh as much, so many of each are compared by how equal the stages are.
_COMPARED = 64


@dataclasses.dataclass(frozen=True)
class _Ways:
    """All ways to make stages, each of which starts in `first[end]:after[end]`.

    `weights` has the weight of a cut at each position, and `total` the costs before it.
    """

    first: np.ndarray
    after: np.ndarray
    weights: Sequence[int]
    total: np.ndarray
    num_stages: int

    def best(self) -> list[int]:
        """Finds the cuts of least weight, then of stages as equal as can be."""
        lightest = self._lightest()
        end = len(self.weights) - 1
        # The ends of each stage on a way of least weight, from the last stage on.
        ends = [[end]]
        for n in range(self.num_stages - 1, 0, -1):
            ends.append(self._starts_of(ends[-1], lightest[n], lightest[n + 1], n))
        ends.append([0])
        ends.reverse()
        squares = [{0: 0.0}]
        back: list[dict[int, int]] = []
        for n in range(1, self.num_stages + 1):
            squares.append({})
            back.append({})
            starts = np.array(ends[n - 1])
            known = np.array([squares[-2].get(s, np.inf) for s in ends[n - 1]])
            for e in ends[n]:
                # Two positions may be on lightest ways, and on none together.
                lightest_before = (lightest[n][e] or 0) - self.weights[e]
                alike = np.array([lightest[n - 1][s] == lightest_before for s in ends[n - 1]])
                fits = alike & (self.first[e] <= starts) & (starts < self.after[e])
                sums = known + (self.total[e] - self.total[starts]) ** 2
                least = int(np.argmin(np.where(fits, sums, np.inf)))
                if fits[least] and sums[least] < np.inf:
                    squares[-1][e], back[-1][e] = float(sums[least]), ends[n - 1][least]
        cuts = []
        for source in reversed(back):
            end = source[end]
            cuts.append(end)
        return list(reversed(cuts))[1:]

    def _starts_of(
        self,
        ends: Sequence[int],
        before: Sequence[int | None],
        weight: Sequence[int | None],
        number: int,
    ) -> list[int]:
        """Finds where the stages begin that lie on a lightest way and have one of the ends."""
        alike: dict[int, list[int]] = {}
        for position, w in enumerate(before):
            if w is not None:
                alike.setdefault(w, []).append(position)
        found: set[int] = set()
        for e in ends:
            wanted = weight[e]
            assert wanted is not None
            positions = alike.get(wanted - self.weights[e], [])
            low, high = (bisect.bisect_left(positions, x[e]) for x in (self.first, self.after))
            found.update(positions[low:high])
        even = self.total[-1] * number / self.num_stages
        nearest = sorted(found, key=lambda p: abs(self.total[p] - even))
        return sorted(nearest[:_COMPARED])

    def _lightest(self) -> list[list[int | None]]:
        """Finds for each number of stages the least weight of ways to each position."""
        n = len(self.weights) - 1
        best: list[int | None] = [0] + [None] * n
        found = [best]
        first, after = self.first.tolist(), self.after.tolist()
        for _ in range(self.num_stages):
            window: deque[tuple[int, int]] = deque()
            new: list[int | None] = [None] * (n + 1)
            starts = iter(range(n))
            for end in range(1, n + 1):
                for start in itertools.islice(starts, after[end] - after[end - 1]):
                    weight = best[start]
                    if weight is not None:
                        while window and window[-1][0] > weight:
                            window.pop()
                        window.append((weight, start))
                while window and window[0][1] < first[end]:
                    window.popleft()
                if window:
                    new[end] = window[0][0] + self.weights[end]
            best = new
            found.append(best)
        return found
