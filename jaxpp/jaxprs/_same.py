"""Tells when two computations are one, by keys that are equal where JAX could not tell either."""

from typing import Any

import jax

from jaxpp import _compat
from jaxpp.jaxprs import primitives
from jaxpp.jaxprs._equations import is_literal, opened


def structure(jaxpr, *, differentiable: bool = False) -> Any:
    """Makes a hashable key, equal for jaxprs that JAX itself could not tell apart.

    They compute the same thing in the same order, with the same primitives, under the same
    configuration. Source lines and the names of `jax.jit` calls do not count. The rules of
    `jax.custom_jvp` and `jax.custom_vjp` count where the jaxprs may still be differentiated.
    """
    inside = opened(jaxpr)
    number: dict[Any, int] = {}

    def atom(a):
        if is_literal(a):
            return ("literal", a.aval, _hashable(a.val, differentiable))
        return number.setdefault(a, len(number))

    def typed(v):
        return atom(v), v.aval

    head = tuple(map(typed, [*inside.constvars, *inside.invars]))
    body = tuple(
        (
            eqn.primitive,
            eqn.ctx,
            tuple(map(atom, eqn.invars)),
            _params(eqn, differentiable),
            tuple(map(typed, eqn.outvars)),
        )
        for eqn in inside.eqns
    )
    # An array of JAX never changes, one of NumPy may.
    consts = tuple(
        id(c) if isinstance(c, jax.Array) else _hashable(c, differentiable)
        for c in _compat.constants_of(jaxpr)
    )
    return head, body, tuple(map(atom, inside.outvars)), consts


def key_of_params(eqn) -> Any:
    """Makes a hashable key of the parameters of an equation that is not differentiated any more."""
    return _params(eqn, False)


def key_of_value(value: Any) -> Any:
    """Makes a hashable key of a value, such as that of a literal."""
    return _hashable(value, False)


_DERIVATIVE_RULES = frozenset(
    {"jvp_jaxpr_fun", "jvp", "fwd_jaxpr_thunk", "bwd", "fwd", "out_trees", "symbolic_zeros"}
)


def _params(eqn, differentiable: bool):
    ignored = {"name"} if eqn.primitive.name == "jit" else set()
    if eqn.primitive.name in primitives.CUSTOM_RULES and not differentiable:
        ignored |= _DERIVATIVE_RULES
    rules = {"jvp_jaxpr_fun": _compat.derivative_rule}
    return tuple(
        (k, _hashable(rules[k](v) if k in rules else v, differentiable))
        for k, v in sorted(eqn.params.items())
        if k not in ignored
    )


def _hashable(value, differentiable: bool):
    if isinstance(value, _compat.JaxprTypes):
        return structure(value, differentiable=differentiable)
    if isinstance(value, tuple | list):
        return tuple(_hashable(v, differentiable) for v in value)
    if isinstance(value, dict):
        return tuple((k, _hashable(v, differentiable)) for k, v in sorted(value.items()))
    # A class of NumPy, such as np.float32, has these methods, too.
    if hasattr(value, "tobytes") and hasattr(value, "dtype") and not isinstance(value, type):
        return (value.dtype, value.shape, value.tobytes())
    if isinstance(value, int | float | complex):  # 0.0 is not -0.0, nor 1 True
        return (type(value), repr(value))
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return value
