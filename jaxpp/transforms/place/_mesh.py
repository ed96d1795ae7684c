"""The mesh that `place` is given: one of ours, or one of JAX that becomes ours."""

from typing import Any

import jax

from jaxpp._program import PIPELINE_AXIS, PROVIDED, Mesh


def as_mesh(given: Any) -> Mesh | None:
    """Makes a pipeline's mesh of what `place` was given.

    Raises:
        ValueError: it is a mesh of JAX that has no axis of ranks.
        TypeError: it is no mesh.
    """
    if given is None or hasattr(given, "num_ranks"):
        return given
    if isinstance(given, jax.sharding.Mesh):
        shape, names = given.devices.shape, given.axis_names
        if PIPELINE_AXIS in names:
            return PROVIDED["mesh_of"](shape, names, given.devices, given.axis_types)
        ours = (PIPELINE_AXIS, *names[1:])
        raise ValueError(
            f"place: the mesh is one of JAX with the axes {names}, none of which is "
            f"{PIPELINE_AXIS!r}, the axis of the ranks. Name it: jaxpp.MpmdMesh({shape}, {ours})."
        )
    raise TypeError(
        f"place: a mesh is a jaxpp.MpmdMesh, such as jaxpp.MpmdMesh((4,), ('mpmd',)), or a "
        f"jaxpp.RemoteMpmdMesh; got {given!r}."
    )
