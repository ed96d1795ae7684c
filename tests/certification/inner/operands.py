"""Edits of what an equation reads and gives."""

from jaxpp import jaxprs
from tests.certification.inner.places import Change, Place, is_like


def swap_operands(p: Place) -> Change | None:
    invars = list(p.eqn.invars)
    pairs = [
        (a, b)
        for a in range(len(invars))
        for b in range(a)
        if invars[a] is not invars[b] and is_like(invars[a], invars[b])
    ]
    if not pairs:
        return None
    a, b = p.rng.choice(pairs)
    invars[a], invars[b] = invars[b], invars[a]
    return p.replaced(invars=invars)


def other_operand(p: Place) -> Change | None:
    """Another variable of the same type."""
    invars = list(p.eqn.invars)
    if not invars:
        return None
    k = p.rng.randrange(len(invars))
    if not hasattr(invars[k].aval, "dtype") or not (others := p.like(invars[k])):
        return None
    invars[k] = p.rng.choice(others)
    return p.replaced(invars=invars)


def swap_results(p: Place) -> Change | None:
    outvars = list(p.eqn.outvars)
    pairs = [
        (a, b) for a in range(len(outvars)) for b in range(a) if is_like(outvars[a], outvars[b])
    ]
    if not pairs:
        return None
    a, b = p.rng.choice(pairs)
    outvars[a], outvars[b] = outvars[b], outvars[a]
    return p.replaced(outvars=outvars)


def skip(p: Place) -> Change | None:
    """An operand of the equation stands for its result."""
    if len(p.eqn.outvars) != 1 or p.eqn.effects:
        return None
    same = [v for v in p.eqn.invars if is_like(v, p.eqn.outvars[0])]
    if not same:
        return None
    known = jaxprs.Substitution([(p.eqn.outvars[0], p.rng.choice(same))])
    after = list(map(known.rename, p.after))
    return Change([*p.before, *after], list(map(known, p.jaxpr.outvars)))


def swap_results_of_the_jaxpr(p: Place) -> Change | None:
    outvars = list(p.jaxpr.outvars)
    pairs = [
        (a, b)
        for a in range(len(outvars))
        for b in range(a)
        if outvars[a] is not outvars[b] and is_like(outvars[a], outvars[b])
    ]
    if not pairs:
        return None
    a, b = p.rng.choice(pairs)
    outvars[a], outvars[b] = outvars[b], outvars[a]
    return Change(p.jaxpr.eqns, outvars)


def other_result_of_the_jaxpr(p: Place) -> Change | None:
    """The jaxpr gives another variable of the same type."""
    outvars = list(p.jaxpr.outvars)
    if not outvars:
        return None
    k = p.rng.randrange(len(outvars))
    known = [*p.jaxpr.invars, *jaxprs.results_of(p.jaxpr.eqns)]
    others = [v for v in known if v is not outvars[k] and is_like(v, outvars[k])]
    if not others:
        return None
    outvars[k] = p.rng.choice(others)
    return Change(p.jaxpr.eqns, outvars)


def move(p: Place) -> Change | None:
    """Moves an effect before equations, on which it does not depend: effects change places."""
    if not p.eqn.effects:
        return None
    before, own = p.before, {v for v in p.eqn.invars if not jaxprs.is_literal(v)}
    to = len(before)
    while to and own.isdisjoint(before[to - 1].outvars):
        to -= 1
    if to == len(before):
        return None
    to = p.rng.randrange(to, len(before))
    return Change([*before[:to], p.eqn, *before[to:], *p.after], p.jaxpr.outvars)


KINDS = [
    swap_operands,
    other_operand,
    swap_results,
    skip,
    swap_results_of_the_jaxpr,
    other_result_of_the_jaxpr,
    move,
]
