"""Rebuilds jaxprs: replaces equations by a rule, inlines calls, splices what a function traces to.

A pass maps a closed jaxpr without constants to another. Equations are moved unchanged, so their
names and source lines survive.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxpp import _compat
from jaxpp.jaxprs._equations import called_jaxpr, fresh_var, is_literal, literal, opened, results_of
from jaxpp.jaxprs._typing import Atom, Eqn, Var


class Substitution:
    """The atoms that stand for variables; a variable that is not in it stands for itself."""

    def __init__(self, pairs: Iterable[tuple[Var, Atom]] = ()):
        self.of = dict(pairs)

    def __call__(self, atom: Atom) -> Atom:
        return atom if is_literal(atom) else self.of.get(atom, atom)

    def rename(self, eqn: Eqn) -> Eqn:
        """Replaces the inputs of an equation."""
        return eqn.replace(invars=[self(v) for v in eqn.invars])

    def rename_all(self, eqn: Eqn) -> Eqn:
        """Replaces what an equation reads and makes."""
        outvars: list[Any] = list(map(self, eqn.outvars))
        return self.rename(eqn).replace(outvars=outvars)


#: The replacement of an equation: equations, and the atoms that stand for its results.
Replacement: TypeAlias = tuple[Iterable[Eqn], Iterable[Atom]]


def rewritten(
    eqns: Iterable[Eqn], rule: Callable[[Eqn], Replacement | None], known: Substitution
) -> list[Eqn]:
    """Replaces equations by a rule.

    Args:
        eqns: equations in order.
        rule: gives what takes the place of an equation, whose operands are renamed already; None
            for one that stays.
        known: what stands for the operands; gets what stands for results.
    """
    found = []
    for eqn in map(known.rename, eqns):
        if (new := rule(eqn)) is None:
            found.append(eqn)
            continue
        found += new[0]
        pairs = zip(eqn.outvars, new[1], strict=True)
        known.of.update((v, atom) for v, atom in pairs if atom is not v)
    return found


def rewrite(
    jaxpr: jex.ClosedJaxpr,
    rule: Callable[[Eqn], Replacement | None],
    known: Substitution | None = None,
) -> jex.ClosedJaxpr:
    """Does as `rewritten` with the equations of a jaxpr; an input that `known` names goes."""
    known = Substitution() if known is None else known
    eqns = rewritten(jaxpr.eqns, rule, known)
    inside = jaxpr.jaxpr
    invars = [v for v in inside.invars if v not in known.of]
    return _compat.make_closed_jaxpr(invars, list(map(known, inside.outvars)), eqns)


def inline_call(eqn: Eqn, args: Sequence[Atom]) -> tuple[list[Eqn], list[Atom]]:
    """Returns the equations of a called jaxpr with new variables, and its result atoms."""
    return inline_body(called_jaxpr(eqn), args, eqn)


def inline_body(
    body: Any, args: Sequence[Atom], eqn: Eqn | None = None
) -> tuple[list[Eqn], list[Atom]]:
    """Does as `inline_call`, with any jaxpr; if given, it is among the parameters of `eqn`."""
    inside = opened(body)
    fresh = Substitution(zip(inside.invars, args, strict=True))
    for var, value in zip(inside.constvars, _compat.constants_of(body), strict=True):
        fresh.of[var] = literal(value, var.aval)
    eqns = []
    for inner in inside.eqns:
        renamed = fresh.rename(inner)
        outvars = [fresh_var(v) for v in inner.outvars]
        fresh.of.update(zip(inner.outvars, outvars, strict=True))
        new = renamed.replace(outvars=outvars)
        eqns.append(new if eqn is None else _compat.under_scope(new, eqn))
    return eqns, [fresh(v) for v in inside.outvars]


def inline(
    jaxpr: jex.ClosedJaxpr,
    wanted: Callable[[Eqn], bool],
    change: Callable[[Eqn, list[Eqn]], list[Eqn]] = lambda call, inner: inner,
) -> jex.ClosedJaxpr:
    """Replaces each call that is `wanted` by the equations of its body, inside such calls too.

    `change(call, inner)` may change the equations of a body.
    """
    return rewrite(jaxpr, inlining(wanted, change))


def inlining(
    wanted: Callable[[Eqn], bool],
    change: Callable[[Eqn, list[Eqn]], list[Eqn]] = lambda call, inner: inner,
) -> Callable[[Eqn], Replacement | None]:
    """Makes the rule by which `inline` rewrites."""

    def rule(eqn):
        if called_jaxpr(eqn) is None or not wanted(eqn):
            return None
        known = Substitution()
        inner, results = inline_call(eqn, eqn.invars)
        return rewritten(change(eqn, inner), rule, known), map(known, results)

    return rule


def record(
    fun: Callable, operands: Sequence[Atom], source: Eqn | None = None
) -> tuple[list[Eqn], list[Atom]]:
    """Traces a function of atoms; gives its equations, calls inlined, and the atoms it returns.

    With an equation `source`, the new equations have its names and source line.
    """
    known = Substitution()
    eqns, results = inline_body(jax.make_jaxpr(fun)(*(v.aval for v in operands)), operands)
    eqns = rewritten(eqns, inlining(lambda e: True), known)
    if source is not None:
        eqns = [e.replace(source_info=source.source_info) for e in eqns]
    return eqns, [known(v) for v in results]


def splice(
    fun: Callable, operands: Sequence[Atom], results: Sequence[Var], source: Eqn | None = None
) -> list[Eqn]:
    """Records a function of atoms, whose results are the given variables."""
    return with_results(*record(fun, operands, source), results)


def with_results(eqns: Iterable[Eqn], made: Sequence[Atom], results: Sequence[Var]) -> list[Eqn]:
    """Renames the results of equations to the given variables.

    Where a result is an input, a literal, or there twice, adds a copy.
    """
    eqns = list(eqns)
    own = set(results_of(eqns))
    rename, copies = Substitution(), []
    for atom, wanted in zip(made, results, strict=True):
        if is_literal(atom) or atom not in own or atom in rename.of:
            copies.append((atom, wanted))
        else:
            rename.of[atom] = wanted
    eqns = list(map(rename.rename_all, eqns))
    for atom, wanted in copies:
        if atom is not wanted:
            eqns += splice(jax.lax.optimization_barrier, [rename(atom)], [wanted])
    return eqns


def with_separate_outputs(jaxpr: jex.ClosedJaxpr, taken: Iterable[Var]) -> jex.ClosedJaxpr:
    """Copies an output that is a literal, another output, or among the variables that are `taken`.

    Then each of them has memory of its own.
    """
    eqns, outvars, taken = list(jaxpr.eqns), [], set(taken)
    for v in jaxpr.jaxpr.outvars:
        if is_literal(v) or v in taken:
            own = fresh_var(v)
            eqns += splice(jnp.copy, [v], [own])
            v = own
        outvars.append(v)
        taken.add(v)
    return _compat.make_closed_jaxpr(jaxpr.jaxpr.invars, outvars, eqns)
