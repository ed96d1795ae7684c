"""The body of a microbatch loop, its stage calls opened and each equation's task known.

A task has a position: 0..S-1 are the forwards of stages 0..S-1, and S..2S-1 the backwards of stages
S-1..0, so that values flow from lower positions to higher ones.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp.transforms.stages import dissolve_marks, is_backward_call, is_stage_call, stage_of_call

#: How a result of the loop is made from those that it was divided into: their number, and the
#: function that joins them.
Join = tuple[int, Callable[..., Any]]

WHOLE: Join = (1, lambda result: result)


def joined(results: Sequence[Any], joins: Sequence[Join]) -> list[Any]:
    """Joins the results of a loop, which were divided; those after the last join stay."""
    rest = iter(results)
    return [join(*itertools.islice(rest, number)) for number, join in joins] + list(rest)


@dataclasses.dataclass(frozen=True)
class Body:
    """A loop body, with the loop's operands.

    `position` has the position of each equation's task, None for an equation outside of all calls
    of stages. Carry i becomes `carry_outs[i]`; `ys` are the results of each iteration. The tasks at
    the positions `recomputing` compute a part of a forward again. `values` has the operand of the
    loop for each of its inputs; the loop takes `length` slices, in reverse or not. For each carry
    that takes its microbatches in any order, `folds` has the primitive that combines them. `finish`
    makes the results of the loop as it was traced from those of a loop of this body.
    """

    consts: tuple[Any, ...]
    carries: tuple[Any, ...]
    xs: tuple[Any, ...]
    eqns: tuple[Any, ...]
    position: tuple[int | None, ...]
    carry_outs: tuple[Any, ...]
    ys: tuple[Any, ...]
    num_stages: int
    recomputing: frozenset[int]
    values: Mapping[Any, Any]
    length: int
    reverse: bool
    folds: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    finish: Callable[[Sequence[Any]], Sequence[Any]] = lambda results: results

    @property
    def outputs(self) -> tuple[Any, ...]:
        return (*self.carry_outs, *self.ys)

    def placed(self) -> Iterator[tuple[Any, int | None]]:
        """Pairs each equation with its position."""
        return zip(self.eqns, self.position, strict=True)

    def with_equations(self, placed, **changes: Any) -> "Body":
        """Replaces the equations by others, which are given with their positions."""
        placed = list(placed)
        return dataclasses.replace(
            self, eqns=tuple(e for e, _ in placed), position=tuple(p for _, p in placed), **changes
        )

    def renamed(self, placed, known: _jaxprs.Substitution, **changes: Any) -> "Body":
        """Replaces the equations by others, and its results by what is known of them."""
        outs = tuple(map(known, self.carry_outs))
        return self.with_equations(
            placed, carry_outs=outs, ys=tuple(map(known, self.ys)), **changes
        )

    def divided(self, placed, joins: Sequence[Join], values: Mapping[Any, Any], **changes: Any):
        """Divides carries; `joins` says how the loop's last carries are made from the new ones."""

        def finish(results):
            return self.finish(joined(results, joins))

        values = {**self.values, **values}
        return self.with_equations(placed, values=values, finish=finish, **changes)

    def read(self) -> set[Any]:
        """Finds the variables that equations or results read."""
        read = {v for e in self.eqns for v in _jaxprs.variables(e.invars)}
        return read.union(_jaxprs.variables(self.outputs))

    def maker(self) -> dict[Any, int]:
        """Finds for each variable the number of the equation that makes it."""
        return {v: i for i, e in enumerate(self.eqns) for v in e.outvars}

    def owner(self) -> dict[Any, int]:
        """Finds for each variable the position of the task that makes it, if one task does."""
        return {v: p for e, p in self.placed() if p is not None for v in e.outvars}

    def readers(self) -> dict[Any, set[int]]:
        """Finds for each variable the positions of the tasks that read it."""
        readers: dict[Any, set[int]] = {}
        for e, p in self.placed():
            if p is not None:
                for v in _jaxprs.variables(e.invars):
                    readers.setdefault(v, set()).add(p)
        return readers

    def from_stages(self, more: Iterable[Any]) -> set[Any]:
        """Finds all that depends on `more`, or on what a stage makes of a microbatch."""
        varying = _jaxprs.descendants(self.eqns, [*self.carries, *self.xs])
        staged = [v for e, p in self.placed() if p is not None for v in e.outvars if v in varying]
        return _jaxprs.descendants(self.eqns, [*staged, *more])

    def last_position(self) -> dict[Any, int]:
        """Finds the position of the last task that each variable depends on, if it does on any."""
        at: dict[Any, int] = {}
        for eqn, position in self.placed():
            if position is None:
                found = [at[v] for v in _jaxprs.variables(eqn.invars) if v in at]
                position = max(found, default=None)
            if position is not None:
                at.update(dict.fromkeys(eqn.outvars, position))
        return at

    def stage(self, position: int) -> int:
        """Gives the stage of the task at a position."""
        return 2 * self.num_stages - 1 - position if position >= self.num_stages else position

    def task_name(self, position: int) -> str:
        """Names the task at a position for an error message."""
        return f"{'B' if position >= self.num_stages else 'F'} of stage {self.stage(position)}"


