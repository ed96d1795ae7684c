"""Compiles computations: each once, then loaded on every device that runs it.

Executables are kept for other steps of this process that have the same computations: the same
model under another schedule compiles only the new ones.
"""

import collections
import contextlib
import os
import threading
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpp import _compat, _jaxprs
from jaxpp._program import Bundle, Computation, Run
from jaxpp.runtime.arrays import Home, devices_of, sharding_in
from jaxpp.runtime.executor._copies import Copier, copies


def compile_all(bundle: Bundle, homes: Sequence[Home]) -> list[dict[int, Any]]:
    """Compiles a step's computations.

    Args:
        bundle: the step.
        homes: where the arrays of each rank are.

    Returns:
        For each rank, the executables by the number of their computation.
    """
    used = [
        sorted({i.computation for i in p.instructions if isinstance(i, Run)})
        for p in bundle.programs
    ]
    # Homes of one shape share an executable.
    targets: dict[tuple[int, Any], list[Home]] = {}
    for numbers, home in zip(used, homes, strict=True):
        for n in numbers:
            found = targets.setdefault((n, _shape_of(home)), [])
            if home not in found:
                found.append(home)

    own_settings = current_settings()
    keys = {
        (n, shape): key_of(bundle.computations[n], (own_settings, shape)) for n, shape in targets
    }

    copying = {target for target in targets if copies(bundle.computations[target[0]])}

    def build(target: Any, known: "_Executables | None", lowered: Any) -> dict[Any, Any]:
        first, computation = targets[target][0], bundle.computations[target[0]]
        if target in copying:
            return {home: Copier(computation, home) for home in targets[target]}
        if not known:
            known = _Executables(computation, _compat.compiled(lowered), first)
            bar.update()
        _kept.put(keys[target], known)
        return {home: known.on(home) for home in targets[target]}

    # The largest computation first; each is compiled while the next is lowered.
    by_size = sorted(targets, key=lambda target: -len(bundle.computations[target[0]].jaxpr.eqns))
    known = {target: _kept.get(keys[target]) for target in by_size}
    new = sum(found is None and target not in copying for target, found in known.items())
    with _progress(new) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {}
        for target in by_size:
            lowered = None
            if not known[target] and target not in copying:
                lowered = lower(bundle.computations[target[0]], targets[target][0])
            futures[target] = pool.submit(build, target, known[target], lowered)
    built = {target: future.result() for target, future in futures.items()}
    return [
        {n: built[n, _shape_of(home)][home] for n in numbers}
        for numbers, home in zip(used, homes, strict=True)
    ]


def _progress(total: int) -> Any:
    """Makes a bar of `tqdm`, where that is installed: on a terminal, after two seconds."""
    try:
        import tqdm
    except ImportError:
        return _NoBar()
    return tqdm.tqdm(total=total, desc="jaxpp: compiling", delay=2, leave=False, disable=None)


class _NoBar(contextlib.nullcontext):
    def __enter__(self) -> "_NoBar":
        return self

    def update(self) -> None:
        pass


def _shape_of(home: Home) -> Any:
    """Returns a home's mesh without its devices; None where the home is one device."""
    return home.abstract_mesh if isinstance(home, Mesh) else None


class _Executables:
    """A computation compiled for one home, and loaded on others when they need it."""

    def __init__(self, computation: Computation, compiled: Any, home: Home):
        self._computation = computation
        # Only a compiled executable can be loaded elsewhere; a loaded one cannot be loaded again.
        self._compiled = compiled
        self._by_home = {home: compiled}

    def on(self, home: Home) -> Any:
        """Returns the executable for a home."""
        if home not in self._by_home:
            self._by_home[home] = _compat.load_on_devices(
                self._compiled, devices_of(home)
            ) or _compat.compiled(lower(self._computation, home))
        return self._by_home[home]


class _Kept:
    """A program cache: the executables used last, by the keys of their computations."""

    def __init__(self, size: int):
        self._size = size
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()

    def get(self, key: Hashable) -> Any:
        """Returns the executables of a key, or None."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, executables: Any) -> None:
        """Keeps executables; drops the least recently used where there are too many."""
        with self._lock:
            self._entries[key] = executables
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._entries.clear()


#: Keys name objects of a computation by their ids; the executables hold the computation.
_kept = _Kept(size=512)


def clear_cache() -> None:
    """Forgets all executables, so that the next step is compiled anew."""
    _kept.clear()


def key_of(computation: Computation, configuration: Hashable) -> Hashable:
    """Makes a key of a computation and its settings; equal keys mean equal executables.

    The key names some objects by their ids, and is valid only as long as the computation lives.
    """
    split = computation.in_specs, computation.out_specs
    return _jaxprs.structure(computation.jaxpr), computation.donated, split, configuration


def current_settings() -> tuple[tuple[str, str], ...]:
    """Returns JAX's settings, which compilation may depend on."""
    return tuple((name, str(getattr(jax.config, name, None))) for name in sorted(jax.config.values))


def _constrains_layout(eqn: Any) -> bool:
    return eqn.primitive.name == "layout_constraint"


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
    """Lowers a computation for devices of this process.

    Raises:
        ValueError: XLA cannot run it on these devices.
    """
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
    constrained = any(_jaxprs.contains(e, _constrains_layout) for e in jaxpr.eqns)

    def run(*args):
        own = map(_compat.in_memory_of, args, jaxpr.in_avals)
        results = list(map(_compat.in_memory_of, _jaxprs.run(jaxpr, *own), jaxpr.out_avals))
        return list(map(jnp.copy, results)) if constrained else results

    run.__name__ = run.__qualname__ = computation.name
    wide = _jaxprs.with_its_types(jaxpr)
    specs = computation.out_specs or ((),) * len(jaxpr.out_avals)
    kinds = list(map(_compat.memory_kind, jaxpr.out_avals))
    # Without the memory kinds of results, JAX lets them take the memory of any donated argument.
    out: Any = [sharding_in(home, *own) for own in zip(specs, kinds, strict=True)]
    donated = computation.donated
    if isinstance(home, Mesh):
        with jax.set_mesh(home), wide:
            return jax.jit(run, donate_argnums=donated, out_shardings=out).lower(*avals)
    out = out if any(map(_compat.memory_kind, (*jaxpr.in_avals, *jaxpr.out_avals))) else None
    with jax.default_device(home), wide:
        return jax.jit(run, donate_argnums=donated, out_shardings=out).lower(*avals)
