"""The computations of a loop's tasks: they slice their microbatch, and update buffers in place."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import numpy as np

from jaxpp import _compat, jaxprs
from jaxpp._specs import as_weak_as
from jaxpp.jaxprs import Aval, Eqn, Literal, Var, primitives
from jaxpp.transforms._step import Inside
from jaxpp.transforms.inside import on_rows
from jaxpp.transforms.tasks import rows_type


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Which arrays of all microbatches the computation of a task takes.

    Its inputs are those of the task, with the arrays in place of slices; its constants; the number
    of the microbatch, if it `is_indexed`; and the buffers. Its outputs are those of the task, with
    the buffers in place of results.

    Args:
        slices: for each input of the task the type of the array that has the slices, of a replica;
            None for an input that is no slice.
        carries: the numbers of the inputs whose memory the outputs take.
        buffers: for each output of the task the type of its buffer, of a replica; None where it has
            none.
        replicas: their number.
        has_rows: for each input of the task whether it has a row for each of several replicas.
    """

    slices: tuple[Aval | None, ...]
    carries: tuple[int, ...]
    buffers: tuple[Aval | None, ...]
    replicas: int
    has_rows: tuple[bool, ...]

    @property
    def is_indexed(self) -> bool:
        """Whether the computation takes the number of its microbatch."""
        return any(a is not None for a in (*self.slices, *self.buffers))


def computation(
    jaxpr: jex.ClosedJaxpr, arrays: Arrays, inside: Inside | None
) -> tuple[jex.ClosedJaxpr, tuple[int, ...]]:
    """Makes the computation of a task, and the numbers of the inputs whose memory outputs take.

    Args:
        jaxpr: that of the task, which takes constants after its inputs.
        arrays: the arrays of all microbatches.
        inside: the axes inside a rank.
    """
    index = Var(jax.typeof(np.int32(0)))
    before, invars = [], list(jaxpr.jaxpr.invars)
    for i, aval in enumerate(arrays.slices):
        if aval is not None:
            x, invars[i] = invars[i], Var(aval)
            before += jaxprs.splice(_read, [invars[i], index], [x])
    buffers, after, outvars = list[Var](), [], list(jaxpr.jaxpr.outvars)
    for i, aval in enumerate(arrays.buffers):
        if aval is not None:
            y, outvars[i] = outvars[i], Var(aval)
            buffers.append(Var(aval))
            after += jaxprs.splice(_write, [y, index, buffers[-1]], [outvars[i]])
    invars += [index] * arrays.is_indexed
    first = len(invars)
    whole = _compat.make_closed_jaxpr([*invars, *buffers], outvars, [*before, *jaxpr.eqns, *after])
    donated = (*arrays.carries, *range(first, first + len(buffers)))
    if arrays.replicas > 1:
        others = [False] * (first - len(arrays.has_rows))
        whole = _on_rows(whole, [*arrays.has_rows, *others, *[True] * len(buffers)], arrays, inside)
    return jaxprs.with_copied_constants(whole), donated


def _read(x, index):
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _write(y, index, buffer):
    return as_weak_as(buffer, jax.lax.dynamic_update_index_in_dim(buffer, y, index, 0))


def _on_rows(
    jaxpr: jex.ClosedJaxpr, has_rows: Sequence[bool], arrays: Arrays, inside: Inside | None
) -> jex.ClosedJaxpr:
    """Makes the computation of all replicas of that of one."""
    run = on_rows(jaxpr, has_rows, arrays.replicas, inside)
    avals = [
        rows_type(v.aval, arrays.replicas) if own else v.aval
        for v, own in zip(jaxpr.jaxpr.invars, has_rows, strict=True)
    ]
    made, constants = jaxprs.without_constants(jax.make_jaxpr(run)(*avals))
    assert not constants
    return made


def lifted(tasks: Sequence[Eqn]) -> list[tuple[jex.ClosedJaxpr, tuple[Literal, ...]]]:
    """Turns arrays in tasks, and numbers in which they differ, into inputs; also gives these."""
    found = []
    for part, numbers in jaxprs.lift_differing([_whole(t.params["jaxpr"]) for t in tasks]):
        part, arrays = jaxprs.lift_arrays(part)
        found.append((part.jaxpr, (*numbers, *arrays)))
    return found


def _whole(jaxpr: jex.ClosedJaxpr) -> jaxprs.Part:
    """Inlines the calls in a task that close over arrays, or have derivative rules of their own.

    A task is differentiated no more.
    """

    def closes_over(eqn) -> bool:
        is_plain = eqn.primitive.name in primitives.PLAIN_CALLS
        return is_plain and bool(_compat.constants_of(jaxprs.called_jaxpr(eqn)))

    def is_opened(eqn) -> bool:
        name = eqn.primitive.name
        return name in primitives.CUSTOM_RULES or (
            name in primitives.PLAIN_CALLS and jaxprs.contains(eqn, closes_over)
        )

    plain = jaxprs.inline(jaxpr, is_opened)
    return jaxprs.Part(plain, tuple(plain.jaxpr.invars), tuple(plain.jaxpr.outvars))
