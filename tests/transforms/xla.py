"""What XLA makes of a program: how its results are split, and its collectives."""

import re
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from jaxpp._specs import partition_spec, replicated, spec_of

SIZES = {"data": 2, "model": 2}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def make_mesh():
    return jax.make_mesh((2, 2), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(*shape):
    return array(*shape, dtype=jnp.int32)


def trace(fun, mesh, *args) -> jex.ClosedJaxpr:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.make_jaxpr(fun)(*args)


def compiled(jaxpr, mesh, specs, out_specs=None):
    """What XLA makes of a jaxpr, its results left to XLA or pinned; without LLVM's work."""
    pinned: dict[str, Any] = {}
    if out_specs is not None:
        outs = [NamedSharding(mesh, partition_spec(s or ())) for s in out_specs]
        pinned = {"out_shardings": outs}
    jitted = jax.jit(
        jex.jaxpr_as_fun(jaxpr),
        in_shardings=[NamedSharding(mesh, partition_spec(s)) for s in specs],
        **pinned,
    )
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jitted.lower(*jaxpr.in_avals).compile(compiler_options=options)


def chosen(executable, jaxpr):
    return [
        spec_of(sharding.spec, aval.ndim)
        for sharding, aval in zip(executable.output_shardings, jaxpr.out_avals, strict=True)
    ]


def count(executable) -> int:
    text = executable.as_text()
    return sum(len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES)


def whole(specs, jaxpr):
    """The specs as they are pinned: what may be any is whole."""
    return [
        replicated(a.ndim) if s is None else s for s, a in zip(specs, jaxpr.out_avals, strict=True)
    ]
