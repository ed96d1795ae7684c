"""Finds the sums over examples that can stay apart by replica to the end of a jaxpr.

A value can be made as *shares*, one for each replica, whose sum it is, if it is a sum over examples
or is made of such sums by additive equations. It stays in shares if all its uses are additive too,
and end in a result that is wanted in shares. A value that another equation reads is needed whole,
and is summed where it is made. So a metric, a mean and a variance keep their meaning.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp._specs import Spec
from jaxpp.transforms.inside import propagation
from jaxpp.transforms.inside.replicas import _rules
from jaxpp.transforms.inside.replicas._rules import Replicas

Flags = tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A jaxpr whose calls are inlined, but for checkpoints, with the specs of its variables."""

    jaxpr: jex.ClosedJaxpr
    specs: dict[Any, Spec | None]
    replicas: Replicas
    _nested: dict[int, "Nested | None"] = dataclasses.field(default_factory=dict)

    def nested(self, eqn: Any) -> "Nested | None":
        """Gives the jaxprs inside an equation that may take and give shares; None without one."""
        if id(eqn) not in self._nested:
            self._nested[id(eqn)] = _nested(eqn, self)
        return self._nested[id(eqn)]

    def summed(self, eqn: Any) -> dict[int, int]:
        """Finds the dimensions of an equation's operands in which it sums over the examples."""
        if self._split(eqn.outvars):
            return {}
        return _rules.summed_dimensions(eqn, self.specs, self.replicas)

    def additive(self, eqn: Any, apart: Collection[Any]) -> range:
        """Finds the operands in which an equation is additive; none if it reads examples too."""
        if len(eqn.outvars) != 1 or self._split([*eqn.invars, *eqn.outvars]):
            return range(0)
        chosen = [not _jaxprs.is_literal(v) and v in apart for v in eqn.invars]
        return _primitives.additive_operands(eqn, chosen)

    def _split(self, atoms: Sequence[Any]) -> bool:
        return any(self.replicas.split(self.specs.get(v)) for v in _jaxprs.variables(atoms))


def open_scope(jaxpr: Any, specs: Sequence[Spec | None], replicas: Replicas) -> Scope:
    """Opens a jaxpr whose inputs have the given specs."""
    closed = jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jex.ClosedJaxpr(jaxpr, [])
    bound = _jaxprs.bind_constants(*_jaxprs.without_constants(closed))
    flat = _jaxprs.inline(bound, lambda e: e.primitive.name not in _primitives.CHECKPOINTS)
    return Scope(flat, propagation.propagate(flat, specs, replicas.sizes), replicas)


# ---- one jaxpr ----------------------------------------------------------------------------------


def shares(scope: Scope, given: Collection[Any], wanted: Collection[Any]) -> frozenset[Any]:
    """Finds the variables of a jaxpr that are to be made as shares.

    Args:
        scope: the jaxpr.
        given: its inputs that come in shares.
        wanted: its outputs that may be shares.

    Returns:
        The variables; inputs `given` in shares that are not among them are needed whole.
    """
    allowed: Callable[[Any], bool] = _is_number
    while True:
        able = _made_in_shares(scope, given, allowed)
        kept = able - _needed_whole(scope, able, wanted)
        if kept == able:
            return frozenset(kept)
        allowed = kept.__contains__


def _is_number(var: Any) -> bool:
    """Tells whether a variable has shares: truth values, random keys and tokens have none."""
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.bool_), jnp.number)


def _made_in_shares(
    scope: Scope, given: Collection[Any], allowed: Callable[[Any], bool]
) -> set[Any]:
    """Finds the variables that are made of sums over examples, or of inputs in shares."""
    able = {v for v in given if allowed(v)}
    for eqn in scope.jaxpr.eqns:
        nested = scope.nested(eqn)
        if nested is not None:
            outs = nested.reached(_flags(eqn.invars, able))
            found = [v for v, out in zip(eqn.outvars, outs, strict=True) if out]
        else:
            additive = [eqn.invars[i] for i in scope.additive(eqn, able)]
            sums = any(v in able for v in _jaxprs.variables(additive)) or scope.summed(eqn)
            found = eqn.outvars if sums else []
        able.update(v for v in found if allowed(v))
    return able


def _needed_whole(scope: Scope, able: set[Any], wanted: Collection[Any]) -> set[Any]:
    """Finds the variables read by an equation that is not additive, or gives no shares."""
    whole = set(_jaxprs.variables(scope.jaxpr.jaxpr.outvars)).difference(wanted)
    for eqn in reversed(scope.jaxpr.eqns):
        outs = tuple(v in able and v not in whole for v in eqn.outvars)
        nested = scope.nested(eqn)
        if nested is not None:
            ins, _ = nested.settled(_flags(eqn.invars, able), outs)
            read = [v for v, apart in zip(eqn.invars, ins, strict=True) if not apart]
        elif outs[:1] == (True,):
            additive = scope.additive(eqn, able)
            if scope.summed(eqn):
                additive = summed_onto(eqn)
            read = [v for i, v in enumerate(eqn.invars) if i not in additive]
        else:
            read = eqn.invars
        whole.update(_jaxprs.variables(read))
    return whole


