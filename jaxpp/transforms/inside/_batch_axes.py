"""Splits the slices of a microbatch loop over the axes that the batch is split over."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp import _compat, _jaxprs
from jaxpp._specs import Spec, axes_of
from jaxpp.transforms._step import Step
from jaxpp.transforms.inside import propagation
from jaxpp.transforms.inside._constraints import split_operands
from jaxpp.transforms.tasks import LoopTasks, is_loop


def split_examples(step: Step) -> Step:
    """Splits each microbatch over all replicas, rather than giving each replica some microbatches.

    A batch that is split along its examples becomes, by a reshape to microbatches, an array that is
    split along the microbatches; a loop over microbatches needs each of them split. The pass also
    notes the axes that examples are split over in `Inside.examples`.
    """
    if step.inside is None or not any(map(_shares_examples, step.jaxpr.eqns)):
        return step
    jaxpr, sizes = step.jaxpr, step.inside.sizes
    known = propagation.propagate(jaxpr, [a.spec for a in step.arguments], sizes)
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    axes: dict[str, None] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        wanted = {}
        for n, spec in _slices(eqn, known).items() if _shares_examples(eqn) else ():
            v = eqn.invars[n]
            dimension, over = _examples(v, maker, known)
            new = _split(spec, v.aval.shape, dimension, over, sizes)
            axes.update(dict.fromkeys(new[dimension]))
            if new != spec:
                wanted[n] = new
        eqns += split_operands(eqn, wanted)
    jaxpr = _compat.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars)
    inside = dataclasses.replace(step.inside, examples=tuple(axes))
    return dataclasses.replace(step, jaxpr=jaxpr, inside=inside)


def _shares_examples(eqn: Any) -> bool:
    """Tells whether an equation is a loop whose devices share the examples of a microbatch."""
    return is_loop(eqn) and eqn.params["tasks"].replicas == 1


def _slices(eqn: Any, known: Mapping[Any, Spec | None]) -> dict[int, Spec]:
    """Finds the operands of a loop that it slices, and that have examples to split; their specs."""
    tasks: LoopTasks = eqn.params["tasks"]
    sliced = list(enumerate(eqn.invars))[tasks.num_consts + tasks.num_carry :]
    specs = {n: known[v] for n, v in sliced if not _jaxprs.is_literal(v)}
    return {n: spec for n, spec in specs.items() if spec is not None and len(spec) > 1}


def _examples(v: Any, maker: Mapping[Any, Any], known) -> tuple[int, tuple[str, ...]]:
    """Finds the dimension of the examples in the slices of a loop, and the axes to split it over.

    The slices are a batch whose dimension of examples was reshaped to microbatches and examples,
    and whose dimension of microbatches was then moved to the front.
    """
    eqn, axis = maker.get(v), 0
    if eqn is not None and eqn.primitive.name == "transpose":
        axis = eqn.params["permutation"][0]
        eqn = maker.get(eqn.invars[0])
    over = known[v][0]
    if eqn is not None and eqn.primitive.name == "reshape":
        batch, shape = eqn.invars[0], eqn.outvars[0].aval.shape
        merged = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
        if batch.aval.shape == merged and known.get(batch) is not None:
            return axis + 1, known[batch][axis]
    return 1, over


def _split(
    spec: Spec, shape: Sequence[int], dimension: int, over: Sequence[str], sizes: Mapping[str, int]
) -> Spec:
    """Splits a dimension over some axes, as far as they divide it; the first one becomes whole."""
    entries = [(), *spec[1:]]
    for axis in over:
        parts = sizes[axis] * math.prod(sizes[a] for a in entries[dimension])
        if axis not in axes_of(tuple(entries)) and shape[dimension] % parts == 0:
            entries[dimension] = (*entries[dimension], axis)
    return tuple(entries)
