"""Slices equations by dependence, and makes jaxprs of some of them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.extend.core as jex

from jaxpp import _compat
from jaxpp.jaxprs._equations import is_literal
from jaxpp.jaxprs._typing import Atom, Eqn, Var


class Part(NamedTuple):
    """Equations as a jaxpr: `inputs` are the variables it reads, `outputs` the atoms it gives."""

    jaxpr: jex.ClosedJaxpr
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]


def part(eqns: Sequence[Eqn], outputs: Sequence[Atom], name: str = "part") -> Part:
    """Makes a jaxpr of equations; its inputs are the variables that none of them makes."""
    made, inputs = set(), {}
    for eqn in eqns:
        for var in eqn.invars:
            if not is_literal(var) and var not in made:
                inputs[var] = None
        made.update(eqn.outvars)
    for var in outputs:
        if not is_literal(var) and var not in made:
            inputs[var] = None
    return Part(
        _compat.make_closed_jaxpr(inputs, outputs, eqns, name), tuple(inputs), tuple(outputs)
    )


def ancestors(eqns: Sequence[Eqn], outputs: Iterable[Atom]) -> list[bool]:
    """Tells for each equation whether the outputs depend on it; those with effects are needed."""
    needed = {v for v in outputs if not is_literal(v)}
    keep = [False] * len(eqns)
    for i in reversed(range(len(eqns))):
        if eqns[i].effects or any(v in needed for v in eqns[i].outvars):
            keep[i] = True
            needed.update(v for v in eqns[i].invars if not is_literal(v))
    return keep


def needed(eqns: Sequence[Eqn], outputs: Iterable[Atom]) -> list[Eqn]:
    """Returns the equations that the outputs depend on, and those with effects."""
    return [e for e, keep in zip(eqns, ancestors(eqns, outputs), strict=True) if keep]


def descendants(eqns: Sequence[Eqn], sources: Iterable[Var]) -> set[Var]:
    """Finds all variables that depend on the sources, with the sources."""
    reached = set(sources)
    for eqn in eqns:
        if any(not is_literal(v) and v in reached for v in eqn.invars):
            reached.update(eqn.outvars)
    return reached
