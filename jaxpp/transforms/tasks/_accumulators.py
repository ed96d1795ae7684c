"""Gives a loop the accumulators that its tasks need, each of one task.

A frozen parameter needs none. A parameter that several tasks read has one a task, and one that is
stacked over layers one for the rows of each stage. Those of one result are combined once, after the
loop. (Each direction of a schedule gets its own in `_write`.)
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _specs, jaxprs
from jaxpp.jaxprs import Atom, Eqn, Flow, Var, primitives
from jaxpp.schedules import Kind
from jaxpp.transforms import stacked
from jaxpp.transforms.tasks._loop import Grouped, Key, ScheduledLoop, in_flow

# ---- of a task -----------------------------------------------------------------------------------


_CAST = "convert_element_type"
#: The primitives that a sum may go through before its accumulator: casts, and moves of data.
_PASSED = primitives.REORDERS | {_CAST}


def adds_like(wide: Any, narrow: Any) -> bool:
    """Tells whether shares may be added up in a type in place of another one, in any order.

    Integers wrap, each type in its own way, so that they stay in their type. Floats round, and may
    be added where they are rounded less; but what overflows has to overflow there, too. With few
    exponents, as float16 has, shares that cancel in each microbatch may overflow apart.

    Example:
        >>> [adds_like(jnp.float32, d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8)]
        [True, True, False, False]
    """
    if not (jnp.issubdtype(wide, jnp.inexact) and jnp.issubdtype(narrow, jnp.inexact)):
        return wide == narrow
    if jnp.issubdtype(wide, jnp.complexfloating) != jnp.issubdtype(narrow, jnp.complexfloating):
        return False
    wider, other = jnp.finfo(wide), jnp.finfo(narrow)
    is_wide = wider.nexp >= jnp.finfo(jnp.float32).nexp
    return is_wide and wider.nexp == other.nexp and wider.nmant >= other.nmant


def hand_through_zeros(loop: ScheduledLoop) -> ScheduledLoop:
    """Hands a carry on unchanged if only zeros are added to it: then no task has to make it.

    An example is the gradient of a parameter behind `stop_gradient`.
    """
    maker = {v: e for e in loop.eqns for v in e.outvars}

    def update(carry, out):
        if jaxprs.is_literal(out) or out not in maker:
            return out
        eqn = maker[out]
        adds = eqn.primitive.name in primitives.ADDS and carry in eqn.invars
        zeros = all(v is carry or primitives.is_zero(v, maker) for v in eqn.invars)
        return carry if adds and zeros else out

    outs = tuple(map(update, loop.carries, loop.carry_outs))
    keep = jaxprs.ancestors(loop.eqns, (*outs, *loop.ys))
    return loop.with_equations(itertools.compress(loop.grouped, keep), carry_outs=outs)


def folded(fold: jex.Primitive) -> Callable[..., Any]:
    """Returns the function that joins several accumulators by the primitive that fills them."""
    return lambda *parts: functools.reduce(fold.bind, parts)


def neutral(fold: jex.Primitive | None, first: Atom) -> tuple[list[Eqn], Atom]:
    """The start of a further accumulator beside one that starts with `first`.

    It is zeros for a sum, which the equations make, else the same.
    """
    if not fold or fold.name not in primitives.ADDS:
        return [], first
    eqns, (zeros,) = jaxprs.record(lambda: [_specs.filled(first.aval, 0)], [])
    return eqns, zeros


def split_shared_sums(loop: ScheduledLoop) -> ScheduledLoop:
    """Gives a sum over contributions of several tasks one accumulator for each task.

    Differentiation gives the gradient of a parameter that several stages read as one sum in each
    microbatch. With several accumulators each task accumulates its own contribution, and the
    accumulators are summed once a step. Also finds how each carry combines its microbatches.

    Shares that have to be added in a type which is not `adds_like` the accumulator's are added in
    each microbatch, by the last of their tasks, as in the function.
    """
    sums = _Sums(loop)
    parts, outs, joins = [], [], []
    folds, outside, before = {}, dict(loop.outside), list(loop.before)
    for carry, out in zip(loop.carries, loop.carry_outs, strict=True):
        update = sums.update_of(carry, out)
        carries, carry_outs = [carry], [out]
        if update is not None:
            groups = sums.terms_by_task(update)
            carries += [jaxprs.fresh_var(carry) for _ in groups[1:]]
            carry_outs += [jaxprs.fresh_var(out) for _ in groups[1:]]
            if len(groups) > 1:
                sums.accumulate(update, groups, carries, carry_outs)
            folds.update(dict.fromkeys(carries, update.eqn.primitive))
            for v in carries[1:]:
                eqns, outside[v] = neutral(update.eqn.primitive, v)
                before += eqns
        parts.append(carries)
        outs += carry_outs
        joins.append(folded(folds[carry]) if len(carries) > 1 else None)
    loop = loop.divided(parts, joins, outside=outside, before=tuple(before), folds=folds)
    return loop.with_equations(sums.grouped(), carry_outs=tuple(outs))


@dataclasses.dataclass(frozen=True)
class _Update:
    """The equation that combines a carry with a value of each microbatch, in any order."""

    eqn: Eqn
    carry: Var
    value: Atom


@dataclasses.dataclass(frozen=True)
class _Addend:
    """A term of a sum; `passed` are the casts and moves between it and the sum."""

    value: Atom
    passed: tuple[Eqn, ...] = ()


class _Sums:
    """The equations of a body, among which sums over several tasks give way to sums of each."""

    def __init__(self, loop: ScheduledLoop):
        self.loop = loop
        flow = Flow(loop.eqns)

        def last(i: int, near: list[Key]) -> Key | None:
            return loop.grouped[i][1] or max(near, default=None, key=in_flow)

        self.maker = flow.maker
        #: The last task that each variable depends on, if it does on any.
        self.at = flow.down({}, last)
        atoms = [v for e in loop.eqns for v in e.invars] + list(loop.outputs)
        self.readers = collections.Counter(v for v in atoms if not jaxprs.is_literal(v))
        self.opened = self._sums_of_several()
        self.dropped: set[int] = set()
        self.added: list[Eqn] = []

    def grouped(self) -> list[Grouped]:
        """Returns the equations with their tasks; new ones have none."""
        kept = [pair for i, pair in enumerate(self.loop.grouped) if i not in self.dropped]
        return [*kept, *((e, None) for e in self.added)]

    def update_of(self, carry: Var, out: Atom) -> _Update | None:
        """Finds how a carry combines its microbatches; None if their order counts."""
        if jaxprs.is_literal(out) or out not in self.maker or self.readers[carry] != 1:
            return None
        eqn = self.loop.eqns[self.maker[out]]
        if eqn.primitive.name not in primitives.ADDS | primitives.EXTREMES:
            return None
        left, right = eqn.invars
        for operand, value in ((left, right), (right, left)):
            if not jaxprs.is_literal(operand) and self._uncast(operand) is carry:
                return _Update(eqn, operand, value)
        return None

    def _uncast(self, v: Var) -> Atom:
        """Looks through a cast of weak type alone: a carry that began as a number has one."""
        eqn = self.loop.eqns[self.maker[v]] if v in self.maker else None
        if eqn is None or eqn.primitive.name != _CAST or self.readers[v] != 1:
            return v
        return eqn.invars[0] if eqn.invars[0].aval.dtype == v.aval.dtype else v

    def _sums_of_several(self) -> dict[Var, int]:
        """Finds the sums of values of several tasks, each with the number of its equation.

        Sums of values of a single task, and sums in a forward pass, are left out.
        """
        tasks: dict[Var, set[Key | None]] = {}
        found: dict[Var, int] = {}
        for i, (eqn, key) in enumerate(self.loop.grouped):
            name = eqn.primitive.name
            forward = key is not None and key.kind is Kind.F
            if name not in primitives.ADDS | _PASSED or forward:
                continue
            (v,) = eqn.outvars
            if self.readers[v] != 1:
                continue
            made_by = [tasks.get(o, {self.at.get(o)}) for o in jaxprs.variables(eqn.invars)]
            keys = set[Key | None]().union(*made_by)
            if keys != {self.at.get(v)}:
                tasks[v], found[v] = keys, i
        return found

    def terms_by_task(self, update: _Update) -> list[list[_Addend]]:
        """Groups the terms of a sum by the task that makes them.

        A term that no task makes (the gradient of a penalty on the parameter) joins the first
        group. An extreme has one group.
        """
        if update.eqn.primitive.name not in primitives.ADDS:
            return [[_Addend(update.value)]]
        terms, _ = self._terms(update.value)
        tasks = [None if jaxprs.is_literal(t.value) else self.at.get(t.value) for t in terms]
        first = next((key for key in tasks if key is not None), None)
        groups: dict[Key | None, list[_Addend]] = {}
        for t, key in zip(terms, tasks, strict=True):
            groups.setdefault(key or first, []).append(t)
        return list(groups.values())

    def _terms(self, v: Atom) -> tuple[list[_Addend], list[int]]:
        """Finds the terms of a sum, and the numbers of the equations that add them up.

        A sum in another type, between which and this one is a cast, is opened if it may be added up
        in this one.
        """
        found, numbers, rest = [], [], [_Addend(v)]
        while rest:
            term = rest.pop()
            i = None if jaxprs.is_literal(term.value) else self.opened.get(term.value)
            if i is None or not adds_like(v.aval.dtype, term.value.aval.dtype):
                found.append(term)
                continue
            numbers.append(i)
            eqn = self.loop.eqns[i]
            passed = () if eqn.primitive.name in primitives.ADDS else (eqn,)
            rest += [_Addend(o, (*passed, *term.passed)) for o in reversed(eqn.invars)]
        return found, numbers

    def accumulate(self, update: _Update, groups, carries, outs) -> None:
        """Adds each group of terms to a carry of its own, in place of the sum of all terms."""
        _, numbers = self._terms(update.value)
        self.dropped.update([self.maker[outs[0]], *numbers])
        if update.carry is not carries[0]:
            self.dropped.add(self.maker[update.carry])
        for group, carry, out in zip(groups, carries, outs, strict=True):
            value, *others = map(self._finished, group)
            for v in others:
                partial = jaxprs.fresh_var(v)
                self.added.append(update.eqn.replace(invars=[value, v], outvars=[partial]))
                value = partial
            self.added.append(update.eqn.replace(invars=[carry, value], outvars=[out]))

    def _finished(self, term: _Addend) -> Atom:
        """Moves the data of a term as the sum's, after one cast to the sum's type."""
        value, is_cast = term.value, [e.primitive.name == _CAST for e in term.passed]
        for cast in list(itertools.compress(term.passed, is_cast))[-1:]:
            value = self._added(cast, value, cast.outvars[0].aval)
        for eqn, drop in zip(term.passed, is_cast, strict=True):
            value = value if drop else self._added(eqn, value, value.aval)
        return value

    def _added(self, eqn: Eqn, operand: Atom, like: Any) -> Atom:
        """Adds an equation on another operand, unless it casts that to its own type."""
        shape = operand.aval if eqn.primitive.name == _CAST else eqn.outvars[0].aval
        aval = shape.update(dtype=like.dtype, weak_type=like.weak_type)
        if aval == operand.aval and eqn.primitive.name == _CAST:
            return operand
        self.added.append(eqn.replace(invars=[operand], outvars=[result := Var(aval)]))
        return result


# ---- of the rows of a stage ----------------------------------------------------------------------


def split_stacked_sums(loop: ScheduledLoop) -> ScheduledLoop:
    """Divides a sum over rows that several stages make: the rows of each get an accumulator."""
    loop = _open_calls(loop)
    bounds = _bounds(loop)
    cuts = [bounds.get(v) for v in loop.carries]
    if not any(cuts):
        return loop
    given = {v: stacked.part_vars(v, bounds[v]) for v in loop.carries if v in bounds}
    parts = [given.get(v, [v]) for v in loop.carries]
    slicer = stacked.in_parts(loop.eqns, bounds, given)
    joins = [None if cut is None else lambda *rows: jax.lax.concatenate(rows, 0) for cut in cuts]
    outside, before = dict(loop.outside), list(loop.before)
    for carry, cut in zip(loop.carries, cuts, strict=True):
        for part, rows in zip(given.get(carry, ()), itertools.pairwise(cut or ()), strict=True):
            take = functools.partial(jax.lax.slice_in_dim, start_index=rows[0], limit_index=rows[1])
            eqns, (outside[part],) = jaxprs.record(take, [loop.outside[carry]])
            before += eqns
    carry_outs = slicer.outputs(loop.carry_outs, cuts)
    ys = slicer.outputs(loop.ys, [None] * len(loop.ys))
    # New equations have no task: they join one by dependence later.
    owner = loop.owner()
    grouped = [(e, next((owner.get(v) for v in e.outvars), None)) for e in slicer.eqns]
    keep = jaxprs.ancestors(slicer.eqns, (*carry_outs, *ys))
    loop = loop.divided(parts, joins, outside=outside, before=tuple(before))
    grouped = itertools.compress(grouped, keep)
    return loop.with_equations(grouped, carry_outs=tuple(carry_outs), ys=tuple(ys))


def _bounds(loop: ScheduledLoop) -> dict[Var, stacked.Bounds]:
    """Finds where carries, and what they become, are cut: by the rows that stages make or read."""
    if not any(stacked.pad_interval(e) or stacked.concatenation_intervals(e) for e in loop.eqns):
        return {}  # no stage makes rows of an array
    classes = stacked.Classes(loop.eqns, loop.becomes().items())
    of_stages = [(e, None if key is None else key.stage) for e, key in loop.grouped]
    carried = {classes.of(v) for v in loop.carries}
    variables = [*loop.inputs, *jaxprs.results_of(loop.eqns)]
    used = stacked.rows_used(of_stages, classes)
    return classes.bounds(used, [v for v in variables if classes.of(v) in carried])


def _open_calls(loop: ScheduledLoop) -> ScheduledLoop:
    """Opens calls that take rows of an array, or pad rows with zeros.

    A stage that is rematerialised is such a call. Its backward is a program of its own, so that XLA
    cannot merge the recomputation with the forward even if the call is open.
    """

    def touches_rows(eqn) -> bool:
        if eqn.primitive.name in primitives.CUSTOM_RULES or jaxprs.called_jaxpr(eqn) is None:
            return False
        for inner in (inner for sub in jaxprs.sub_jaxprs(eqn) for inner in sub.eqns):
            if stacked.takes_some_rows(inner) or stacked.pad_interval(inner) or touches_rows(inner):
                return True
        return False

    return loop.rewritten(jaxprs.inlining(touches_rows))
