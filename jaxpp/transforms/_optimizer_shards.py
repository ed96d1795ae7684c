"""ZeRO-1: optimizer state split over the replicas, which each update their part of a parameter.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.1: the gradients are reduced and scattered, each replica updates the part of the
parameters that its state is for, and the new parameters are gathered, once a step.
"""

import math
from collections.abc import Mapping, Sequence

import jax.extend.core as jex

from jaxpp import _jaxprs
from jaxpp._specs import Spec, axes_of
from jaxpp.transforms import _loop, _marks


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


def optimizer_arguments(jaxpr: jex.ClosedJaxpr, pairs: Mapping[int, int]) -> frozenset[int]:
    """The arguments that are optimizer state: handed on to the next step, and read by no stage.

    Args:
        jaxpr: the step.
        pairs: for results that become arguments of the next step, the number of the argument.
    """
    stages = [_loop.is_loop(e) or _marks.is_stage_call(e) for e in jaxpr.eqns]
    read = [v for e, own in zip(jaxpr.eqns, stages, strict=True) if own for v in e.invars]
    needed = set(_jaxprs.variables(read))
    for eqn, keep in zip(jaxpr.eqns, _jaxprs.ancestors(jaxpr.eqns, needed), strict=True):
        if keep:
            needed.update(_jaxprs.variables(eqn.invars))
    return frozenset(n for n in pairs.values() if jaxpr.jaxpr.invars[n] not in needed)
