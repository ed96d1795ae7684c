"""Leaves the mesh that the caller has set: each rank has a mesh of its own."""

import functools
from collections.abc import Callable

import jax

from jaxpp import _compat
from jaxpp._typing import P, R


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
