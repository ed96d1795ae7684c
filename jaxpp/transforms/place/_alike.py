"""Divides segments so that stages share computations: what most of them have, and the rest.

The update of a stage falls into components: equations that depend on each other, such as those of
one parameter. The stages of equal layers have the same ones; the first and the last stage have
those of an embedding or a head besides. Where many equations are the same, such a stage gets two
segments: one that is the others' computation, which is compiled once, and one of its own.
"""

import collections
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

#: Fewer equations than these are compiled again: a further segment takes time in each step.
WORTH = 100

#: The equations of a component, by number.
_Component = list[int]


def divide(
    segments: Sequence[tuple[Any, Sequence[int]]],
    sources: Callable[[int], Iterable[int]],
    like: Callable[[Sequence[int]], Hashable],
) -> list[tuple[Any, Sequence[int]]]:
    """Divides those segments of a phase that contain another one; gives all parts in order.

    Args:
        segments: the numbers of the equations of each segment, with anything that tells its place.
        sources: gives the equations that an equation depends on.
        like: gives a key of some equations, which is equal where their computations may be.
    """
    large = {n: own for n, (_, own) in enumerate(segments) if len(own) >= WORTH}
    if len(large) < 2:
        return list(segments)
    parts = {n: _components(own, sources) for n, own in large.items()}
    keys = {n: tuple(map(like, own)) for n, own in parts.items()}
    counts = collections.Counter(keys.values())
    divided: list[tuple[Any, Sequence[int]]] = []
    for n, (place, numbers) in enumerate(segments):
        shared: list[int] = []
        if n in large and counts[keys[n]] == 1:
            for common in counts:
                found = [i for k in _taken(common, keys[n]) for i in parts[n][k]]
                if len(shared) < len(found) < len(numbers):
                    shared = found
        if len(shared) < WORTH:
            divided.append((place, numbers))
        else:
            rest = sorted(set(numbers).difference(shared))
            divided += [(place, sorted(shared)), (place, rest)]
    return divided


def _taken(common: Sequence[Hashable], keys: Sequence[Hashable]) -> list[int]:
    """Finds where the common components stand among others, in order; none if one is missing."""
    found, start = [], 0
    for wanted in common:
        position = next((n for n in range(start, len(keys)) if keys[n] == wanted), None)
        if position is None:
            return []
        found.append(position)
        start = position + 1
    return found


def _components(
    numbers: Sequence[int], sources: Callable[[int], Iterable[int]]
) -> list[_Component]:
    """Groups equations that depend on each other, in the order of their first ones."""
    parent = {i: i for i in numbers}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i in numbers:
        for j in sources(i):
            if j in parent:
                first, second = sorted((root(i), root(j)))
                parent[second] = first
    groups: dict[int, _Component] = {}
    for i in numbers:
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())
