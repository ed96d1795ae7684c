"""Decides how each value of a step is split inside a rank, before anything is compiled.

The specs of the arguments are propagated through the tasks in the order in which they run, and
every computation is compiled with its specs. So a rank sends an array as the next one expects it,
without asking the compiler, on any mesh and for any schedule.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from jaxpp import _compat
from jaxpp._program import Computation
from jaxpp._specs import Spec, replicated
from jaxpp.transforms.inside import propagation


class Value(Protocol):
    """An array that tasks make and read; `spec` is its spec, where one is given.

    Values of one `memory` (an accumulator) share a buffer, one after the other; the first of them
    `begins` it.
    """

    aval: Any
    spec: Spec | None
    memory: Hashable
    begins: bool


class Task(Protocol):
    """A run of a body over values."""

    @property
    def body(self) -> Any: ...
    @property
    def inputs(self) -> Sequence[Any]: ...
    @property
    def outputs(self) -> Sequence[Any]: ...


def assign(
    tasks: Sequence[Task], arguments: Sequence[Value], sizes: Mapping[str, int]
) -> dict[Any, Spec]:
    """Decides how each value of a step is split.

    Args:
        tasks: the tasks, in an order in which they can run.
        arguments: the values that the step takes.
        sizes: the size of each axis inside a rank.
    """
    values = dict.fromkeys(arguments)
    values.update((v, None) for task in tasks for v in (*task.inputs, *task.outputs))
    given = {v: v.spec for v in values if v.spec is not None}
    in_memory = {v.memory: spec for v, spec in given.items() if v.memory is not None}
    known: dict[tuple[Any, tuple[Spec | None, ...]], list[Spec | None]] = {}
    specs: dict[Value, Spec | None] = {}
    # The second round knows the specs of the values that are added to accumulators.
    for _ in range(2):
        specs = dict(given)
        for task in tasks:
            own = tuple(specs.get(v) for v in task.inputs)
            if (task.body, own) not in known:
                known[task.body, own] = propagation.output_specs(task.body.jaxpr, own, sizes)
            for value, spec in zip(task.outputs, known[task.body, own], strict=True):
                if value.memory is not None:
                    if spec is not None and not value.begins:
                        spec = in_memory.setdefault(value.memory, spec)
                    spec = in_memory.get(value.memory)
                specs[value] = given.get(value, spec)
    return {v: specs.get(v) or replicated(len(v.aval.shape)) for v in values}


def with_specs(
    computation: Computation,
    in_specs: tuple[Spec, ...],
    out_specs: tuple[Spec, ...],
    sizes: Mapping[str, int],
) -> Computation:
    """Gives a computation specs; an output takes the memory of an input only if split alike."""
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
