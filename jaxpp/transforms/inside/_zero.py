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
from typing import Any

from jaxpp import _compat, _jaxprs
from jaxpp._specs import Spec, axes_of, partition_spec, replicated
from jaxpp.transforms._step import Step
from jaxpp.transforms.inside import propagation
from jaxpp.transforms.inside._constraints import constraint, split_operands
from jaxpp.transforms.tasks import LoopTasks, TaskBody, is_loop


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


def gather_in_tasks(step: Step) -> Step:
    """Lets tasks gather the parameters that are split further than the tasks read them.

    Otherwise XLA would see parameters and examples split over the same axes, keep the parameters
    split, and move the examples.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> from jaxpp._program import Argument
        >>> from jaxpp.transforms._step import Inside
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.schedule(jaxpp.microbatch(jax.grad(loss), 2), jaxpp.schedules.OneFOneB())
        >>> types = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=types)
        >>> split, whole = (("data",), ()), ((), ())
        >>> with jax.sharding.use_abstract_mesh(mesh):
        ...     jaxpr = jax.make_jaxpr(grad)(jnp.ones((4, 4)), jnp.ones((8, 4)))
        ...     weight, batch = (Argument("", aval, 0, spec=split) for aval in jaxpr.in_avals)
        ...     weight = dataclasses.replace(weight, in_tasks=whole)
        ...     batch = dataclasses.replace(batch, in_tasks=split)
        ...     step = Step(jaxpr, (weight, batch), (), inside=Inside(mesh, {}))
        ...     own = gather_in_tasks(step)
        >>> (loop,) = filter(is_loop, own.jaxpr.eqns)
        >>> loop.params["tasks"].bodies[0].jaxpr.eqns[0].primitive.name
        'sharding_constraint'
    """
    specs, whole = [a.spec for a in step.arguments], [a.in_tasks for a in step.arguments]
    if step.inside is None or specs == whole:
        return step
    split, read = (propagation.propagate(step.jaxpr, s, step.inside.sizes) for s in (specs, whole))
    eqns: list[Any] = []
    for eqn in step.jaxpr.eqns:
        # Replicas gather by themselves: a task reads its constants whole.
        shared = is_loop(eqn) and eqn.params["tasks"].replicas == 1
        eqns += _gather_in_loop(eqn, split, read) if shared else [eqn]
    jaxpr = _compat.with_equations(step.jaxpr, eqns, step.jaxpr.jaxpr.outvars)
    return dataclasses.replace(step, jaxpr=jaxpr)


def _gather_in_loop(
    eqn: Any, split: Mapping[Any, Spec | None], read: Mapping[Any, Spec | None]
) -> list[Any]:
    """Gathers what is split in another way than tasks read it; gives the loop after its carries."""
    tasks: LoopTasks = eqn.params["tasks"]
    specs = {
        n: read[v] or replicated(v.aval.ndim)
        for n, v in enumerate(eqn.invars[: tasks.num_consts + tasks.num_carry])
        if not _jaxprs.is_literal(v) and split[v] is not None and split[v] != read[v]
    }
    bodies = tuple(_gather(body, specs) for body in tasks.bodies)
    params = {**eqn.params, "tasks": dataclasses.replace(tasks, bodies=bodies)}
    # A carry, which tasks write over, is gathered once: its spec stays the same.
    carries = {n: spec for n, spec in specs.items() if n >= tasks.num_consts}
    return split_operands(eqn.replace(params=params), carries)


def _gather(body: TaskBody, specs: Mapping[int, Spec]) -> TaskBody:
    """Makes a task gather constants first, to the given specs."""
    known, gathers = _jaxprs.Substitution(), []
    for ref, v in zip(body.inputs, body.jaxpr.jaxpr.invars, strict=True):
        if ref.source == "const" and ref.index in specs:
            known.of[v] = _jaxprs.fresh_var(v)
            gathers.append(constraint(v, partition_spec(specs[ref.index]), known.of[v]))
    if not gathers:
        return body
    eqns = [*gathers, *(known.rename(eqn) for eqn in body.jaxpr.eqns)]
    outvars = [known(v) for v in body.jaxpr.jaxpr.outvars]
    return dataclasses.replace(body, jaxpr=_compat.with_equations(body.jaxpr, eqns, outvars))
