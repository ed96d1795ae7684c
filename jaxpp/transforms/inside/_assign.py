"""Decides how each value of a step is split inside a rank, before anything is compiled.

The specs of the arguments are propagated through the runs in the order in which they happen, and
every computation is compiled with them: what a rank sends and what the next one expects agree
without asking the compiler, on any mesh and for any schedule.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxpp import _compat
from jaxpp._program import Computation
from jaxpp._specs import Spec, replicated
from jaxpp.transforms.inside import propagation


class Event(Protocol):
    """A run of a computation over named values."""

    computation: int
    inputs: list[Hashable]
    outputs: list[Hashable]


def assign(
    events: Sequence[Event],
    computations: Sequence[Computation],
    fixed: Mapping[Hashable, Spec],
    groups: Mapping[Hashable, Hashable],
    first_of: Iterable[Hashable],
    sizes: Mapping[str, int],
) -> dict[Hashable, Spec]:
    """The spec of each value.

    Args:
        events: the runs, in an order in which they can happen.
        computations: what they run.
        fixed: the specs of values that are given, or wanted: arguments, constants, results.
        groups: for values that share memory one after the other (an accumulator), their group.
        first_of: the values of groups that their first use takes: the empty accumulators.
        sizes: the axes inside a rank.
    """
    beginnings = frozenset(first_of)
    of_group: dict[Hashable, Spec] = {}
    for key, spec in fixed.items():
        if key in groups:
            of_group[groups[key]] = spec
    known: dict[tuple[int, tuple[Spec | None, ...]], list[Spec | None]] = {}
    specs: dict[Hashable, Spec | None] = {}
    # The second round knows what is added to the accumulators.
    for _ in range(2):
        specs = dict(fixed)
        for event in events:
            own = tuple(specs.get(key) for key in event.inputs)
            if (event.computation, own) not in known:
                jaxpr = computations[event.computation].jaxpr
                known[event.computation, own] = propagation.output_specs(jaxpr, own, sizes)
            for key, spec in zip(event.outputs, known[event.computation, own], strict=True):
                if key in groups:
                    if spec is not None and key not in beginnings:
                        spec = of_group.setdefault(groups[key], spec)
                    spec = of_group.get(groups[key])
                if key not in fixed:
                    specs[key] = spec
    ndims = {
        key: len(v.aval.shape)
        for event in events
        for key, v in zip(
            event.outputs, computations[event.computation].jaxpr.jaxpr.outvars, strict=True
        )
    }
    return {k: replicated(ndims[k]) if s is None else s for k, s in specs.items()}


def with_specs(
    computation: Computation,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    sizes: Mapping[str, int],
) -> Computation:
    """A computation over split arrays; it takes the memory of arrays that are split alike."""
    jaxpr = computation.jaxpr.jaxpr
    vacant: dict[Any, int] = {}
    for v, spec in zip(jaxpr.outvars, out_specs, strict=True):
        kind = v.aval.shape, v.aval.dtype, spec
        vacant[kind] = vacant.get(kind, 0) + 1
    donated = []
    for i in computation.donated:
        aval = jaxpr.invars[i].aval
        kind = aval.shape, aval.dtype, in_specs[i]
        if vacant.get(kind, 0) > 0:
            vacant[kind] -= 1
            donated.append(i)
    whole = propagation.made_whole(computation.jaxpr, in_specs, sizes)
    return dataclasses.replace(
        computation,
        in_specs=in_specs,
        out_specs=out_specs,
        donated=tuple(donated),
        whole=tuple({f"`{e.primitive.name}`{_compat.at_source_line(e)}": None for e in whole}),
    )
