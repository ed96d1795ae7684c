"""Finds the sums over examples that can stay apart by replica to the end of a jaxpr.

A value can be made as *shares*, one for each replica, whose sum it is, if it is a sum over examples
or is made of such sums by additive equations. It stays in shares if all its uses are additive too,
and end in a result that is wanted in shares. A value that another equation reads is needed whole,
and is summed where it is made. So a metric, a mean and a variance keep their meaning.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat, _jaxprs, _primitives
from jaxpp._specs import Spec
from jaxpp.transforms.inside import propagation
from jaxpp.transforms.inside.replicas import _rules
from jaxpp.transforms.inside.replicas._rules import Replicas


@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """A jaxpr whose calls are inlined, but for checkpoints, with the specs of its variables.

    No other scope has the same variables. `nested` has by its `id` each equation that holds jaxprs
    which may take and give shares.
    """

    jaxpr: jex.ClosedJaxpr
    specs: Mapping[Any, Spec | None]
    replicas: Replicas
    nested: Mapping[int, "Nested"]

    def summed(self, eqn: Any) -> dict[int, int]:
        """Finds the dimensions of an equation's operands in which it sums over the examples."""
        if self._split(eqn.outvars):
            return {}
        return _rules.summed_dimensions(eqn, self.specs, self.replicas)

    def additive(self, eqn: Any, apart: Collection[Any]) -> list[int]:
        """Finds the operands in which an equation is additive, beside those that it sums over.

        If it reads examples in another way, there are none.
        """
        summed = self.summed(eqn)
        if len(eqn.outvars) != 1 or (not summed and self._split([*eqn.invars, *eqn.outvars])):
            return []
        operands = _primitives.additive_operands(eqn, [_among(v, apart) for v in eqn.invars])
        return [i for i in operands if i not in summed]

    def _split(self, atoms: Sequence[Any]) -> bool:
        return any(self.replicas.split(self.specs.get(v)) for v in _jaxprs.variables(atoms))


@dataclasses.dataclass(frozen=True)
class Nested:
    """The jaxprs that an equation holds: a checkpoint's, a loop's body, a conditional's branches.

    Args:
        bodies: each takes the equation's operands from number `first` on, and gives its results.
        carries: the number of the input, and of the output, of a body for each carry of a loop.
        slices: the number of the first input of a body that is a slice of its operand.
        stacks: the number of the first result that is a stack of outputs.
    """

    bodies: Sequence[Scope]
    first: int
    carries: Sequence[tuple[int, int]]
    slices: int
    stacks: int


def open_scope(jaxpr: Any, specs: Sequence[Spec | None], replicas: Replicas) -> Scope:
    """Opens a jaxpr whose inputs have the given specs."""
    invars = list(map(_jaxprs.fresh_var, _jaxprs.opened(jaxpr).invars))
    eqns, outvars = _jaxprs.inline_body(jaxpr, invars)
    flat = _jaxprs.inline(
        _compat.make_closed_jaxpr(invars, outvars, eqns),
        lambda e: e.primitive.name not in _primitives.CHECKPOINTS,
    )
    known = propagation.propagate(flat, specs, replicas.sizes)
    nested = {
        id(eqn): _open_nested(eqn, known, replicas)
        for eqn in flat.eqns
        if eqn.primitive.name in _primitives.CHECKPOINTS or eqn.primitive.name in ("cond", "scan")
    }
    return Scope(flat, known, replicas, nested)


def _open_nested(eqn: Any, known: dict[Any, Spec | None], replicas: Replicas) -> Nested:
    held = propagation.held(eqn, known, replicas.sizes)
    bodies = [open_scope(jaxpr, specs, replicas) for jaxpr, specs in held]
    if eqn.primitive.name != "scan":
        first = int(eqn.primitive.name == "cond")
        return Nested(bodies, first, [], len(eqn.invars), len(eqn.outvars))
    num_consts, num_carry = _compat.scan_parts(eqn)
    carries = [(num_consts + i, i) for i in range(num_carry)]
    return Nested(bodies, 0, carries, num_consts + num_carry, num_carry)


