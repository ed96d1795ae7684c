"""Checks of the flat arguments of a step, on any mesh."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxpp._program import Bundle
from jaxpp.jaxprs import check_arrays
from jaxpp.runtime.arrays._handle import ArrayHandle


def check_arguments(bundle: Bundle, args: Sequence[Any]) -> None:
    """Checks that no argument has been deleted, and that no donated one is passed twice.

    Raises:
        ValueError: one was donated to an earlier call, or is passed twice and donated once.
    """
    each = zip(bundle.arguments, args, strict=True)
    check_arrays((own.name, own.donated, arg) for own, arg in each)


def check_layouts(bundle: Bundle, args: Sequence[Any], error: Exception) -> None:
    """Explains an error of a computation by the memory layout of an argument, if that is why.

    Raises:
        ValueError: an array has another layout than JAX gives it by default.
    """
    if "layout" not in str(error):
        return
    for own, arg in zip(bundle.arguments, args, strict=True):
        layout = getattr(getattr(arg, "format", None), "layout", None)
        order = getattr(layout, "major_to_minor", None)
        if order is not None and tuple(order) != tuple(range(arg.ndim)):
            raise ValueError(
                f"args{own.name} has a memory layout of its own, {layout}, but a placed step reads "
                f"and keeps arrays in the default layout. Pass jnp.copy(array), which has that."
            ) from error


def check_here(arg: jax.Array, name: str) -> None:
    """Checks that an argument is on devices of this process.

    Raises:
        ValueError: it is in other processes.
    """
    if isinstance(arg, ArrayHandle) and not arg.is_fully_addressable:
        raise ValueError(
            f"args{name} is {arg!r}, and the step runs on a mesh of this process: pass "
            f"jaxpp.gather(x), which fetches it while its own mesh runs."
        )
