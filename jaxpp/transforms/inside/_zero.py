"""ZeRO: splits optimizer state, and parameters if wanted, over the replicas.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". With
optimizer state split (ZeRO-1, section 5.1) the gradients are reduced and scattered, each replica
updates the part of the parameters that its state is for, and the new parameters are gathered, once
a step. With parameters split too (ZeRO-3, section 5.3) each task gathers the parameters that it
reads, and drops them when it ends. Gradients are accumulated whole all the same, as they are
reduced once a step.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxpp._specs import Spec, axes_of
from jaxpp.transforms._step import Step


def scattered(
    spec: Spec, shape: Sequence[int], axes: tuple[str, ...], sizes: Mapping[str, int]
) -> Spec | None:
    """Splits an array over further axes, along one of its dimensions.

    Args:
        spec: the spec of the array so far.
        shape: its shape.
        axes: the axes to split it over.
        sizes: the size of each axis inside a rank.

    Returns:
        The new spec. It splits the largest whole dimension that the axes divide, or else the
        largest one; None where they divide none, or where one of the axes is used already.

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


def split_state(step: Step) -> Step:
    """Splits optimizer state and parameters further, as `zero1` and `zero3` say."""
    if step.inside is None:
        return step
    sizes = step.inside.sizes
    arguments = []
    for own in step.arguments:
        axes = step.inside.zero.get(own.role)
        spec = axes and scattered(own.spec, own.aval.shape, axes, sizes)
        arguments.append(dataclasses.replace(own, spec=spec) if spec else own)
    results = tuple(
        dataclasses.replace(r, spec=arguments[r.becomes].spec)
        if r.spec is None and r.becomes is not None
        else r
        for r in step.results
    )
    return dataclasses.replace(step, arguments=tuple(arguments), results=results)
