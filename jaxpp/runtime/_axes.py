"""The axes of a mesh: their names and sizes, of which one is that of the pipeline."""

from collections.abc import Sequence

PIPELINE_AXIS = "mpmd"


def check_axes(
    kind: str, shape: Sequence[int], axis_names: Sequence[str]
) -> tuple[tuple[int, ...], tuple[str, ...], int]:
    """Checks the axes of a mesh.

    Args:
        kind: what the mesh is called, for errors.
        shape: the size of each axis.
        axis_names: the name of each axis.

    Returns:
        The shape, the names, and the number of ranks.

    Raises:
        ValueError: the names are not one for each axis, or not different; none of them is
            `"mpmd"`; a size is below 1; or another axis has a size above 1.
    """
    shape, axis_names = tuple(int(n) for n in shape), tuple(axis_names)
    if len(shape) != len(axis_names) or len(set(axis_names)) < len(axis_names):
        raise ValueError(
            f"{kind} needs a name of its own for each axis, got shape {shape} and names "
            f"{axis_names}."
        )
    if PIPELINE_AXIS not in axis_names:
        raise ValueError(f"{kind} needs an axis named {PIPELINE_AXIS!r}, got {axis_names}.")
    sizes = dict(zip(axis_names, shape, strict=True))
    if any(n < 1 for n in shape):
        raise ValueError(f"{kind} needs axes of size 1 at least, got {sizes}.")
    wide = [a for a, n in sizes.items() if a != PIPELINE_AXIS and n > 1]
    if wide:
        raise ValueError(
            f"{kind} runs each rank on one device so far, got {sizes}; give {wide[0]!r} the size 1."
        )
    return shape, axis_names, sizes[PIPELINE_AXIS]
