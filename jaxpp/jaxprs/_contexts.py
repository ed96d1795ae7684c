"""The contexts of a trace: definitions in place of transforms, no mesh, no garbage collection."""

import contextlib
import contextvars
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxpp import _compat
from jaxpp.jaxprs._typing import P, R

_definitions = contextvars.ContextVar[Mapping[str, Callable[..., Any]]]("definitions")
# The key keeps JAX from using a trace that was made with the transforms themselves.
_cache_key = jax.make_user_context(())


@contextlib.contextmanager
def by_definition(definitions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Puts definitions, by the names of transforms, in their place.

    Who checks a transform traces a function with the transform's definition instead.
    """
    token = _definitions.set(definitions)
    try:
        with _cache_key(tuple(sorted(definitions))):
            yield
    finally:
        _definitions.reset(token)


def definition_of(transform: str) -> Callable[..., Any] | None:
    """The definition that stands for a transform; None outside of `by_definition`."""
    return _definitions.get({}).get(transform)


def without_mesh(fun: Callable[P, R]) -> Callable[P, R]:
    """Makes a function that runs outside of `jax.set_mesh` and `jax.sharding.use_abstract_mesh`.

    Under a mesh, JAX would compute with all of the mesh's devices, and refuse arrays of a rank.
    """

    @functools.wraps(fun)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or _compat.is_tracing():
            return fun(*args, **kwargs)
        with jax.set_mesh(None):  # pyright: ignore[reportArgumentType]
            try:
                return fun(*args, **kwargs)
            except (ValueError, TypeError, LookupError, RuntimeError) as error:
                error.add_note(
                    f"The mesh {mesh.axis_names} that jax.set_mesh or use_abstract_mesh has set "
                    f"does not hold in a placed step: each rank is a mesh of its own. Give the "
                    f"axes to the pipeline's mesh: jaxpp.MpmdMesh((2, 2), ('mpmd', 'data'))."
                )
                raise

    return run


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pauses the garbage collector, in all threads, while much is made that stays.

    Equations and terms stay; there is less to look through afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
