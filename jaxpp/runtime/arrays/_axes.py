"""The axes of a mesh: the pipeline axis, and the axes inside a rank."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxpp._program import PIPELINE_AXIS
from jaxpp._specs import axis_sizes


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a mesh, one of them the pipeline axis.

    Args:
        shape: the size of each axis.
        names: the name of each axis.
        types: the type of each axis; that of the pipeline's means nothing.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    types: tuple[AxisType, ...]

    @property
    def num_ranks(self) -> int:
        """The size of the pipeline axis."""
        return self.shape[self.names.index(PIPELINE_AXIS)]

    @property
    def inside(self) -> AbstractMesh | None:
        """The mesh of every rank, without its devices; None where there is no other axis."""
        own = [i for i, name in enumerate(self.names) if name != PIPELINE_AXIS]
        if not own:
            return None
        return AbstractMesh(
            tuple(self.shape[i] for i in own),
            tuple(self.names[i] for i in own),
            axis_types=tuple(self.types[i] for i in own),
        )

    @property
    def devices_per_rank(self) -> int:
        """The product of the sizes of the axes inside a rank."""
        return math.prod(self.shape) // self.num_ranks


def check_axes(
    kind: str,
    shape: Sequence[int],
    axis_names: Sequence[str],
    axis_types: Sequence[AxisType] | None = None,
) -> Axes:
    """Checks the axes of a mesh.

    Args:
        kind: what the mesh is called, for errors.
        shape: the size of each axis.
        axis_names: the name of each axis.
        axis_types: the type of each axis, as in `jax.make_mesh`; by default all are `Auto`.

    Raises:
        ValueError: the names or types are not one for each axis, or the names are not different;
            none of them is `"mpmd"`; or a size is below 1.
    """
    if not isinstance(shape, Iterable):
        of = " For one of JAX's, pass mesh.devices.shape, its axis_names and its devices."
        raise ValueError(
            f"{kind} needs the size of each axis, as in {kind}((4, 2), ('mpmd', 'data')), got "
            f"{shape!r}.{of if isinstance(shape, Mesh) else ''}"
        )
    shape, names = tuple(int(n) for n in shape), tuple(axis_names)
    if len(shape) != len(names) or len(set(names)) < len(names):
        raise ValueError(
            f"{kind} needs a name of its own for each axis, got shape {shape} and names {names}."
        )
    if PIPELINE_AXIS not in names:
        raise ValueError(f"{kind} needs an axis named {PIPELINE_AXIS!r}, got {names}.")
    types = (AxisType.Auto,) * len(names) if axis_types is None else tuple(axis_types)
    if len(types) != len(names):
        raise ValueError(f"{kind} needs a type for each of its axes {names}, got {types}.")
    if any(n < 1 for n in shape):
        sizes = dict(zip(names, shape, strict=True))
        raise ValueError(f"{kind} needs axes of size 1 at least, got {sizes}.")
    return Axes(shape, names, types)


def check_ranks(kind: str, meshes: Sequence[Mesh]) -> AbstractMesh:
    """Checks the meshes of ranks that may differ in size.

    Args:
        kind: what makes a mesh of them, for errors.
        meshes: that of each rank.

    Returns:
        A mesh each of whose axes has a multiple of the sizes that it has in the ranks, the least.

    Raises:
        ValueError: there is none, or they differ in more than the sizes of their axes.
        TypeError: one is not a `jax.sharding.Mesh`.
    """
    if not meshes:
        raise ValueError(f"{kind} needs the mesh of each rank, got none.")
    for rank, mesh in enumerate(meshes):
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"{kind} needs a jax.sharding.Mesh for each rank, such as "
                f"jax.make_mesh((2,), ('data',)), got {mesh!r} for rank {rank}."
            )
        if PIPELINE_AXIS in mesh.axis_names or not mesh.axis_names:
            raise ValueError(
                f"{kind} needs meshes of the axes inside a rank, at least one and none called "
                f"{PIPELINE_AXIS!r}, got {mesh.axis_names} for rank {rank}."
            )
        for what in ("axis_names", "axis_types"):
            own, first = getattr(mesh, what), getattr(meshes[0], what)
            if own != first:
                raise ValueError(
                    f"{kind} needs the same axes in all ranks, but the {what} of rank {rank} are "
                    f"{own}, and those of rank 0 {first}. A rank that is not split along an axis "
                    f"has it with size 1."
                )
    return common_mesh([without_devices(mesh) for mesh in meshes])


def check_shapes(
    kind: str,
    shapes: Sequence[Sequence[int]],
    axis_names: Sequence[str],
    axis_types: Sequence[AxisType] | None = None,
) -> list[AbstractMesh]:
    """Checks the shapes of ranks that may differ; returns the mesh of each, without its devices.

    Args:
        kind: what makes a mesh of them, for errors.
        shapes: for each rank the size of each axis inside it.
        axis_names: the name of each of these axes.
        axis_types: their types, as in `jax.make_mesh`; by default all are `Auto`.

    Raises:
        ValueError: there is none, or one is no shape of a rank with these axes.
    """
    if not shapes or not axis_names or PIPELINE_AXIS in axis_names:
        raise ValueError(
            f"{kind} needs a shape for each rank, and the names of the axes inside a rank, none of "
            f"them {PIPELINE_AXIS!r}, got shapes {shapes} and names {tuple(axis_names)}."
        )
    meshes = []
    for rank, own in enumerate(shapes):
        types = axis_types if axis_types is None else (AxisType.Auto, *axis_types)
        sizes, names = (1, *own), (PIPELINE_AXIS, *axis_names)
        meshes.append(check_axes(f"{kind}: rank {rank}", sizes, names, types).inside)
    return meshes


def common_mesh(insides: Sequence[AbstractMesh]) -> AbstractMesh:
    """Makes a mesh: each axis has the least common multiple of its sizes in the ranks."""
    sizes = zip(*(mesh.axis_sizes for mesh in insides), strict=True)
    return insides[0].update(axis_sizes=tuple(math.lcm(*own) for own in sizes))


def without_devices(mesh: Mesh) -> AbstractMesh:
    """Gives a mesh without its devices."""
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types)


def shape_of(
    axis_names: Sequence[str], inside: AbstractMesh | None, num_ranks: int
) -> tuple[int, ...]:
    """Gives the size of each axis of a mesh of ranks."""
    sizes = axis_sizes(inside) | {PIPELINE_AXIS: num_ranks}
    return tuple(sizes[name] for name in axis_names)


def describe_mesh(
    kind: str, axis_names: Sequence[str], insides: Sequence[AbstractMesh | None]
) -> str:
    """Writes a mesh of ranks as Python does; with the sizes of each rank where they differ."""
    if len(set(insides)) == 1:
        return f"{kind}({shape_of(axis_names, insides[0], len(insides))}, {tuple(axis_names)})"
    sizes = ", ".join(str(own.axis_sizes) for own in insides if own)
    return f"{kind}.of_ranks({sizes} of {tuple(axis_names)[1:]})"
