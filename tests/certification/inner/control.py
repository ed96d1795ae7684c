"""Edits of branches, loops and effects."""

import jax.numpy as jnp
from jax import lax

from jaxpp import _compat, jaxprs
from tests.certification.inner.places import Change, Place

_EFFECTS = ("debug_callback", "debug_print", "io_callback", "pure_callback")


def swap_branches(p: Place) -> Change | None:
    if p.name != "cond":
        return None
    branches = list(p.eqn.params["branches"])
    a, b = p.rng.sample(range(len(branches)), 2)
    branches[a], branches[b] = branches[b], branches[a]
    return p.replaced(params={**p.eqn.params, "branches": tuple(branches)})


def same_branch(p: Place) -> Change | None:
    """A branch is the same as another one."""
    if p.name != "cond":
        return None
    branches = list(p.eqn.params["branches"])
    a, b = p.rng.sample(range(len(branches)), 2)
    branches[a] = branches[b]
    effects = frozenset(e for branch in branches for e in branch.effects)
    return p.replaced(params={**p.eqn.params, "branches": tuple(branches)}, effects=effects)


def other_branch(p: Place) -> Change | None:
    """The number of the branch is another one; out of bounds it is that of the nearest."""
    if p.name != "cond":
        return None
    change = p.rng.choice([lambda i: 1 - i, lambda i: i + 1, lambda i: 2 * i, lambda i: i * i])
    return p.on_operand(0, change)


def turned(p: Place) -> Change | None:
    """A scan runs the other way."""
    if p.name != "scan":
        return None
    return p.replaced(params={**p.eqn.params, "reverse": not p.eqn.params["reverse"]})


def turned_twice(p: Place) -> Change | None:
    """A scan runs the other way, over what is turned, and what it gives is turned: the same."""
    if p.name != "scan" or p.eqn.effects:
        return None
    num_consts, num_carry = _compat.scan_parts(p.eqn)
    params = {**p.eqn.params, "reverse": not p.eqn.params["reverse"]}

    def run(*args):
        args = [x if k < num_consts + num_carry else lax.rev(x, (0,)) for k, x in enumerate(args)]
        made = p.bind(params)(*args)
        return [x if k < num_carry else lax.rev(x, (0,)) for k, x in enumerate(made)]

    return p.instead(run)


def without_effect(p: Place) -> Change | None:
    if p.name not in _EFFECTS:
        return None
    if not p.eqn.outvars:
        return p.change([])
    return p.instead(lambda *args: [jnp.zeros(v.aval.shape, v.aval.dtype) for v in p.eqn.outvars])


def effect_twice(p: Place) -> Change | None:
    if p.name not in _EFFECTS:
        return None
    again = p.eqn.replace(outvars=list(map(jaxprs.fresh_var, p.eqn.outvars)))
    return p.change([again, p.eqn])


def effect_of_another(p: Place) -> Change | None:
    """An effect sees another value."""
    if p.name not in _EFFECTS or not p.eqn.invars:
        return None
    k = p.rng.randrange(len(p.eqn.invars))
    return p.on_operand(k, lambda x: ~x if x.dtype == bool else x + jnp.ones((), x.dtype))


def other_callback(p: Place) -> Change | None:
    """An effect calls what another one calls."""
    others = [
        e.params["callback"]
        for e in p.jaxpr.eqns
        if e.primitive is p.eqn.primitive and e is not p.eqn and "callback" in e.params
    ]
    if p.name not in _EFFECTS or not others:
        return None
    return p.replaced(params={**p.eqn.params, "callback": p.rng.choice(others)})


def from_the_start(p: Place) -> Change | None:
    """A loop starts with another value."""
    if p.name not in ("while", "scan") or not p.eqn.outvars:
        return None
    count = len(p.eqn.outvars)
    if p.name == "scan":
        num_consts, count = _compat.scan_parts(p.eqn)
    else:
        num_consts = p.eqn.params["cond_nconsts"] + p.eqn.params["body_nconsts"]
    if not count:
        return None
    k = num_consts + p.rng.randrange(count)
    return p.on_operand(k, lambda x: ~x if x.dtype == bool else x + jnp.ones((), x.dtype))


KINDS = [
    swap_branches,
    same_branch,
    other_branch,
    turned,
    turned_twice,
    without_effect,
    effect_twice,
    effect_of_another,
    other_callback,
    from_the_start,
]
