"""Computations that differ in whole numbers alone become one, which takes the numbers as inputs.

Stages with dropout are such: each folds its own number into a key, or takes a key of its own from
an array of them. Arithmetic of whole numbers is exact, so the results are the same to the bit.
"""

import collections
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat, _jaxprs

#: Where a number is: the equation, and its operand, or the dimension in which it slices.
_Place = tuple[int, int]


def lift_differing(parts: Sequence[_jaxprs.Part]) -> list[tuple[_jaxprs.Part, tuple[Any, ...]]]:
    """Turns the numbers in which parts differ from others into the last inputs of each.

    Returns:
        Each part, with the literals for its new inputs; those of like parts have equal jaxprs.
    """
    found = [_numbers(part.jaxpr) for part in parts]
    sizes = [(len(part.jaxpr.eqns), len(own)) for part, own in zip(parts, found, strict=True)]
    several = {size for size, count in collections.Counter(sizes).items() if size[1] and count > 1}
    groups: dict[Hashable, list[int]] = {}
    for n, (part, own) in enumerate(zip(parts, found, strict=True)):
        if sizes[n] in several:
            groups.setdefault(_jaxprs.structure(_lift(part.jaxpr, list(own))), []).append(n)
    lifted: list[tuple[_jaxprs.Part, tuple[Any, ...]]] = [(part, ()) for part in parts]
    for members in groups.values():
        values = zip(*(found[n].values() for n in members), strict=True)
        differ = [len({int(literal.val) for literal in own}) > 1 for own in values]
        for n in members if any(differ) else ():
            own = [place for place, wanted in zip(found[n], differ, strict=True) if wanted]
            jaxpr = _lift(parts[n].jaxpr, own)
            lifted[n] = parts[n]._replace(jaxpr=jaxpr), tuple(found[n][place] for place in own)
    return lifted


def without_numbers(jaxpr: jex.ClosedJaxpr) -> Hashable:
    """Makes a key that is equal for jaxprs which differ in such numbers alone."""
    return _jaxprs.structure(_lift(jaxpr, list(_numbers(jaxpr))))


def _numbers(jaxpr: jex.ClosedJaxpr) -> dict[_Place, jex.Literal]:
    """Finds the numbers that equations of whole numbers and keys have, and where they slice."""
    found: dict[_Place, jex.Literal] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        if not all(_is_whole(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            continue
        if eqn.primitive.name == "slice" and set(eqn.params["strides"] or ()) <= {1}:
            found |= {(i, d): _index(n) for d, n in enumerate(eqn.params["start_indices"])}
        else:
            numbers = ((n, v) for n, v in enumerate(eqn.invars) if _jaxprs.is_literal(v))
            found |= {(i, n): v for n, v in numbers if not _jaxprs.is_array_literal(v)}
    return found


def _is_whole(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)  # a token has none
    if dtype is None or getattr(dtype, "kind", "") == "f":
        return False
    return jnp.issubdtype(dtype, jnp.integer) or _jaxprs.is_key(aval)


def _index(value: int) -> jex.Literal:
    return jex.Literal(np.int32(value), jax.typeof(np.int32(value)))


def _lift(jaxpr: jex.ClosedJaxpr, places: Sequence[_Place]) -> jex.ClosedJaxpr:
    """Turns the numbers at some places into the last inputs of a jaxpr."""
    by_equation: dict[int, dict[int, Any]] = {}
    invars = list(jaxpr.jaxpr.invars)
    numbers = _numbers(jaxpr)
    for i, n in places:
        invars.append(_jaxprs.fresh_var(numbers[i, n]))
        by_equation.setdefault(i, {})[n] = invars[-1]
    eqns: list[Any] = []
    for i, eqn in enumerate(jaxpr.eqns):
        given = by_equation.get(i, {})
        if not given:
            eqns.append(eqn)
        elif eqn.primitive.name == "slice":
            starts = [given.get(d, _index(n)) for d, n in enumerate(eqn.params["start_indices"])]
            eqns += _jaxprs.splice(_slice_of(eqn), [*eqn.invars, *starts], eqn.outvars, eqn)
        else:
            operands = [given.get(n, v) for n, v in enumerate(eqn.invars)]
            eqns.append(eqn.replace(invars=operands))
    return _compat.make_closed_jaxpr(invars, jaxpr.jaxpr.outvars, eqns)


def _slice_of(eqn: Any) -> Any:
    def run(x, *starts):
        sizes = eqn.outvars[0].aval.shape
        return jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)

    return run
