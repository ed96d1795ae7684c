"""Changes a loop's accumulators: none for a frozen parameter, one a task for a shared one."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxpp import _jaxprs, _primitives, _specs
from jaxpp.transforms.tasks._microbatch_loop import MicrobatchLoop

#: The primitives that a sum may go through before its accumulator: casts, and moves of data.
_PASSED = _primitives.REORDERS | {"convert_element_type"}


def hand_through_zeros(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Hands a carry on unchanged if only zeros are added to it: then no task has to make it.

    An example is the gradient of a parameter behind `stop_gradient`.
    """
    maker = {v: e for e in loop.eqns for v in e.outvars}

    def update(carry, out):
        if _jaxprs.is_literal(out) or out not in maker:
            return out
        eqn = maker[out]
        adds = eqn.primitive.name in _primitives.ADDS and carry in eqn.invars
        zeros = all(v is carry or _primitives.is_zero(v, maker) for v in eqn.invars)
        return carry if adds and zeros else out

    outs = tuple(map(update, loop.carries, loop.carry_outs))
    keep = _jaxprs.ancestors(loop.eqns, (*outs, *loop.ys))
    kept = [p for p, k in zip(loop.placed(), keep, strict=True) if k]
    return loop.with_equations(kept, carry_outs=outs)


def folded(fold: Any) -> Callable[..., Any]:
    """Returns the function that joins several accumulators by the primitive that fills them."""
    return lambda *parts: functools.reduce(fold.bind, parts)


def neutral(fold: Any, first: Any) -> tuple[list[Any], Any]:
    """The start of a further accumulator beside one that starts with `first`.

    It is zeros for a sum, which the equations make, else the same.
    """
    if not fold or fold.name not in _primitives.ADDS:
        return [], first
    eqns, (zeros,) = _jaxprs.record(lambda: [_specs.filled(first.aval, 0)], [])
    return eqns, zeros


def split_shared_sums(loop: MicrobatchLoop) -> MicrobatchLoop:
    """Gives a sum over contributions of several tasks one accumulator for each task.

    Differentiation gives the gradient of a parameter that several stages read as one sum in each
    microbatch. With several accumulators each task accumulates its own contribution, and the
    accumulators are summed once a step. Also finds how each carry combines its microbatches.
    """
    sums = _Sums(loop)
    parts, outs, joins = [], [], []
    folds, operands, before = {}, dict(loop.operands), list(loop.before)
    for carry, out in zip(loop.carries, loop.carry_outs, strict=True):
        fold = sums.fold(carry, out)
        own, own_outs = [carry], [out]
        if fold is not None:
            groups = sums.terms_by_task(fold)
            own += [_jaxprs.fresh_var(carry) for _ in groups[1:]]
            own_outs += [_jaxprs.fresh_var(out) for _ in groups[1:]]
            if len(groups) > 1:
                sums.accumulate(fold, groups, own, own_outs)
            folds.update(dict.fromkeys(own, fold.eqn.primitive))
            for v in own[1:]:
                eqns, operands[v] = neutral(fold.eqn.primitive, v)
                before += eqns
        parts.append(own)
        outs += own_outs
        joins.append(folded(folds[carry]) if len(own) > 1 else None)
    loop = loop.divided(parts, joins, operands=operands, before=tuple(before), folds=folds)
    return loop.with_equations(sums.placed(), carry_outs=tuple(outs))


@dataclasses.dataclass(frozen=True)
class _Fold:
    """The equation that combines a carry with a value of each microbatch, in any order."""

    eqn: Any
    carry: Any
    value: Any


@dataclasses.dataclass(frozen=True)
class _Term:
    """A term of a sum; `linear` are the equations between it and the sum, applied to it alone."""

    value: Any
    linear: tuple[Any, ...] = ()