def summed_onto(eqn: Any) -> range:
    """Gives the operand that a sum over examples is added to: the first one of a scatter."""
    return range(1 if eqn.primitive.name == "scatter-add" else 0)


def _flags(atoms: Sequence[Any], variables: Collection[Any]) -> Flags:
    return tuple(not _jaxprs.is_literal(v) and v in variables for v in atoms)


# ---- jaxprs in equations ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Nested:
    """The jaxprs that an equation holds: a checkpoint's, a loop's body, a conditional's branches.

    Args:
        bodies: each takes the equation's operands from number `first` on, and gives its results.
        first: the number of the first operand that the bodies take.
        carries: the number of the operand, and of the result, of each carry of a loop.
        stacked_operands: the operands that the bodies take slices of.
        stacked_results: the results that are stacks of the bodies' results.
    """

    bodies: tuple[Scope, ...]
    first: int = 0
    carries: tuple[tuple[int, int], ...] = ()
    stacked_operands: range = range(0)
    stacked_results: range = range(0)

    def reached(self, ins: Flags) -> Flags:
        """Finds the results that may be in shares, given the operands that are."""
        while True:
            found = [_made_in_shares(s, self._given(s, ins), _is_number) for s in self.bodies]
            outs = self._made(found)
            grown = _with(ins, [i for i, o in self.carries if outs[o]], True)
            if grown == ins:
                return outs
            ins = grown

    def settled(self, ins: Flags, wanted: Flags) -> tuple[Flags, Flags]:
        """Decides which operands, and which results, are to be in shares.

        Args:
            ins: the operands that can be.
            wanted: the results that can be.
        """
        outs = _both(wanted, self.reached(ins))
        for i, o in self.carries:
            ins = _with(ins, [i], outs[o])
        while True:
            found = [self._shares(scope, ins, outs) for scope in self.bodies]
            new_ins, new_outs = self._taken(ins, found), _both(outs, self._made(found))
            lost = [(i, o) for i, o in self.carries if not (new_ins[i] and new_outs[o])]
            new_ins = _with(new_ins, [i for i, _ in lost], False)
            new_outs = _with(new_outs, [o for _, o in lost], False)
            if (new_ins, new_outs) == (ins, outs):
                return ins, outs
            ins, outs = new_ins, new_outs

    def _given(self, scope: Scope, ins: Flags) -> list[Any]:
        """Gives the inputs of a body that are in shares."""
        invars = scope.jaxpr.jaxpr.invars
        return [v for v, apart in zip(invars, ins[self.first :], strict=True) if apart]

    def _shares(self, scope: Scope, ins: Flags, outs: Flags) -> frozenset[Any]:
        wanted = [v for v, o in zip(scope.jaxpr.jaxpr.outvars, outs, strict=True) if o]
        return shares(scope, self._given(scope, ins), _jaxprs.variables(wanted))

    def _taken(self, ins: Flags, found: Sequence[Collection[Any]]) -> Flags:
        """Gives the operands that every body takes in shares."""
        taken = list(ins)
        for scope, apart in zip(self.bodies, found, strict=True):
            for i, v in enumerate(scope.jaxpr.jaxpr.invars, self.first):
                taken[i] = taken[i] and v in apart
        return tuple(taken)

    def _made(self, found: Sequence[Collection[Any]]) -> Flags:
        """Gives the results of which any body makes shares."""
        made = [
            _flags(scope.jaxpr.jaxpr.outvars, apart)
            for scope, apart in zip(self.bodies, found, strict=True)
        ]
        return tuple(any(each) for each in zip(*made, strict=True))


def _with(flags: Flags, numbers: Sequence[int], value: bool) -> Flags:
    return tuple(value if i in numbers else flag for i, flag in enumerate(flags))


def _both(one: Flags, other: Flags) -> Flags:
    return tuple(a and b for a, b in zip(one, other, strict=True))


def _nested(eqn: Any, scope: Scope) -> Nested | None:
    specs = [None if _jaxprs.is_literal(v) else scope.specs.get(v) for v in eqn.invars]
    name = eqn.primitive.name
    if name in _primitives.CHECKPOINTS:
        return Nested((open_scope(eqn.params["jaxpr"], specs, scope.replicas),))
    if name == "cond":
        branches = eqn.params["branches"]
        return Nested(tuple(open_scope(b, specs[1:], scope.replicas) for b in branches), 1)
    if name != "scan":
        return None
    num_consts, num_carry = _compat.scan_parts(eqn)
    # A carry may be split in another way after an iteration than before the first.
    for i in range(num_carry):
        specs[num_consts + i] = scope.specs.get(eqn.outvars[i], specs[num_consts + i])
    sliced = range(num_consts + num_carry, len(eqn.invars))
    for i in sliced:
        spec = specs[i]
        specs[i] = None if spec is None else spec[1:]
    return Nested(
        (open_scope(eqn.params["jaxpr"], specs, scope.replicas),),
        carries=tuple((num_consts + i, i) for i in range(num_carry)),
        stacked_operands=sliced,
        stacked_results=range(num_carry, len(eqn.outvars)),
    )
