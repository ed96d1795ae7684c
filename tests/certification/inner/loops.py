"""Edits of loops and branches as a whole: of what they run over, and of how they are put together.

Some are laws of linear loops only, or of loops whose iterations do not depend on each other.
"""

from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from jaxpp import _compat, jaxprs
from tests.certification.inner.places import Change, Place, is_like


def _parts(p: Place) -> tuple[int, int]:
    """The numbers of operands of a loop that are constant, and of carries."""
    if p.name == "scan":
        return _compat.scan_parts(p.eqn)
    return p.eqn.params["cond_nconsts"] + p.eqn.params["body_nconsts"], len(p.eqn.outvars)


def _is_loop(p: Place) -> bool:
    return p.name in ("scan", "while") and not p.eqn.effects


def carries_change_places(p: Place) -> Change | None:
    """Two carries change places before the loop and after it, and not in it."""
    if not _is_loop(p):
        return None
    num_consts, num_carry = _parts(p)
    outvars = p.eqn.outvars
    pairs = [(a, b) for a in range(num_carry) for b in range(a) if is_like(outvars[a], outvars[b])]
    if not pairs:
        return None
    a, b = p.rng.choice(pairs)

    def run(*args):
        args = list(args)
        i, j = num_consts + a, num_consts + b
        args[i], args[j] = args[j], args[i]
        made = list(p.bind()(*args))
        made[a], made[b] = made[b], made[a]
        return made

    return p.instead(run)


def scaled_carry(p: Place) -> Change | None:
    """A carry is scaled before the loop, and scaled back after it: right if it is linear."""
    if not _is_loop(p):
        return None
    num_consts, num_carry = _parts(p)
    floats = [
        k for k in range(num_carry) if jnp.issubdtype(p.eqn.outvars[k].aval.dtype, jnp.inexact)
    ]
    if not floats:
        return None
    k = p.rng.choice(floats)
    do, undo = p.rng.choice(
        [
            (lambda x: x * 2, lambda x: x / 2),
            (lambda x: -x, lambda x: -x),
            (lambda x: x + 1, lambda x: x - 1),
            (lambda x: lax.rev(x, range(x.ndim)), lambda x: lax.rev(x, range(x.ndim))),
        ]
    )

    def run(*args):
        args = list(args)
        args[num_consts + k] = do(args[num_consts + k])
        made = list(p.bind()(*args))
        made[k] = undo(made[k])
        return made

    return p.instead(run)


def turned_rows(p: Place) -> Change | None:
    """What a scan runs over is turned, and so is what it gives: right without carries."""
    if p.name != "scan" or p.eqn.effects:
        return None
    num_consts, num_carry = _parts(p)
    if len(p.eqn.invars) == num_consts + num_carry:
        return None
    only = p.rng.random() < 0.3

    def run(*args):
        args = list(args)
        ks = range(num_consts + num_carry, len(args))
        for k in [p.rng.choice(list(ks))] if only else ks:
            args[k] = jnp.flip(args[k], 0)
        made = list(p.bind()(*args))
        return [*made[:num_carry], *(x if only else jnp.flip(x, 0) for x in made[num_carry:])]

    return p.instead(run)


def _body(p: Place) -> Any:
    jaxpr = p.eqn.params["jaxpr" if p.name == "scan" else "body_jaxpr"]
    return jex.jaxpr_as_fun(jaxpr)


def peeled(p: Place) -> Change | None:
    """The first iteration of a scan runs before it, or is left out, or runs twice."""
    if p.name != "scan" or p.eqn.effects or p.eqn.params["length"] < 2:
        return None
    num_consts, num_carry = _parts(p)
    params, how = p.eqn.params, p.rng.choice(["before", "left out", "twice"])
    fewer = {**params, "length": params["length"] - 1}

    def run(*args):
        consts, carry = args[:num_consts], list(args[num_consts:][:num_carry])
        xs, first = args[num_consts + num_carry :], -1 if params["reverse"] else 0
        made = _body(p)(*consts, *carry, *(x[first] for x in xs))
        if how == "twice":
            return p.bind()(*consts, *made[:num_carry], *xs)
        carry = carry if how == "left out" else list(made[:num_carry])
        rest = [x[:-1] if first else x[1:] for x in xs]
        made_after = p.bind(fewer)(*consts, *carry, *rest)
        ys = [
            jnp.concatenate([b, a[None]] if first else [a[None], b])
            for a, b in zip(made[num_carry:], made_after[num_carry:], strict=True)
        ]
        return [*made_after[:num_carry], *ys]

    return p.instead(run)


