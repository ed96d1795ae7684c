"""Compiles computations: each once, then loaded on every device that runs it.

Executables are kept for other steps of this process that compute the same thing: the same model
under another schedule compiles only what is new in it.
"""

import collections
import os
import threading
from collections.abc import Hashable, Sequence
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

    configuration = settings()
    keys = {n: key_of(c, configuration) for n, c in enumerate(bundle.computations) if n in targets}

    def build(n: int, known: "_Executables | None", lowered: Any) -> dict[Any, Any]:
        first = targets[n][0]
        found = known or _Executables(bundle.computations[n], lowered.compile(), first)
        _kept.put(keys[n], found)
        return {device: found.on(device) for device in targets[n]}

    # The largest first, each compiled while the next is lowered.
    by_size = sorted(targets, key=lambda n: -len(bundle.computations[n].jaxpr.eqns))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {}
        for n in by_size:
            known = _kept.get(keys[n])
            lowered = None if known else _lower(bundle.computations[n], targets[n][0])
            futures[n] = pool.submit(build, n, known, lowered)
    built = {n: future.result() for n, future in futures.items()}
    return [
        {n: built[n][device] for n in numbers}
        for numbers, device in zip(used, devices, strict=True)
    ]


class _Executables:
    """A computation compiled for one device, and loaded on others as they are asked for."""

    def __init__(self, computation: Computation, compiled: Any, device: Any):
        self._computation = computation
        # Only what was compiled can be loaded elsewhere: what was loaded cannot, again.
        self._compiled = compiled
        self._by_device = {device: compiled}

    def on(self, device: Any) -> Any:
        """The executable of a device."""
        if device not in self._by_device:
            self._by_device[device] = (
                _compat.load_on_device(self._compiled, device)
                or _lower(self._computation, device).compile()
            )
        return self._by_device[device]


class _Kept:
    """The computations compiled last, by what they compute."""

    def __init__(self, size: int):
        self._size = size
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()

    def get(self, key: Hashable) -> Any:
        """What was kept, or None."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, executables: Any) -> None:
        """Keeps executables, and drops those that were not used the longest."""
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
    """What a computation computes, and under which settings: equal where an executable would be.

    It names some objects by their ids, and holds only as long as the computation lives.
    """
    return _jaxprs.structure(computation.jaxpr), computation.donated, configuration


def settings() -> tuple[tuple[str, str], ...]:
    """JAX's settings, which compilation may depend on."""
    return tuple((name, str(getattr(jax.config, name, None))) for name in sorted(jax.config.values))


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
