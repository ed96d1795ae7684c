"""ZeRO-1: optimizer state split over the replicas, which each update their part of a parameter.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.1: the gradients are reduced and scattered, each replica updates the part of the
parameters that its state is for, and the new parameters are gathered, once a step.
"""

import math
from collections.abc import Mapping, Sequence

from jaxpp._specs import Spec, axes_of


def scattered(
    spec: Spec, shape: Sequence[int], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> Spec | None:
    """The spec of an array that is split over further axes, along one of its dimensions.

    Args:
        spec: how it is split already.
        shape: its shape.
        axes: the axes to split it over.
        sizes: the size of each axis inside a rank.

    Returns:
        The spec, with the largest dimension that can be split so, whole ones first; None where none
        can be, or it is split over one of the axes.

    Example:
        >>> scattered(((), ("model",)), (6, 8), ("data",), {"data": 2, "model": 2})
        (('data',), ('model',))
        >>> scattered(((),), (3,), ("data",), {"data": 2})
    """
    if set(axes_of(spec)) & set(axes):
        return None
    added = math.prod(sizes[a] for a in axes)
    found = [
        (not entry, size, -dimension)
        for dimension, (size, entry) in enumerate(zip(shape, spec, strict=True))
        if size and size % (added * math.prod(sizes[a] for a in entry)) == 0
    ]
    if not found:
        return None
    chosen = -max(found)[2]
    return tuple(e + axes if n == chosen else e for n, e in enumerate(spec))
