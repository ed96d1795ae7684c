"""Edits of types inside: other precision, and casts that are put in, left out or moved."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from jaxpp import _compat, jaxprs
from tests.certification.inner.places import Change, Place, is_like

#: The types through which a value of a type may go.
_THROUGH = {
    "float32": ["bfloat16", "float16", "int32", "bool"],
    "bfloat16": ["float32", "float16", "int8", "float8_e4m3fn"],
    "float16": ["float32", "bfloat16", "int32"],
    "int32": ["float32", "int8", "int16", "uint32", "uint8", "bool", "bfloat16"],
    "uint32": ["int32", "float32", "uint16"],
    "uint8": ["int8", "float32", "int32", "float16"],
    "int8": ["int32", "uint8", "float32", "bool"],
    "bool": ["float32", "int32", "uint8", "bfloat16"],
    "complex64": ["float32"],
}
_FLOATS = ("float32", "bfloat16", "float16")


def _through(p: Place, atom: Any) -> str | None:
    types = _THROUGH.get(str(getattr(atom.aval, "dtype", "")))
    return p.rng.choice(types) if types else None


def round_trip_of_an_operand(p: Place) -> Change | None:
    if not p.eqn.invars:
        return None
    k = p.rng.randrange(len(p.eqn.invars))
    atom = p.eqn.invars[k]
    if (other := _through(p, atom)) is None or _compat.is_ref(atom):
        return None
    return p.on_operand(k, lambda x: x.astype(other).astype(x.dtype))


def round_trip_of_a_result(p: Place) -> Change | None:
    if not p.eqn.outvars:
        return None
    k = p.rng.randrange(len(p.eqn.outvars))
    if (other := _through(p, p.eqn.outvars[k])) is None:
        return None
    return p.on_result(k, lambda x: x.astype(other).astype(x.dtype))


def less_precision(p: Place) -> Change | None:
    """A result loses some bits, or has as many as before."""
    if len(p.eqn.outvars) != 1 or str(p.eqn.outvars[0].aval.dtype) not in _FLOATS:
        return None
    info = jnp.finfo(p.eqn.outvars[0].aval.dtype)
    bits = p.rng.choice([(info.nexp, info.nmant), (info.nexp, info.nmant - 1), (5, info.nmant)])
    return p.on_result(0, lambda x: lax.reduce_precision(x, *bits))


def other_precision(p: Place) -> Change | None:
    """The operation runs in another dtype, and its result is cast back."""
    if len(p.eqn.outvars) != 1 or p.eqn.effects or p.name in ("convert_element_type", "copy"):
        return None
    if jaxprs.called_jaxpr(p.eqn) is not None:
        return None
    own = str(p.eqn.outvars[0].aval.dtype)
    others = [t for t in _THROUGH.get(own, ()) if t not in ("bool", "float8_e4m3fn")]
    if own in _FLOATS:
        others = [t for t in others if "float" in t]
    elif own == "bool":  # a comparison
        own, others = "float32", ["bfloat16", "int32", "float16"]
    if not others:
        return None
    if not any(str(getattr(v.aval, "dtype", "")) == own for v in p.eqn.invars):
        return None
    other = p.rng.choice(others)
    params = dict(p.eqn.params)
    for name in ("preferred_element_type", "new_dtype", "dtype", "out_dtype"):
        if params.get(name) is not None:
            params[name] = jnp.dtype(other)

    def run(*args):
        cast = [x.astype(other) if str(x.dtype) == own else x for x in args]
        (made,) = jax.tree.leaves(p.bind(params)(*cast))
        return made.astype(p.eqn.outvars[0].aval.dtype)

    return p.instead(run)


def other_precision_of_a_carry(p: Place) -> Change | None:
    """A loop keeps a carry in another dtype, to which each iteration rounds it."""
    if p.name not in ("scan", "while"):
        return None
    num_consts, num_carry = (
        _compat.scan_parts(p.eqn)
        if p.name == "scan"
        else (p.eqn.params["cond_nconsts"] + p.eqn.params["body_nconsts"], len(p.eqn.outvars))
    )
    carries = [
        k
        for k in range(num_carry)
        if str(p.eqn.outvars[k].aval.dtype) in (*_FLOATS, "int32") and not p.eqn.effects
    ]
    if not carries:
        return None
    k = p.rng.choice(carries)
    aval = p.eqn.outvars[k].aval
    other = _through(p, p.eqn.outvars[k])
    if other in (None, "bool"):
        return None
    body = p.eqn.params["jaxpr" if p.name == "scan" else "body_jaxpr"]

    def loop(*args):
        args = list(args)
        args[num_consts + k] = args[num_consts + k].astype(other)
        consts, carry, xs = args[:num_consts], args[num_consts:][:num_carry], None
        if p.name == "while":
            split = p.eqn.params["cond_nconsts"]

            def keeps_on(c):
                c = [*c[:k], c[k].astype(aval.dtype), *c[k + 1 :]]
                return jex.jaxpr_as_fun(p.eqn.params["cond_jaxpr"])(*consts[:split], *c)[0]

            def again(c):
                c = [*c[:k], c[k].astype(aval.dtype), *c[k + 1 :]]
                made = jex.jaxpr_as_fun(body)(*consts[split:], *c)
                made[k] = made[k].astype(other)
                return made

            made = lax.while_loop(keeps_on, again, list(carry))
            return [*made[:k], made[k].astype(aval.dtype), *made[k + 1 :]]
        xs = args[num_consts + num_carry :]

        def one(c, x):
            c = [*c[:k], c[k].astype(aval.dtype), *c[k + 1 :]]
            made = jex.jaxpr_as_fun(body)(*consts, *c, *x)
            made[k] = made[k].astype(other)
            return list(made[:num_carry]), list(made[num_carry:])

        length, reverse = p.eqn.params["length"], p.eqn.params["reverse"]
        made, ys = lax.scan(one, list(carry), list(xs), length=length, reverse=reverse)
        return [*made[:k], made[k].astype(aval.dtype), *made[k + 1 :], *ys]

    return p.instead(loop)


def _cast_of(p: Place) -> Any:
    """The equation that makes the operand of a cast."""
    if p.name != "convert_element_type" or jaxprs.is_literal(p.eqn.invars[0]):
        return None
    return next((e for e in p.before if p.eqn.invars[0] in e.outvars), None)


def without_casts(p: Place) -> Change | None:
    """Of two casts that come back to the first type none."""
    maker = _cast_of(p)
    if maker is None or maker.primitive.name != "convert_element_type":
        return None
    if not is_like(maker.invars[0], p.eqn.outvars[0]):
        return None
    return p.change(jaxprs.with_results([], [maker.invars[0]], p.eqn.outvars))


def cast_by_way_of(p: Place) -> Change | None:
    """A cast goes by way of another type."""
    if p.name != "convert_element_type":
        return None
    new = p.eqn.params["new_dtype"]
    if (other := _through(p, p.eqn.invars[0])) is None:
        return None
    return p.instead(lambda x: x.astype(other).astype(new))


def cast_first(p: Place) -> Change | None:
    """Operands are cast, in place of the result of an operation on them."""
    maker = _cast_of(p)
    if maker is None or maker.effects or len(maker.outvars) != 1:
        return None
    new, params = p.eqn.params["new_dtype"], dict(maker.params)
    old = p.eqn.invars[0].aval.dtype
    for name in ("preferred_element_type", "new_dtype", "dtype", "out_dtype"):
        if params.get(name) is not None:
            params[name] = new

    def run(*args):
        cast = [x.astype(new) if x.dtype == old else x for x in args]
        return maker.primitive.bind(*cast, **params)

    return p.instead(run, maker.invars)


def cast_last(p: Place) -> Change | None:
    """The result of an operation is cast, in place of its operands."""
    makers: Sequence[Any] = [
        next((e for e in p.before if v in e.outvars), None)
        for v in p.eqn.invars
        if not jaxprs.is_literal(v)
    ]
    if not makers or len(makers) < len(p.eqn.invars) or p.eqn.effects:
        return None
    if any(m is None or m.primitive.name != "convert_element_type" for m in makers):
        return None
    if len({m.invars[0].aval.dtype for m in makers}) > 1 or len(p.eqn.outvars) != 1:
        return None
    params, old = dict(p.eqn.params), makers[0].invars[0].aval.dtype
    for name in ("preferred_element_type", "dtype", "out_dtype"):
        if params.get(name) is not None:
            params[name] = old
    new = p.eqn.outvars[0].aval.dtype
    return p.instead(lambda *args: p.bind(params)(*args).astype(new), [m.invars[0] for m in makers])


KINDS = [
    round_trip_of_an_operand,
    round_trip_of_a_result,
    less_precision,
    other_precision,
    other_precision,
    other_precision_of_a_carry,
    without_casts,
    cast_by_way_of,
    cast_first,
    cast_last,
]
