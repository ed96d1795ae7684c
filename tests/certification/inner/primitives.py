"""Edits that put one operation in the place of another of the same signature."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.certification.inner.places import Change, Place

#: Operations of one signature: functions of the operands, or of the operands and the parameters.
FAMILIES = [
    {
        "add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min,
        "div": lax.div, "rem": lax.rem, "atan2": lax.atan2, "pow": lax.pow, "add_any": lax.add,
        "nextafter": lax.nextafter,
    },
    {
        "sin": lax.sin, "cos": lax.cos, "tanh": lax.tanh, "tan": lax.tan, "exp": lax.exp,
        "log": lax.log, "log1p": lax.log1p, "expm1": lax.expm1, "neg": lax.neg, "abs": lax.abs,
        "sign": lax.sign, "floor": lax.floor, "ceil": lax.ceil, "round": lax.round,
        "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "square": lax.square, "logistic": lax.logistic,
        "erf": lax.erf, "cbrt": lax.cbrt, "exp2": lax.exp2, "copy": lambda x: x,
        "integer_pow": lambda x: lax.integer_pow(x, 3), "stop_gradient": lambda x: x,
    },
    {
        "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor,
        "shift_left": lax.shift_left, "shift_right_logical": lax.shift_right_logical,
        "shift_right_arithmetic": lax.shift_right_arithmetic, "add": lax.add, "sub": lax.sub,
        "mul": lax.mul, "max": lax.max, "min": lax.min, "div": lax.div, "rem": lax.rem,
    },
    {
        "eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge,
    },
    {"real": lax.real, "imag": lax.imag, "abs": lax.abs},
    {"conj": lax.conj, "neg": lax.neg, "exp": lax.exp},
    {
        "not": lax.bitwise_not, "population_count": lax.population_count, "clz": lax.clz,
        "neg": lax.neg, "abs": lax.abs, "sign": lax.sign,
    },
    {"is_finite": lax.is_finite, "isnan": jnp.isnan, "isinf": jnp.isinf},
]  # fmt: skip
#: The same with the parameters.
WITH_PARAMS = [
    {
        "reduce_sum": lambda x, axes, **_: jnp.sum(x, axes, dtype=x.dtype),
        "reduce_max": lambda x, axes, **_: jnp.max(x, axes),
        "reduce_min": lambda x, axes, **_: jnp.min(x, axes),
        "reduce_prod": lambda x, axes, **_: jnp.prod(x, axes, dtype=x.dtype),
        "reduce_and": lambda x, axes, **_: jnp.all(x, axes),
        "reduce_or": lambda x, axes, **_: jnp.any(x, axes),
    },
    {
        "cumsum": lambda x, axis, reverse: lax.cumsum(x, axis, reverse),
        "cumprod": lambda x, axis, reverse: lax.cumprod(x, axis, reverse),
        "cummax": lambda x, axis, reverse: lax.cummax(x, axis, reverse),
        "cummin": lambda x, axis, reverse: lax.cummin(x, axis, reverse),
    },
    {
        "argmax": lambda x, axes, index_dtype: lax.argmax(x, axes[0], index_dtype),
        "argmin": lambda x, axes, index_dtype: lax.argmin(x, axes[0], index_dtype),
    },
]


def other_primitive(p: Place) -> Change | None:
    found = [f for f in FAMILIES if p.name in f]
    if found:
        family = p.rng.choice(found)
        fun = family[p.rng.choice([n for n in family if n != p.name])]
        return p.instead(fun)
    found = [f for f in WITH_PARAMS if p.name in f]
    if found:
        fun = found[0][p.rng.choice([n for n in found[0] if n != p.name])]
        return p.instead(lambda *args: fun(*args, **p.eqn.params))
    return None


#: How another collective is bound.
_COLLECTIVES = {"psum": lax.psum_p, "pmax": lax.pmax_p, "pmin": lax.pmin_p}


def other_collective(p: Place) -> Change | None:
    if p.name not in (*_COLLECTIVES, "psum_invariant"):
        return None
    primitive = _COLLECTIVES[p.rng.choice([n for n in _COLLECTIVES if n != p.name])]
    params = {k: p.eqn.params[k] for k in ("axes", "axis_index_groups") if k in p.eqn.params}
    params.setdefault("axis_index_groups", None)
    return p.replaced(primitive=primitive, params=params)


def without_collective(p: Place) -> Change | None:
    if not p.shards or p.name not in (
        "psum", "psum_invariant", "pmax", "pmin", "ppermute", "pvary", "all_to_all",
    ):  # fmt: skip
        return None
    return p.instead(lambda *args: [jax.lax.neg(jax.lax.neg(x)) for x in args])


KINDS = [other_primitive, other_primitive, other_collective, without_collective]
