"""Checks of the arrays that a step is given, before they are used or deleted."""

from collections.abc import Iterable
from typing import Any

import jax

from jaxpp import _compat


def check_arrays(arguments: Iterable[tuple[str, bool, Any]]) -> None:
    """Checks that no array has been deleted, and that no donated one is passed twice.

    Args:
        arguments: the name of each argument, whether it is donated, and its value.

    Raises:
        ValueError: one was donated to an earlier call, or is passed twice and donated once.
    """
    seen: dict[int, tuple[str, bool]] = {}
    for name, donated, value in arguments:
        if not isinstance(value, jax.Array) or _compat.is_tracer(value):
            continue
        if value.is_deleted():
            check_there(value, name)
        first, first_donated = seen.setdefault(id(value), (name, donated))
        if first != name and (donated or first_donated):
            raise ValueError(
                f"args{name} is the same array as args{first}, and one of them is donated, which "
                f"deletes both. Copy it with jnp.copy, or do not donate it."
            )


def check_there(value: Any, name: str) -> None:
    """Checks that an argument has not been deleted.

    Raises:
        ValueError: it has been.
    """
    if isinstance(value, jax.Array) and value.is_deleted():
        why = getattr(value, "why_deleted", "") or "donated to an earlier call, which deleted it"
        raise ValueError(
            f"args{name} was {why}; pass what that call returned, or leave the argument out of "
            f"donate_argnums."
        )