# ---- what stays apart ---------------------------------------------------------------------------


def shares(scope: Scope, given: Collection[Any], wanted: Collection[Any]) -> frozenset[Any]:
    """Finds the variables that are to be made as shares, of a jaxpr and of those inside it.

    Args:
        scope: the jaxpr.
        given: its inputs that come in shares.
        wanted: its outputs that may be shares.

    Returns:
        The variables; inputs `given` in shares that are not among them are needed whole.
    """
    allowed: Callable[[Any], bool] = _is_number
    while True:
        able = _completed(functools.partial(_add_able, scope, allowed), filter(allowed, given))
        whole = _completed(functools.partial(_add_whole, scope, able, wanted), ())
        if able.isdisjoint(whole):
            return frozenset(able)
        allowed = able.difference(whole).__contains__


def _completed(add: Callable[[set[Any]], None], start: Iterable[Any]) -> set[Any]:
    """Adds to a set until there is nothing to add."""
    found, size = set(start), -1
    while size < len(found):
        size = len(found)
        add(found)
    return found


def _is_number(var: Any) -> bool:
    """Tells whether a variable has shares: truth values, random keys and tokens have none."""
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.bool_), jnp.number)


def _among(atom: Any, variables: Collection[Any]) -> bool:
    return not _jaxprs.is_literal(atom) and atom in variables


def _add_able(scope: Scope, allowed: Callable[[Any], bool], able: set[Any]) -> None:
    """Adds the variables that are made of sums over examples, or of inputs in shares."""
    for eqn in scope.jaxpr.eqns:
        found: list[Any] = []
        if nested := scope.nested.get(id(eqn)):
            for body in nested.bodies:
                inputs, outputs = body.jaxpr.jaxpr.invars, body.jaxpr.jaxpr.outvars
                pairs = [*zip(eqn.invars[nested.first :], inputs, strict=True)]
                pairs += [(outputs[o], inputs[i]) for i, o in nested.carries]
                able.update(v for source, v in pairs if _among(source, able) and allowed(v))
                _add_able(body, allowed, able)
                made = zip(outputs, eqn.outvars, strict=True)
                found += [v for output, v in made if _among(output, able)]
        elif scope.summed(eqn) or any(
            _among(eqn.invars[i], able) for i in scope.additive(eqn, able)
        ):
            found = eqn.outvars
        able.update(filter(allowed, found))


def _add_whole(
    scope: Scope, able: Collection[Any], wanted: Collection[Any], whole: set[Any]
) -> None:
    """Adds the variables that an equation reads which is not additive, or gives no shares."""
    whole.update(set(_jaxprs.variables(scope.jaxpr.jaxpr.outvars)).difference(wanted))
    for eqn in reversed(scope.jaxpr.eqns):
        apart = [v in able and v not in whole for v in eqn.outvars]
        read = eqn.invars
        if nested := scope.nested.get(id(eqn)):
            read = _read_whole(eqn, nested, able, apart, whole)
        elif apart == [True]:
            additive = scope.additive(eqn, able)
            read = [v for i, v in enumerate(eqn.invars) if i not in additive]
        whole.update(_jaxprs.variables(read))


def _read_whole(
    eqn: Any, nested: Nested, able: Collection[Any], apart: Sequence[bool], whole: set[Any]
) -> list[Any]:
    """Adds the variables needed whole in the bodies of an equation; gives its operands that are."""
    read = eqn.invars[: nested.first]
    for body in nested.bodies:
        inputs, outputs = body.jaxpr.jaxpr.invars, body.jaxpr.jaxpr.outvars
        wanted = [v for v, own in zip(outputs, apart, strict=True) if own]
        _add_whole(body, able, _jaxprs.variables(wanted), whole)
        for i, o in nested.carries:
            ends = (inputs[i], outputs[o])
            if not (apart[o] and all(_among(v, able) and v not in whole for v in ends)):
                whole.update((inputs[i], eqn.outvars[o]))
        operands = zip(eqn.invars[nested.first :], inputs, strict=True)
        read += [v for v, own in operands if own not in able or own in whole]
    return read