def read_body(
    jaxpr: jex.ClosedJaxpr,
    num_consts: int,
    num_carry: int,
    operands: Sequence[Any],
    length: int,
    reverse: bool,
) -> Body:
    """Opens the stage calls in the jaxpr of a loop's body.

    Args:
        jaxpr: one iteration; it takes constants, carries and slices, and gives carries and results.
        num_consts: the number of its inputs that are constants.
        num_carry: the number of its inputs, and of its outputs, that are carries.
        operands: the operands of the loop.
        length: the number of slices.
        reverse: whether the loop takes the last slice first.

    Raises:
        ValueError: if stages are called inside a loop or conditional, or differ in their number.
    """
    flat, again = _inline_to_calls(jaxpr)
    sizes = sorted({call[1] for e in flat.eqns if (call := stage_of_call(e))})
    if len(sizes) > 1:
        raise ValueError(
            f"schedule: one microbatch loop calls functions of "
            f"{' and '.join(map(str, sizes))} stages; split them alike, or give each a loop of its "
            f"own."
        )
    (num_stages,) = sizes
    known = _jaxprs.Substitution()
    placed: list[tuple[Any, int | None]] = []
    edges: set[Any] = set()
    recomputing: set[int] = set()
    for eqn, computed_again in zip(flat.eqns, again, strict=True):
        eqn = known.rename(eqn)
        call = stage_of_call(eqn)
        if call is None:
            if _rounds_nothing(eqn) and eqn.invars[0] in edges:
                known.of[eqn.outvars[0]] = eqn.invars[0]
            else:
                placed.append((eqn, None))
            continue
        backward = computed_again or is_backward_call(eqn)
        position = 2 * num_stages - 1 - call[0] if backward else call[0]
        opened = _jaxprs.part(*_jaxprs.inline_call(eqn, eqn.invars))
        clean, _ = dissolve_marks(opened.jaxpr)
        if computed_again or _jaxprs.contains(eqn, _recomputes):
            recomputing.add(position)
        placed.extend((e, position) for e in clean.eqns)
        known.of.update(
            (o, known(r)) for o, r in zip(eqn.outvars, clean.jaxpr.outvars, strict=True)
        )
        edges.update(_jaxprs.variables(clean.jaxpr.outvars))
    invars = tuple(flat.jaxpr.invars)
    outvars = tuple(known(v) for v in flat.jaxpr.outvars)
    return Body(
        invars[:num_consts],
        invars[num_consts : num_consts + num_carry],
        invars[num_consts + num_carry :],
        tuple(e for e, _ in placed),
        tuple(p for _, p in placed),
        outvars[:num_carry],
        outvars[num_carry:],
        num_stages,
        frozenset(recomputing),
        dict(zip(invars, operands, strict=True)),
        length,
        reverse,
    )


def _inline_to_calls(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """Brings the calls of stages to the top of a loop's body.

    Also tells for each equation whether a checkpoint computes it again for a backward in it. Where
    a stage in the checkpoint reads the forward of an earlier one, they are forwards of the loop,
    for the earlier one's backward comes later. So it is for the gradient of a loss over the batch.
    """

    def holds_calls(eqn):
        return not is_stage_call(eqn) and _jaxprs.contains(eqn, is_stage_call)

    known = _jaxprs.Substitution()
    eqns: list[Any] = []
    again: list[bool] = []

    def add(jaxpr: jex.ClosedJaxpr, computed_again: bool) -> list[Any]:
        """Adds the equations of a program; gives its results."""
        flat = _jaxprs.inline(jaxpr, lambda e: holds_calls(e) and not _recomputes(e))
        for eqn in map(known.rename, flat.eqns):
            if not holds_calls(eqn):
                eqns.append(eqn)
                again.append(computed_again)
                continue
            if not _recomputes(eqn):
                raise ValueError(
                    f"schedule: stages are called inside a `{eqn.primitive.name}`"
                    f"{_compat.at_source_line(eqn)}; a schedule needs them directly in the "
                    f"microbatch loop."
                )
            called = _jaxprs.part(*_jaxprs.inline_call(eqn, eqn.invars)).jaxpr
            inner = _jaxprs.inline(called, holds_calls).eqns
            is_again = any(map(is_backward_call, inner)) and not _are_chained(inner)
            known.of.update(zip(eqn.outvars, add(called, computed_again or is_again), strict=True))
        return list(map(known, flat.jaxpr.outvars))

    outvars = add(jaxpr, False)
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns), again


def _are_chained(eqns: Sequence[Any]) -> bool:
    """Tells whether a stage reads a value that the forward of an earlier stage makes."""
    behind: dict[Any, set[int]] = {}
    for eqn in eqns:
        stages = set().union(*(behind.get(v, ()) for v in _jaxprs.variables(eqn.invars)))
        if (call := stage_of_call(eqn)) is not None:
            if any(stage < call[0] for stage in stages):
                return True
            if not is_backward_call(eqn):
                stages.add(call[0])
        behind.update(dict.fromkeys(eqn.outvars, stages))
    return False


def _recomputes(eqn) -> bool:
    """Tells whether an equation is the backward of a checkpoint: it computes its forward again."""
    return eqn.primitive.name in _primitives.CHECKPOINTS and eqn.params["differentiated"]


def _rounds_nothing(eqn) -> bool:
    """Tells whether an equation rounds a value to its own dtype, as checkpoints do to keep one."""
    if eqn.primitive.name != "reduce_precision":
        return False
    kind = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (kind.nexp, kind.nmant)
