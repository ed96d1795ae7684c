"""Computations as bytes: the driver sends them to the processes that compile and run them."""

import contextlib
import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
from jax import export as jax_export
from jax.experimental import serialize_executable
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh

from jaxpp import _compat, _jaxprs
from jaxpp._program import Computation
from jaxpp._specs import Spec, partition_spec
from jaxpp.runtime.arrays import Home, devices_of, sharding_in
from jaxpp.runtime.remote.calls._hoist import Hoisted, hoist


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """A computation as serialised StableHLO, and the options of its compilation.

    `told` is the number of its last results, which are the values that debug callbacks read; None
    where there are no callbacks.
    """

    name: str
    payload: bytes
    donated: tuple[int, ...]
    in_specs: tuple[Spec, ...] = ()
    out_specs: tuple[Spec, ...] = ()
    told: int | None = None


def export(
    computation: Computation,
    platform: str,
    inside: AbstractMesh | None = None,
    hoisted: Hoisted | None = None,
) -> Exported:
    """Lowers a computation for a platform; the driver needs no device of it.

    Args:
        computation: what to lower.
        platform: of the processes that run it, as JAX names it: `"cpu"`, `"cuda"`, `"rocm"`.
        inside: the mesh that each rank is, without its devices; None where it is one device.
        hoisted: the computation without its debug callbacks, where the caller makes these.

    Raises:
        ValueError: for a callback with a result, which belongs to the driver's process; for a debug
            callback that is made an unknown number of times, or wants parts of arrays.
    """
    hoisted = hoisted or hoist(computation.jaxpr)
    _check_callbacks(computation, hoisted.jaxpr, inside)

    def run(*args):
        return _jaxprs.run(hoisted.jaxpr, *args)

    run.__name__ = run.__qualname__ = computation.name
    invars = computation.jaxpr.jaxpr.invars
    in_specs = computation.in_specs or ((),) * len(invars)
    avals = [
        jax.ShapeDtypeStruct(
            v.aval.shape,
            v.aval.dtype,
            sharding=inside and NamedSharding(inside, partition_spec(spec)),
            weak_type=_is_weak(v.aval),
        )
        for v, spec in zip(invars, in_specs, strict=True)
    ]
    out_specs = computation.out_specs
    if inside:
        out_specs += ((),) * len(hoisted.read)
    out = inside and [NamedSharding(inside, partition_spec(s)) for s in out_specs]
    lower = jax.jit(run, donate_argnums=computation.donated, out_shardings=out)
    under = use_abstract_mesh(inside) if inside else contextlib.nullcontext()
    with under, _jaxprs.with_its_types(computation.jaxpr):
        try:
            exported = jax_export.export(lower, platforms=[platform])(*avals)
        except ValueError as error:
            # JAX promises no stability for most custom calls (cuDNN's attention, Pallas kernels)
            # and refuses to export them. Here both ends run one version, so none is needed.
            names = re.findall(r"@?([\w.$]+)", str(error).partition("custom call")[2])
            if not names:
                raise
            checks = [jax_export.DisabledSafetyCheck.custom_call(name) for name in names]
            export_all = jax_export.export(lower, platforms=[platform], disabled_checks=checks)
            exported = export_all(*avals)
    payload = bytes(exported.serialize())
    told = len(hoisted.read) if hoisted.replays else None
    specs = computation.in_specs, out_specs
    return Exported(computation.name, payload, computation.donated, *specs, told)


def compile_exported(exported: Exported, home: Home) -> Callable[..., Any]:
    """Compiles an exported computation for devices of this process."""
    restored = jax_export.deserialize(bytearray(exported.payload))

    def run(*args):
        return restored.call(*args)

    run.__name__ = run.__qualname__ = exported.name
    in_specs = exported.in_specs or ((),) * len(restored.in_avals)
    avals = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding_in(home, spec))
        for a, spec in zip(restored.in_avals, in_specs, strict=True)
    ]
    # The driver's trace may have 64-bit types, whatever this process's own setting is.
    if not isinstance(home, Mesh):
        with jax.enable_x64(True), jax.default_device(home):
            return jax.jit(run, donate_argnums=exported.donated).lower(*avals).compile()
    out = [sharding_in(home, spec) for spec in exported.out_specs]
    with jax.enable_x64(True), jax.set_mesh(home):
        jitted = jax.jit(run, donate_argnums=exported.donated, out_shardings=out)
        return jitted.lower(*avals).compile()


def serialize(compiled: Any) -> bytes | None:
    """Gives a compiled computation as bytes, for processes of the same host and kind of device.

    None where the backend cannot serialise it, or where JAX's persistent cache is on: on CPU an
    executable from that cache, serialised again, loads but fails when it is called.
    """
    config: Any = jax.config
    if config.jax_enable_compilation_cache and config.jax_compilation_cache_dir:
        return None
    try:
        return pickle.dumps(serialize_executable.serialize(compiled))
    except (ValueError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError):
        return None


def load_serialized(payload: bytes, home: Home) -> Callable[..., Any] | None:
    """Loads bytes from `serialize` on devices of this process; None where the backend cannot."""
    try:
        return serialize_executable.deserialize_and_load(
            *pickle.loads(payload), execution_devices=list(devices_of(home))
        )
    except (ValueError, NotImplementedError, TypeError, jax.errors.JaxRuntimeError):
        return None


def _is_weak(aval: Any) -> bool:
    return getattr(aval, "weak_type", False)


def _check_callbacks(computation: Computation, left: Any, inside: AbstractMesh | None) -> None:
    """Refuses the callbacks that are `left` in a jaxpr, and those that want parts of arrays."""
    if found := _find(left, _calls_back):
        what, why = "calls back into Python", "but runs in another process than what it would call"
        if _compat.is_error_if(found):
            what = "raises by an eqx.error_if"
        elif _compat.is_debug_callback(found):
            what = "has a debug callback"
            why = (
                "in a jax.lax.while_loop, whose length is not known beforehand (a jax.lax.scan can "
                "have one), or in a jax.shard_map"
            )
    elif inside and inside.size > 1 and (found := _find(computation.jaxpr, _is_partitioned)):
        what, why = "has a partitioned debug callback", "but workers give these whole arrays only"
    else:
        return
    raise ValueError(
        f"RemoteMpmdMesh: {computation.name} {what} (`{found.primitive.name}`"
        f"{_compat.at_source_line(found)}), {why}. Return the value from the step, or debug on a "
        f"jaxpp.MpmdMesh."
    )


def _find(jaxpr: Any, wanted: Callable[[Any], bool]) -> Any | None:
    """Finds the first equation of a jaxpr, or inside one, that is wanted."""
    for eqn in jaxpr.eqns:
        if wanted(eqn):
            return eqn
        for inner in _jaxprs.sub_jaxprs(eqn):
            if found := _find(inner, wanted):
                return found
    return None


def _calls_back(eqn: Any) -> bool:
    return "callback" in eqn.primitive.name or _compat.is_debug_callback(eqn)


def _is_partitioned(eqn: Any) -> bool:
    return _compat.is_debug_callback(eqn) and eqn.params["partitioned"]