class _Sums:
    """The equations of a body, among which sums over several tasks give way to sums of each."""

    def __init__(self, loop: MicrobatchLoop):
        self.loop = loop
        self.maker, self.at = loop.maker(), loop.last_position()
        atoms = [v for e in loop.eqns for v in e.invars] + list(loop.outputs)
        self.readers = collections.Counter(v for v in atoms if not _jaxprs.is_literal(v))
        self.opened = self._sums_of_several()
        self.dropped: set[int] = set()
        self.added: list[Any] = []

    def placed(self) -> list[tuple[Any, int | None]]:
        """Returns the equations with their positions; new ones have none."""
        kept = [p for i, p in enumerate(self.loop.placed()) if i not in self.dropped]
        return [*kept, *((e, None) for e in self.added)]

    def fold(self, carry, out) -> _Fold | None:
        """Finds how a carry combines its microbatches; None if their order counts."""
        if _jaxprs.is_literal(out) or out not in self.maker or self.readers[carry] != 1:
            return None
        eqn = self.loop.eqns[self.maker[out]]
        if eqn.primitive.name not in _primitives.ADDS | _primitives.EXTREMES:
            return None
        left, right = eqn.invars
        if self._uncast(left) is carry:
            return _Fold(eqn, left, right)
        return _Fold(eqn, right, left) if self._uncast(right) is carry else None

    def _uncast(self, v) -> Any:
        """Looks through a cast of weak type alone: a carry that began as a number has one."""
        eqn = (
            None if _jaxprs.is_literal(v) or v not in self.maker else self.loop.eqns[self.maker[v]]
        )
        if eqn is None or eqn.primitive.name != "convert_element_type" or self.readers[v] != 1:
            return v
        return eqn.invars[0] if eqn.invars[0].aval.dtype == v.aval.dtype else v

    def _sums_of_several(self) -> dict[Any, int]:
        """Finds the sums of values of several tasks, each with the number of its equation.

        Sums of values of a single task, and sums in a forward pass, are left out.
        """
        tasks: dict[Any, set[int | None]] = {}
        found: dict[Any, int] = {}
        for i, (eqn, position) in enumerate(self.loop.placed()):
            name = eqn.primitive.name
            forward = position is not None and position < self.loop.num_stages
            if name not in _primitives.ADDS | _PASSED or forward:
                continue
            (v,) = eqn.outvars
            exact = name in _PASSED and not jnp.issubdtype(v.aval.dtype, jnp.inexact)
            if self.readers[v] != 1 or exact:
                continue
            made_by = [tasks.get(o, {self.at.get(o)}) for o in _jaxprs.variables(eqn.invars)]
            own = set[int | None]().union(*made_by)
            if own != {self.at.get(v)}:
                tasks[v], found[v] = own, i
        return found

    def terms_by_task(self, fold: _Fold) -> list[list[_Term]]:
        """Groups the terms of a sum by the task that makes them.

        A term that no task makes (the gradient of a penalty on the parameter) joins the first
        group. An extreme has one group.
        """
        if fold.eqn.primitive.name not in _primitives.ADDS:
            return [[_Term(fold.value)]]
        terms, _ = self._terms(fold.value)
        tasks = [None if _jaxprs.is_literal(t.value) else self.at.get(t.value) for t in terms]
        first = next((p for p in tasks if p is not None), None)
        groups: dict[int | None, list[_Term]] = {}
        for t, p in zip(terms, tasks, strict=True):
            groups.setdefault(first if p is None else p, []).append(t)
        return list(groups.values())

    def _terms(self, v) -> tuple[list[_Term], list[int]]:
        """Finds the terms of a sum, and the numbers of the equations that add them up."""
        found, numbers, rest = [], [], [_Term(v)]
        while rest:
            term = rest.pop()
            i = None if _jaxprs.is_literal(term.value) else self.opened.get(term.value)
            if i is None:
                found.append(term)
                continue
            numbers.append(i)
            eqn = self.loop.eqns[i]
            linear = () if eqn.primitive.name in _primitives.ADDS else (eqn,)
            rest += [_Term(o, (*linear, *term.linear)) for o in reversed(eqn.invars)]
        return found, numbers

    def accumulate(self, fold: _Fold, groups, carries, outs) -> None:
        """Adds each group of terms to a carry of its own, in place of the sum of all terms."""
        _, numbers = self._terms(fold.value)
        self.dropped.update([self.maker[outs[0]], *numbers])
        if fold.carry is not carries[0]:
            self.dropped.add(self.maker[fold.carry])
        for group, carry, out in zip(groups, carries, outs, strict=True):
            value, *others = map(self._finished, group)
            for v in others:
                partial = _jaxprs.fresh_var(v)
                self.added.append(fold.eqn.replace(invars=[value, v], outvars=[partial]))
                value = partial
            self.added.append(fold.eqn.replace(invars=[carry, value], outvars=[out]))

    def _finished(self, term: _Term) -> Any:
        """Applies a term's linear equations to its value."""
        value = term.value
        for eqn in term.linear:
            result = _jaxprs.fresh_var(eqn.outvars[0])
            self.added.append(eqn.replace(invars=[value], outvars=[result]))
            value = result
        return value
