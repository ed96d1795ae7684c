"""Computations on their way to the processes that compile them: as bytes, or as they are."""

import contextlib
import dataclasses
import functools
import io
import pickle
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex

from jaxpp import _compat, jaxprs
from jaxpp._program import Computation
from jaxpp.jaxprs import primitives
from jaxpp.runtime.arrays import Home
from jaxpp.runtime.executor import Copier, copies, lower

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
class Traced:
    """A computation, and JAX's settings that it was traced under."""

    traced: Computation
    settings: Mapping[str, Any]

    @staticmethod
    def of(computation: Computation) -> "Traced":
        """Takes a computation with the settings of this moment."""
        config: Any = jax.config
        return Traced(computation, {name: getattr(config, f"jax_{name}") for name in SETTINGS})

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of the arguments whose memory it may take."""
        return self.traced.donated

    def compile(self, home: Home) -> Any:
        """Lowers and compiles the computation for devices of this process."""
        if copies(self.traced):
            return Copier(self.traced, home)
        with contextlib.ExitStack() as stack:
            for name, value in self.settings.items():
                stack.enter_context(getattr(jax, name)(value))
            return _compat.compiled(lower(self.traced, home))

    def computation(self) -> Computation:
        """Returns the computation."""
        return self.traced


@dataclasses.dataclass(frozen=True, eq=False)
class Pickled:
    """A computation as bytes.

    Args:
        donated: the positions of the arguments whose memory it may take.
        payload: the pickled `Traced`.
    """

    donated: tuple[int, ...]
    payload: bytes

    @staticmethod
    def of(computation: Computation) -> "Pickled":
        """Pickles a computation.

        Raises:
            ValueError: an equation has a parameter that cannot be pickled.
        """
        own = dataclasses.replace(computation, jaxpr=_without_rules(computation.jaxpr))
        try:
            payload = _pickle(Traced.of(own))
        except Exception as error:
            raise _refusal(own, error) from error
        return Pickled(computation.donated, payload)

    def compile(self, home: Home) -> Any:
        """Lowers and compiles the computation for devices of this process."""
        return pickle.loads(self.payload).compile(home)

    def computation(self) -> Computation:
        """Unpickles the computation."""
        return pickle.loads(self.payload).traced


@functools.cache
def _pickler() -> Any:
    import ray.cloudpickle  # Ray takes long to import

    class Pickler(ray.cloudpickle.Pickler):  # pyright: ignore
        """Also pickles what a jaxpr consists of, and functions by their code where need be."""

        def reducer_override(self, value: Any) -> Any:
            found = _compat.reduced(value)
            return super().reducer_override(value) if found is NotImplemented else found

    return Pickler


def _pickle(value: Any) -> bytes:
    file = io.BytesIO()
    _pickler()(file).dump(value)
    return file.getvalue()


def _refusal(computation: Computation, error: Exception) -> Exception:
    """Makes the error for a computation that cannot be pickled; it names the equation."""
    for eqn in computation.jaxpr.eqns:
        try:
            _pickle(eqn)
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
