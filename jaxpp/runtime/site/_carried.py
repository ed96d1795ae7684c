"""Values of the user, and computations, on the way to a site: as bytes or as they are."""

import contextlib
import dataclasses
import functools
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from jaxpp import _compat, jaxprs
from jaxpp._program import Computation
from jaxpp.jaxprs import primitives
from jaxpp.runtime.arrays import Home
from jaxpp.runtime.executor import Executables, compile_for

#: JAX's settings under which a computation is lowered: those that it was traced under. With
#: `debug_nans` JAX donates nothing, so that the arguments of what failed are still there.
SETTINGS = (
    "debug_nans",
    "enable_x64",
    "default_matmul_precision",
    "default_prng_impl",
    "numpy_dtype_promotion",
    "threefry_partitionable",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A value as bytes: a pickle, and the memory of its arrays."""

    data: bytes
    buffers: tuple[np.ndarray, ...]

    @staticmethod
    def of(value: Any) -> "Packed":
        """Pickles a value: functions and classes by their code where need be.

        So it is known here, before any worker is called, that it can be pickled; and what cannot be
        read on the other side is an error of the method that reads it.

        Raises:
            Exception: the value cannot be pickled.
        """
        file, buffers = io.BytesIO(), []
        _pickler()(file, protocol=5, buffer_callback=buffers.append).dump(value)
        return Packed(file.getvalue(), tuple(np.frombuffer(b.raw(), np.uint8) for b in buffers))

    def get(self) -> Any:
        """Returns the value; its arrays have memory of their own."""
        return pickle.loads(self.data, buffers=[bytearray(own) for own in self.buffers])


def unpacked(value: Any) -> Any:
    """Returns a value that has come to this process, packed or as it is."""
    return value.get() if isinstance(value, Packed) else value


@functools.cache
def _pickler() -> Any:
    import ray.cloudpickle  # Ray takes long to import

    class Pickler(ray.cloudpickle.Pickler):  # pyright: ignore
        """Also pickles what a jaxpr consists of, and functions by their code where need be."""

        def reducer_override(self, value: Any) -> Any:
            found = _compat.reduced(value)
            return super().reducer_override(value) if found is NotImplemented else found

    return Pickler


@dataclasses.dataclass(frozen=True, eq=False)
class WithSettings:
    """A computation, and JAX's settings that it was traced under."""

    computation: Computation
    settings: Mapping[str, Any]

    @functools.cached_property
    def executables(self) -> Executables:
        """Its executables, one for each home that asks."""
        return Executables(self._compile)

    def _compile(self, home: Home) -> Any:
        """Lowers and compiles the computation for devices of this process."""
        with contextlib.ExitStack() as stack:
            for name, value in self.settings.items():
                stack.enter_context(getattr(jax, name)(value))
            return compile_for(self.computation, home)


def carry(computation: Computation, of: Callable[[Any], Any]) -> Any:
    """Makes a computation ready to go to the sites that compile it, by `of`: a `WithSettings`.

    Raises:
        ValueError: an equation has a parameter that cannot be pickled.
    """
    own = dataclasses.replace(computation, jaxpr=_without_rules(computation.jaxpr))
    settings = {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS}
    try:
        return of(WithSettings(own, settings))
    except Exception as error:
        raise _refusal(own, of, error) from error


def _refusal(computation: Computation, of: Callable[[Any], Any], error: Exception) -> Exception:
    """Makes the error for a computation that cannot be pickled; it names the equation."""
    for eqn in computation.jaxpr.eqns:
        try:
            of(eqn)
        except Exception as own:
            return ValueError(
                f"RemoteMpmdMesh: {computation.name} cannot go to a worker process: its equation "
                f"`{eqn.primitive.name}`{_compat.at_source_line(eqn)} cannot be pickled: {own}. "
                f"Callbacks and other functions in it must not hold files, locks or the like."
            )
    return error


def _has_rule(eqn: Any) -> bool:
    return eqn.primitive.name in primitives.CUSTOM_RULES


def _without_rules(jaxpr: jex.ClosedJaxpr) -> Any:
    """Opens the calls of functions with derivative rules, which nothing differentiates any more.

    The rules hold what they were traced with, which cannot be pickled.
    """
    if not any(jaxprs.contains(eqn, _has_rule) for eqn in jaxpr.eqns):
        return jaxpr
    opened, constants = jaxprs.without_constants(jaxpr)
    flat = jaxprs.inline(jaxprs.bind_constants(opened, constants), _has_rule)
    eqns = [jaxprs.map_jaxprs(eqn, _without_rules) for eqn in flat.eqns]
    if constants:
        return _compat.make_closed_jaxpr(flat.jaxpr.invars, flat.jaxpr.outvars, eqns)
    return _compat.with_equations(jaxpr, eqns, flat.jaxpr.outvars)
