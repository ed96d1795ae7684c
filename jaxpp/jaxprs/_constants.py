"""The constants of jaxprs: as inputs, as literals, as copies on the host."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax.sharding import NamedSharding

from jaxpp import _compat
from jaxpp.jaxprs._equations import (
    fresh_var,
    is_array_literal,
    is_key,
    is_literal,
    literal,
    map_jaxprs,
)
from jaxpp.jaxprs._parts import Part
from jaxpp.jaxprs._rewrite import Substitution, rewrite
from jaxpp.jaxprs._typing import Aval, Literal, Var


def without_constants(jaxpr: jex.ClosedJaxpr) -> tuple[jex.ClosedJaxpr, list[Any]]:
    """Turns a jaxpr's constants into its first inputs."""
    invars = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
    opened = _compat.make_closed_jaxpr(invars, jaxpr.jaxpr.outvars, jaxpr.jaxpr.eqns)
    return opened, list(jaxpr.consts)


def bind_constants(jaxpr: jex.ClosedJaxpr, values: Sequence[Any]) -> jex.ClosedJaxpr:
    """Replaces a jaxpr's first inputs by literals of the given values."""
    pairs = zip(jaxpr.jaxpr.invars, values, strict=False)
    known = Substitution((v, literal(value, v.aval)) for v, value in pairs)
    return rewrite(jaxpr, lambda eqn: None, known)


def copied_to_host(value: Any, aval: Aval) -> Any:
    """Copies a constant of a trace to the host: whoever has the array may write to it or delete it.

    `jax.jit` has such a copy, too, in its executable.
    """
    if is_key(aval):
        data: Any = np.array(jax.device_get(jax.random.key_data(value)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return np.array(jax.device_get(value), aval.dtype)


def with_copied_constants(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Copies the arrays that stand in a jaxpr or inside its equations, each once."""
    copies: dict[int, tuple[Any, Any]] = {}

    def copy(value, aval):
        if id(value) not in copies:
            copies[id(value)] = value, _compat.typed(copied_to_host(value, aval), aval)
        return copies[id(value)][1]

    def visit_atom(a):
        is_array = is_literal(a) and is_array_literal(a) and not _compat.is_tracer(a.val)
        return Literal(copy(a.val, a.aval), a.aval) if is_array else a

    def visit(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        inside = closed.jaxpr
        eqns = [
            map_jaxprs(e, visit).replace(invars=list(map(visit_atom, e.invars)))
            for e in closed.eqns
        ]
        new = _compat.with_equations(closed, eqns, list(map(visit_atom, inside.outvars)))
        consts = zip(closed.consts, inside.constvars, strict=True)
        return new.replace(consts=[copy(c, v.aval) for c, v in consts])

    return visit(jaxpr)


def without_devices(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Lets each `jax.device_put` of a task name a memory, and no devices: these are its rank's.

    A split over the axes of the rank stays.
    """

    def own(eqn):
        eqn = map_jaxprs(eqn, without_devices)
        if eqn.primitive.name != "device_put":
            return eqn
        mesh = _compat.mesh_of(eqn)

        def place(given, var):
            if isinstance(given, NamedSharding) and set(mesh.axis_names) >= set(given.mesh.shape):
                return NamedSharding(mesh, given.spec, memory_kind=given.memory_kind)
            return _compat.memory_space(var.aval)

        devices = tuple(map(place, eqn.params["devices"], eqn.outvars))
        return eqn.replace(
            params={**eqn.params, "devices": devices, "srcs": (None,) * len(devices)}
        )

    return _compat.with_equations(jaxpr, map(own, jaxpr.eqns))


def lift_arrays(part: Part) -> tuple[Part, tuple[Literal, ...]]:
    """Turns the arrays among a part's literals into its last inputs; also gives these literals.

    So an array that a function closes over is in no executable, nor in the key of one.

    Raises:
        ValueError: a derivative rule closes over a value that was traced with the function.
    """
    lifted: dict[int, tuple[Var, Literal]] = {}

    def lift(atom, eqn=None):
        if is_literal(atom) and _compat.is_tracer(atom.val):
            raise ValueError(
                f"A function with a derivative rule (jax.custom_vjp or custom_jvp), called"
                f"{_compat.at_source_line(eqn)}, closes over a value that JAX traces, such as an "
                f"argument of the loss. It cannot be called as part of a jaxpr then, as inside "
                f"jax.jit; give it the value as an argument."
            )
        if not is_literal(atom) or not is_array_literal(atom):
            return atom
        return lifted.setdefault(id(atom.val), (fresh_var(atom), atom))[0]

    eqns = [e.replace(invars=[lift(v, e) for v in e.invars]) for e in part.jaxpr.eqns]
    outvars = list(map(lift, part.jaxpr.jaxpr.outvars))
    if not lifted:
        return part, ()
    variables, literals = zip(*lifted.values(), strict=True)
    invars = [*part.jaxpr.jaxpr.invars, *variables]
    return part._replace(jaxpr=_compat.make_closed_jaxpr(invars, outvars, eqns)), literals
