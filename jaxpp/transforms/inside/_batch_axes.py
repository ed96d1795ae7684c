"""Splits the examples of each microbatch over the axes that the batch is split over.

So it is where a loop has no replicas: each task is then an SPMD program whose devices share the
examples, and sums over them, such as gradients, are made by a collective in the task.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.extend.core as jex
from jax.sharding import PartitionSpec

from jaxpp import _compat, _jaxprs
from jaxpp._specs import Spec, axes_of, partition_spec
from jaxpp._typing import Eqn, Var
from jaxpp.schedules import Kind
from jaxpp.transforms._step import Step
from jaxpp.transforms.inside import _propagation
from jaxpp.transforms.inside._automatic_axes import constraint
from jaxpp.transforms.tasks import ScheduledLoop, is_loop


def split_examples(step: Step) -> Step:
    """Splits each microbatch over all devices, rather than giving each some microbatches.

    A batch that is split along its examples becomes, by a reshape to microbatches, an array that is
    split along the microbatches; a loop over microbatches needs each of them split. The pass also
    notes the axes of the examples in `Inside.examples`. Of the slices of replicas each device has
    those of its replica, also where types say that an explicit axis splits the examples.
    """
    inside = step.inside
    if inside is None or not any(map(is_loop, step.jaxpr.eqns)):
        return step
    jaxpr = _left_to_replicas(step.jaxpr, inside.replicas)
    if not any(map(_shares_examples, jaxpr.eqns)):
        return dataclasses.replace(step, jaxpr=jaxpr)
    known = _propagation.propagate(jaxpr, [a.spec for a in step.arguments], inside.sizes)
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    axes: dict[str, None] = {}
    eqns = []
    for eqn in jaxpr.eqns:
        operands = list(eqn.invars)
        sliced = len(ScheduledLoop.of(eqn).xs) if _shares_examples(eqn) else 0
        for n, v in list(enumerate(operands))[len(operands) - sliced :]:
            if _jaxprs.is_literal(v) or (spec := known[v]) is None or len(spec) < 2:
                continue
            dimension, new = _split(v, spec, maker, known, inside.sizes)
            axes |= dict.fromkeys(new[dimension])
            if new != spec:
                operands[n] = own = _jaxprs.fresh_var(v)
                eqns.append(constraint(v, partition_spec(new), own))
        eqns.append(eqn.replace(invars=operands))
    examples = tuple(a for a in axes if inside.sizes[a] > 1)
    inside = dataclasses.replace(inside, examples=examples)
    jaxpr = _compat.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars)
    return dataclasses.replace(step, jaxpr=jaxpr, inside=inside)


def cost_of_sharing(step: Step) -> str:
    """Says what it costs that devices share the examples of a microbatch; empty if it is little.

    Args:
        step: the step, after `split_examples`.
    """
    if step.inside is None or not (axes := step.inside.examples):
        return ""
    for eqn in filter(_shares_examples, step.jaxpr.eqns):
        keys = (task.params["key"] for task in ScheduledLoop.of(eqn).tasks)
        if any(key.kind in (Kind.B, Kind.W) for key in keys):
            count = math.prod(step.inside.sizes[a] for a in axes)
            return (
                f"the microbatches{_compat.at_source_line(eqn)} are split over {', '.join(axes)}: "
                f"each backward task has an all-reduce of its gradients over {count} devices. "
                f"microbatch(..., replicas={count}) has one a step; without it, means and "
                f"statistics are those of the examples of all these devices."
            )
    return ""


#: What lies between a batch and its slices.
_SLICING = ("reshape", "transpose", "sharding_constraint")


def _left_to_replicas(jaxpr: jex.ClosedJaxpr, axis: str) -> jex.ClosedJaxpr:
    """Leaves the axis of the replicas out of the constraints of their slices."""
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    changed: dict[Var, Eqn] = {}
    for loop in (e for e in jaxpr.eqns if is_loop(e) and e.params["replicas"] > 1):
        own = ScheduledLoop.of(loop)
        given = own.num_consts + own.num_carry * own.num_directions
        for v in _jaxprs.variables(loop.invars[given:]):
            found: list[tuple[Var, Eqn]] = []
            while v in maker and maker[v].primitive.name in _SLICING:
                eqn, (operand, *_) = maker[v], maker[v].invars
                if eqn.primitive.name == "sharding_constraint":
                    open_ = _open_over(axis, eqn.params["sharding"].spec)
                    found.append((v, constraint(operand, open_, v)))
                elif eqn.primitive.name == "reshape":  # what was found is no longer of the batch
                    changed.update(found)
                    found = []
                v = operand
    eqns = [changed.get(e.outvars[0], e) if e.outvars else e for e in jaxpr.eqns]
    return _compat.with_equations(jaxpr, eqns, jaxpr.jaxpr.outvars)


def _open_over(axis: str, spec: PartitionSpec) -> PartitionSpec:
    """Leaves an axis out of a spec, and open what is whole then."""
    entries = (e if isinstance(e, str | tuple) else () for e in spec)
    axes = ((e,) if isinstance(e, str) else e for e in entries)
    kept = (tuple(a for a in own if a != axis) for own in axes)
    return PartitionSpec(*(own or PartitionSpec.UNCONSTRAINED for own in kept))


def _shares_examples(eqn: Eqn) -> bool:
    return is_loop(eqn) and eqn.params["replicas"] == 1


def _split(
    v: Var,
    spec: Spec,
    maker: Mapping[Var, Eqn],
    known: _propagation.Known,
    sizes: Mapping[str, int],
) -> tuple[int, Spec]:
    """Finds the dimension of the examples in slices, and their spec, whole along microbatches.

    The slices are a batch whose dimension of examples was reshaped to microbatches and examples,
    and whose dimension of microbatches was then moved to the front.
    """
    eqn, axis, over = maker.get(v), 0, spec[0]
    if eqn is not None and eqn.primitive.name == "transpose":
        axis = eqn.params["permutation"][0]
        (moved,) = _jaxprs.variables(eqn.invars)
        eqn = maker.get(moved)
    if eqn is None or eqn.primitive.name != "reshape":
        axis = 0
    else:
        (whole,) = _jaxprs.variables(eqn.invars)
        batch = known.get(whole)
        if batch and len(batch) == len(spec) - 1:
            over = batch[axis]
    entries, dimension = [(), *spec[1:]], axis + 1
    for name in over:
        parts = sizes[name] * math.prod(sizes[a] for a in entries[dimension])
        if name not in axes_of(tuple(entries)) and v.aval.shape[dimension] % parts == 0:
            entries[dimension] = (*entries[dimension], name)
    return dimension, tuple(entries)
