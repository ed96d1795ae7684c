"""Computations that differ in whole numbers alone become one, which takes the numbers as inputs.

Stages with dropout are such: each folds its own number into a key, or takes a key of its own from
an array of them. Arithmetic of whole numbers is exact, so the results are the same to the bit.
"""

import collections
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat
from jaxpp.jaxprs._equations import fresh_var, is_array_literal, is_key, is_literal, literal_of
from jaxpp.jaxprs._parts import Part
from jaxpp.jaxprs._rewrite import splice
from jaxpp.jaxprs._same import structure
from jaxpp.jaxprs._typing import Aval, Eqn, Literal

#: The place of a number: its equation, and its operand.
_Place = tuple[int, int]


def lift_differing(parts: Sequence[Part]) -> list[tuple[Part, tuple[Literal, ...]]]:
    """Turns the numbers in which parts differ from others into the last inputs of each.

    Returns:
        Each part, with the literals for its new inputs; those of like parts have equal jaxprs.
    """
    opened = [_with_start_operands(part.jaxpr) for part in parts]
    found = list(map(_numbers, opened))
    sizes = [(len(part.jaxpr.eqns), len(own)) for part, own in zip(parts, found, strict=True)]
    several = {size for size, count in collections.Counter(sizes).items() if size[1] and count > 1}
    groups: dict[Hashable, list[int]] = {}
    for n, (jaxpr, own) in enumerate(zip(opened, found, strict=True)):
        if sizes[n] in several:
            groups.setdefault(structure(_lift(jaxpr, own)), []).append(n)
    lifted: list[tuple[Part, tuple[Literal, ...]]] = [(part, ()) for part in parts]
    for members in groups.values():
        values = zip(*(found[n].values() for n in members), strict=True)
        differ = [len({int(literal.val) for literal in own}) > 1 for own in values]
        for n in members if any(differ) else ():
            places = zip(found[n].items(), differ, strict=True)
            own = {place: literal for (place, literal), wanted in places if wanted}
            lifted[n] = parts[n]._replace(jaxpr=_lift(opened[n], own)), tuple(own.values())
    return lifted


def without_numbers(jaxpr: jex.ClosedJaxpr) -> Hashable:
    """Makes a key that is equal for jaxprs which differ in such numbers alone."""
    opened = _with_start_operands(jaxpr)
    return structure(_lift(opened, _numbers(opened)))


def with_start_operands(eqn: Eqn) -> Eqn:
    """Turns the places at which an equation slices into operands."""
    if eqn.primitive.name != "slice" or set(eqn.params["strides"] or (1,)) != {1}:
        return eqn
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    sizes = [limit - start for start, limit in zip(starts, limits, strict=True)]
    literals = [literal_of(np.uint32(start)) for start in starts]
    (dynamic,) = splice(
        lambda x, *at: jax.lax.dynamic_slice(x, at, sizes),
        [eqn.invars[0], *literals],
        eqn.outvars,
        eqn,
    )
    return dynamic


def _with_start_operands(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    eqns = [with_start_operands(e) if _is_whole(e) else e for e in jaxpr.eqns]
    return _compat.with_equations(jaxpr, eqns)


def _numbers(jaxpr: jex.ClosedJaxpr) -> dict[_Place, Literal]:
    """Finds the numbers among the operands of equations of whole numbers and keys."""
    return {
        (i, n): v
        for i, eqn in enumerate(jaxpr.eqns)
        if _is_whole(eqn)
        for n, v in enumerate(eqn.invars)
        if is_literal(v) and not is_array_literal(v)
    }


def _is_whole(eqn: Eqn) -> bool:
    """Tells whether an equation is one among whole numbers and keys."""

    def is_number(aval: Aval) -> bool:
        dtype = getattr(aval, "dtype", None)  # a token has none
        if dtype is None or getattr(dtype, "kind", "") == "f":
            return False
        return jnp.issubdtype(dtype, jnp.integer) or is_key(aval)

    return all(is_number(v.aval) for v in (*eqn.outvars, *eqn.invars))


def _lift(jaxpr: jex.ClosedJaxpr, numbers: Mapping[_Place, Literal]) -> jex.ClosedJaxpr:
    """Turns some numbers, by their places, into the last inputs of a jaxpr."""
    variables = {place: fresh_var(literal) for place, literal in numbers.items()}
    eqns = [
        e.replace(invars=[variables.get((i, n), v) for n, v in enumerate(e.invars)])
        for i, e in enumerate(jaxpr.eqns)
    ]
    invars = [*jaxpr.jaxpr.invars, *variables.values()]
    return _compat.make_closed_jaxpr(invars, jaxpr.jaxpr.outvars, eqns)
