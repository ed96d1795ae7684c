"""Compiles computations: each once, then loaded on every device that runs it.

Executables are kept for other steps of this process that have the same computations: the same
model under another schedule compiles only the new ones.
"""

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpp import _compat, jaxprs
from jaxpp._messages import progress
from jaxpp._program import Bundle, Computation, Run
from jaxpp.runtime.arrays import Home, devices_of, sharding_in


def compile_all(bundle: Bundle, homes: Sequence[Home]) -> list[dict[int, Any]]:
    """Compiles a step's computations; returns for each rank its executables by their numbers."""
    used = [
        sorted({i.computation for i in p.instructions if isinstance(i, Run)})
        for p in bundle.programs
    ]
    # Homes of one shape share an executable.
    targets: dict[tuple[int, Any], list[Home]] = {}
    for numbers, home in zip(used, homes, strict=True):
        for n in numbers:
            targets.setdefault((n, _shape_of(home)), []).append(home)

    settings = current_settings()
    kept = {
        (n, shape): _kept(key_of(bundle.computations[n], (settings, shape))) for n, shape in targets
    }

    def build(target: Any, lowered: Any) -> dict[Any, Any]:
        own = kept[target]
        own.compile = own.compile or functools.partial(compile_for, bundle.computations[target[0]])
        if lowered is not None:
            own.by_home[targets[target][0]] = _compat.compiled(lowered)
        return {home: own.on(home) for home in targets[target]}

    # The largest computation first; each is compiled while the next is lowered.
    by_size = sorted(targets, key=lambda t: -len(bundle.computations[t[0]].jaxpr.eqns))
    new = [t for t in by_size if not kept[t].by_home and not copies(bundle.computations[t[0]])]
    with progress("compiling", len(new), 2) as update, ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {}
        for target in by_size:
            lowered = None
            if target in new:
                lowered = lower(bundle.computations[target[0]], targets[target][0])
            futures[target] = pool.submit(build, target, lowered)
            if target in new:
                futures[target].add_done_callback(lambda compiled: update())
    return [
        {n: futures[n, _shape_of(home)].result()[home] for n in numbers}
        for numbers, home in zip(used, homes, strict=True)
    ]


def _shape_of(home: Home) -> Any:
    """Returns a home's mesh without its devices; None where the home is one device."""
    return home.abstract_mesh if isinstance(home, Mesh) else None


class Executables:
    """A computation that `compile` compiles for a home; loaded on others when they need it."""

    def __init__(self, compile: Callable[[Home], Any] | None = None) -> None:
        self.compile = compile
        self.by_home: dict[Home, Any] = {}

    def on(self, home: Home) -> Any:
        """Returns the executable for a home."""
        if home not in self.by_home:
            # Only a compiled executable can be loaded elsewhere: the first one.
            first = next(iter(self.by_home.values()), None)
            loaded = first and _compat.load_on_devices(first, devices_of(home))
            assert self.compile is not None
            self.by_home[home] = loaded or self.compile(home)
        return self.by_home[home]


@functools.lru_cache(maxsize=512)
def _kept(key: Hashable) -> Executables:
    """Returns the executables of a key, empty at first, which hold what its ids name."""
    return Executables()


def clear_cache() -> None:
    """Forgets all executables, so that the next step is compiled anew."""
    _kept.cache_clear()


def key_of(computation: Computation, configuration: Hashable) -> Hashable:
    """Makes a key of a computation and its settings; equal keys mean equal executables.

    The key names some objects by their ids, and is valid only as long as the computation lives.
    """
    split = computation.in_specs, computation.out_specs
    return jaxprs.structure(computation.jaxpr), computation.donated, split, configuration


def current_settings() -> tuple[tuple[str, str], ...]:
    """Returns JAX's settings, which compilation may depend on."""
    return tuple((name, str(getattr(jax.config, name, None))) for name in sorted(jax.config.values))


def _check_bits(computation: Computation, home: Home) -> None:
    """Refuses what XLA on CPU does to memory that is not its own.

    Its collectives take each element of a type of two bits for one of four.
    """
    jaxpr = computation.jaxpr
    narrow = [a.dtype for a in (*jaxpr.in_avals, *jaxpr.out_avals) if _compat.bits_of(a) < 4]
    devices = devices_of(home)
    if narrow and len(devices) > 1 and devices[0].platform == "cpu":
        raise ValueError(
            f"place: a rank of {len(devices)} CPU devices has arrays of {narrow[0]}, which the "
            f"collectives of XLA between such devices do not take. Cast them to a type of four "
            f"bits or more, or give each rank one device."
        )


def lower(computation: Computation, home: Home) -> jax.stages.Lowered:
    """Lowers a computation for devices of this process; a `ValueError` where XLA cannot run it."""
    _check_bits(computation, home)
    invars = computation.jaxpr.jaxpr.invars
    in_specs = computation.in_specs or ((),) * len(invars)
    avals = [
        jax.ShapeDtypeStruct(
            v.aval.shape,
            v.aval.dtype,
            sharding=sharding_in(home, spec, _compat.memory_kind(v.aval)),
            weak_type=getattr(v.aval, "weak_type", False),
        )
        for v, spec in zip(invars, in_specs, strict=True)
    ]

    # Programs read arrays in the default layout. To JAX a constraint on a result is its layout.
    jaxpr = computation.jaxpr
    if devices_of(home)[0].platform != "cpu":  # XLA overlaps what is in one computation
        jaxpr = jaxprs.inline(jaxpr, _compat.is_call_apart)
    jaxpr = _compat.with_equations(jaxpr, map(_compat.typed_apart, jaxpr.eqns))
    constrains = lambda eqn: eqn.primitive.name == "layout_constraint"  # noqa: E731
    constrained = any(jaxprs.contains(eqn, constrains) for eqn in jaxpr.eqns)

    def run(*args):
        own = map(_compat.in_memory_of, args, jaxpr.in_avals)
        results = list(map(_compat.in_memory_of, jaxprs.run(jaxpr, *own), jaxpr.out_avals))
        return list(map(jnp.copy, results)) if constrained else results

    run.__name__ = run.__qualname__ = computation.name
    specs = computation.out_specs or ((),) * len(jaxpr.out_avals)
    kinds = list(map(_compat.memory_kind, jaxpr.out_avals))
    # Without the memory kinds of results, JAX lets them take the memory of any donated argument.
    out: Any = [sharding_in(home, *own) for own in zip(specs, kinds, strict=True)]
    if isinstance(home, Mesh):
        under = jax.set_mesh(home)
    else:
        under = jax.default_device(home)
        out = out if any(map(_compat.memory_kind, (*jaxpr.in_avals, *jaxpr.out_avals))) else None
    with under, jaxprs.with_its_types(jaxpr):
        return jax.jit(run, donate_argnums=computation.donated, out_shardings=out).lower(*avals)


def compile_for(computation: Computation, home: Home) -> Any:
    """Lowers and compiles a computation for a home, or makes what copies in its place."""
    if copies(computation):
        return Copier(computation, home)
    return _compat.compiled(lower(computation, home))


# ---- copies between the memories of a device and of its host ------------------------------------


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
    """Copies arrays as an executable would, but not in the order of the device's computations."""

    def __init__(self, computation: Computation, home: Home):
        jaxpr, specs = computation.jaxpr, computation.out_specs
        specs = specs or ((),) * len(jaxpr.out_avals)
        self._shardings = [
            sharding_in(home, spec, _compat.memory_kind(aval) or "device")
            for spec, aval in zip(specs, jaxpr.out_avals, strict=True)
        ]

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        return jax.device_put(list(arrays), self._shardings)
