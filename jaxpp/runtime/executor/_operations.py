"""Runs a computation operation by operation, to name the one that gives an invalid value."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpp import _compat, jaxprs
from jaxpp._program import Computation
from jaxpp.runtime.arrays import Home


def find_invalid(computation: Computation, home: Home, args: Sequence[Any]) -> str | None:
    """Finds the operation of a computation that gives an invalid value.

    `jax_debug_nans` or `jax_debug_infs` is set, which says what is invalid. JAX does the same where
    a jitted function gives such a value. Returns the operation and the user's line; None where no
    operation by itself gives such a value, or one cannot be run by itself.
    """
    config: Any = jax.config
    kinds = [kind for kind in _CHECKS if getattr(config, f"jax_debug_{kind}s")]
    under = jax.set_mesh(home) if isinstance(home, Mesh) else contextlib.nullcontext()
    with under, jax.debug_nans(False), jax.debug_infs(False):
        try:
            _run(computation.jaxpr, args, kinds)
        except FloatingPointError as error:
            return str(error)
        except Exception:
            return None
    return None


def _run(
    jaxpr: jex.ClosedJaxpr, args: Sequence[Any], kinds: Sequence[str], called: str = ""
) -> list[Any]:
    """Runs a jaxpr; `called` says where, for operations of a library, which have no line."""
    inside = jaxpr.jaxpr
    known = dict(zip([*inside.constvars, *inside.invars], [*jaxpr.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        body, line = jaxprs.called_jaxpr(eqn), _compat.at_source_line(eqn) or called
        if body is not None:
            closed = body if isinstance(body, jex.ClosedJaxpr) else jex.ClosedJaxpr(body, ())
            results = _run(closed, jaxprs.read(eqn.invars, known), kinds, line)
            known.update(zip(eqn.outvars, results, strict=True))
            continue
        kept = [v for v in eqn.outvars if not isinstance(v, jex.DropVar)]
        part = jaxprs.part([eqn], kept)
        results = jaxprs.run(part.jaxpr, *jaxprs.read(part.inputs, known))
        if kind := next(filter(None, (_invalid(x, kinds) for x in results)), ""):
            raise FloatingPointError(
                f"invalid value ({kind}) encountered in {eqn.primitive.name}{line}"
            )
        known.update(zip(kept, results, strict=True))
    return jaxprs.read(inside.outvars, known)


#: The functions that find invalid values, by their kind.
_CHECKS = {"nan": jnp.isnan, "inf": jnp.isinf}


def _invalid(value: Any, kinds: Sequence[str]) -> str:
    """Tells which of some kinds of invalid values an array has; empty for none."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return ""
    return next((kind for kind in kinds if bool(_CHECKS[kind](value).any())), "")
