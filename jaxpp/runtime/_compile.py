"""Compiles computations: each once, then loaded on every device that runs it."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxpp import _compat, _jaxprs
from jaxpp._program import Bundle, Computation, Run


def compile_all(bundle: Bundle, devices: Sequence[Any]) -> list[dict[int, Any]]:
    """Compiles a step's computations.

    Args:
        bundle: the step.
        devices: the device of each rank.

    Returns:
        For each rank, the executables by the number of their computation.
    """
    used = [
        sorted({i.computation for i in p.instructions if isinstance(i, Run)})
        for p in bundle.programs
    ]
    targets: dict[int, list[Any]] = {}
    for numbers, device in zip(used, devices, strict=True):
        for n in numbers:
            found = targets.setdefault(n, [])
            if device not in found:
                found.append(device)

    def build(n: int, lowered: Any) -> dict[Any, Any]:
        first, *others = targets[n]
        compiled = lowered.compile()
        executables = {first: compiled}
        for device in others:
            loaded = _compat.load_on_device(compiled, device)
            executables[device] = loaded or _lower(bundle.computations[n], device).compile()
        return executables

    # The largest first, each compiled while the next is lowered.
    by_size = sorted(targets, key=lambda n: -len(bundle.computations[n].jaxpr.eqns))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {
            n: pool.submit(build, n, _lower(bundle.computations[n], targets[n][0])) for n in by_size
        }
    built = {n: future.result() for n, future in futures.items()}
    return [
        {n: built[n][device] for n in numbers}
        for numbers, device in zip(used, devices, strict=True)
    ]


def _lower(computation: Computation, device: Any):
    sharding = SingleDeviceSharding(device)
    avals = [
        jax.ShapeDtypeStruct(
            v.aval.shape,
            v.aval.dtype,
            sharding=sharding,
            weak_type=getattr(v.aval, "weak_type", False),
        )
        for v in computation.jaxpr.jaxpr.invars
    ]

    def run(*args):
        return _jaxprs.run(computation.jaxpr, *args)

    run.__name__ = run.__qualname__ = computation.name
    with jax.default_device(device):
        return jax.jit(run, donate_argnums=computation.donated).lower(*avals)
