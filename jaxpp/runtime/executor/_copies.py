"""Copies between the memories of a device and of its host, beside what the device computes."""

import types
from collections.abc import Sequence
from typing import Any

import jax

from jaxpp import _compat
from jaxpp._program import Computation
from jaxpp.runtime.arrays import Home, sharding_in


def copies(computation: Computation) -> bool:
    """Tells whether a computation only copies its inputs, in their order, to another memory."""
    inside = computation.jaxpr.jaxpr
    copied = [
        (eqn.invars[0], eqn.outvars[0])
        for eqn in inside.eqns
        if eqn.primitive.name == "device_put" and len(eqn.invars) == 1
    ]
    inputs, outputs = [v for v, _ in copied], [v for _, v in copied]
    return bool(copied) and (inputs, outputs) == (list(inside.invars), list(inside.outvars))


class Copier:
    """Copies arrays as an executable would, but not in the order of the device's computations.

    It does not wait for the copies: who reads one of them does. Like an executable it has its
    `args_info` and `out_info`.
    """

    def __init__(self, computation: Computation, home: Home):
        jaxpr, specs = computation.jaxpr, computation.out_specs
        specs = specs or ((),) * len(jaxpr.out_avals)
        self._shardings = [
            sharding_in(home, spec, _compat.memory_kind(aval) or "device")
            for spec, aval in zip(specs, jaxpr.out_avals, strict=True)
        ]
        self.args_info = [types.SimpleNamespace(donated=False) for _ in jaxpr.in_avals]
        self.out_info = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(jaxpr.out_avals, self._shardings, strict=True)
        ]

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        return jax.device_put(list(arrays), self._shardings)
