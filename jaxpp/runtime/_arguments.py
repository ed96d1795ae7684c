"""What the flat arguments of a step must be, on any mesh."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxpp._program import Bundle


def check_arguments(bundle: Bundle, args: Sequence[Any]) -> None:
    """Checks that no argument has been deleted, or would be deleted while it is read.

    Raises:
        ValueError: one was donated to an earlier call, or is passed twice and donated once.
    """
    names, donated = bundle.arg_names, bundle.donated
    seen: dict[int, int] = {}
    for n, arg in enumerate(args):
        if not isinstance(arg, jax.Array):
            continue
        check_there(arg, names[n])
        first = seen.setdefault(id(arg), n)
        if first != n and (n in donated or first in donated):
            raise ValueError(
                f"args{names[n]} is the same array as args{names[first]}, and one of them is "
                f"donated, which deletes both. Copy it with jnp.copy, or do not donate it."
            )


def check_there(arg: Any, name: str) -> None:
    """Checks that an argument has not been deleted.

    Raises:
        ValueError: it has been.
    """
    if isinstance(arg, jax.Array) and arg.is_deleted():
        why = getattr(arg, "why_deleted", "") or "donated to an earlier call, which deleted it"
        raise ValueError(
            f"args{name} was {why}; pass what that call returned, or leave the argument out of "
            f"donate_argnums."
        )
