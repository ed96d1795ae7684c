"""The axes of a mesh: the pipeline axis, and the axes inside a rank."""

import dataclasses
from collections.abc import Iterable, Sequence

from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxpp._program import PIPELINE_AXIS


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
