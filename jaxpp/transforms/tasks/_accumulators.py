"""Changes a loop's accumulators: none for a frozen parameter, one a task for a shared one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxpp import _jaxprs, _primitives
from jaxpp.transforms.tasks._body import Body

#: The primitives that a sum may go through before its accumulator: casts, and moves of data.
_PASSED = _primitives.REORDERS | {"convert_element_type"}


def hand_through_zeros(body: Body) -> Body:
    """Hands a carry on unchanged if only zeros are added to it: then no task has to make it.

    An example is the gradient of a parameter behind `stop_gradient`.
    """
    maker = {v: e for e in body.eqns for v in e.outvars}

    def update(carry, out):
        if _jaxprs.is_literal(out) or out not in maker:
            return out
        eqn = maker[out]
        adds = eqn.primitive.name in _primitives.ADDS and carry in eqn.invars
        zeros = all(v is carry or _primitives.is_zero(v, maker) for v in eqn.invars)
        return carry if adds and zeros else out

    outs = tuple(map(update, body.carries, body.carry_outs))
    keep = _jaxprs.ancestors(body.eqns, (*outs, *body.ys))
    kept = [placed for placed, k in zip(body.placed(), keep, strict=True) if k]
    return body.with_equations(kept, carry_outs=outs)


@dataclasses.dataclass(frozen=True)
class Sums:
    """A body in which each shared sum has an accumulator for each task that adds to it.

    Carry i of the old body is the sum of the carries `summands[i]` of the new one; new carries
    begin with zeros. For each carry that takes its microbatches in any order, `folds` has the
    primitive that combines them.
    """

    body: Body
    summands: tuple[tuple[int, ...], ...]
    folds: dict[int, Any]


def split_shared_sums(body: Body) -> Sums:
    """Gives a sum over contributions of several tasks one accumulator for each task.

    Differentiation gives the gradient of a parameter that several stages read as one sum in each
    microbatch. With several accumulators each task accumulates its own contribution, and the
    accumulators are summed once a step.
    """
    maker, at = body.maker(), body.last_position()
    readers: dict[Any, int] = {}
    for v in [v for e in body.eqns for v in e.invars] + list(body.outputs):
        if not _jaxprs.is_literal(v):
            readers[v] = readers.get(v, 0) + 1

    def itself(v) -> Any:
        """Looks through a cast of weak type alone: a carry that began as a number has one."""
        eqn = None if _jaxprs.is_literal(v) or v not in maker else body.eqns[maker[v]]
        if eqn is None or eqn.primitive.name != "convert_element_type" or readers.get(v) != 1:
            return v
        return eqn.invars[0] if eqn.invars[0].aval.dtype == v.aval.dtype else v

    def fold(carry, out) -> tuple[Any, Any] | None:
        """Finds the equation that combines a carry with one value in any order, and that value."""
        if _jaxprs.is_literal(out) or out not in maker or readers.get(carry) != 1:
            return None
        eqn = body.eqns[maker[out]]
        if eqn.primitive.name not in _primitives.ADDS | _primitives.EXTREMES:
            return None
        left, right = eqn.invars
        if itself(left) is carry:
            return eqn, right
        return (eqn, left) if itself(right) is carry else None

    opened = _sums_of_several(body, at, readers)

    def terms(v) -> tuple[list[_Term], list[int]]:
        """Finds the terms of a sum, and the numbers of the equations that add them up."""
        found, numbers, rest = [], [], [_Term(v)]
        while rest:
            term = rest.pop()
            i = None if _jaxprs.is_literal(term.value) else opened.get(term.value)
            if i is None:
                found.append(term)
                continue
            numbers.append(i)
            eqn = body.eqns[i]
            linear = () if eqn.primitive.name in _primitives.ADDS else (eqn,)
            rest += [_Term(o, (*linear, *term.linear)) for o in reversed(eqn.invars)]
        return found, numbers

    carries, outs = list(body.carries), list(body.carry_outs)
    summands: list[tuple[int, ...]] = []
    folds: dict[int, Any] = {}
    dropped: set[int] = set()
    sums: list[Any] = []
    for j, (carry, out) in enumerate(zip(body.carries, body.carry_outs, strict=True)):
        summands.append((j,))
        folded = fold(carry, out)
        if folded is None:
            continue
        eqn, value = folded
        folds[j] = eqn.primitive
        if eqn.primitive.name not in _primitives.ADDS:
            continue
        found, numbers = terms(value)
        groups = _by_task(found, at)
        if len(groups) < 2:
            continue
        dropped.update([maker[out], *numbers])
        dropped.update(maker[v] for v in eqn.invars if itself(v) is carry and v is not carry)
        for n, group in enumerate(groups):
            if n > 0:
                summands[j] += (len(carries),)
                folds[len(carries)] = eqn.primitive
                carry, out = _jaxprs.fresh_var(carry), _jaxprs.fresh_var(out)
                carries.append(carry)
                outs.append(out)
            value, *others = (_finished(t, sums) for t in group)
            for v in others:
                partial = _jaxprs.fresh_var(v)
                sums.append(eqn.replace(invars=[value, v], outvars=[partial]))
                value = partial
            sums.append(eqn.replace(invars=[carry, value], outvars=[out]))
    kept = [placed for i, placed in enumerate(body.placed()) if i not in dropped]
    apart = body.with_equations(
        [*kept, *((e, None) for e in sums)], carries=tuple(carries), carry_outs=tuple(outs)
    )
    return Sums(apart, tuple(summands), folds)


@dataclasses.dataclass(frozen=True)
class _Term:
    """A term of a sum; `linear` are the equations between it and the sum, applied to it alone."""

    value: Any
    linear: tuple[Any, ...] = ()


def _sums_of_several(
    body: Body, at: Mapping[Any, int], readers: Mapping[Any, int]
) -> dict[Any, int]:
    """Finds the sums of values of several tasks, each with the number of its equation.

    Sums of values of a single task, and sums in a forward pass, are left out.
    """
    tasks: dict[Any, set[int | None]] = {}
    found: dict[Any, int] = {}
    for i, (eqn, position) in enumerate(body.placed()):
        name = eqn.primitive.name
        if name not in _primitives.ADDS | _PASSED or (
            position is not None and position < body.num_stages
        ):
            continue
        (v,) = eqn.outvars
        if readers.get(v) != 1 or (
            name in _PASSED and not jnp.issubdtype(v.aval.dtype, jnp.inexact)
        ):
            continue
        made_by = [tasks.get(o, {at.get(o)}) for o in _jaxprs.variables(eqn.invars)]
        own = set[int | None]().union(*made_by)
        if own != {at.get(v)}:
            tasks[v], found[v] = own, i
    return found


def _finished(term: _Term, eqns: list[Any]) -> Any:
    """Applies a term's linear equations to its value, adds them to `eqns`, and gives the result."""
    value = term.value
    for eqn in term.linear:
        result = _jaxprs.fresh_var(eqn.outvars[0])
        eqns.append(eqn.replace(invars=[value], outvars=[result]))
        value = result
    return value


def _by_task(terms: list[_Term], at: dict[Any, int]) -> list[list[_Term]]:
    """Groups terms by the task that makes them.

    A term that no task makes (the gradient of a penalty on the parameter) joins the first group.
    """
    tasks = [None if _jaxprs.is_literal(t.value) else at.get(t.value) for t in terms]
    first = next((p for p in tasks if p is not None), None)
    groups: dict[int | None, list[_Term]] = {}
    for t, p in zip(terms, tasks, strict=True):
        groups.setdefault(first if p is None else p, []).append(t)
    return list(groups.values())
