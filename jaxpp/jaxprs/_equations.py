"""Reads equations: their atoms, and the jaxprs inside them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxpp import _compat
from jaxpp.jaxprs import primitives
from jaxpp.jaxprs._typing import Atom, Aval, Eqn, Jaxpr, Literal, Var

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def is_literal(atom: Atom) -> "TypeIs[Literal]":
    """Tells whether an atom is a literal and not a variable."""
    return isinstance(atom, Literal)


def literal(value: Any, aval: Aval) -> Literal:
    """Makes a literal, of a number of Python or NumPy: JAX takes its own arrays for constants."""
    is_number = not aval.shape and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    if is_number and not _compat.is_tracer(value):
        value = _compat.typed(np.array(value, aval.dtype), aval)
    return Literal(value, aval)


def literal_of(number: np.generic) -> Literal:
    """Makes the literal of a number of NumPy."""
    return Literal(number, jax.typeof(number))


def literal_array(literal: Literal) -> Any:
    """Returns a literal's value as an array of its type; in a jaxpr it may be a Python scalar."""
    aval = literal.aval
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return literal.val
    return jnp.asarray(literal.val, None if aval.weak_type else aval.dtype)


def is_array_literal(literal: Literal) -> bool:
    """Tells whether a literal is an array, or a random key, and not a number."""
    return bool(literal.aval.shape) or jnp.issubdtype(literal.aval.dtype, jax.dtypes.extended)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Returns the atoms that are variables."""
    return [a for a in atoms if not isinstance(a, Literal)]


def fresh_var(var: Atom) -> Var:
    """Makes a new variable of the same type."""
    return Var(var.aval)


def read(atoms: Iterable[Atom], values: Mapping[Var, Any]) -> list[Any]:
    """Returns the values of atoms: arrays for literals, and those in `values` for variables."""
    return [literal_array(a) if is_literal(a) else values[a] for a in atoms]


def operands_of(eqns: Iterable[Eqn], outputs: Iterable[Atom] = ()) -> set[Var]:
    """Finds the variables that equations read, with those among some outputs."""
    return {v for e in eqns for v in variables(e.invars)}.union(variables(outputs))


def results_of(eqns: Iterable[Eqn]) -> list[Var]:
    """Returns the variables that equations make, in order."""
    return [v for e in eqns for v in e.outvars]


def is_key(x: Any) -> bool:
    """Tells whether an array, or a type, is of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def called_jaxpr(eqn: Eqn) -> Any | None:
    """Returns the body of an equation that calls it once (a jit, a checkpoint ...), or None."""
    body = primitives.CALLS.get(eqn.primitive.name)
    return None if body is None else eqn.params[body]


def opened(jaxpr: Any) -> Jaxpr:
    """Returns a jaxpr without its constants, whether it is open or closed."""
    return jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr


def manual_axes(eqn: Eqn) -> Any:
    """Returns the axes that a `shard_map` is over."""
    params = eqn.params
    return params.get("newly_manual_axes", params.get("manual_axes", params["mesh"].axis_names))


def shardings_of(eqn: Eqn) -> list[jax.sharding.Sharding]:
    """Returns the shardings that a `jax.jit` call has for its arguments and results."""
    given = [eqn.params.get(name) or () for name in ("in_shardings", "out_shardings")]
    return [s for own in given for s in own if isinstance(s, jax.sharding.Sharding)]


def contains(eqn: Eqn, wanted: Callable[[Eqn], bool]) -> bool:
    """Tells whether an equation, or one anywhere inside it, is wanted."""
    return wanted(eqn) or any(
        contains(inner, wanted) for sub in sub_jaxprs(eqn) for inner in sub.eqns
    )


def sub_jaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs among an equation's parameters, opened."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, _compat.JaxprTypes):
                yield opened(item)


def map_jaxprs(eqn: Eqn, fun: Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]) -> Eqn:
    """Applies a function of closed jaxprs to each jaxpr among an equation's parameters."""

    def new(value):
        if isinstance(value, _compat.JaxprTypes):
            closed = value if isinstance(value, jex.ClosedJaxpr) else jex.ClosedJaxpr(value, ())
            return _compat.with_closed_type(fun(closed), value)
        if isinstance(value, tuple) and any(isinstance(v, _compat.JaxprTypes) for v in value):
            kind: Any = type(value)
            return kind(*map(new, value)) if hasattr(value, "_fields") else kind(map(new, value))
        return value

    return eqn.replace(params={name: new(value) for name, value in eqn.params.items()})
