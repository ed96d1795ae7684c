"""By definition: a context in which transforms stand for what they mean.

Who checks a transform traces a function with the transform's definition in its place.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

_definitions = contextvars.ContextVar[Mapping[str, Callable[..., Any]]]("definitions")
# The key keeps JAX from using a trace that was made with the transforms themselves.
_cache_key = jax.make_user_context(())


@contextlib.contextmanager
def by_definition(definitions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Puts definitions, by the names of transforms, in their place."""
    token = _definitions.set(definitions)
    try:
        with _cache_key(tuple(sorted(definitions))):
            yield
    finally:
        _definitions.reset(token)


def definition_of(transform: str) -> Callable[..., Any] | None:
    """The definition that stands for a transform; None outside of `by_definition`."""
    return _definitions.get({}).get(transform)


def with_definition(
    transform: str, definition: Callable[..., Any]
) -> contextlib.AbstractContextManager[None]:
    """Puts another definition of a transform in the place of the one that stands for it."""
    return by_definition({**_definitions.get({}), transform: definition})
