"""The passes over a step that settle how it is split over the axes inside a rank."""

import dataclasses

from jaxpp._program import Role
from jaxpp.transforms import _batch_axes, _deferred_sums, _parameter_shards
from jaxpp.transforms._optimizer_shards import scattered
from jaxpp.transforms._step import Step


def split_state(step: Step) -> Step:
    """Splits what is kept from step to step further, as `zero1` and `zero3` say."""
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


def split_examples(step: Step) -> Step:
    """Splits the examples of each microbatch over the replicas."""
    if step.inside is None:
        return step
    specs = [a.spec for a in step.arguments]
    jaxpr, axes = _batch_axes.split_slices(step.jaxpr, specs, step.inside.sizes)
    inside = dataclasses.replace(step.inside, examples=axes)
    return dataclasses.replace(step, jaxpr=jaxpr, inside=inside)


def gather_in_tasks(step: Step) -> Step:
    """Lets tasks gather the parameters that are split further than they read them."""
    if step.inside is None:
        return step
    own, whole = ([a.spec for a in step.arguments], [a.in_tasks for a in step.arguments])
    jaxpr = _parameter_shards.gather_in_tasks(step.jaxpr, own, whole, step.inside.sizes)
    return dataclasses.replace(step, jaxpr=jaxpr)


def defer_sums(step: Step) -> Step:
    """Adds up gradients over the replicas once a step, not once a microbatch."""
    inside = step.inside
    if inside is None:
        return step
    jaxpr = _deferred_sums.defer_sums(
        step.jaxpr,
        [a.spec for a in step.arguments],
        inside.examples,
        inside.sizes,
        own=inside.own_sizes,
        scatter=set(inside.examples) == set(inside.zero[Role.OPTIMIZER]),
    )
    return dataclasses.replace(step, jaxpr=jaxpr)