def invariant_carry(p: Place) -> Change | None:
    """A carry starts as a function of itself that the body would give anyway, or is what it was."""
    if not _is_loop(p):
        return None
    num_consts, num_carry = _parts(p)
    if not num_carry:
        return None
    k = p.rng.randrange(num_carry)
    return p.change(
        [
            p.eqn.replace(
                outvars=[jaxprs.fresh_var(v) if i == k else v for i, v in enumerate(p.eqn.outvars)]
            ),
            *jaxprs.with_results([], [p.eqn.invars[num_consts + k]], [p.eqn.outvars[k]]),
        ]
    )


def once_more(p: Place) -> Change | None:
    """A loop runs again on what it has given."""
    if not _is_loop(p):
        return None
    num_consts, num_carry = _parts(p)
    if not num_carry:
        return None

    def run(*args):
        made = p.bind()(*args)
        again = p.bind()(*args[:num_consts], *made[:num_carry], *args[num_consts + num_carry :])
        return [*again[:num_carry], *made[num_carry:]]

    return p.instead(run)


def after_the_branches(p: Place) -> Change | None:
    """A result of a branch is chosen by a select, all branches being run."""
    if p.name != "cond" or p.eqn.effects or len(p.eqn.params["branches"]) != 2:
        return None
    is_turned = p.rng.random() < 0.4

    def run(which, *args):
        one, other = (jex.jaxpr_as_fun(b)(*args) for b in p.eqn.params["branches"])
        first = which > 0 if not is_turned else which >= 0
        return [lax.select(first, b, a) for a, b in zip(one, other, strict=True)]

    return p.instead(run)


def other_test(p: Place) -> Change | None:
    """A while loop ends at another time: its test is one of another state, or is negated."""
    if p.name != "while" or p.eqn.effects:
        return None
    params = p.eqn.params
    a, b = params["cond_nconsts"], params["body_nconsts"]
    test = jex.jaxpr_as_fun(params["cond_jaxpr"])
    how = p.rng.choice(["after", "twice", "one more"])

    def run(*args):
        consts, body_consts, carry = args[:a], args[a:][:b], list(args[a + b :])

        def body(c):
            made = _body(p)(*body_consts, *c)
            return _body(p)(*body_consts, *made) if how == "twice" else made

        def keeps_on(c):
            seen = _body(p)(*body_consts, *c) if how == "after" else c
            return test(*consts, *seen)[0]

        made = lax.while_loop(keeps_on, body, carry)
        return body(made) if how == "one more" else made

    return p.instead(run)


def effects_apart(p: Place) -> Change | None:
    """A loop with several effects runs twice, each time with some of them."""
    if p.name not in ("scan", "while") or not p.eqn.effects:
        return None
    key = "jaxpr" if p.name == "scan" else "body_jaxpr"
    body = p.eqn.params[key]
    effects = [e for e in body.eqns if e.effects]
    if len(effects) < 2:
        return None
    one = p.rng.choice(effects)
    eqns = [e for e in body.eqns if e is not one]
    others = _compat.with_equations(body, eqns)
    if any(e.effects and e.outvars for e in body.eqns):
        return None  # what it gives would be missing in one of them
    alone = [e for e in body.eqns if e is one or not e.effects]
    first = _compat.with_equations(body, alone)
    fresh = [jaxprs.fresh_var(v) for v in p.eqn.outvars]
    loops = [
        p.eqn.replace(params={**p.eqn.params, key: first}, outvars=fresh),
        p.eqn.replace(params={**p.eqn.params, key: others}),
    ]
    return p.change(loops if p.rng.random() < 0.5 else loops[::-1])


def other_block(p: Place) -> Change | None:
    """A block of a kernel is another one: its index map gives something else."""
    if p.name != "pallas_call":
        return None
    import dataclasses

    mapping = p.eqn.params["grid_mapping"]
    blocks = list(mapping.block_mappings)
    k = p.rng.randrange(len(blocks))
    index_map = blocks[k].index_map_jaxpr
    outvars = list(index_map.jaxpr.outvars)
    if len(outvars) < 2 or outvars[0] is outvars[1]:
        return None
    new = index_map.replace(jaxpr=index_map.jaxpr.replace(outvars=outvars[::-1]))
    blocks[k] = dataclasses.replace(blocks[k], index_map_jaxpr=new)
    mapping = dataclasses.replace(mapping, block_mappings=tuple(blocks))
    return p.replaced(params={**p.eqn.params, "grid_mapping": mapping})


KINDS = [
    carries_change_places,
    scaled_carry,
    turned_rows,
    peeled,
    invariant_carry,
    once_more,
    after_the_branches,
    other_test,
    effects_apart,
    other_block,
]
