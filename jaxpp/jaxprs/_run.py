"""Runs jaxprs; equal ones share an executable."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.tree_util as jtu

from jaxpp import _compat
from jaxpp.jaxprs._arguments import is_array
from jaxpp.jaxprs._equations import contains, is_literal, literal_array, read, results_of
from jaxpp.jaxprs._parts import part
from jaxpp.jaxprs._same import structure
from jaxpp.jaxprs._trace import trace
from jaxpp.jaxprs._typing import Eqn

#: The dtypes that JAX narrows unless 64 bits are switched on.
WIDE = frozenset(("int64", "uint64", "float64", "complex128"))


def run(jaxpr: jex.ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr, under its equations' own names and source lines."""
    results = jex.jaxpr_as_fun(jaxpr)(*args)
    return [
        literal_array(v) if is_literal(v) else x
        for v, x in zip(jaxpr.jaxpr.outvars, results, strict=True)
    ]


def run_equations(eqns: Sequence[Eqn], values: dict[Any, Any]) -> None:
    """Evaluates equations of which `values` has the operands; puts the results there, too."""
    own = part(eqns, results_of(eqns))
    values.update(zip(own.outputs, run(own.jaxpr, *read(own.inputs, values)), strict=True))


def run_compiled(fun: Callable[..., Any], *args: Any) -> Any:
    """Evaluates a function; where no jaxpr records it, equal programs share an executable.

    `jax.jit` would know the function by its identity, and so compile a new function of each call
    anew. Here it is traced at each call, so that it sees what Python has by then.
    """
    return fun(*args) if _compat.writes_jaxpr() else compiled(fun, *args)(*args)


def compiled(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns a function for arguments of these types; equal programs share an executable.

    What is differentiated or batched eagerly shares those of its derivatives, too.
    """
    if _compat.is_jit_disabled():
        return fun
    traced = trace(fun, args)
    key = structure(traced.jaxpr, differentiable=_compat.is_differentiating())
    run = _compiled(_Structured(key, traced.jaxpr))
    consts = traced.inputs[: traced.num_closed_over]

    def call(*args: Any) -> Any:
        arrays = [leaf for leaf in jtu.tree_leaves(args) if is_array(leaf)]
        return traced.rebuild(run(*consts, *arrays))

    return call


@dataclasses.dataclass(frozen=True)
class _Structured:
    """A jaxpr that equals those of the same structure; it keeps alive what the structure names."""

    structure: Any
    jaxpr: jex.ClosedJaxpr = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=256)
def _compiled(program: _Structured) -> Callable[..., list[Any]]:
    return jax.jit(functools.partial(run, program.jaxpr))


def with_its_types(jaxpr: jex.ClosedJaxpr) -> contextlib.AbstractContextManager:
    """Makes the context in which a jaxpr with 64-bit types can be evaluated; else the present one.

    A function may have such types in a part of it alone: under a `jax.enable_x64` of its own.
    """

    def is_wide(eqn) -> bool:
        dtypes = (getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars))
        return any(getattr(dtype, "name", "") in WIDE for dtype in dtypes)

    wide = any(contains(eqn, is_wide) for eqn in jaxpr.eqns)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()
